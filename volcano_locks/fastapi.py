"""Leader-only work in FastAPI and Starlette applications.

The law of this module: a singleton runs inside a hold or not at all, and its lease is never given
back while it still runs. Whatever happens to the election (the lock service is down, the credential
is refused, the singleton crashes) the application starts and serves; only a configuration that
cannot work stops it, at start-up. How a lease is won, kept and lost is decided by ``AsyncLockClient``.

Each process that runs the application's lifespan stands in the election: with ``--workers 3`` three
do, one leads. ``leader_lifespan`` must belong to the outermost application: Starlette runs the
lifespan of no mounted one.
"""

# Without postponed annotations: FastAPI reads those of a dependency, and of a class it cannot
# resolve strings.

import functools
import inspect
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import Mount

from .async_client import AsyncHold, AsyncLockClient
from .errors import (
    ConfigurationError,
    InvalidRequest,
    LeaseLost,
    OutcomeUnknown,
    VolcanoLocksError,
)
from .models import MAX_TTL, check_key, check_ttl

__all__ = [
    "LeaderLifespan",
    "Leadership",
    "Once",
    "Restart",
    "TermEnd",
    "leader_health",
    "leader_lifespan",
    "require_leader",
    "run_once",
]

logger = logging.getLogger("volcano_locks.fastapi")

_STATE: Final = "volcano_locks:"
"""Put before the key of a lock, the name of its candidate in the lifespan's state. One name each, so
that any way of merging states keeps all of them."""
_STEADY: Final = 60.0
"""Seconds. A term that lasted so long ends a row of bad ones."""
_WIND_DOWN: Final = 2.0
"""Seconds. After so long a loss another may lead: the margin of a second before the expiry at which
a holder is told to stop, and the service's second of grace (law 5, contract rule 5)."""
_RETRY_AFTER: Final = "1"
"""Seconds, for a client that was told 503: another worker leads, and the next try may reach it."""


# -- when to run again -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TermEnd:
    """How a singleton ended by itself while it led.

    ``error``: what it raised; None if it returned. ``lasted``: seconds. ``in_a_row``: how many such
    ends there were in this process, this one included, since a term last lasted a minute.
    """

    error: Exception | None
    lasted: float
    in_a_row: int


@dataclass(frozen=True)
class Restart:
    """When this process stands again after its singleton ended by itself. The lease is released
    before the pause, so that a standby runs it meanwhile.

    ``when``: "always"; "on_crash": a singleton that returns is done in this process; "never".
    The pause doubles from ``first_pause`` to ``longest_pause`` seconds, half of it by chance.
    Raises ConfigurationError for pauses that would only burn the quota.
    """

    when: Literal["always", "on_crash", "never"] = "always"
    first_pause: float = 1.0
    longest_pause: float = 60.0

    def __post_init__(self) -> None:
        if self.when not in ("always", "on_crash", "never"):
            raise ConfigurationError(
                f"Restart(when={self.when!r}): 'always', 'on_crash' or 'never' are possible"
            )
        if not 0.1 <= self.first_pause <= self.longest_pause <= MAX_TTL:
            raise ConfigurationError(
                "Restart: first_pause must be at least 0.1 s and at most longest_pause"
            )

    def __call__(self, end: TermEnd) -> float | None:
        """Seconds to pause, or None to stand no more."""
        if self.when == "never" or (self.when == "on_crash" and end.error is None):
            return None
        step = min(self.first_pause * 2.0 ** min(end.in_a_row - 1, 30), self.longest_pause)
        return step * (0.5 + random.random() / 2)  # noqa: S311 - chance, not a secret


_ALWAYS: Final = Restart()

# -- the lifespan ----------------------------------------------------------------------------------


