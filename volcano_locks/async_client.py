"""The anyio driver: AsyncLockClient and AsyncHold, on asyncio and trio.

The law of this module: it performs what the flows of ``_core`` ask for and decides nothing. Losing
the lease cancels the body; the caller's own cancellation stays the caller's. What an interrupted
flow still has to clean up, and every release, is shielded from cancellation and bounded in time.

A client may be made at module level and used from several event loops, one after another or at
once: each loop gets connections of its own, closed when the loop ends or by ``aclose``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import sys
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import anyio
import anyio.to_thread

from ._client import (
    LONGEST_SLEEP,
    ClientBase,
    HoldBase,
    announces_too_much,
    refuse_generators,
    to_no_answer,
    to_reply,
    unfinished,
    wants_lease,
)
from ._core.effects import Answer, Effect, Flow, NoAnswer, Send, Woke
from ._core.flows import Left
from ._core.tenure import Loss
from .contract import Reply
from .errors import ConfigurationError, InvalidRequest, LockHeld, VolcanoLocksError
from .models import Lease, LockResult, LockState, Secret

if TYPE_CHECKING:
    from types import TracebackType

    from anyio.abc import TaskGroup
    from typing_extensions import Self

    from ._http import httpx

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup  # type: ignore[import-not-found, unused-ignore]

__all__ = ["AsyncCampaign", "AsyncHold", "AsyncLockClient"]

T = TypeVar("T")
Params = ParamSpec("Params")
logger = logging.getLogger("volcano_locks")


class AsyncLockClient(ClientBase):
    """A client of the lock service for asyncio and trio. Connects on first use.

    Close it with ``aclose``, or use it in an ``async with`` statement. Arguments: see ClientBase.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pools: weakref.WeakKeyDictionary[
            Any, tuple[httpx.AsyncClient, AsyncGenerator[httpx.AsyncClient, None]]
        ] = weakref.WeakKeyDictionary()

    async def aclose(self) -> None:
        """Close this event loop's connections. Live holds are not released by this."""
        pooled = self._pools.get(_running_loop())
        if pooled is not None:
            await pooled[1].aclose()
        if self._local is not None:
            self._local.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await _to_the_end(self.aclose)

    # -- the five operations: as in LockClient ------------------------------------------------------

    async def acquire(
        self,
        key: str,
        ttl: int | None = None,
        *,
        token: str | Secret | None = None,
        request_id: str | None = None,
    ) -> Lease | None:
        """Try once to win the lock for ``ttl`` seconds: the lease, or None if another holds it.

        Cancelling it leaves no orphan: what the service may have granted is released first. Raises
        OutcomeUnknown or Refused; source: contract rules 1 to 4.
        """
        return await self._run(self._acquiring(key, ttl, token, request_id))

    async def renew(
        self, lease: Lease, ttl: int | None = None, *, request_id: str | None = None
    ) -> Lease:
        """Set the expiry to ``ttl`` seconds from now: the new lease. One request, no retry.

        Raises LeaseLost (contract rule 6), OutcomeUnknown or Refused.
        """
        return await self._run(self._renewing(lease, ttl, request_id))

    async def release(self, lease: Lease, *, request_id: str | None = None) -> None:
        """Give the lock back; fine if it is free already. A few tries within three seconds,
        shielded from cancellation.

        Raises LeaseLost if another owns it (contract rule 7), OutcomeUnknown or Refused.
        """
        await _to_the_end(lambda: self._run(self._releasing(lease, request_id)))

    async def get(self, key: str, *, request_id: str | None = None) -> LockState:
        """Whether the lock is held, until when, and its fencing token. An answer of the past."""
        return await self._run(self._getting(key, request_id))

    async def force_release(self, key: str, *, request_id: str | None = None) -> None:
        """Drop whatever lease there is. The old holder works on until its next renewal fails: only
        the fence protects then (contract rule 8)."""
        await self._run(self._forcing(key, request_id))

    # -- holds --------------------------------------------------------------------------------------

    def hold(
        self,
        key: str,
        *,
        ttl: int | None = None,
        wait: float | None = 0,
        min_hold: float = 0,
        token: str | Secret | None = None,
        request_id: str | None = None,
    ) -> AsyncHold:
        """A lease that is renewed while the ``async with`` body runs, and released after it.

        If it is lost, the body is cancelled and LeaseLost is raised. Otherwise as LockClient.hold.
        """
        return AsyncHold(
            self,
            key,
            ttl=ttl,
            wait=wait,
            min_hold=min_hold,
            token=token,
            request_id=request_id,
        )

    def campaign(self, key: str, *, ttl: int | None = None) -> AsyncCampaign:
        """Wait in line for the lock: ``async with`` enters one term, iterating gives one after another.

        A standby takes over from a crashed leader as soon as the service allows it, and rides out
        outages of the service.
        """
        return AsyncCampaign(functools.partial(self.hold, key, ttl=ttl, wait=None))

    async def with_lock(
        self, key: str, work: Callable[[AsyncHold], Awaitable[T]], **hold_options: Any
    ) -> LockResult[T]:
        """Run ``await work(hold)`` under the lock; ``LockResult(acquired=False)`` if another holds it.

        Options and errors are those of ``hold``, but that contention is no error.
        """
        hold = self.hold(key, **hold_options)
        try:
            await hold.__aenter__()
        except LockHeld:
            return LockResult(acquired=False)
        async with AsyncExitStack() as leave:
            leave.push_async_exit(hold)
            working = work(hold)
            if not inspect.isawaitable(working):
                raise unfinished(f"with_lock({key!r})", working)
            return LockResult(acquired=True, value=await working)
        raise AssertionError("a hold swallows no exception")

    def leader_only(
        self, key: str, **hold_options: Any
    ) -> Callable[[Callable[Params, Awaitable[T]]], Callable[Params, Awaitable[LockResult[T]]]]:
        """A decorator: the coroutine function runs under the lock and its callers get a LockResult.

        A parameter named ``lease``, if the function has one, is given the live hold.
        """

        def decorate(
            function: Callable[Params, Awaitable[T]],
        ) -> Callable[Params, Awaitable[LockResult[T]]]:
            refuse_generators(f"leader_only({key!r})", function)
            gives_lease = wants_lease(function)

            @functools.wraps(function)
            async def led(*args: Params.args, **kwargs: Params.kwargs) -> LockResult[T]:
                def work(hold: AsyncHold) -> Awaitable[T]:
                    if gives_lease:
                        kwargs["lease"] = hold
                    return function(*args, **kwargs)

                return await self.with_lock(key, work, **hold_options)

            return led

        return decorate

    # -- driving ------------------------------------------------------------------------------------

    async def _pool(self) -> httpx.AsyncClient:
        loop = _running_loop()
        pooled = self._pools.get(loop)
        if pooled is None:
            generator = self._pooling(loop)
            pooled = self._pools[loop] = (await anext(generator), generator)
        return pooled[0]

    async def _pooling(self, loop: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
        # An asynchronous generator, because an event loop that ends closes those that are open: no
        # other hook exists for that on both asyncio and trio.
        from ._http import httpx

        async with self._open_pool(httpx.AsyncClient) as pool:
            try:
                yield pool
            finally:
                self._pools.pop(loop, None)

    async def _run(self, flow: Flow[T]) -> T:
        try:
            effect = next(flow)
            while True:
                try:
                    result = await self._perform(effect)
                except GeneratorExit:
                    raise
                except BaseException as interruption:
                    return await self._wind_down(flow, interruption)
                effect = flow.send(result)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]

    async def _wind_down(self, flow: Flow[T], interruption: BaseException) -> T:
        async def clean_up() -> T:
            try:
                effect = flow.throw(interruption)
                while True:
                    effect = flow.send(await self._perform(effect))
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]

        return await _to_the_end(clean_up)

    async def _perform(self, effect: Effect) -> Answer | Woke:
        if isinstance(effect, Send):
            return await self._send(effect)
        now = self._clock.now()
        if effect.until > now:
            await self._clock.sleep(min(effect.until - now, LONGEST_SLEEP))
            now = self._clock.now()
        return Woke(now)

    async def _asking(self, effect: Send) -> Callable[[], Awaitable[Reply]]:
        """All that can be prepared before the clock is read."""
        if self._local is not None:
            # The store waits for the disk and for other processes: not on the event loop.
            call = functools.partial(self._local.answer, effect.request)
            return functools.partial(anyio.to_thread.run_sync, call)
        return functools.partial(_exchange, await self._pool(), self._http_request(effect))

    async def _send(self, effect: Send) -> Answer:
        clock = self._clock
        ask = await self._asking(effect)
        result: Reply | NoAnswer
        sent_wall, sent_at = clock.wall(), clock.now()
        try:
            # httpx bounds each step; a peer that trickles its answer is bounded here.
            with anyio.fail_after(effect.timeout):
                result = await ask()
        except ConfigurationError:
            raise  # a store or proxy that cannot be used: nothing was sent
        except Exception as error:
            # Whatever it was, the flow must know that no answer came: it may hold a lease.
            result = to_no_answer(error)
        return Answer(sent_at, clock.now(), sent_wall, result)


