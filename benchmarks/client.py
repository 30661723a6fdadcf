"""The client against bare pooled httpx and the vendor's SDK; imports; a thousand leases."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import anyio
import httpx
from anyio.abc import TaskStatus

from benchmarks._measure import Result, compare
from benchmarks._stub import stub_service
from volcano_locks import AsyncLockClient, LeaseLost, LockClient, Policy
from volcano_locks.local.transport import LocalTransport

KEY = "sk-benchmark"


def run() -> list[Result]:
    with stub_service() as url:
        return [_against_httpx(url), _against_the_vendor(url), _import(), _decision()]


def _bare(client: httpx.Client, url: str) -> None:
    headers = {
        "Authorization": f"Bearer {KEY}",
        "X-Volcano-Request-Id": str(uuid.uuid4()),
        "X-Volcano-Lock-Token": str(uuid.uuid4()),
    }
    granted = client.post(f"{url}/locks/job/lease", json={"ttl_seconds": 30}, headers=headers)
    granted.raise_for_status()
    granted.json()
    headers["X-Volcano-Request-Id"] = str(uuid.uuid4())
    client.delete(f"{url}/locks/job/lease", headers=headers).raise_for_status()


def _ours(client: LockClient) -> None:
    lease = client.acquire("job", 30)
    assert lease is not None
    client.release(lease)


def _against_httpx(url: str) -> Result:
    with LockClient(KEY, url) as ours, httpx.Client(timeout=5, trust_env=False) as theirs:
        return compare(
            "acquire + release: LockClient / bare pooled httpx",
            lambda: _ours(ours),
            lambda: _bare(theirs, url),
            rounds=1_000,
            bound=1.10,
        )


def _against_the_vendor(url: str) -> Result:
    from volcano_sdk import VolcanoClient  # type: ignore[import-untyped]

    theirs = VolcanoClient(anon_key="ak-none", service_key=KEY, api_url=url).locks
    with LockClient(KEY, url) as ours:

        def vendor() -> None:
            theirs.release("job", theirs.acquire("job", ttl=30))

        return compare(
            "acquire + release: LockClient / the vendor's Python SDK",
            lambda: _ours(ours),
            vendor,
            rounds=30,
            warmup=3,
            bound=1.0,
        )


def _process(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def _import() -> Result:
    return compare(
        "process start + import: volcano_locks / httpx",
        lambda: _process("import volcano_locks"),
        lambda: _process("import httpx"),
        rounds=15,
        warmup=2,
        bound=1.15,
    )


def _decision() -> Result:
    with stub_service() as url:
        ours = (
            "from volcano_locks import LockClient\n"
            f"with LockClient('{KEY}', '{url}') as client: client.acquire('job')"
        )
        theirs = (
            "import httpx\n"
            "with httpx.Client(trust_env=False) as client:\n"
            f"    client.post('{url}/locks/job/lease', json={{'ttl_seconds': 30}})"
        )
        return compare(
            "process start to leader decision: LockClient / bare httpx",
            lambda: _process(ours),
            lambda: _process(theirs),
            rounds=15,
            warmup=2,
            bound=1.15,
        )


LEASES = 1_000
SECONDS = 60.0


def report() -> tuple[str, bool]:
    """What no ratio tells, and whether it is as it should be: a thousand leases, held by one process
    against the local service."""
    return asyncio.run(_hold_many())


async def _hold_many() -> tuple[str, bool]:
    lost: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        service = LocalTransport(f"{folder}/locks.sqlite3", quota=10**9)
        policy = Policy(quota_per_minute=10**9)
        async with AsyncLockClient(KEY, transport=service, policy=policy) as client:
            await client.get("warm-up")
            before = _memory()
            async with anyio.create_task_group() as tasks:
                over = anyio.Event()
                leaving = anyio.Semaphore(8)  # all at once would wait for one disk

                async def hold(number: int, *, task_status: TaskStatus[None]) -> None:
                    try:
                        async with client.hold(f"lease-{number}", ttl=30):
                            task_status.started()
                            await over.wait()
                            await leaving.acquire()
                        leaving.release()
                    except LeaseLost as error:
                        lost.append(error.key)

                for number in range(LEASES):
                    await tasks.start(hold, number)
                each = (_memory() - before) / LEASES / 1024
                cpu = time.process_time()
                await anyio.sleep(SECONDS)
                spent = (time.process_time() - cpu) / SECONDS
                over.set()
        service.close()
    return (
        f"{LEASES:,} leases held by one process for {SECONDS:g} s against the local service: "
        f"{len(lost)} lost, {each:.1f} KiB each, {spent:.0%} of one core (the service's part included)",
        not lost,
    )


def _memory() -> int:
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