def leader_lifespan(
    singleton: Callable[..., Awaitable[object]],
    *,
    key: str,
    ttl: int | None = None,
    client: AsyncLockClient | None = None,
    lifespan: Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]] | None = None,
    restart: Callable[[TermEnd], float | None] = _ALWAYS,
    grace: float = 10.0,
) -> "LeaderLifespan":
    """A lifespan, for ``FastAPI(lifespan=...)``, that runs ``await singleton(lease)`` in one process
    of all that serve this application, and lets another take over.

    ``lease`` is the live hold: pass it to fenced writes. A singleton that names them is given more:
    ``app``, ``state`` (what ``lifespan`` yielded) and ``stopping`` (an anyio.Event, see below).

    ``ttl``: seconds, by default the client's. ``client``: by default one from the settings, made and
    closed inside the lifespan; a client that you pass stays yours. ``lifespan``: the application's
    own, entered before and left after the singleton's; its state is kept. Another leader_lifespan
    there makes a second singleton. ``restart``: what follows an end that was the singleton's own: a
    Restart, or any function of a TermEnd that gives seconds to pause, or None to stand no more.

    Losing the lease cancels the singleton. A shutdown cancels it too, but one that takes ``stopping``
    is given ``grace`` seconds from when that event is set to return by itself. Then the lease is
    released; a standby leads within one poll interval (``Policy.poll_interval``, 5 s). A singleton
    that shields itself for longer is waited for, with an error in the log, and keeps its lease.

    Raises ConfigurationError or InvalidRequest, here or when the lifespan starts.
    """
    return LeaderLifespan(
        singleton,
        key=key,
        ttl=ttl,
        client=client,
        lifespan=lifespan,
        restart=restart,
        grace=grace,
    )


class LeaderLifespan:
    """What ``leader_lifespan`` gives: called with an application, it is that application's lifespan."""

    def __init__(
        self,
        singleton: Callable[..., Awaitable[object]],
        *,
        key: str,
        ttl: int | None,
        client: AsyncLockClient | None,
        lifespan: Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]] | None,
        restart: Callable[[TermEnd], float | None],
        grace: float,
    ) -> None:
        _check_async(singleton, "singleton", "async def singleton(lease): ...")
        self.wants = _wants(singleton)
        if inspect.isasyncgenfunction(lifespan):
            raise ConfigurationError(
                f"lifespan={lifespan.__qualname__}: decorate it with @asynccontextmanager"
            )
        if not 0 <= grace <= 3_600:
            raise ConfigurationError(f"grace={grace!r}: seconds from 0 to 3,600")
        self.key = check_key(key)
        self.ttl = None if ttl is None else check_ttl(ttl)
        self.singleton = singleton
        self.restart = restart
        self.grace = grace
        self._client = client
        self._lifespan = lifespan

    def __repr__(self) -> str:
        return f"<LeaderLifespan {self.key!r} of {_name(self.singleton)}>"

    @asynccontextmanager
    async def __call__(self, app: Any) -> AsyncIterator[dict[str, Any]]:
        """Stand in the election from start-up to shutdown. Never waits for the lock service."""
        _warn_of_mounted(app)
        async with AsyncExitStack() as stack:
            state: dict[str, Any] = {}
            if self._lifespan is not None:
                own = await stack.enter_async_context(self._lifespan(app))
                state.update(own or {})
            if _STATE + self.key in state:
                raise ConfigurationError(
                    f"two singletons of this application share the lock {self.key!r}: one would "
                    "wait for the other for ever. Give each its own key"
                )
            client = self._client
            if client is None:
                client = await stack.enter_async_context(AsyncLockClient.from_settings())
            client.hold(
                self.key, ttl=self.ttl
            )  # sends nothing; refuses what the prefix made too long
            candidate = _Candidate(self, client, {"app": app, "state": dict(state)})
            async with candidate.standing():
                yield {**state, _STATE + self.key: candidate}


_OFFERS: Final = ("app", "state", "stopping")
"""What a singleton may name after its first parameter, the lease."""


def _wants(function: Callable[..., object]) -> tuple[str, ...]:
    named = list(inspect.signature(function).parameters)[1:]
    return tuple(name for name in _OFFERS if name in named)


