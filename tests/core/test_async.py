"""What only tasks and event loops can do to a hold: cancellation, several loops, blocked loops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.core.fake import Drop, FakeService
from tests.core.simulation import Counting
from volcano_locks import AsyncLockClient, InvalidRequest, LeaseLost, Policy, TransportFailed
from volcano_locks.contract import Operation
from volcano_locks.testing import ManualClock

ACQUIRE, RENEW, RELEASE = Operation.ACQUIRE, Operation.RENEW, Operation.RELEASE
PATIENT: dict[str, Any] = {"ttl": 180, "policy": Policy(timeout=60, release_budget=60)}
"""For real sockets: what is not about time leaves a slow machine the time."""
pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def driver_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(service: FakeService, clock: ManualClock) -> AsyncLockClient:
    return make(service, clock)


def make(service: FakeService, clock: ManualClock, **options: Any) -> AsyncLockClient:
    return AsyncLockClient("sk-x", transport=service, clock=clock, entropy=Counting(), **options)


class Slow(FakeService):
    """Every answer needs many turns of the event loop, before and after it takes effect."""

    turns = 6

    async def handle_async_request(self, request: Any) -> Any:
        for _ in range(self.turns):
            await anyio.lowlevel.checkpoint()
        response = await super().handle_async_request(request)
        for _ in range(self.turns):
            await anyio.lowlevel.checkpoint()
        return response


async def test_losing_the_lease_cancels_the_body(
    client: AsyncLockClient, service: FakeService, clock: ManualClock
) -> None:
    cancelled = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_lose_after, service, clock)
        with pytest.raises(LeaseLost) as caught:
            async with client.hold("job", ttl=30) as hold:
                try:
                    await anyio.sleep_forever()
                except anyio.get_cancelled_exc_class():
                    cancelled = True
                    assert hold.lost
                    raise
    assert cancelled
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


async def _lose_after(service: FakeService, clock: ManualClock) -> None:
    await anyio.wait_all_tasks_blocked()
    service.take_over("job")
    await clock.aadvance(12)


async def test_the_callers_own_cancellation_stays_the_callers(
    client: AsyncLockClient, service: FakeService
) -> None:
    with anyio.CancelScope() as scope:
        async with client.hold("job", ttl=30):
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert service.free("job")
    with anyio.move_on_after(0.01) as timeout:
        async with client.hold("job", ttl=30):
            await anyio.sleep_forever()
    assert timeout.cancelled_caught


async def test_a_body_that_swallows_the_cancellation_is_still_told_of_the_loss(
    client: AsyncLockClient, service: FakeService, clock: ManualClock
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_lose_after, service, clock)
        with pytest.raises(LeaseLost):
            async with client.hold("job", ttl=30):
                with contextlib.suppress(BaseException):
                    await anyio.sleep_forever()


async def test_a_body_that_fails_while_it_is_cancelled_for_a_loss_raises_its_own(
    client: AsyncLockClient, service: FakeService, clock: ManualClock
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_lose_after, service, clock)
        with pytest.raises(ZeroDivisionError):
            async with client.hold("job", ttl=30):
                try:
                    await anyio.sleep_forever()
                finally:
                    raise ZeroDivisionError


@pytest.mark.parametrize("turns", range(40))
async def test_cancelling_an_acquire_at_any_instant_leaves_no_orphan(
    clock: ManualClock, turns: int
) -> None:  # law 8
    service = Slow(clock)
    service.next(ACQUIRE, Drop(arrives=True))
    clock.rush = True
    async with make(service, clock) as client:
        async with anyio.create_task_group() as tasks:

            async def lead() -> None:
                async with client.hold("job", ttl=30):
                    await anyio.sleep_forever()

            tasks.start_soon(lead)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert service.free("job")


async def test_a_release_in_flight_survives_cancellation(clock: ManualClock) -> None:
    service = Slow(clock)
    async with make(service, clock) as client:
        async with anyio.create_task_group() as tasks:

            async def lead() -> None:
                async with client.hold("job", ttl=30):
                    pass

            tasks.start_soon(lead)
            while not service.locks["job"].owner:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert service.answers[-1] == (RELEASE, 204)


async def test_a_release_that_hangs_is_bounded_in_time(clock: ManualClock) -> None:
    class Hanging(FakeService):
        async def handle_async_request(self, request: Any) -> Any:
            if request.method == "DELETE":
                await anyio.sleep_forever()
            return await super().handle_async_request(request)

    client = AsyncLockClient(
        "sk-x",
        transport=Hanging(clock),
        clock=clock,
        policy=Policy(timeout=600, release_budget=0.2, release_tries=1),
    )
    started = time.monotonic()
    async with client, client.hold("job", ttl=30):
        pass
    assert time.monotonic() - started < 60  # of the 600


async def test_a_blocked_event_loop_cannot_make_lost_lie(
    client: AsyncLockClient, service: FakeService, clock: ManualClock
) -> None:  # R4
    with pytest.raises(LeaseLost):
        async with client.hold("job", ttl=5) as hold:
            await anyio.wait_all_tasks_blocked()
            clock.advance(6, settle=False)  # as time.sleep(6) would
            assert hold.lost
            hold.check()
    assert not service.sent(RENEW)


async def test_the_renewing_task_survives_garbage_collection(
    client: AsyncLockClient, service: FakeService, clock: ManualClock
) -> None:  # R11
    async with client.hold("job", ttl=30) as hold:
        for _ in range(5):
            gc.collect()
            await clock.aadvance(11)
        hold.check()
    assert len(service.sent(RENEW)) == 5


async def test_renewals_go_on_while_the_body_waits_in_a_worker_thread(
    client: AsyncLockClient, service: FakeService, clock: ManualClock
) -> None:
    async with client.hold("job", ttl=30) as hold:
        done = threading.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, done.wait)
            for _ in range(3):
                await clock.aadvance(11)
            await anyio.to_thread.run_sync(hold.check)
            done.set()


async def test_wait_lost_from_another_task(
    client: AsyncLockClient, service: FakeService, clock: ManualClock
) -> None:
    heard: list[bool] = []
    async with anyio.create_task_group() as tasks:
        with pytest.raises(LeaseLost):
            async with client.hold("job", ttl=30) as hold:
                assert not await hold.wait_lost(0)

                async def listen() -> None:
                    heard.append(await hold.wait_lost())

                tasks.start_soon(listen)
                service.take_over("job")
                await clock.aadvance(12)
    assert heard == [True]


async def test_many_holds_in_one_task(client: AsyncLockClient, service: FakeService) -> None:
    from contextlib import AsyncExitStack

    async with AsyncExitStack() as stack:
        for number in range(50):
            await stack.enter_async_context(client.hold(f"job{number}", ttl=30))
    assert all(service.free(f"job{number}") for number in range(50))


async def test_native_cancellation_of_an_asyncio_task(
    client: AsyncLockClient, service: FakeService, driver_name: str
) -> None:
    async def lead() -> None:
        async with client.hold("job", ttl=30):
            await anyio.sleep_forever()

    if driver_name == "trio":
        import trio

        with trio.move_on_after(0.01) as scope:
            await lead()
        assert scope.cancelled_caught
    else:
        task = asyncio.create_task(lead())
        await anyio.wait_all_tasks_blocked()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert service.free("job")


# -- several event loops: H1 -----------------------------------------------------------------------


class Keeping:
    """A raw HTTP server that keeps connections open and says how many it has seen."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.open = 0
        self.seen = 0
        self.changed = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self.changed:
            self.open += 1
            self.seen += 1
        with connection:
            while self._answer(connection):
                pass
        with self.changed:
            self.open -= 1
            self.changed.notify_all()

    def _answer(self, connection: socket.socket) -> bool:
        head = b""
        while b"\r\n\r\n" not in head:
            part = connection.recv(4096)
            if not part:
                return False
            head += part
        if head.startswith((b"POST", b"PATCH")) and not head.endswith(b"}"):
            connection.recv(4096)
        body = b'{"expires_at": "2030-01-01T00:00:00Z", "fencing_token": 7, "held": true}'
        status = {b"P": b"201 Created", b"D": b"204 No Content"}.get(head[:1], b"200 OK")
        status = b"200 OK" if head.startswith(b"PATCH") else status
        payload = b"" if head[:1] == b"D" else body
        connection.sendall(
            b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(payload), payload)
        )
        return True

    def all_closed(self) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.open == 0, 60)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def server() -> Any:
    server = Keeping()
    yield server
    server.close()


