"""For tests of code that leads: time that stands still until the test moves it, and a lock service.

The law of this module: a test owns its clock and its service. Nothing here sleeps, and nothing here
is imported by the library itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from .contract import Malformed, Operation, Reply, Request, decode_grant, decode_request
from .models import MAX_TTL, Secret

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._http import httpx
    from .async_client import AsyncLockClient
    from .client import LockClient
    from .local.faults import Fault, Plan

__all__ = ["Elsewhere", "Exchange", "LockService", "ManualClock"]

_PATIENCE = 10.0
"""Real seconds after which ``advance`` gives up on a thread or a loop that does not come to rest."""
_BACKGROUND = "volcano-locks "


@dataclass(frozen=True, eq=False)
class _Sleeper:
    due: float
    wake: Callable[[], object]
    thread: threading.Thread
    """The one that sleeps, or that of the task's event loop."""


class ManualClock:
    """A Clock that moves only by ``advance``, or by ``aadvance`` in a task.

    Sleepers are woken one by one in the order in which they are due, each with the clock at its own
    instant, and each is given the time to come back to the clock (or end) before it moves on.
    """

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=timezone.utc)) -> None:
        self._start = start
        self._now = 1_000.0
        self._wall_shift = -1_000.0
        self._changed = threading.Condition()
        self._sleepers: set[_Sleeper] = set()
        self._loops: dict[Any, threading.Thread] = {}
        self.rush = False
        """Whether time passes for a caller that waits (retries, waiting for a lock), as by ``advance``;
        what runs in the background waits for that."""

    def now(self) -> float:
        return self._now

    def wall(self) -> datetime:
        return self._start + timedelta(seconds=self._now + self._wall_shift)

    def shift_wall(self, seconds: float) -> None:
        """Set the wall clock forward (or back), while time itself stands."""
        self._wall_shift += seconds

    def wait(self, event: threading.Event, seconds: float) -> bool:
        due = self._now + seconds
        if self.rush and not threading.current_thread().name.startswith(_BACKGROUND):
            self.advance(seconds)
            return event.is_set()
        sleeper = _Sleeper(due, _nothing, threading.current_thread())
        with self._changed:
            self._sleepers.add(sleeper)
            self._changed.notify_all()
            while not event.is_set() and self._now < due:
                # The event is set without our knowing; look at it often.
                self._changed.wait(0.002)
            self._sleepers.discard(sleeper)
        return event.is_set()

    async def sleep(self, seconds: float) -> None:
        import anyio.lowlevel

        if self.rush and not (anyio.get_current_task().name or "").startswith(_BACKGROUND):
            await self.aadvance(seconds)
            return
        woken, loop, own = anyio.Event(), self.join_loop(), threading.current_thread()

        def wake() -> None:
            # At once in the loop's own thread: aadvance then finds the task awake, not still asleep.
            if threading.current_thread() is own:
                woken.set()
            else:
                _call_soon(loop, woken.set)

        sleeper = _Sleeper(self._now + seconds, wake, own)
        with self._changed:
            self._sleepers.add(sleeper)
        try:
            await woken.wait()
        finally:
            with self._changed:
                self._sleepers.discard(sleeper)

    def advance(self, seconds: float, *, settle: bool = True) -> None:
        """Let time pass for threads, and for the tasks of event loops in other threads.

        ``settle=False``: jump, as after a suspension of the process. AssertionError if a task of this
        thread's own event loop would have to run meanwhile: ``await aadvance`` there.
        """
        target = self._now + seconds
        if not settle:
            self._move(target)
            return
        self._settle()
        while (due := self._next_due()) <= target:
            self._refuse_own_tasks(due)
            self._move(due)
            self._settle()
        self._move(target)
        self._settle()

    async def aadvance(self, seconds: float, *, settle: bool = True) -> None:
        """The same in a task, whose event loop goes on meanwhile."""
        import anyio

        self.join_loop()
        target = self._now + seconds
        if not settle:
            self._move(target)
            await anyio.wait_all_tasks_blocked()
            return
        await self._asettle()
        while (due := self._next_due()) <= target:
            self._move(due)
            await self._asettle()
        self._move(target)
        await self._asettle()

    def join_loop(self) -> Any:
        """Have time pass for the tasks of the running event loop, too; returns what stands for it."""
        loop: Any
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            import trio

            loop = trio.lowlevel.current_trio_token()
        self._loops[loop] = threading.current_thread()
        return loop

    def _next_due(self) -> float:
        with self._changed:
            first = min(self._sleepers, key=lambda sleeper: sleeper.due, default=None)
        return float("inf") if first is None else max(first.due, self._now)

    def _refuse_own_tasks(self, due: float) -> None:
        with self._changed:
            own = any(
                sleeper.due <= due and sleeper.thread is threading.current_thread()
                for sleeper in self._sleepers
            )
        if own:
            raise AssertionError(
                "a task of this event loop has to run before that much time has passed: in a task, "
                "use `await lock_service.clock.aadvance(seconds)`, and `await lock_service.alose(key)`"
            )

    def _move(self, now: float) -> None:
        with self._changed:
            self._now = max(self._now, now)
            for sleeper in [sleeper for sleeper in self._sleepers if sleeper.due <= self._now]:
                self._sleepers.remove(sleeper)
                with contextlib.suppress(RuntimeError):  # its loop has ended without it
                    sleeper.wake()
            self._changed.notify_all()

    def _settle(self) -> None:
        """Wait until every thread of ours waits on the clock for something later, or has ended, and
        every task of the loops of other threads waits for something."""
        asked, give_up = self._ask_loops(), time.monotonic() + _PATIENCE
        with self._changed:
            while not self._at_rest(asked, give_up):
                self._changed.wait(0.002)  # a thread that ends does not say so

    async def _asettle(self) -> None:
        """The same, and for the other tasks of this loop."""
        import anyio

        await anyio.wait_all_tasks_blocked()
        asked, give_up = self._ask_loops(), time.monotonic() + _PATIENCE
        while not self._at_rest(asked, give_up):  # noqa: ASYNC110 - threads do not say so
            await anyio.sleep(0.002)

    def _ask_loops(self) -> list[tuple[Any, threading.Event]]:
        """Have the loops of other threads tell when all of their tasks wait for something."""
        asked = []
        for loop, thread in list(self._loops.items()):
            if thread is threading.current_thread():
                continue
            settled = threading.Event()
            try:
                _call_soon(loop, partial(_tell_when_settled, loop, settled))
            except RuntimeError:  # it has ended
                del self._loops[loop]
            else:
                asked.append((loop, settled))
        return asked

    def _at_rest(self, asked: list[tuple[Any, threading.Event]], give_up: float) -> bool:
        with self._changed:
            asleep = {sleeper.thread for sleeper in self._sleepers if sleeper.due > self._now}
        busy = [
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith(_BACKGROUND)
            and getattr(thread, "clock", self) is self
            and thread not in asleep
        ]
        busy += [f"tasks of {loop}" for loop, settled in asked if not settled.is_set()]
        if busy and time.monotonic() > give_up:
            raise AssertionError(f"busy for {_PATIENCE:g} s: {busy}")
        return not busy