def _check_async(
    function: Callable[..., object], what: str, advice: str, offers: tuple[str, ...] = _OFFERS
) -> None:
    inner: object = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    # A plain function would block the event loop: nothing would be renewed, and nothing served.
    if not (
        inspect.iscoroutinefunction(inner)
        or inspect.iscoroutinefunction(getattr(type(inner), "__call__", None))  # noqa: B004
    ):
        raise ConfigurationError(f"{what} {_name(inner)} is not async: write {advice}")
    try:
        wanted = dict.fromkeys(_wants(function) if offers else ())
        inspect.signature(function).bind(object(), **wanted)
    except TypeError as error:
        more = f", and if you like {', '.join(offers)}" if offers else ""
        raise ConfigurationError(
            f"{what} {_name(inner)} cannot be called ({error}): write {advice}; it is given the lease{more}"
        ) from None


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _warn_of_mounted(app: Any) -> None:
    for route in getattr(app, "routes", ()):
        if not isinstance(route, Mount):
            continue
        mounted = getattr(getattr(route.app, "router", None), "lifespan_context", None)
        if isinstance(mounted, LeaderLifespan):
            logger.warning(
                "the singleton of lock %r will never run: its lifespan belongs to the application "
                "mounted at %r, and Starlette runs the outermost application's only. Compose it "
                "there: leader_lifespan(..., lifespan=leader_lifespan(...))",
                mounted.key,
                route.path,
            )


# -- the election ----------------------------------------------------------------------------------


class _Term:
    """One lease and the singleton that runs under it."""

    def __init__(self, hold: AsyncHold) -> None:
        self.hold = hold
        self.began_at = anyio.current_time()
        self.lost_at: float | None = None
        self.over = anyio.Event()  # the singleton has ended
        self.returned = False
        self.cut_short = False  # by a loss or a shutdown, however the singleton took that
        self.error: Exception | None = None


