"""The thread driver: LockClient and Hold.

The law of this module: it performs what the flows of ``_core`` ask for and decides nothing. One
pooled connection set per process; one daemon thread per hold renews it and refers to the hold by
nothing, so a forgotten hold stops being renewed. No lock is taken that a forked child or a signal
handler could find taken.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ._client import (
    LONGEST_BODY,
    LONGEST_SLEEP,
    ClientBase,
    HoldBase,
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
from .errors import ConfigurationError, LockHeld, VolcanoLocksError
from .models import Lease, LockResult, LockState, Secret

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from ._core.tenure import Belief
    from ._http import httpx
    from .clock import Clock

__all__ = ["Campaign", "Hold", "LockClient"]

T = TypeVar("T")
Params = ParamSpec("Params")
logger = logging.getLogger("volcano_locks")


class LockClient(ClientBase):
    """A client of the lock service for threads. Thread-safe; connects on first use.

    Close it, or use it in a ``with`` statement. Arguments: see ClientBase.
    """

    # One pool per process id: a forked child never touches its parent's sockets (law 7).
    # dict.setdefault is atomic, so no lock has to survive a fork.

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pools: dict[int, httpx.Client] = {}

    def close(self) -> None:
        """Close the connections. A later use opens new ones; live holds are not released by this."""
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            pool.close()
        if self._local is not None:
            self._local.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the five operations ------------------------------------------------------------------------

    def acquire(
        self,
        key: str,
        ttl: int | None = None,
        *,
        token: str | Secret | None = None,
        request_id: str | None = None,
    ) -> Lease | None:
        """Try once to win the lock for ``ttl`` seconds: the lease, or None if another holds it.

        Nobody renews this lease: see ``hold``. With your own ``token`` an uncertain acquisition can
        be repeated safely. Raises OutcomeUnknown or Refused; source: contract rules 1 to 4.
        """
        return self._run(self._acquiring(key, ttl, token, request_id))

    def renew(
        self, lease: Lease, ttl: int | None = None, *, request_id: str | None = None
    ) -> Lease:
        """Set the expiry to ``ttl`` seconds from now: the new lease. One request, no retry.

        Raises LeaseLost (contract rule 6), OutcomeUnknown or Refused.
        """
        return self._run(self._renewing(lease, ttl, request_id))

    def release(self, lease: Lease, *, request_id: str | None = None) -> None:
        """Give the lock back; fine if it is free already. A few tries within three seconds.

        Raises LeaseLost if another owns it (contract rule 7), OutcomeUnknown or Refused.
        """
        self._run(self._releasing(lease, request_id))

    def get(self, key: str, *, request_id: str | None = None) -> LockState:
        """Whether the lock is held, until when, and its fencing token. An answer of the past."""
        return self._run(self._getting(key, request_id))

    def force_release(self, key: str, *, request_id: str | None = None) -> None:
        """Drop whatever lease there is. The old holder works on until its next renewal fails: only
        the fence protects then (contract rule 8)."""
        self._run(self._forcing(key, request_id))

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
        on_lost: Callable[[Hold], object] | None = None,
    ) -> Hold:
        """A lease that is renewed while the ``with`` body runs, and released after it.

        ``ttl``: seconds. ``wait``: seconds to wait for the lock, None for ever. ``min_hold``: seconds
        from the acquisition for which nobody else may start, even if the body is done sooner.
        ``token`` and ``request_id`` go to the acquisition only. ``on_lost`` is called once, in a
        thread of its own, if the lease is lost while the body runs.

        Entering raises LockHeld on contention, OutcomeUnknown, Refused; leaving raises LeaseLost if
        the lease was lost before the body ended, unless the body raised something itself (law 6).
        """
        return Hold(
            self,
            key,
            ttl=ttl,
            wait=wait,
            min_hold=min_hold,
            token=token,
            request_id=request_id,
            on_lost=on_lost,
        )

    def campaign(
        self,
        key: str,
        *,
        ttl: int | None = None,
        on_lost: Callable[[Hold], object] | None = None,
    ) -> Campaign:
        """Wait in line for the lock: ``with`` enters one term, iterating gives one term after another.

        A standby takes over from a crashed leader as soon as the service allows it, and rides out
        outages of the service.
        """
        return Campaign(functools.partial(self.hold, key, ttl=ttl, wait=None, on_lost=on_lost))

    def with_lock(self, key: str, work: Callable[[Hold], T], **hold_options: Any) -> LockResult[T]:
        """Run ``work(hold)`` under the lock; ``LockResult(acquired=False)`` if another holds it.

        Options and errors are those of ``hold``, but that contention is no error.
        """
        hold = self.hold(key, **hold_options)
        try:
            hold.__enter__()
        except LockHeld:
            return LockResult(acquired=False)
        with contextlib.ExitStack() as leave:
            leave.push(hold)
            value = work(hold)
            if (
                inspect.isawaitable(value)
                or inspect.isgenerator(value)
                or inspect.isasyncgen(value)
            ):
                raise unfinished(f"with_lock({key!r})", value)
            return LockResult(acquired=True, value=value)

    def leader_only(
        self, key: str, **hold_options: Any
    ) -> Callable[[Callable[Params, T]], Callable[Params, LockResult[T]]]:
        """A decorator: the function runs under the lock and its callers get a LockResult.

        A parameter named ``lease``, if the function has one, is given the live hold.
        """

        def decorate(function: Callable[Params, T]) -> Callable[Params, LockResult[T]]:
            refuse_generators(f"leader_only({key!r})", function)
            if inspect.iscoroutinefunction(inspect.unwrap(function)):
                raise unfinished(f"leader_only({key!r})", function)
            gives_lease = wants_lease(function)

            @functools.wraps(function)
            def led(*args: Params.args, **kwargs: Params.kwargs) -> LockResult[T]:
                def work(hold: Hold) -> T:
                    if gives_lease:
                        kwargs["lease"] = hold
                    return function(*args, **kwargs)

                return self.with_lock(key, work, **hold_options)

            return led

        return decorate

    # -- driving ------------------------------------------------------------------------------------

    def _pool(self) -> httpx.Client:
        pid = os.getpid()
        pool = self._pools.get(pid)
        if pool is None:
            from ._http import httpx

            mine = self._open_pool(httpx.Client)
            pool = self._pools.setdefault(pid, mine)
            if pool is not mine:
                mine.close()
        return pool

    def _run(self, flow: Flow[T]) -> T:
        return _drive(flow, self._perform)

    def _perform(self, effect: Effect, stop: threading.Event | None = None) -> Answer | Woke:
        """Perform one effect; ``stop`` ends a sleep, and what would come after it, with _Stopped."""
        if isinstance(effect, Send):
            return self._send(effect)
        now = self._clock.now()
        if effect.until > now:
            seconds = min(effect.until - now, LONGEST_SLEEP)
            if self._clock.wait(stop or threading.Event(), seconds):
                raise _Stopped
            now = self._clock.now()
        return Woke(now)

    def _asking(self, effect: Send) -> Callable[[], Reply]:
        """All that can be prepared before the clock is read."""
        if self._local is not None:
            return functools.partial(self._local.answer, effect.request)
        return functools.partial(self._exchange, self._pool(), self._http_request(effect), effect)

    def _exchange(self, pool: httpx.Client, request: httpx.Request, effect: Send) -> Reply:
        end = self._clock.now() + effect.timeout
        response = pool.send(request, stream=True)
        try:
            body = b""
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > LONGEST_BODY:
                    break
                if self._clock.now() > end:
                    # httpx bounds each step; a peer that trickles its answer is bounded here.
                    raise TimeoutError("the answer trickles")
            return to_reply(response, body)
        finally:
            response.close()

    def _send(self, effect: Send) -> Answer:
        clock = self._clock
        ask = self._asking(effect)
        result: Reply | NoAnswer
        sent_wall, sent_at = clock.wall(), clock.now()
        try:
            result = ask()
        except ConfigurationError:
            raise  # a store or proxy that cannot be used: nothing was sent
        except Exception as error:
            # Whatever it was, the flow must know that no answer came: it may hold a lease.
            result = to_no_answer(error)
        return Answer(sent_at, clock.now(), sent_wall, result)


def _drive(
    flow: Flow[T], perform: Callable[[Effect], Any], interruption: BaseException | None = None
) -> T:
    """Run a flow to its end, whatever interrupts it: the interruption is thrown into it."""
    # A signal's handler may raise between two effects, too: then the flow waits, and has to clean
    # up. The loop is a function of its own, since CPython 3.11 runs the edge back to the head of a
    # loop outside of a `try` that begins there.
    try:
        return _step(flow, perform, interruption)
    except BaseException as error:
        if inspect.getgeneratorstate(flow) == inspect.GEN_SUSPENDED:
            return _drive(flow, perform, error)
        raise


def _step(flow: Flow[T], perform: Callable[[Effect], Any], interruption: BaseException | None) -> T:
    try:
        effect = next(flow) if interruption is None else flow.throw(interruption)
        while True:
            try:
                result = perform(effect)
            except BaseException as error:  # noqa: PERF203
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


class _Stopped(Exception):
    """The hold is being left: the keeper ends."""


_live: weakref.WeakSet[Hold] = weakref.WeakSet()


class _Worker(threading.Thread):
    """A hold's thread in the background."""

    clock: Clock
    """Whose passing time it waits for: who moves that clock waits for this thread, for no other."""