def run_in_a_new_loop(driver_name: str, function: Callable[..., Any], *args: Any) -> Any:
    result: list[Any] = []

    def run() -> None:
        result.append(anyio.run(function, *args, backend=driver_name))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return result[0]


def test_one_client_serves_loops_one_after_another_and_leaks_nothing(
    server: Keeping, driver_name: str
) -> None:  # H1
    client = AsyncLockClient("sk-x", server.url, **PATIENT)

    async def work() -> int:
        lease = await client.acquire("job")
        assert lease is not None
        await client.release(lease)
        async with client.hold("job") as hold:
            return hold.fencing_token

    for number in range(3):
        assert run_in_a_new_loop(driver_name, work) == 7
        assert server.all_closed()  # nobody called aclose
        assert server.seen == number + 1  # one connection per loop, kept alive in between
    assert len(client._pools) == 0


def test_one_client_serves_two_loops_at_once(server: Keeping, driver_name: str) -> None:  # H1
    client = AsyncLockClient("sk-x", server.url, **PATIENT)
    both = threading.Barrier(2, timeout=60)

    async def work() -> None:
        async with client.hold("job"):
            both.wait()
            await client.get("job")
            both.wait()

    threads = [
        threading.Thread(target=lambda: anyio.run(work, backend=driver_name)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert server.all_closed()
    assert len(client._pools) == 0


async def test_200_acquires_cancelled_while_connecting_leave_renewals_working(
    driver_name: str,
) -> None:  # H3
    server = Keeping()
    full = socket.create_server(("127.0.0.1", 0), backlog=1)
    try:
        async with AsyncLockClient("sk-x", server.url, **PATIENT) as client:
            lease = await client.acquire("job")
            assert lease is not None
            elsewhere = f"http://127.0.0.1:{full.getsockname()[1]}"
            there = client._base
            for _ in range(200):
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as tasks:
                        client._base = elsewhere  # the next connection waits for ever
                        tasks.start_soon(client.get, "job")
                        await anyio.lowlevel.checkpoint()
                        await anyio.lowlevel.checkpoint()
                        client._base = there
                        scope.cancel()
            with anyio.fail_after(60):
                assert (await client.renew(lease)).fencing_token == 7
    finally:
        full.close()
        server.close()


async def test_a_peer_that_trickles_its_answer_is_bounded(driver_name: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def trickle() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            # Too much to be there in a quarter of an hour.
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 65000\r\n\r\n")
            while not stop.wait(0.02):
                connection.sendall(b" ")

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    policy = Policy(timeout=0.5)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with AsyncLockClient("sk-x", url, policy=policy) as client:
        with pytest.raises(TransportFailed), anyio.fail_after(60):
            await client.get("job")
    stop.set()
    thread.join(60)
    listener.close()


def test_ctrl_c_in_asyncio_run_releases(tmp_path: Path, driver_name: str) -> None:
    code = f"""
        import anyio, asyncio, os, signal
        from volcano_locks import AsyncLockClient
        async def main():
            async with AsyncLockClient(api_url="local:{tmp_path}/locks.sqlite3") as client:
                async with client.hold("job", ttl=60):
                    os.kill(os.getpid(), signal.SIGINT)
                    await anyio.sleep(600)
        try: anyio.run(main, backend="{driver_name}")
        except (KeyboardInterrupt, asyncio.CancelledError): pass  # Python 3.10: the latter
        async def look():
            async with AsyncLockClient(api_url="local:{tmp_path}/locks.sqlite3") as client:
                print((await client.get("job")).held)
        anyio.run(look)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("turns", range(0, 30, 2))
async def test_native_cancellation_at_any_instant_of_leaving_leaves_no_lease(
    clock: ManualClock, turns: int, driver_name: str
) -> None:
    service = Slow(clock)
    service.next(RELEASE, 503)
    clock.rush = True
    async with make(service, clock) as client:

        async def lead() -> None:
            async with client.hold("job", ttl=30):
                pass

        if driver_name == "trio":
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lead)
                await _turns(25 + turns)
                tasks.cancel_scope.cancel()
        else:
            task = asyncio.create_task(lead())
            await _turns(25 + turns)
            task.cancel()
            task.cancel()
            await asyncio.wait([task])
    assert service.free("job")


async def _turns(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


async def test_a_loss_comes_out_of_a_nursery_as_lease_lost(
    client: AsyncLockClient, service: FakeService, clock: ManualClock, driver_name: str
) -> None:
    async def body() -> None:
        if driver_name == "trio":
            import trio

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                nursery.start_soon(trio.sleep_forever)
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
                group.start_soon(anyio.sleep_forever)

    came_out: list[BaseException] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_lose_after, service, clock)
        try:
            async with client.hold("job", ttl=30):
                await body()
        except BaseException as error:  # a stray cancellation would end the test without a word
            came_out.append(error)
    assert [type(error) for error in came_out] == [LeaseLost]


async def test_the_bodys_own_error_comes_out_of_a_group_beside_a_cancellation(
    client: AsyncLockClient, service: FakeService, clock: ManualClock
) -> None:
    async def fail_when_cancelled() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ZeroDivisionError

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_lose_after, service, clock)
        with pytest.raises(BaseException) as caught:
            async with client.hold("job", ttl=30):
                async with anyio.create_task_group() as group:
                    group.start_soon(anyio.sleep_forever)
                    group.start_soon(fail_when_cancelled)
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]  # type: ignore[attr-defined]


async def test_plain_functions_and_generators_are_refused_by_the_async_client(
    client: AsyncLockClient, service: FakeService
) -> None:
    async def asyncgen() -> Any:
        yield

    with pytest.raises(InvalidRequest, match="neither takes generators"):
        client.leader_only("job")(asyncgen)
    with pytest.raises(InvalidRequest, match="AsyncLockClient takes async functions"):
        await client.with_lock("job", lambda hold: 42)  # type: ignore[arg-type, return-value]
    assert service.free("job")


async def test_a_hold_left_in_another_task_is_released_and_says_so(
    client: AsyncLockClient, service: FakeService, driver_name: str
) -> None:
    if driver_name == "trio":
        return  # a nursery cannot be left in another task at all
    hold = client.hold("job", ttl=30)
    await asyncio.create_task(hold.__aenter__())
    with pytest.raises(InvalidRequest, match="same task"):
        await hold.__aexit__(None, None, None)
    assert service.free("job")