class _Candidate:
    """This process in one election. Stands in one event loop, from start-up to shutdown."""

    def __init__(
        self, lifespan: LeaderLifespan, client: AsyncLockClient, offers: dict[str, Any]
    ) -> None:
        self.key = lifespan.key
        self.withdrawn = False
        self._lifespan = lifespan
        self._client = client
        self._stopping = anyio.Event()
        self._ended = anyio.Event()
        self._scope = anyio.CancelScope()  # of what this candidate waits for right now
        self._term: _Term | None = None
        self._in_a_row = 0
        self._refusals = 0
        offers["stopping"] = self._stopping
        self._offers = {name: offers[name] for name in lifespan.wants}

    # -- what others see ---------------------------------------------------------------------------

    @property
    def lease(self) -> AsyncHold | None:
        term = self._term
        return None if term is None or term.hold.lost else term.hold

    @property
    def overdue(self) -> float:
        """Seconds since the lease was lost for which the singleton has been running on."""
        term = self._term
        if term is None or term.lost_at is None:
            return 0.0
        return anyio.current_time() - term.lost_at

    # -- from start-up to shutdown -----------------------------------------------------------------

    @asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        failed: Exception | None = None
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._stand, name=f"volcano-locks candidate {self.key}")
            try:
                yield
            except Exception as error:
                failed = error  # raised below: the group would wrap it
            finally:
                await self._stop()
        if failed is not None:
            raise failed

    async def _stop(self) -> None:
        self._stopping.set()
        grace, term = self._lifespan.grace, self._term
        try:
            if term is not None and "stopping" in self._offers:
                with anyio.move_on_after(grace):
                    await term.over.wait()
        finally:
            # Only the singleton, or the waiting for a lease: the hold goes on renewing until the
            # singleton has wound down, and is left then.
            self._scope.cancel()
        with anyio.move_on_after(grace) as late:
            await self._ended.wait()
        if late.cancelled_caught:
            logger.error(
                "the singleton of lock %r still runs %g s after it was cancelled: it shields itself, "
                "or waits for a thread. Its lease is kept until it ends",
                self.key,
                grace,
            )

    async def _stand(self) -> None:
        try:
            while not self._stopping.is_set():
                pause = await self._run_term()
                if pause is None:
                    self.withdrawn = True
                    logger.info("lock %r: this process stands no more", self.key)
                    return
                with anyio.CancelScope() as self._scope:
                    if self._stopping.is_set():
                        return
                    await anyio.sleep(pause)
        finally:
            self._ended.set()

    async def _run_term(self) -> float | None:
        """Wait for the lease, lead, give it back: seconds to pause before the next, None for none."""
        term: _Term | None = None
        try:
            with anyio.CancelScope() as self._scope:
                async with self._client.campaign(self.key, ttl=self._lifespan.ttl) as hold:
                    term, self._refusals = _Term(hold), 0
                    logger.info("leading %r, fencing token %d", hold.key, hold.fencing_token)
                    self._group.start_soon(self._watch, term)
                    await self._lead(term)
        except LeaseLost:
            pass  # the client has logged it; whoever leads next is found out by standing again
        except Exception as error:
            return self._explain(error)
        if term is None:
            return 0.0  # told to stop while waiting
        return self._judge(term)

    async def _lead(self, term: _Term) -> None:
        self._term = term
        try:
            async with anyio.create_task_group() as group:
                self._scope = group.cancel_scope
                group.start_soon(self._work, term, name=f"volcano-locks singleton {self.key}")
        finally:
            self._term = None
            term.over.set()
        if not (term.returned or term.error or term.cut_short):
            term.error = RuntimeError("the singleton was cancelled from inside: it awaited a task")

    async def _work(self, term: _Term) -> None:
        # In a task of its own: a cancellation that did not come from us must not end the candidate.
        try:
            await self._lifespan.singleton(term.hold, **self._offers)
            term.returned = True
        except LeaseLost as error:
            if not term.hold.lost:
                term.error = error  # another lock's
        except Exception as error:
            term.error = error
        finally:
            term.cut_short = term.hold.lost or self._stopping.is_set()

    async def _watch(self, term: _Term) -> None:
        await term.hold.wait_lost()
        if term.over.is_set():
            return
        term.lost_at = anyio.current_time()
        with anyio.move_on_after(_WIND_DOWN) as late:
            await term.over.wait()
        if late.cancelled_caught:
            logger.error(
                "the singleton of lock %r still runs %g s after its lease was lost; another may lead "
                "now, and only fenced writes are safe. Does it shield itself, or wait for a thread?",
                self.key,
                _WIND_DOWN,
            )

    def _judge(self, term: _Term) -> float | None:
        if term.error is not None:
            logger.error("the singleton of lock %r crashed", self.key, exc_info=term.error)
        lasted = anyio.current_time() - term.began_at
        if term.cut_short or not (term.returned or term.error):
            return _ALWAYS(TermEnd(None, lasted, 1))  # a moment, in which a standby may come first
        self._in_a_row = 1 if lasted >= _STEADY else self._in_a_row + 1
        end = TermEnd(term.error, lasted, self._in_a_row)
        try:
            pause = self._lifespan.restart(end)
            return pause if pause is None else max(0.1, min(float(pause), MAX_TTL))
        except Exception:
            logger.exception("the restart strategy of lock %r failed; Restart() decides", self.key)
            return _ALWAYS(end)

    def _explain(self, error: Exception) -> float | None:
        # Refused, mostly. The application goes on, and a key that is mended elsewhere is noticed.
        self._refusals += 1
        pause = _ALWAYS(TermEnd(error, 0.0, self._refusals))
        logger.error(
            "the singleton of lock %r does not run: %s. Trying again in %.0f s",
            self.key,
            error,
            pause,
            exc_info=None if isinstance(error, VolcanoLocksError) else error,
        )
        return pause


# -- dependencies ----------------------------------------------------------------------------------