class Hold(HoldBase):
    """The live lease of a ``with client.hold(...)`` body. See HoldBase for what it answers."""

    def __init__(
        self,
        client: LockClient,
        key: str,
        *,
        on_lost: Callable[[Hold], object] | None,
        **options: Any,
    ) -> None:
        super().__init__(client, key, **options)
        self._client = client
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._over = threading.Event()  # set when the keeper has ended or the hold was left
        self._keeper: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._enter_once()
        belief = self._begin(self._client._run(self._campaigning()))
        keeper = _Keeper(self._client, belief, self._stop, self._over)
        try:
            weakref.finalize(self, keeper.abandon).atexit = False
            self._rules.quota.hold(keeper, self.ttl)
            self._keeper = self._start(keeper.run, self._keeping())
            if self._on_lost is not None:
                self._start(
                    _notify, weakref.ref(self), belief, self._over, self._clock, self._on_lost
                )
            _live.add(self)
        except BaseException as error:
            self._rules.quota.leave(keeper)
            self._leave(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loss = self._leave(error)
        if loss is not None and error is None:
            raise self._live().error(loss)

    def release(self) -> None:
        """Give the lock back before the body ends, from any thread; the rest of the body must not
        write any more. A second call does nothing."""
        self._leave(None)

    def wait_lost(self, timeout: float | None = None) -> bool:
        """Block until the hold is lost or left, at most ``timeout`` seconds: whether it is over.

        Computed from the clock, so it is on time even while a renewal hangs.
        """
        return os.getpid() != self._pid or _wait_over(
            self._live(), self._over, self._clock, timeout
        )

    def _start(self, work: Callable[..., None], *args: Any) -> threading.Thread:
        name = f"volcano-locks {work.__name__.strip('_')} {self.key}"
        thread = _Worker(target=work, args=args, name=name, daemon=True)
        thread.clock = self._clock
        thread.start()
        return thread

    def _leave(self, error: BaseException | None) -> Loss | None:
        loss, flow = self._ending(error)
        if loss is Loss.FORKED:
            return loss
        self._stop.set()
        self._over.set()
        try:
            if self._keeper is not None and self._keeper is not threading.current_thread():
                self._keeper.join(_JOIN)
            if flow is not None:
                self._give_back(flow)
        except BaseException:
            # A signal struck while we left: the lease must not stay behind for that (law 6).
            if flow is not None:
                self._give_back(self._leaving(0.0))
            raise
        finally:
            _live.discard(self)
        return loss

    def _give_back(self, flow: Flow[Left]) -> None:
        try:
            self._report_left(self._client._run(flow))
        except VolcanoLocksError as stuck:
            self._report_stuck(stuck)

    def _leave_at_exit(self, budget: float) -> None:
        policy = replace(self._rules.policy, release_budget=budget, release_tries=1)
        self._rules = replace(self._rules, policy=policy)
        self._leave(SystemExit())


_JOIN = 0.5
"""Seconds to wait for the keeper's end; a renewal on the wire may last longer and does no harm."""


class _Keeper:
    """What the renewing thread knows: everything but the Hold, which may be forgotten meanwhile."""

    def __init__(
        self, client: LockClient, belief: Belief, stop: threading.Event, over: threading.Event
    ) -> None:
        self._client = client
        self._belief = belief
        self._stop = stop
        self._over = over

    def run(self, flow: Flow[Loss]) -> None:
        try:
            loss = _drive(flow, self._perform)
            if loss is not Loss.RELEASED:
                logger.error("%s", self._belief.error(loss))
                self._over.set()
        except _Stopped:
            pass
        except Exception:
            # The tenure runs out by itself and every look finds that; say why nobody renews it.
            logger.exception("renewing stopped for a reason of our own; the lease will run out")
        finally:
            self._client._rules.quota.leave(self)

    def abandon(self) -> None:
        """The Hold was forgotten: stop renewing, so that the lease runs out."""
        self._belief.lose(Loss.RELEASED)
        self._stop.set()
        self._over.set()

    def _perform(self, effect: Effect) -> Answer | Woke:
        if self._stop.is_set():
            raise _Stopped
        return self._client._perform(effect, self._stop)


def _wait_over(belief: Belief, over: threading.Event, clock: Clock, timeout: float | None) -> bool:
    """Wait until the belief is lost, by the clock or by the keeper's word; False if time ran out."""
    end = math.inf if timeout is None else clock.now() + timeout
    while belief.look(now := clock.now()) is None:
        if now >= end:
            return False
        clock.wait(over, min(belief.remaining(now), end - now))
    return True


def _notify(
    hold: weakref.ref[Hold],
    belief: Belief,
    over: threading.Event,
    clock: Clock,
    on_lost: Callable[[Hold], object],
) -> None:
    _wait_over(belief, over, clock, None)
    lost = hold()
    if lost is None or belief.loss is Loss.RELEASED:
        return
    try:
        on_lost(lost)
    except Exception:
        logger.exception("on_lost of lock %r failed", lost.key)


class Campaign:
    """Terms of leadership, each a Hold of its own."""

    def __init__(self, new_term: Callable[[], Hold]) -> None:
        self._new_term = new_term
        self._terms: dict[int, list[Hold]] = {}  # by thread: several may stand at once

    def __enter__(self) -> Hold:
        term = self._new_term()
        term.__enter__()
        self._terms.setdefault(threading.get_ident(), []).append(term)
        return term

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        me = threading.get_ident()
        term = self._terms[me].pop()
        if not self._terms[me]:
            del self._terms[me]
        term.__exit__(kind, error, traceback)

    def __iter__(self) -> Iterator[Hold]:
        """Terms to be entered, for ever: ``for term in campaign:``, ``with term:``."""
        while True:
            yield self._new_term()


_EXIT_BUDGET = 1.5
"""Seconds for all releases of a process that ends without having left its holds."""


@atexit.register
def _release_at_exit() -> None:
    holds = list(_live)
    end = time.monotonic() + _EXIT_BUDGET
    for number, hold in enumerate(holds):
        left = end - time.monotonic()
        if left <= 0:
            logger.warning("%d leases are left to expire by themselves", len(holds) - number)
            return
        hold._leave_at_exit(left / (len(holds) - number))
