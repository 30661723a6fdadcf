"""``volcano-locks serve`` as a process: several on one file, killed, stopped, asked nonsense."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner

from tests.contract.served import KEY, PATIENCE, ROOT, served
from volcano_locks import LockClient, Policy, ServiceUnavailable, TransportFailed
from volcano_locks._http import httpx
from volcano_locks.cli import main
from volcano_locks.local import server as server_module
from volcano_locks.local.address import DEFAULT_KEY
from volcano_locks.local.faults import Faults
from volcano_locks.local.server import MAX_STREAMS, create_app
from volcano_locks.local.service import Credential, LockService
from volcano_locks.local.store import Store
from volcano_locks.models import Secret


def headers(token: str | None = None, key: str = KEY) -> dict[str, str]:
    found = {"X-Volcano-Request-Id": str(uuid.uuid4()), "Authorization": f"Bearer {key}"}
    return found if token is None else {**found, "X-Volcano-Lock-Token": token}


def plainly(url: str) -> httpx.Client:
    """With nothing of ours in between, and patient."""
    return httpx.Client(base_url=url, trust_env=False, verify=False, timeout=PATIENCE)


def ask(url: str, method: str, path: str, token: str | None = None, ttl: int | None = None):
    body = None if ttl is None else json.dumps({"ttl_seconds": ttl})
    with plainly(url) as http:
        return http.request(method, path, headers=headers(token), content=body)


def client(url: str) -> LockClient:
    return LockClient(KEY, url, policy=Policy(timeout=PATIENCE, release_budget=PATIENCE))


# -- processes -------------------------------------------------------------------------------------


def test_two_servers_on_one_file_are_one_service(tmp_path: Path):
    store = str(tmp_path / "store")
    with served(store=store) as one, served(store=store) as two:
        first, second = client(one.url), client(two.url)
        with first, second:
            lease = first.acquire("job", ttl=600)
            assert lease is not None
            assert second.acquire("job", ttl=600) is None
            assert second.get("job").fencing_token == lease.fencing_token
            assert second.renew(lease, ttl=900).fencing_token == lease.fencing_token
            second.release(lease)
            again = first.acquire("job", ttl=600)
            assert again is not None
            assert again.fencing_token > lease.fencing_token


def test_two_servers_under_load_never_grant_one_lock_twice(tmp_path: Path):
    """Each holder marks a set while it holds; a mark that is there already is a second holder."""
    store, inside, seen, wrong = str(tmp_path / "store"), set(), [], []
    end = time.monotonic() + PATIENCE

    def contend(url: str) -> None:
        with plainly(url) as http:
            while len(seen) < 30 and not wrong and time.monotonic() < end:
                token = str(uuid.uuid4())
                body = json.dumps({"ttl_seconds": 600})
                answer = http.post("/locks/job/lease", content=body, headers=headers(token))
                if answer.status_code == 201:
                    if inside:
                        wrong.append("two holders at once")
                    inside.add(token)
                    seen.append(answer.json()["fencing_token"])
                    inside.discard(token)
                    http.delete("/locks/job/lease", headers=headers(token))
                elif answer.status_code != 409:
                    wrong.append(answer.text)

    with (
        served("--quota", "100000", store=store) as one,
        served("--quota", "100000", store=store) as two,
    ):
        threads = [threading.Thread(target=contend, args=(url,)) for url in [one.url, two.url] * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(seen) >= 30
    assert seen == sorted(set(seen)), "tokens rise with every hand-over"


def test_a_killed_server_comes_back_with_every_lease_and_token(tmp_path: Path):
    store, token = str(tmp_path / "store"), str(uuid.uuid4())
    with served(store=store) as server:
        granted = ask(server.url, "POST", "/locks/job/lease", token, 600).json()
        server.kill()
    with served(store=store) as server:
        assert ask(server.url, "GET", "/locks/job").json() == {"held": True, **granted}
        again = ask(server.url, "POST", "/locks/job/lease", token, 600)
        assert again.json()["fencing_token"] == granted["fencing_token"]


@contextlib.contextmanager
def heard(*options: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server of which each word counts: its URL, and how it is told to stop.

    It stops in silence: it says so if it had to break off what was open when its patience was over.
    """
    command = [sys.executable, "-m", "volcano_locks", "serve", "--port=0", "--store=memory"]
    process = subprocess.Popen(
        [*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def stops_at_once() -> None:
        process.terminate()
        told = process.communicate(timeout=PATIENCE)[1]
        assert (process.returncode, told) == (0, "")

    with process, contextlib.ExitStack() as ends:
        ends.callback(process.kill)
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().strip().partition("=")[2]
        assert "Locks are kept" in process.stderr.readline()
        assert "--faults" not in options or "Faults" in process.stderr.readline()
        yield url, stops_at_once


def test_sigterm_stops_cleanly_with_pages_open_and_requests_under_way():
    with heard("--faults") as (url, stops_at_once), plainly(url) as http:
        assert http.post("/_faults", json={"fault": "freeze"}).status_code == 200
        answers: list[int] = []
        thread = threading.Thread(
            target=lambda: answers.append(ask(url, "GET", "/locks/job").status_code)
        )
        thread.start()
        with http.stream("GET", "/events") as stream:
            assert next(stream.iter_lines()) == "event: view"
            while http.get("/_faults").json()["pending"]:
                time.sleep(0.01)  # until the frozen request is there
            stops_at_once()
        thread.join()
        assert answers == [200]


def test_sigterm_does_not_wait_for_the_rest_of_a_request():
    with heard() as (url, stops_at_once), socket.socket() as half:
        half.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        half.sendall(
            b"POST /locks/a/lease HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n{"
        )
        with plainly(url) as http:
            assert http.get("/healthz").status_code == 200  # and it was read before that
        stops_at_once()


def test_sigterm_does_not_wait_for_a_page_that_does_not_read():
    with heard() as (url, stops_at_once), socket.socket() as page:
        with plainly(url) as http:
            for number in range(200):
                name, token = f"{number:x>128}", str(uuid.uuid4())
                answer = http.post(
                    f"/locks/{name}/lease", json={"ttl_seconds": 60}, headers=headers(token)
                )
                assert answer.status_code == 201
        # Small segments and a small window, so that the server's system takes little off its hands.
        page.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        page.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        page.settimeout(PATIENCE)
        page.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        page.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        seen = b""
        while b"event: view" not in seen:
            seen += page.recv(256)
        stops_at_once()


def test_what_was_being_drawn_when_the_server_stops_is_not_sent(monkeypatch):
    """It would come after the pages that do not read were left."""
    service, stopping = LockService(Store(None)), asyncio.Event()
    read = service.store.read
    monkeypatch.setattr(service.store, "read", lambda since: (stopping.set(), read(since))[1])
    stream = create_app(service, stopping=stopping).locks.server.stream(None)

    async def main() -> list[bytes]:
        return [chunk async for chunk in stream]

    assert asyncio.run(main()) == []


def test_a_port_in_use_is_told_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "volcano_locks", "serve", "--store", "memory", "--port", port],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 78
    assert "choose another with --port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--host", "0.0.0.0", "--service-key", "sk-mine"], 64, "--allow-remote"),
        (["--host", "0.0.0.0", "--allow-remote"], 64, "a key of your own"),
        (["--service-key", "ak-anon"], 78, "anon key"),
        (["--service-key", " "], 78, "no service key"),
        (["--project", "sk-secret"], 64, "NAME=KEY"),
        (["--project", "a=sk-one", "--project", "b=sk-one"], 64, "same key"),
        (["--quota", "0"], 64, "quota"),
        (["--store", "/nonexistent/store"], 78, "make /nonexistent"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_starts(options, code, words):
    result = CliRunner().invoke(main, ["serve", *options])
    assert result.exit_code == code
    assert words in result.output
    assert "sk-secret" not in result.output
    assert "sk-one" not in result.output


def test_the_lines_to_paste_name_the_url_and_hide_a_key_of_ones_own(tmp_path: Path):
    done = subprocess.Popen(
        [sys.executable, "-m", "volcano_locks", "serve", "--port=0", "--service-key=sk-my-own"],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.stdout is not None
    lines = [done.stdout.readline(), done.stdout.readline()]
    done.terminate()
    out, err = done.communicate(timeout=PATIENCE)
    assert re.fullmatch(r"export VOLCANO_API_URL=http://127\.0\.0\.1:\d+\n", lines[0])
    assert lines[1].startswith("# VOLCANO_SERVICE_KEY: ")
    assert "sk-my-own" not in "".join(lines) + out + err
    assert str(tmp_path / "volcano-locks" / "locks.sqlite3") in err, "the file of local: alone"


def test_it_counts_by_the_wall_clock():
    with served() as server:
        before = datetime.now(timezone.utc)
        granted = ask(server.url, "POST", "/locks/job/lease", str(uuid.uuid4()), 600).json()
        after = datetime.now(timezone.utc)
    whole = before.replace(microsecond=before.microsecond // 1_000 * 1_000)
    until = datetime.fromisoformat(granted["expires_at"].replace("Z", "+00:00"))
    assert whole <= until - timedelta(seconds=600) <= after


# -- who is let in, and how many ---------------------------------------------------------------------


def test_no_environment_lets_a_header_say_who_is_at_this_machine(monkeypatch):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own, and images set it
    with served() as server, plainly(server.url) as http:
        for said in ("127.0.0.1", "10.0.0.7"):
            assert http.get("/", headers={"X-Forwarded-For": said}).status_code == 401
        assert http.get("/").status_code == 200


@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("POST", "/_faults")])
def test_the_server_takes_the_client_from_the_connection_alone(monkeypatch, method, path):
    """The page refuses what a proxy marked, whatever it says; this is the line behind that."""
    seen: list[uvicorn.Config] = []
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    monkeypatch.setattr(server_module, "_PROXIED", ())
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: seen.append(self.config))
    server_module.serve(LockService(Store(None)), "127.0.0.1", 0, faults=Faults())
    seen[0].load()

    async def ask(client: str, forwarded: str) -> int:
        transport = httpx.ASGITransport(seen[0].loaded_app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.request(
                method, path, json={"fault": "503"}, headers={"X-Forwarded-For": forwarded}
            )
            return answer.status_code

    assert asyncio.run(ask("10.0.0.7", "127.0.0.1")) == 401
    assert asyncio.run(ask("127.0.0.1", "10.0.0.7")) == 200


def test_a_body_that_breaks_off_is_not_taken_for_a_whole_one():
    """What arrived reads as an acquire for 30 seconds; what was meant is not known."""
    service = LockService(Store(None))
    part = b'{"ttl_seconds": 30}'
    messages = [{"type": "http.request", "body": part, "more_body": True}]

    async def receive() -> Any:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    ids = {**headers(str(uuid.uuid4())), "Content-Length": "60"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/locks/job/lease",
        "headers": [(name.lower().encode(), value.encode()) for name, value in ids.items()],
    }
    asyncio.run(create_app(service)(scope, receive, send))
    assert service.store.read().locks == []
    messages.append({"type": "http.request", "body": part, "more_body": False})
    asyncio.run(create_app(service)(scope, receive, send))
    assert [row.key for row in service.store.read().locks] == ["job"]


@pytest.mark.parametrize("name", ["rebound.test", "localhost"])
def test_a_web_site_that_knows_the_key_does_nothing(name):
    """By a name of its own for loopback, or by ours from afar."""
    service = LockService(Store(None))

    async def main() -> int:
        transport = httpx.ASGITransport(create_app(service), client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{name}") as http:
            origin = {"Origin": "http://rebound.test", **headers(str(uuid.uuid4()))}
            answer = await http.post("/locks/job/lease", headers=origin, json={"ttl_seconds": 60})
            return answer.status_code

    assert asyncio.run(main()) == 403
    assert service.store.read().locks == []


@pytest.mark.parametrize("marks", [{}, {"X-Forwarded-For": "10.0.0.7"}])
@pytest.mark.parametrize("checks_keys", [True, False])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/locks/job"),
        ("POST", "/locks/job/lease"),
        ("DELETE", "/locks/job"),
        ("GET", "/"),
        ("GET", "/force-release?project=shop&key=job"),
    ],
)
def test_under_a_name_that_a_web_site_can_have_a_key_that_everybody_knows_opens_nothing(
    method, path, checks_keys, marks
):
    """To a name of its own a site's script sends a GET with no Origin, and most headers it likes."""
    keys = [Credential(Secret(DEFAULT_KEY), "shop"), Credential(Secret("sk-my-own"), "shop")]
    service, token = (
        LockService(Store(None), credentials=keys if checks_keys else None),
        str(uuid.uuid4()),
    )

    async def ask(host: str, key: str) -> int:
        transport = httpx.ASGITransport(create_app(service), client=("127.0.0.1", 1))
        who = {**headers(token, key), **marks, "Host": host}
        if not path.startswith("/locks/"):
            who["Authorization"] = "Basic " + base64.b64encode(f"me:{key}".encode()).decode()
        body = b'{"ttl_seconds": 60}' if method == "POST" else None
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.request(method, path, headers=who, content=body)).status_code

    opened = 201 if method == "POST" else 204 if method == "DELETE" else 200
    for host in ("rebound.test:8787", "localhost.rebound.test", "10.0.0.7", ""):
        assert asyncio.run(ask(host, DEFAULT_KEY)) in (401, 403), host
    assert service.store.read() == Store(None).read(), "and it costs no operation"
    if checks_keys:
        assert asyncio.run(ask("[::1]:8787", DEFAULT_KEY)) == opened
        assert asyncio.run(ask("rebound.test", "sk-my-own")) == opened