class Leadership:
    """A dependency: whether this process leads. ``leadership: Annotated[Leadership, Depends()]``.

    In Starlette, ``Leadership(request)``. With several singletons, ``Depends(Leadership.of(key))``.
    Every look is computed now. Raises ConfigurationError if the lifespan has not run.
    """

    def __init__(self, connection: HTTPConnection) -> None:
        self._candidate = _find(connection, None)

    @classmethod
    def of(cls, key: str) -> "Callable[[HTTPConnection], Leadership]":
        """The dependency for one of several singletons; ``key`` as leader_lifespan was given it."""

        def leadership(connection: HTTPConnection) -> Leadership:
            found = cls.__new__(cls)
            found._candidate = _find(connection, key)
            return found

        return leadership

    @property
    def key(self) -> str:
        return self._candidate.key

    @property
    def lease(self) -> AsyncHold | None:
        """The live hold if this process leads. A request is not cancelled when it is lost: call
        ``lease.check()`` between steps, and fence the writes."""
        return self._candidate.lease

    @property
    def is_leader(self) -> bool:
        """Whether this process leads and may act. False from the moment at which it may not."""
        return self._candidate.lease is not None

    @property
    def overdue(self) -> float:
        """Seconds since the lease was lost for which the singleton has not stopped; 0.0 else."""
        return self._candidate.overdue


class _RequireLeader:
    """A dependency: the live hold, or 503 with Retry-After where this process does not lead."""

    def __call__(self, connection: HTTPConnection) -> AsyncHold:
        return _require(_find(connection, None))

    def of(self, key: str) -> Callable[[HTTPConnection], AsyncHold]:
        """The dependency for one of several singletons; ``key`` as leader_lifespan was given it."""

        def required(connection: HTTPConnection) -> AsyncHold:
            return _require(_find(connection, key))

        return required


require_leader: Final = _RequireLeader()
"""``lease: Annotated[AsyncHold, Depends(require_leader)]``, or one of several singletons:
``Depends(require_leader.of(key))``. 503 with Retry-After where this process does not lead."""


def _require(candidate: _Candidate) -> AsyncHold:
    lease = candidate.lease
    if lease is None:
        raise HTTPException(
            503, "this process does not lead", headers={"Retry-After": _RETRY_AFTER}
        )
    return lease


async def leader_health(request: Request) -> JSONResponse:
    """An endpoint for liveness probes: ``app.add_api_route("/healthz", leader_health)``.

    200, also for a standby and while the lock service is down; 503 only if a singleton of this
    process still runs two seconds after its lease was lost. Source: client-go's rule.
    """
    locks = {candidate.key: _word(candidate) for candidate in _candidates(request)}
    healthy = _OVERDUE not in locks.values()
    body = {"status": "ok" if healthy else _OVERDUE, "locks": locks}
    return JSONResponse(body, 200 if healthy else 503)


_OVERDUE: Final = "overdue"


def _word(candidate: _Candidate) -> str:
    if candidate.overdue > _WIND_DOWN:
        return _OVERDUE
    if candidate.lease is not None:
        return "leading"
    return "withdrawn" if candidate.withdrawn else "standby"


def _candidates(connection: HTTPConnection) -> list[_Candidate]:
    state: Mapping[str, Any] = connection.scope.get("state") or {}
    found = [value for value in state.values() if isinstance(value, _Candidate)]
    if not found:
        raise ConfigurationError(
            "leader_lifespan has not run: pass it to the outermost application, "
            "FastAPI(lifespan=leader_lifespan(...)). The lifespan of a mounted application never "
            "runs, and a test client runs one only in a with statement"
        )
    return found


