"""Ten thousand random requests, sensible and not: no 500, and the document describes each answer.

Most go straight to the application, as no server would let all of them in; some go to a real one,
and some, judged one by one, to two on one file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tests.contract.served import PATIENCE, served
from volcano_locks._http import httpx
from volcano_locks.local.faults import Fault, Faults
from volcano_locks.local.openapi import document
from volcano_locks.local.server import create_app
from volcano_locks.local.service import Credential, LockService
from volcano_locks.local.store import Store
from volcano_locks.models import Secret

KEY = "sk-local-development"
QUOTA = 10**9
REQUESTS = 200


def application(faults: Faults | None = None) -> Any:
    service = LockService(Store(None), credentials=[Credential(Secret(KEY), "p")], quota=QUOTA)
    return create_app(service, faults=faults or Faults())


schema = schemathesis.openapi.from_asgi("/openapi.json", application())


@schema.parametrize()
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_one_that_the_document_describes(case: schemathesis.Case) -> None:
    body = case.body
    if isinstance(body, dict) and isinstance(ttl := body.get("ttl_seconds"), float):
        # 30.0 is an integer to JSON Schema; the contract's whole seconds are written as such.
        body["ttl_seconds"] = int(ttl) if ttl.is_integer() else ttl
    # Without the credential everything would be one 401.
    case.call_and_validate(headers={**case.headers, "Authorization": f"Bearer {KEY}"})


def described(method: str, path: str, status: int) -> bool:
    """Whether the document has this answer to such a request, or has no such request."""
    found = re.fullmatch(r"/locks/[^/]+(/lease)?", path)
    operations = document()["paths"]["/locks/{key}" + (found[1] or "")] if found else {}
    operation = operations.get(method.lower())
    return operation is None or str(status) in operation["responses"]


def nonsense(chance: random.Random) -> tuple[str, str, dict[str, str], bytes]:
    """A request that is right in most places and odd in some."""

    def text(length: int) -> str:
        return "".join(chr(chance.choice([9, 33, 37, 46, 65, 97, 126, 255])) for _ in range(length))

    def mostly(right: str, *odd: str) -> str:
        return right if chance.random() < 0.7 else chance.choice(odd)

    method = chance.choice(["GET", "POST", "PATCH", "DELETE"])
    method = mostly(method, "PUT", "HEAD", "OPTIONS", "TRACE", "X")
    key = mostly("job", "a.b", "%2e%2e", "%00", "%C3%A9", "x" * 130, "", text(5))
    key = key.replace("#", "").replace("?", "")
    shape = chance.choice(["/locks/{}/lease", "/locks/{}"])
    shape = mostly(
        shape, "/{}", "/locks/{}/", "//{}", "/force-release", "/_faults", "/_faults", "/healthz"
    )
    path = shape.format(key) + mostly("", "?", "?project=p&key=job", "?a=%ff", "?" + "k=v&" * 50)
    headers: dict[str, str] = {}
    for name in ("X-Volcano-Request-Id", "X-Volcano-Lock-Token"):
        value = mostly(str(uuid.UUID(int=chance.randrange(3))), text(3), "", "{}")
        if chance.random() < 0.9:
            headers[name] = value
    key = mostly(KEY, "ak-x", "", "\xff")
    headers["Authorization"] = mostly("Bearer ", "bearer ", "Basic ", "") + key
    if chance.random() < 0.3:
        headers["Content-Length"] = chance.choice(["0", "9" * 30, "-1", "x"])
    if chance.random() < 0.3:
        headers["Host"] = chance.choice(["localhost", "evil.example", "[", "[::1]:80", ""])
    if chance.random() < 0.2:
        headers["Origin"] = chance.choice(["null", "http://[", "https://evil.example"])
    if path.startswith("/_faults") and chance.random() < 0.8:
        return "POST", path, headers, planned(chance)
    if chance.random() < 0.5:
        return method, path, headers, b'{"ttl_seconds":10}'
    body = chance.choice(
        [
            b'{"ttl_seconds":1e400}',
            b'{"ttl_seconds":NaN}',
            b'{"ttl_seconds":10,"ttl_seconds":"x"}',
            b"",
            b"\x00" * 50,
            b'"' + b"\\ud800" * 9 + b'"',
            b"[" * 2_000,
            b"9" * 4_000,
            b"x" * 5_000,
            bytes(chance.randrange(256) for _ in range(20)),
        ]
    )
    return method, path, headers, body


def planned(chance: random.Random) -> bytes:
    """A plan for faults that is right in most places and odd in some."""
    odd = ["\ud800", "\0", "", "x" * 3_000, 1e308, float("nan"), -1, 10**400, None, True, [], {}]
    fields: dict[str, object] = {
        "fault": chance.choice([*(fault.value for fault in Fault), "clock-shift"]),
        "times": chance.randrange(1, 9),
        "operation": chance.choice(["acquire", "force-release"]),
        "key": chance.choice(["job", "a.b", "\ud800", "job\udfff"]),
        "seconds": chance.choice([0, 3.5, 1e9, -1e9]),
    }
    for name in list(fields):
        if name != "fault" and chance.random() < 0.4:
            del fields[name]
    if chance.random() < 0.3:
        fields[chance.choice([*fields, "\ud800"])] = chance.choice(odd)
    return json.dumps(fields).encode()


@pytest.mark.parametrize("seed", range(2))
def test_five_thousand_requests_of_nonsense_leave_no_500(seed: int) -> None:
    faults, chance = Faults(), random.Random(seed)
    app = application(faults)
    statuses: dict[int, int] = {}
    surprises: list[tuple[str, Any, int]] = []

    async def send(method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        """Straight to ASGI, as no client would let most of this out."""
        from urllib.parse import unquote

        raw, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(raw, errors="replace"),
            "raw_path": raw.encode("latin-1"),
            "query_string": query.encode("latin-1"),
            "root_path": "",
            "headers": [
                (name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()
            ],
            "client": (chance.choice(["127.0.0.1", "10.0.0.1", "odd"]), 1),
            "server": ("127.0.0.1", 80),
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def reply(message: Any) -> None:
            if message["type"] == "http.response.start":
                if not described(method, scope["path"], message["status"]):
                    surprises.append((method, scope["path"], message["status"]))
                statuses[message["status"]] = statuses.get(message["status"], 0) + 1

        await app(scope, receive, reply)

    async def main() -> None:
        for _ in range(5_000):
            method, path, headers, body = nonsense(chance)
            await send(method, path, headers, body)
            faults.clear()  # what it may have planned would be a 5xx of our own making

    asyncio.run(main())
    assert not [status for status in statuses if status >= 500], statuses
    assert surprises == []
    assert sum(statuses.values()) == 5_000
    assert {200, 201, 204, 400, 401, 403, 404, 405, 413} <= statuses.keys(), statuses


def test_a_thousand_requests_of_nonsense_to_a_real_server_leave_no_500() -> None:
    """As bytes on a connection of their own: no client in between that mends or refuses them."""
    chance, statuses, plans = random.Random(3), Counter[int](), Counter[int]()

    def send(address: tuple[str, int], request: bytes) -> int:
        with socket.create_connection(address, timeout=PATIENCE) as connection:
            connection.sendall(request)
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # it need not read all of it
                while len(answer) < 12 and (part := connection.recv(4_096)):
                    answer += part
        assert answer.startswith(b"HTTP/1.1 "), (request, answer)
        return int(answer[9:12])

    with served("--faults", "--quota", str(QUOTA)) as server:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        address = host, int(port)
        for _ in range(1_000):
            method, path, headers, body = nonsense(chance)
            headers = {
                "Host": "localhost",
                "Content-Length": str(len(body)),
                "Connection": "close",
                **headers,
            }
            lines = [
                f"{method} {path} HTTP/1.1",
                *(f"{n}: {v}" for n, v in headers.items()),
                "",
                "",
            ]
            status = send(address, "\r\n".join(lines).encode("latin-1") + body)
            statuses[status] += 1
            if method == "POST" and path.startswith("/_faults"):
                plans[status] += 1
                if 400 <= status < 500:
                    continue
                clear = "DELETE /_faults HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                assert send(address, clear.encode()) == 200
        assert server.process.poll() is None
    assert not [status for status in statuses if status >= 500], statuses
    assert {200, 201, 204, 400, 401, 403, 404, 405, 413} <= statuses.keys(), statuses
    assert {200, 400, 401, 403} <= plans.keys(), plans


def test_two_servers_on_one_file_answer_random_requests_as_one(tmp_path: Path) -> None:
    """Each request goes to either, and each answer is judged by what both were asked before."""
    chance, seen = random.Random(5), Counter[tuple[str, int]]()
    owners: dict[str, tuple[str, int]] = {}
    last: dict[str, int] = {}
    tokens = [str(uuid.UUID(int=number)) for number in range(3)]
    who = {"Authorization": f"Bearer {KEY}", "X-Volcano-Request-Id": tokens[0]}
    options: dict[str, Any] = {"headers": who, "trust_env": False, "verify": False}
    options["timeout"] = PATIENCE
    store = str(tmp_path / "store")
    with (
        served("--quota", str(QUOTA), store=store) as one,
        served("--quota", str(QUOTA), store=store) as two,
        httpx.Client(base_url=one.url, **options) as first,
        httpx.Client(base_url=two.url, **options) as second,
    ):
        for _ in range(REQUESTS):
            key, token = chance.choice("abc"), chance.choice(tokens)
            owner, fence = owners.get(key, (None, None))
            method, lease = chance.choice(
                [("POST", "/lease")] * 3
                + [("PATCH", "/lease"), ("DELETE", "/lease"), ("GET", ""), ("DELETE", "")]
            )
            answer = chance.choice([first, second]).request(
                method,
                f"/locks/{key}{lease}",
                content=b'{"ttl_seconds": 3600}' if method in ("POST", "PATCH") else None,
                headers={"X-Volcano-Lock-Token": token} if lease else {},
            )
            status, said = answer.status_code, answer.json() if answer.content else {}
            seen[method + lease, status] += 1
            if method == "GET":
                assert (status, said["held"]) == (200, owner is not None)
                assert said.get("fencing_token") == fence
            elif not lease or (method == "DELETE" and owner in (None, token)):
                assert status == 204
                owners.pop(key, None)
            elif owner == token:
                assert status == (201 if method == "POST" else 200)
                assert said["fencing_token"] == fence
            elif method == "POST" and owner is None:
                assert status == 201
                assert said["fencing_token"] > last.get(key, 0)
                last[key] = said["fencing_token"]
                owners[key] = token, last[key]
            else:
                assert status == 409
                code = "lock_held" if method == "POST" else "lock_ownership_lost"
                assert said["code"] == code
    assert len(seen) == 8, seen


def test_a_failure_inside_is_503_and_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    service = LockService(Store(None))

    def broken(*_: object) -> None:
        raise RuntimeError("the secret is 42")

    monkeypatch.setattr(service, "reply", broken)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.get("/locks/job")

    answer = asyncio.run(main())
    assert answer.status_code == 503
    assert answer.json()["code"] == "lock_service_unavailable"
    assert "42" not in answer.text