def _nothing() -> None:
    """A thread looks for itself."""


def _call_soon(loop: Any, work: Callable[[], object]) -> None:
    """Call that in the loop's thread, from any thread; RuntimeError if the loop has ended."""
    if isinstance(loop, asyncio.AbstractEventLoop):
        loop.call_soon_threadsafe(work)
    else:
        loop.run_sync_soon(work)


def _tell_when_settled(loop: Any, settled: threading.Event) -> None:
    """In the loop's own thread."""
    import anyio

    async def settle() -> None:
        try:
            await anyio.wait_all_tasks_blocked()
        finally:
            settled.set()

    if isinstance(loop, asyncio.AbstractEventLoop):
        task = loop.create_task(settle())
        task.add_done_callback(_settling.discard)
        _settling.add(task)
    else:
        import trio

        trio.lowlevel.spawn_system_task(settle)


_settling: Final[set[object]] = set()
"""asyncio itself may forget a task that nobody keeps."""


@dataclass(frozen=True)
class Exchange:
    """A request that reached the test's service, and its answer: None if the answer was lost."""

    operation: Operation
    key: str
    request_id: str
    ttl: int | None
    status: int | None
    token: Secret | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Elsewhere:
    """A lease of another holder, somewhere else. It does not run out unless asked to."""

    key: str
    fencing_token: int
    _service: LockService = field(repr=False)
    _token: Secret = field(repr=False)

    def release(self) -> None:
        """The other holder gives the lock back."""
        self._service._ask(Operation.RELEASE, self.key, self._token)