def test_a_page_that_takes_nothing_of_its_stream_gives_its_place_to_another(monkeypatch):
    monkeypatch.setattr(server_module, "STALLED", 0.01)
    app = create_app(LockService(Store(None)))

    async def mute(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def main() -> None:
        scope = {"type": "http", "method": "GET", "path": "/events", "query_string": b""}
        stays = asyncio.Event()
        place = {"client": ("127.0.0.1", 1), "headers": [(b"host", b"localhost")]}
        await app({**scope, **place}, stays.wait, mute)
        assert app.locks.server._streams == 0

    asyncio.run(asyncio.wait_for(main(), 20))


def test_asking_for_the_head_of_the_stream_opens_none():
    app = create_app(LockService(Store(None)))

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.head("/events")

    answer = asyncio.run(asyncio.wait_for(main(), 20))
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/event-stream")


def test_streams_that_open_all_at_once_are_bounded_and_give_their_places_back():
    with served() as server, contextlib.ExitStack() as opened:
        host, _, port = server.url.removeprefix("http://").rpartition(":")

        def ask_for_a_stream() -> socket.socket:
            stream = opened.enter_context(
                socket.create_connection((host, int(port)), timeout=PATIENCE)
            )
            stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return stream

        streams = [ask_for_a_stream() for _ in range(4 * MAX_STREAMS)]
        statuses = [stream.recv(12)[-3:] for stream in streams]
        assert statuses.count(b"200") == MAX_STREAMS
        assert statuses.count(b"503") == 3 * MAX_STREAMS
        for stream in streams:
            stream.close()
        freed, deadline = 0, time.monotonic() + PATIENCE
        while freed < MAX_STREAMS:
            assert time.monotonic() < deadline, f"{freed} of {MAX_STREAMS} places were given back"
            stream = ask_for_a_stream()
            if stream.recv(12)[-3:] == b"200":
                freed += 1
            else:
                stream.close()  # refused ones, kept open, would use up the files of both processes
                time.sleep(0.01)
        assert ask_for_a_stream().recv(12)[-3:] == b"503", "and not more than there are"


# -- faults ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty():
    with served("--faults") as server:
        yield server.url


@pytest.fixture
def faults(faulty: str):
    with plainly(faulty) as http:
        yield http
        http.delete("/_faults")


@pytest.fixture
def plan(faults: httpx.Client):
    return lambda fault, **fields: faults.post("/_faults", json={"fault": fault, **fields})


def test_there_is_no_fault_route_unless_asked_for():
    with served() as server, plainly(server.url) as http:
        assert http.get("/_faults").status_code in (401, 404)


@pytest.mark.parametrize(
    ("fault", "status", "retry_after"),
    [("503", 503, None), ("429", 429, "7"), ("paused", 503, "60"), ("html-502", 502, None)],
)
def test_canned_answers_are_given_as_often_as_planned(faulty, plan, fault, status, retry_after):
    assert plan(fault, times=2, seconds=7).status_code == 200
    for _ in range(2):
        answer = ask(faulty, "GET", "/locks/job")
        assert answer.status_code == status
        assert answer.headers.get("Retry-After") == retry_after
    assert ask(faulty, "GET", "/locks/job").status_code == 200


def test_a_dropped_request_does_nothing_and_a_dropped_answer_was_done(faulty, plan):
    for fault, held in (("drop-request", False), ("drop-answer", True)):
        key = f"job.{uuid.uuid4()}"
        plan(fault, operation="acquire", key=key)
        with pytest.raises(httpx.TransportError):
            ask(faulty, "POST", f"/locks/{key}/lease", str(uuid.uuid4()), 600)
        assert ask(faulty, "GET", f"/locks/{key}").json()["held"] is held


def test_our_client_finds_out_what_a_dropped_answer_did(faulty, plan):
    key = f"job.{uuid.uuid4()}"
    plan("drop-answer", operation="acquire", key=key)
    with client(faulty) as locks:
        lease = locks.acquire(key, ttl=600)
        assert lease is not None
        assert locks.get(key).fencing_token == lease.fencing_token
        plan("drop-request", times=4, key=key)
        with pytest.raises(TransportFailed):
            locks.get(key)
        plan("html-502", times=4, key=key)
        with pytest.raises((ServiceUnavailable, TransportFailed)):
            locks.get(key)


def test_a_delayed_request_is_late_and_a_frozen_one_goes_on_when_thawed(faulty, faults, plan):
    plan("delay", seconds=0.3)
    started = time.monotonic()
    assert ask(faulty, "GET", "/locks/job").status_code == 200
    assert time.monotonic() - started >= 0.3
    plan("delay-answer", seconds=0.2)
    started = time.monotonic()
    assert ask(faulty, "GET", "/locks/job").status_code == 200
    assert time.monotonic() - started >= 0.2
    plan("freeze")
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(ask(faulty, "GET", "/locks/job").status_code)
    )
    thread.start()
    while faults.get("/_faults").json()["pending"]:
        time.sleep(0.01)  # until the request is there
    thread.join(0.2)
    assert answers == []
    faults.delete("/_faults")
    thread.join(PATIENCE)
    assert answers == [200]


def test_a_shifted_clock_judges_leases(faulty, plan):
    key = f"job.{uuid.uuid4()}"
    ask(faulty, "POST", f"/locks/{key}/lease", str(uuid.uuid4()), 10)
    plan("clock-shift", seconds=12)
    assert ask(faulty, "GET", f"/locks/{key}").json() == {"held": False}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"fault": "no-such"}',
        b'{"fault": "503", "times": 0}',
        b'{"fault": "503", "times": "x"}',
        b'{"fault": "503", "seconds": -1}',
        b'{"fault": "503", "seconds": "x"}',
        b'{"fault": "503", "operation": "steal"}',
        b'{"fault": "503", "more": 1}',
        b'{"fault": "503", "key": "\\ud800"}',
        b'{"fault": "503", "key": "no key"}',
        b'{"fault": "503", "key": ""}',
        b'{"fault": "clock-shift", "seconds": "x"}',
        b'{"fault": "clock-shift", "seconds": 1e999}',
    ],
)
def test_a_senseless_plan_is_400_and_plans_nothing(faults, body):
    assert faults.post("/_faults", content=body).status_code == 400
    assert faults.get("/_faults").json()["pending"] == []