def _find(connection: HTTPConnection, key: str | None) -> _Candidate:
    found = [each for each in _candidates(connection) if key in (None, each.key)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(sorted(each.key for each in _candidates(connection)))
    if not found:
        raise ConfigurationError(f"no singleton of this application has the lock {key!r}: {known}")
    raise ConfigurationError(
        f"which lock? This application has several: {known}. Write Leadership.of(key) or "
        "require_leader.of(key)"
    )


# -- start-up work ---------------------------------------------------------------------------------


class Once(Enum):
    """What became of start-up work. Every outcome is one of four; none is guessed."""

    RAN = "done here and now"
    DONE = "was done before, here or elsewhere"
    ELSEWHERE = "is being done elsewhere, and the wait is over"
    UNKNOWN = "the lock service could not tell; nothing was done here"

    @property
    def is_done(self) -> bool:
        return self in (Once.RAN, Once.DONE)


async def run_once(
    work: Callable[[AsyncHold], Awaitable[object]],
    *,
    key: str,
    already_done: Callable[[], Any] | None = None,
    remember: int = 3_600,
    ttl: int | None = None,
    wait: float | None = None,
    client: AsyncLockClient | None = None,
) -> Once:
    """Start-up work that one replica does: ``await work(lease)`` under the lock, unless it is done.

    ``wait``: seconds for which the others wait for it; None for as long as it takes, 0 to skip.
    ``already_done``: a function, async or not, that looks whether the work is done, in the place
    that knows (the migration table, say); it is asked before the lock and again under it. Without
    it, a second lock ``<key>.done``, held for ``remember`` seconds after a run that returned, is
    the marker: put a version into the key to have it run once for each version.

    A run that raises, or loses its lease, leaves no marker, and the next replica runs it; a process
    that dies between the work and the marker as well: the work must bear to be repeated.

    The service being down gives UNKNOWN after a try, not an error: the application decides whether
    to serve. Raises what ``work`` and ``already_done`` raise, LeaseLost, Refused and
    ConfigurationError.
    """
    _check_async(work, "work", "async def work(lease): ...", ())
    marker = check_key(f"{check_key(key)}.done")
    check_ttl(remember)
    if wait is not None and not 0 <= wait < float("inf"):
        raise InvalidRequest(f"wait={wait!r}: seconds from 0, or None to wait for ever")
    async with AsyncExitStack() as stack:
        if client is None:
            client = await stack.enter_async_context(AsyncLockClient.from_settings())
        return await _Run(client, work, key, marker, already_done, remember).run(ttl, wait)


class _Run:
    """One replica's part in start-up work."""

    def __init__(
        self,
        client: AsyncLockClient,
        work: Callable[[AsyncHold], Awaitable[object]],
        key: str,
        marker: str,
        already_done: Callable[[], Any] | None,
        remember: int,
    ) -> None:
        self._client = client
        self._work = work
        self._key = key
        self._marker = marker
        self._already_done = already_done
        self._remember = remember
        self._began = False

    async def run(self, ttl: int | None, wait: float | None) -> Once:
        try:
            if await self._is_done():
                return Once.DONE
            # One try first: an outage at start-up is told at once, a later one is ridden out.
            for seconds in (0,) if wait == 0 else (0, wait):
                led = await self._client.with_lock(
                    self._key, self._run_unless_done, ttl=ttl, wait=seconds
                )
                if led.value is not None:
                    return led.value
        except OutcomeUnknown as error:
            if self._began:
                raise  # the work's own
            logger.warning("start-up work of lock %r was not run: %s", self._key, error)
            return Once.UNKNOWN
        return Once.ELSEWHERE

    async def _run_unless_done(self, hold: AsyncHold) -> Once:
        if await self._is_done():
            return Once.DONE
        self._began = True
        await self._work(hold)
        hold.check()
        if self._already_done is None:
            await self._mark()
        return Once.RAN

    async def _is_done(self) -> bool:
        if self._already_done is None:
            return (await self._client.get(self._marker)).held
        done = self._already_done()
        return bool(await done if inspect.isawaitable(done) else done)

    async def _mark(self) -> None:
        try:
            await self._client.acquire(self._marker, ttl=self._remember)
        except VolcanoLocksError as error:
            logger.warning(
                "the work of lock %r is done, but could not be marked; it may be repeated: %s",
                self._key,
                error,
            )