async def _to_the_end(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Finish this bounded work whatever cancels the caller meanwhile; its cancellation comes after.

    A shield of anyio holds off its own scopes only. On asyncio ``task.cancel()`` reaches through it
    (``asyncio.timeout``, ``wait_for``, a task group that aborts), so there the work is a task.
    """
    with anyio.CancelScope(shield=True):
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return await work()
        task = asyncio.create_task(work())
        late: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as cancelled:  # noqa: PERF203
                late = cancelled
        if late is not None:
            if not task.cancelled():
                task.exception()  # seen: the cancellation is what the caller gets
            raise late
        return task.result()
    raise AssertionError("a shield swallows nothing")


async def _exchange(pool: httpx.AsyncClient, request: httpx.Request) -> Reply:
    response = await pool.send(request, stream=True)
    try:
        # A body that does not say its length is bounded in time only: leaving httpx's asynchronous
        # generators half-way would leave them to the garbage collector.
        return to_reply(response, b"" if announces_too_much(response) else await response.aread())
    finally:
        with anyio.CancelScope(shield=True):
            await response.aclose()


def _running_loop() -> Any:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        import trio

        return trio.lowlevel.current_trio_token()


class AsyncHold(HoldBase):
    """The live lease of an ``async with client.hold(...)`` body. See HoldBase for what it answers."""

    def __init__(self, client: AsyncLockClient, key: str, **options: Any) -> None:
        super().__init__(client, key, **options)
        self._client = client

    async def __aenter__(self) -> Self:
        self._enter_once()
        self._begin(await self._client._run(self._campaigning()))
        self._over = anyio.Event()
        self._keeper = anyio.CancelScope()
        self._task = anyio.get_current_task().id
        self._rules.quota.hold(self, self.ttl)
        self._group: TaskGroup = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._keep, name=f"volcano-locks keep {self.key}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        # Only a cancellation is shown to the group: it tells the loss's own from the caller's, and
        # would wrap anything else. trio may have put it into a group, beside the body's own errors.
        cancellation, own = _split(error)
        loss, leaving = self._ending(error)
        self._keeper.cancel()
        if anyio.get_current_task().id != self._task:
            await self._give_back(leaving)
            return self._left_elsewhere(loss, error)
        shown = cancellation and (type(cancellation), cancellation, cancellation.__traceback__)
        try:
            swallowed = bool(await self._group.__aexit__(*(shown or (None, None, None))))
        finally:
            await self._give_back(leaving)
        swallowed = swallowed and cancellation is not None
        if swallowed:
            loss = loss or self._live().loss
            if own is not None:
                raise own
        if loss is not None and (error is None or swallowed):
            raise self._live().error(loss) from None
        return swallowed

    def _left_elsewhere(self, loss: Loss | None, error: BaseException | None) -> bool:
        """The end in another task than the beginning: released, but no loss can cancel that body."""
        if error is None:
            if loss is not None:
                raise self._live().error(loss)
            raise InvalidRequest(
                f"hold of {self.key!r} was entered in one task and left in another (wait_for around "
                "its entry, or an asynchronous generator): enter and leave it in the same task. It "
                "has been released"
            )
        return False

    async def release(self) -> None:
        """Give the lock back before the body ends, from any task; the rest of the body must not write
        any more. A second call does nothing."""
        _, leaving = self._ending(None)
        self._keeper.cancel()
        await self._give_back(leaving)

    async def wait_lost(self, timeout: float | None = None) -> bool:
        """Wait until the hold is lost or left, at most ``timeout`` seconds: whether it is over.

        Of use outside the body only: the body itself is cancelled.
        """
        end = math.inf if timeout is None else self._clock.now() + timeout
        while not self.lost:
            left = min(self.remaining(), end - self._clock.now())
            if left <= 0:
                return False
            async with anyio.create_task_group() as either:
                # Without a timeout it is the hold's own waiting, not the caller's: a test's clock tells
                # them apart by the name.
                name = None if timeout is not None else f"volcano-locks alarm {self.key}"
                either.start_soon(self._alarm, left, either.cancel_scope, name=name)
                await self._over.wait()
                either.cancel_scope.cancel()
        return True

    async def _alarm(self, seconds: float, scope: anyio.CancelScope) -> None:
        await self._clock.sleep(seconds)
        scope.cancel()

    async def _keep(self) -> None:
        with self._keeper:
            try:
                await self._client._run(self._keeping())
            except Exception:
                # The tenure runs out by itself and every look finds that; say why nobody renews it.
                logger.exception("renewing stopped for a reason of our own; the lease will run out")
                await self._clock.sleep(self.remaining())
            loss = self._loss()
            if loss is not None and loss is not Loss.RELEASED:
                logger.error("%s", self._live().error(loss))
                self._over.set()
                self._group.cancel_scope.cancel()

    async def _give_back(self, leaving: Flow[Left] | None) -> None:
        self._over.set()
        self._rules.quota.leave(self)
        if leaving is None:
            return
        try:
            self._report_left(await _to_the_end(lambda: self._client._run(leaving)))
        except VolcanoLocksError as stuck:
            self._report_stuck(stuck)


def _split(error: BaseException | None) -> tuple[BaseException | None, BaseException | None]:
    """What of a body's end is a cancellation, and what is its own."""
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(error, cancelled):
        return error, None
    if isinstance(error, BaseExceptionGroup):
        cancellation, own = error.split(cancelled)
        return cancellation, own
    return None, error


class AsyncCampaign:
    """Terms of leadership, each an AsyncHold of its own."""

    def __init__(self, new_term: Callable[[], AsyncHold]) -> None:
        self._new_term = new_term
        self._terms: dict[int, list[AsyncHold]] = {}  # by task: several may stand at once

    async def __aenter__(self) -> AsyncHold:
        term = self._new_term()
        await term.__aenter__()
        self._terms.setdefault(anyio.get_current_task().id, []).append(term)
        return term

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        me = anyio.get_current_task().id
        term = self._terms[me].pop()
        if not self._terms[me]:
            del self._terms[me]
        return await term.__aexit__(kind, error, traceback)

    def __aiter__(self) -> Self:
        """Terms to be entered, for ever: ``async for term in campaign:``, ``async with term:``."""
        return self

    async def __anext__(self) -> AsyncHold:
        return self._new_term()