_names: Final = itertools.count(1)


class LockService:
    """A lock service for one test: in memory, judged by the test's clock, at the test's command.

    The contract is the real one, quota and all. ``clock`` moves by ``clock.advance``, and by itself
    where the code under test waits for the lock or between tries; renewals wait for ``advance``.
    ``requests`` are those that arrived, oldest first. ``settings`` points Django or Flask here in
    one line::

        settings.VOLCANO_LOCKS = lock_service.settings            # Django, pytest-django
        app.config["VOLCANO_LOCKS"] = lock_service.settings       # Flask
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        from .local.address import name_service
        from .local.faults import Faults
        from .local.service import LockService as Service
        from .local.store import Store

        self.clock = clock or _rushing_clock()
        self.requests: list[Exchange] = []
        self.faults = Faults()
        self.url = f"local:@test-{next(_names)}"
        self._store = Store(None)
        start = round(self.clock.wall().timestamp() * 1_000) - round(self.clock.now() * 1_000)
        # Time by the monotonic hand: shift_wall moves the client's wall clock and not the service's.
        self._service = Service(
            self._store,
            clock=self.faults.shifted(lambda: start + round(self.clock.now() * 1_000)),
        )
        self.transport: Any = _kit_transport(self)
        self._unname = name_service(self.url, self.transport, self.clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the service: its URL leads nowhere any more."""
        self._unname()
        self._store.close()

    @property
    def settings(self) -> dict[str, Any]:
        """What ``VOLCANO_LOCKS`` has to be for this service."""
        return {"API_URL": self.url}

    def client(self, **options: Any) -> LockClient:
        """A client of this service, on its clock."""
        from .client import LockClient

        return LockClient(api_url=self.url, **options)

    def async_client(self, **options: Any) -> AsyncLockClient:
        """The same for asyncio and trio."""
        from .async_client import AsyncLockClient

        return AsyncLockClient(api_url=self.url, **options)

    # -- what happens elsewhere ------------------------------------------------------------------

    def hold_elsewhere(self, key: str, ttl: int = MAX_TTL) -> Elsewhere:
        """Somebody else leads for ``ttl`` seconds. AssertionError if the lock is held already."""
        token = Secret(str(uuid.uuid4()))
        reply = self._ask(Operation.ACQUIRE, key, token, ttl)
        grant = decode_grant(reply)
        if reply.status != 201 or grant is None or grant.fencing_token is None:
            raise AssertionError(
                f"lock {key!r} is held already: take it away from its holder with lose({key!r})"
            )
        return Elsewhere(key, grant.fencing_token, self, token)

    def lose(self, key: str) -> Elsewhere:
        """Another takes the lock away, and time passes until the holder's renewal was refused.

        For holders in threads. AssertionError if nobody holds the lock.
        """
        left, new = self._usurp(key)
        seen = len(self.requests)
        for _ in range(_STEPS):
            if self._renewal_refused(key, seen):
                break
            self.clock.advance(left / _STEPS)
        return new

    async def alose(self, key: str) -> Elsewhere:
        """As ``lose``, for holders in tasks of this event loop."""
        left, new = self._usurp(key)
        seen = len(self.requests)
        for _ in range(_STEPS):
            if self._renewal_refused(key, seen):
                break
            await self.clock.aadvance(left / _STEPS)
        return new

    def expire(self, key: str) -> None:
        """The lease runs out, as if the process had been suspended: time jumps to where the lock is
        free again. AssertionError if nobody holds it."""
        self.clock.advance(self._left(key) + 1.001, settle=False)

    def fail_next(
        self,
        fault: Fault | str = "503",
        times: int = 1,
        *,
        operation: Operation | str | None = None,
        key: str | None = None,
        seconds: float | None = None,
    ) -> Plan:
        """Make the next ``times`` requests fail that fit ``operation`` ("renew") and ``key``.

        ``fault``: 503, 429, paused, html-502, drop-request, drop-answer, delay, delay-answer or
        freeze; see ``volcano_locks.local.faults.Fault``. Delays move the clock instead of waiting,
        and no further than to the client's timeout. ValueError for another name.
        """
        return self.faults.plan(fault, times, operation=operation, key=key, seconds=seconds)

    def _usurp(self, key: str) -> tuple[float, Elsewhere]:
        left = self._left(key)
        self._ask(Operation.FORCE_RELEASE, key)
        return left, self.hold_elsewhere(key)

    def _renewal_refused(self, key: str, since: int) -> bool:
        return any(
            exchange.operation is Operation.RENEW and exchange.key == key and exchange.status == 409
            for exchange in self.requests[since:]
        )

    def _left(self, key: str) -> float:
        now = self._service.clock()
        for row in self._store.read().locks:
            if row.key == key and not row.record.free(now):
                return max(0.0, (row.record.expires_at - now) / 1_000)
        raise AssertionError(f"nobody holds lock {key!r}, so it cannot be lost")

    def _ask(
        self, operation: Operation, key: str, token: Secret | None = None, ttl: int | None = None
    ) -> Reply:
        """A request from elsewhere: neither recorded nor faulted, but of the project's quota."""
        request = Request(operation, key, str(uuid.uuid4()), token, ttl)
        return self._service.perform(request)

    def _exchange(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout: float
    ) -> Reply | None:
        """The answer, or None if none arrives in time."""
        plan = self.faults.take(method, path)
        fault = None if plan is None else plan.fault.value
        reply = None if plan is None else plan.canned()
        if plan is not None and fault in {"delay", "freeze", "drop-request"}:
            self._pass(min(plan.seconds, timeout))
        if reply is None and fault not in {"drop-request", "freeze"}:
            reply = self._service.reply(method, path, headers, body)
        if plan is not None and fault == "delay-answer":
            self._pass(min(plan.seconds, timeout))
        late = plan is not None and plan.seconds >= timeout and fault in {"delay", "delay-answer"}
        if late or fault == "drop-answer":
            reply = None
        self._record(method, path, headers, body, None if reply is None else reply.status)
        return reply

    def _pass(self, seconds: float) -> None:
        if seconds > 0:
            self.clock.advance(seconds, settle=False)

    def _record(
        self, method: str, path: str, headers: dict[str, str], body: bytes, status: int | None
    ) -> None:
        request = decode_request(method, path, headers, body)
        if not isinstance(request, Malformed):
            self.requests.append(
                Exchange(
                    request.operation,
                    request.key,
                    request.request_id,
                    request.ttl,
                    status,
                    request.token,
                )
            )


def _rushing_clock() -> ManualClock:
    clock = ManualClock()
    clock.rush = True
    return clock


_STEPS: Final = 50
"""Steps in which the time of a lease passes: fine enough to stop soon after a renewal."""


def _kit_transport(service: LockService) -> Any:
    """An httpx transport, sync and async, into the service. Made here so that ManualClock alone
    costs no HTTP library."""
    from ._http import httpx
    from .local.transport import respond

    class KitTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            return self._answer(request, request.read())

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            service.clock.join_loop()
            return self._answer(request, await request.aread())

        def _answer(self, request: httpx.Request, body: bytes) -> httpx.Response:
            timeout = request.extensions.get("timeout", {}).get("read") or float("inf")
            headers = dict(request.headers)
            reply = service._exchange(request.method, request.url.path, headers, body, timeout)
            if reply is None:
                raise httpx.ReadError("no answer: a planned fault", request=request)
            return respond(reply)

    return KitTransport()
