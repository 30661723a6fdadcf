"""One hold suite, three drivers: threads, anyio on asyncio, anyio on trio.

Tests are coroutines and speak to a ``Driver``; for threads it runs the blocking client in a worker
thread, so that each test is written once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest

from tests.core.fake import FakeService, clock_for_the_service
from tests.core.simulation import Counting
from volcano_locks import AsyncLockClient, LockClient
from volcano_locks.testing import ManualClock


class ThreadDriver:
    name = "thread"
    client_type: type[Any] = LockClient

    def __init__(self, client: LockClient, clock: ManualClock) -> None:
        self.client = client
        self.clock = clock

    async def advance(self, seconds: float, *, settle: bool = True) -> None:
        await anyio.to_thread.run_sync(lambda: self.clock.advance(seconds, settle=settle))

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        function = getattr(self.client, method)
        return await anyio.to_thread.run_sync(
            lambda: function(*args, **options), abandon_on_cancel=True
        )

    def work(self, value: object) -> Callable[[Any], Any]:
        return lambda hold: value

    @asynccontextmanager
    async def hold(self, key: str = "job", **options: Any) -> AsyncIterator[Any]:
        hold = self.client.hold(key, **options)
        await anyio.to_thread.run_sync(hold.__enter__, abandon_on_cancel=True)
        try:
            yield hold
        except BaseException as error:
            caught = error
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(
                    lambda: hold.__exit__(type(caught), caught, caught.__traceback__)
                )
            raise
        else:
            await anyio.to_thread.run_sync(lambda: hold.__exit__(None, None, None))

    async def release(self, hold: Any) -> None:
        await anyio.to_thread.run_sync(hold.release)


class AnyioDriver:
    client_type: type[Any] = AsyncLockClient

    def __init__(self, name: str, client: AsyncLockClient, clock: ManualClock) -> None:
        self.name = name
        self.client = client
        self.clock = clock

    async def advance(self, seconds: float, *, settle: bool = True) -> None:
        await self.clock.aadvance(seconds, settle=settle)

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        return await getattr(self.client, method)(*args, **options)

    def work(self, value: object) -> Callable[[Any], Any]:
        async def work(hold: Any) -> object:
            return value

        return work

    def hold(self, key: str = "job", **options: Any) -> AbstractAsyncContextManager[Any]:
        return self.client.hold(key, **options)

    async def release(self, hold: Any) -> None:
        await hold.release()


Driver = ThreadDriver | AnyioDriver


@pytest.fixture
def clock() -> ManualClock:
    return clock_for_the_service()


@pytest.fixture
def service(clock: ManualClock) -> FakeService:
    return FakeService(clock)


@pytest.fixture(params=["thread", "asyncio", "trio"])
def driver_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def anyio_backend(driver_name: str) -> str:
    return "trio" if driver_name == "trio" else "asyncio"


@pytest.fixture
async def driver(driver_name: str, service: FakeService, clock: ManualClock) -> Any:
    options: dict[str, Any] = {
        "api_url": "https://locks.example",
        "transport": service,
        "clock": clock,
        "entropy": Counting(),
    }
    if driver_name == "thread":
        with LockClient("sk-test", **options) as client:
            yield ThreadDriver(client, clock)
    else:
        async with AsyncLockClient("sk-test", **options) as async_client:
            yield AnyioDriver(driver_name, async_client, clock)
