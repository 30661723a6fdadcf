"""Lifespans under a lock service and a clock of the test's own, on asyncio and trio."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from tests.core.fake import FakeService, clock_for_the_service
from volcano_locks import AsyncLockClient, Policy
from volcano_locks.testing import ManualClock

PATIENCE = 60.0
"""Real seconds after which a test gives up on something that ought to happen at once."""


class Journal:
    """What happened, in order, and a way to wait for it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._changed = anyio.Event()

    def note(self, event: str) -> None:
        self.events.append(event)
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, event: str, times: int = 1) -> None:
        with anyio.fail_after(PATIENCE):
            while self.events.count(event) < times:
                await self._changed.wait()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def clock() -> ManualClock:
    return clock_for_the_service()


@pytest.fixture
def service(clock: ManualClock) -> FakeService:
    return FakeService(clock)


@pytest.fixture
def new_client(service: FakeService, clock: ManualClock) -> Callable[[], AsyncLockClient]:
    return lambda: AsyncLockClient(
        "sk-test",
        "https://locks.example",
        transport=service,
        clock=clock,
        policy=Policy(poll_interval=2),
    )


@pytest.fixture
def client(new_client: Callable[[], AsyncLockClient]) -> AsyncLockClient:
    return new_client()
