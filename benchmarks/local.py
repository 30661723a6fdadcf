"""The local lock service: ``local:`` against two bare SQLite transactions, and the served form against
a bare Starlette route.

The bare side does the least that could be called the same: a transaction of equal durability that
reads and writes one row; a route that parses the body and answers with JSON. A bare transaction is as
``sqlite3.connect`` gives it; one more line has the store's own journal mode on both sides, which leaves
what the service itself costs. The time of both is the disk's above all, so the ratio is the disk's, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from volcano_locks import LockClient
from volcano_locks._http import httpx
from volcano_locks.contract import Operation, Request
from volcano_locks.local.service import LockService
from volcano_locks.local.store import Store
from volcano_locks.models import Secret

from ._measure import Result, compare

BOUND = 1.5
ROOT = Path(__file__).parents[1]
KEY = "sk-local-development"

_BARE = """
import socket, sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

async def lease(request):
    if request.method == "DELETE":
        return JSONResponse({}, 200)
    body = await request.json()
    return JSONResponse({"expires_at": "2026-01-01T00:00:00Z", "fencing_token": body["ttl_seconds"]}, 201)

listener = socket.create_server(("127.0.0.1", 0), backlog=512)
listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
app = Starlette(routes=[Route("/locks/{key}/lease", lease, methods=["POST", "DELETE"])])
config = uvicorn.Config(
    app, lifespan="off", ws="none", access_log=False, log_level="warning", server_header=False
)
uvicorn.Server(config).run(sockets=[listener])
"""


def run() -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        return [*_embedded(folder), *_served()]


def _embedded(folder: str) -> list[Result]:
    bare = _bare_transaction(os.path.join(folder, "bare"), "DELETE")
    like_ours = _bare_transaction(os.path.join(folder, "like ours"), "PERSIST")

    def two_bare() -> None:
        bare()
        bare()

    def two_like_ours() -> None:
        like_ours()
        like_ours()

    service = LockService(Store(os.path.join(folder, "direct")), quota=10**9)

    def direct() -> None:
        token = Secret(str(uuid.uuid4()))
        service.perform(Request(Operation.ACQUIRE, "job", "r", token, 30))
        service.perform(Request(Operation.RELEASE, "job", "r", token))

    results = [
        compare(
            "local service: acquire + release / 2 bare transactions",
            direct,
            two_bare,
            rounds=150,
            bound=BOUND,
        )
    ]
    service.store.close()
    with _client(f"local:{os.path.join(folder, 'client')}") as client:
        results.append(
            compare(
                "LockClient on local: acquire + release / 2 bare transactions",
                lambda: _pair(client),
                two_bare,
                rounds=150,
                bound=BOUND,
            )
        )
        results.append(
            compare(
                "the same, the bare ones in the store's journal mode, too",
                lambda: _pair(client),
                two_like_ours,
                rounds=150,
            )
        )
    return results


def _served() -> list[Result]:
    with (
        _server(
            "-m", "volcano_locks", "serve", "--port=0", "--store=memory", "--quota=1000000000"
        ) as ours,
        _server("-c", _BARE) as bare,
        contextlib.ExitStack() as stack,
    ):
        mine, theirs = (
            stack.enter_context(httpx.Client(base_url=url, trust_env=False, verify=False))
            for url in (ours, bare)
        )
        latency = compare(
            "served in memory: acquire + release / bare Starlette route",
            lambda: _http_pair(mine),
            lambda: _http_pair(theirs),
            rounds=300,
            bound=BOUND,
        )
        throughput = compare(
            "the same with 8 connections at once, 80 pairs",
            _crowd(mine),
            _crowd(theirs),
            rounds=8,
            warmup=1,
            bound=BOUND,
        )
    return [latency, throughput]


def _bare_transaction(path: str, journal_mode: str) -> Callable[[], None]:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(f"PRAGMA journal_mode = {journal_mode}")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE lock (key TEXT PRIMARY KEY, value INTEGER)")
    db.execute("INSERT INTO lock VALUES ('job', 0)")

    def transaction() -> None:
        db.execute("BEGIN IMMEDIATE")
        value = db.execute("SELECT value FROM lock WHERE key = ?", ("job",)).fetchone()[0]
        db.execute("UPDATE lock SET value = ? WHERE key = ?", (value + 1, "job"))
        db.execute("COMMIT")

    return transaction


def _client(url: str) -> LockClient:
    """A client whose service does not count: the quota would end the run after ten rounds a second."""
    client = LockClient(api_url=url)
    assert client._local is not None
    client._local.quota = 10**9
    return client


def _pair(client: LockClient) -> None:
    lease = client.acquire("job", ttl=30)
    assert lease is not None
    client.release(lease)


def _http_pair(client: httpx.Client, key: str = "job") -> None:
    headers = {
        "Authorization": f"Bearer {KEY}",
        "X-Volcano-Lock-Token": str(uuid.uuid4()),
        "X-Volcano-Request-Id": str(uuid.uuid4()),
    }
    path, body = f"/locks/{key}/lease", json.dumps({"ttl_seconds": 30}).encode()
    assert client.request("POST", path, headers=headers, content=body).status_code == 201
    assert client.request("DELETE", path, headers=headers).status_code in (200, 204)


def _crowd(client: httpx.Client) -> Callable[[], None]:
    def member(number: int) -> None:
        for _ in range(10):
            _http_pair(client, f"job-{number}")

    def crowd() -> None:
        threads = [threading.Thread(target=member, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return crowd


@contextlib.contextmanager
def _server(*arguments: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip().removeprefix("export VOLCANO_API_URL=")
    finally:
        process.terminate()
        process.wait(15)


if __name__ == "__main__":
    for result in run():
        print(
            f"{result.ratio:5.2f}  {result.ours_us:8.0f} us / {result.theirs_us:8.0f} us  {result.name}"
        )
