"""Time that a test lets pass, for whoever lives by it: threads, tasks, and an application's own loop."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from volcano_locks import AsyncHold, AsyncLockClient, LockClient
from volcano_locks.fastapi import leader_lifespan
from volcano_locks.testing import LockService

both_backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@both_backends
def test_an_app_in_a_test_client_leads_on_and_loses_as_its_test_lets_time_pass(
    backend: str, lock_service: LockService, async_lock_client: AsyncLockClient
):
    led, seen = threading.Event(), []

    async def consume(hold: AsyncHold) -> None:
        seen.append(hold.fencing_token)
        led.set()
        try:
            await anyio.sleep_forever()
        finally:
            seen.append("stopped")

    app = Starlette(lifespan=leader_lifespan(consume, key="consumer", client=async_lock_client))
    with TestClient(app, backend=backend):
        assert led.wait(60)
        lock_service.clock.advance(100)
        assert len(seen) == 1
        lock_service.lose("consumer")
        assert seen[1:] == ["stopped"]


def test_letting_time_pass_without_await_in_a_task_is_told_and_does_not_hang(
    lock_service: LockService, async_lock_client: AsyncLockClient
):
    async def work() -> None:
        async with async_lock_client.hold("rollup", ttl=30):
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(AssertionError, match=r"await lock_service\.clock\.aadvance"):
                lock_service.clock.advance(60)
            with pytest.raises(AssertionError, match=r"await lock_service\.alose"):
                lock_service.lose("rollup")

    anyio.run(work)


@both_backends
def test_a_task_that_lets_time_pass_leaves_threads_the_time_to_renew(
    backend: str, lock_service: LockService, lock_client: LockClient
):
    async def work() -> None:
        with lock_client.hold("rollup", ttl=30) as hold:
            await lock_service.clock.aadvance(600)
            assert not hold.lost

    anyio.run(work, backend=backend)


def test_only_holds_of_the_same_clock_are_waited_for(
    lock_service: LockService, lock_client: LockClient, tmp_path: Path
):
    real = LockClient(api_url=f"local:{tmp_path / 'locks'}")
    with LockService() as other, other.client().hold("rollup", ttl=30), real.hold("rollup"):
        with lock_client.hold("rollup", ttl=30) as hold:
            lock_service.clock.advance(60)
            assert not hold.lost
    real.close()
