"""What both clients are made of: configuration, requests, and the handle of a hold.

The law of this module: it decides and prepares; ``client`` and ``async_client`` perform. A client
holds no lease, only the means to get one; a hold is one acquisition, used once.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ._core import flows
from ._core.effects import Entropy, Flow, NoAnswer, Send
from ._core.policy import Policy, Quota
from ._core.tenure import Belief, Loss, Tenure
from .clock import SYSTEM_CLOCK, Clock
from .contract import DEFAULT_API_URL, Operation, Reply, Request, decode_state, is_loopback
from .errors import ConfigurationError, InvalidRequest, LeaseLost, UnexpectedResponse
from .models import Lease, LockState, Secret, check_key, check_service_key, check_ttl, check_uuid

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._http import httpx
    from .local.service import LockService
    from .settings import LockSettings

logger = logging.getLogger("volcano_locks")

P = TypeVar("P")

LONGEST_SLEEP = 604_800.0
"""Seconds in one go: a week is as good as for ever, and no system call refuses it."""

_USER_AGENT = "volcano-locks/0.1"
_LOCAL_ORIGIN = "http://local.invalid"


class SystemEntropy:
    """Ids and jitter from the operating system's randomness."""

    def uuid(self) -> str:
        return str(uuid.uuid4())

    def fraction(self) -> float:
        return random.random()  # noqa: S311 - jitter; ids come from uuid4


class ClientBase:
    """Configuration of a client, checked here and now, and its requests as flows."""

    def __init__(
        self,
        service_key: str | Secret | None = None,
        api_url: str = DEFAULT_API_URL,
        *,
        ttl: int = 30,
        key_prefix: str = "",
        timeout: float = 5.0,
        allow_http: Iterable[str] = (),
        trust_env: bool = True,
        transport: Any = None,
        clock: Clock = SYSTEM_CLOCK,
        policy: Policy | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        """Check everything; connect to nothing.

        ``api_url``: https://..., http:// on loopback, ``local:`` or ``local:PATH``. ``ttl``: seconds,
        where a call names none. ``key_prefix`` is put before every key. ``timeout``: seconds for the
        longest try. ``allow_http``: hosts that may be spoken to in plain http. ``trust_env``: hear
        HTTP_PROXY, NO_PROXY and SSL_CERT_FILE; loopback never uses a proxy. ``transport``, ``clock``,
        ``policy`` and ``entropy`` let a test own the network, time, numbers and chance.

        Raises ConfigurationError or InvalidRequest.
        """
        if not isinstance(api_url, str):
            raise ConfigurationError(f"the API URL is a {type(api_url).__name__}, no text")
        if not _is_number(timeout, 0.001, 3_600):
            raise ConfigurationError(f"timeout={timeout!r}: seconds up to 3,600, above 0")
        allow_http = [allow_http] if isinstance(allow_http, str) else allow_http
        local = api_url.startswith("local:")
        if api_url.startswith("local:@") and transport is None:
            # A service of volcano_locks.testing, which brings the clock that the test moves.
            from .local.address import named_service

            transport, clock = named_service(api_url)
        origin, loopback = (_LOCAL_ORIGIN, True) if local else _check_url(api_url, allow_http)
        self._local = _open_local(api_url) if local and transport is None else None
        self._shown = api_url if local else origin
        self._base = origin
        key = Secret("local") if local and service_key is None else check_service_key(service_key)
        self._authorization = Secret(f"Bearer {key.reveal()}")
        self._transport = transport
        self._trust_env = trust_env and not loopback
        self._timeout = timeout
        self._ttl = check_ttl(ttl)
        if key_prefix != "":
            check_key(key_prefix)
        self._prefix = key_prefix
        self._clock = clock
        policy = policy or Policy(timeout=timeout)
        self._rules = flows.Rules(policy, entropy or SystemEntropy(), Quota(policy))

    @classmethod
    def from_settings(cls, settings: LockSettings | None = None, **options: Any) -> Self:
        """A client by LockSettings (by default from the environment and ``.env``).

        ``options`` are those of the constructor, and win. Raises ConfigurationError.
        """
        if settings is None:
            from .settings import LockSettings

            settings = LockSettings.load()
        key = settings.service_key
        values: dict[str, Any] = {
            "service_key": None if key is None else Secret(key.get_secret_value()),
            "api_url": settings.api_url,
            "ttl": settings.ttl,
            "key_prefix": settings.key_prefix,
            "timeout": settings.timeout,
            "allow_http": [host.strip() for host in settings.allow_http.split(",") if host.strip()],
            "trust_env": settings.trust_env,
        }
        return cls(**(values | options))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._shown} ttl={self._ttl} key_prefix={self._prefix!r}>"

    # -- requests ---------------------------------------------------------------------------------

    def _ask(
        self, key: str, ttl: int | None, token: str | Secret | None, request_id: str | None
    ) -> Request:
        entropy = self._rules.entropy
        return Request(
            Operation.ACQUIRE,
            self._full_key(key),
            self._id(request_id),
            Secret(entropy.uuid() if token is None else check_uuid(token, "ownership token")),
            self._ttl if ttl is None else check_ttl(ttl),
        )

    def _full_key(self, key: str) -> str:
        key = check_key(key)
        return check_key(self._prefix + key) if self._prefix else key

    def _id(self, request_id: str | None) -> str:
        return (
            self._rules.entropy.uuid()
            if request_id is None
            else check_uuid(request_id, "request id")
        )

    # -- flows of the plain operations -------------------------------------------------------------

    def _acquiring(
        self, key: str, ttl: int | None, token: str | Secret | None, request_id: str | None
    ) -> Flow[Lease | None]:
        ask = self._ask(key, ttl, token, request_id)
        tenure = yield from flows.acquire(ask, self._rules, sweep=token is None)
        return None if tenure is None else tenure.lease

    def _renewing(self, lease: Lease, ttl: int | None, request_id: str | None) -> Flow[Lease]:
        ttl = self._ttl if ttl is None else check_ttl(ttl)
        request = Request(Operation.RENEW, lease.key, self._id(request_id), lease.token, ttl)
        return (yield from flows.renew_once(request, lease, self._rules))

    def _releasing(self, lease: Lease, request_id: str | None) -> Flow[None]:
        request = Request(Operation.RELEASE, lease.key, self._id(request_id), lease.token)
        if (yield from flows.release(request, self._rules)) is flows.Left.NOT_OURS:
            raise LeaseLost(
                lease.key, Loss.REFUSED.value, status=409, request_id=request.request_id
            )

    def _getting(self, key: str, request_id: str | None) -> Flow[LockState]:
        request = Request(Operation.GET, self._full_key(key), self._id(request_id))
        reply = yield from flows.once(request, self._rules)
        state = decode_state(reply)
        if state is None:
            raise UnexpectedResponse(
                f"get of lock {request.key!r}: the body is no lock state",
                status=reply.status,
                request_id=request.request_id,
            )
        return state

    def _forcing(self, key: str, request_id: str | None) -> Flow[None]:
        request = Request(Operation.FORCE_RELEASE, self._full_key(key), self._id(request_id))
        yield from flows.once(request, self._rules)

    # -- the wire -----------------------------------------------------------------------------------

    def _open_pool(self, kind: type[P]) -> P:
        from ._http import open_pool

        return open_pool(
            kind,
            host=urlsplit(self._base).hostname or "",
            timeout=self._timeout,
            trust_env=self._trust_env,
            transport=self._transport,
            borrowed=self._transport is not None,
        )

    def _headers(self, request: Request) -> dict[str, str]:
        """With the secrets: to be passed on at once, since a local variable shows in a traceback."""
        return {
            "authorization": self._authorization.reveal(),
            "accept": "application/json",
            "user-agent": _USER_AGENT,
            **request.headers,
        }

    def _http_request(self, effect: Send) -> httpx.Request:
        from ._http import httpx

        request = effect.request
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), effect.timeout)
        try:
            return httpx.Request(
                request.operation.method,
                self._base + request.path,
                headers=self._headers(request),
                content=request.content or None,
                extensions={"timeout": timeouts},
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ConfigurationError(f"the API URL cannot be used: {error}") from None


def _open_local(url: str) -> LockService:
    from .local.address import store_path
    from .local.service import LockService
    from .local.store import Store

    return LockService(Store(store_path(url)))


def _check_url(url: str, allow_http: Iterable[str]) -> tuple[str, bool]:
    """The base URL without a final slash, and whether its host is this machine."""
    advice = "set VOLCANO_API_URL to https://..., to the URL of `volcano-locks serve`, or to local:"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ConfigurationError(f"the API URL cannot be read; {advice}") from None
    if parts.scheme not in {"https", "http"} or not host:
        raise ConfigurationError(f"the API URL {parts.scheme}:... is not usable; {advice}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigurationError(
            "the API URL must carry no credentials, query or fragment; the key goes into "
            "VOLCANO_SERVICE_KEY"
        )
    loopback = is_loopback(host)
    if parts.scheme == "http" and not loopback and host not in set(allow_http):
        raise ConfigurationError(
            f"plain http to {host} would show the service key to the network; use https, or allow "
            f"this host by name: VOLCANO_LOCKS_ALLOW_HTTP={host}"
        )
    return url.rstrip("/"), loopback


LONGEST_BODY = 65_536
"""Bytes read of an answer. The contract's are shorter than 1,000; the rest of a proxy's page is not
worth a process's memory, and what is cut off decodes to nothing."""


def announces_too_much(response: httpx.Response) -> bool:
    length = response.headers.get("content-length", "0")
    return (
        not (length.isascii() and length.isdigit()) or len(length) > 9 or int(length) > LONGEST_BODY
    )


def to_reply(response: httpx.Response, body: bytes) -> Reply:
    return Reply(response.status_code, body, response.headers.get("retry-after"))


def to_no_answer(error: Exception) -> NoAnswer:
    from ._http import surely_unsent

    return NoAnswer(error, sent=not surely_unsent(error))


class HoldBase:
    """One live lease, or the proof that it is lost. Made by ``hold`` of a client, entered once.

    Every look is computed from the clock and the last renewal that got through; no thread or task
    has to be on time for it to be right (law 4). In a forked child it is lost (law 7).
    """

    def __init__(
        self,
        client: ClientBase,
        key: str,
        *,
        ttl: int | None,
        wait: float | None,
        min_hold: float,
        token: str | Secret | None,
        request_id: str | None,
    ) -> None:
        if wait is not None and not _is_number(wait, 0, float("inf")):
            raise InvalidRequest(f"wait={wait!r}: seconds from 0, or None to wait for ever")
        if not _is_number(min_hold, 0, 86_400):
            raise InvalidRequest(f"min_hold={min_hold!r}: seconds from 0 to 86,400 (a day)")
        self._rules = client._rules
        self._clock = client._clock
        self._ask = client._ask(key, ttl, token, request_id)
        self._owns_token = token is None
        self._wait = wait
        self._min_hold = min_hold
        self._belief: Belief | None = None
        self._pid = os.getpid()
        # A list, since appending is atomic for threads and signal handlers; a lock would not be.
        self._entries: list[None] = []
        self._exits: list[None] = []

    def __repr__(self) -> str:
        if self._belief is None:
            return f"<{type(self).__name__} {self.key!r} not entered>"
        state = "lost" if self.lost else f"{self.remaining():.1f} s left"
        return f"<{type(self).__name__} {self.key!r} fencing_token={self.fencing_token} {state}>"

    @property
    def key(self) -> str:
        """The lock's key, with the client's prefix."""
        return self._ask.key

    @property
    def lease(self) -> Lease:
        """The lease as last confirmed. Raises InvalidRequest if the hold was never entered."""
        return self._live().tenure.lease

    @property
    def fencing_token(self) -> int:
        """The number that goes into every write that this lease protects."""
        return self.lease.fencing_token

    @property
    def ttl(self) -> int:
        """Seconds for which each acquisition and renewal asks."""
        assert self._ask.ttl is not None
        return self._ask.ttl

    def remaining(self) -> float:
        """Seconds this holder may still act; 0.0 once lost. Source: laws 1 and 5, contract rule 6."""
        if self._loss() is not None:
            return 0.0
        return self._live().remaining(self._clock.now())

    @property
    def lost(self) -> bool:
        """Whether the holder must have stopped by now; once True, never False again."""
        return self._loss() is not None

    @property
    def released(self) -> bool:
        """Whether it was given back while it was still ours; such an end is no loss."""
        return self._belief is not None and self._belief.loss is Loss.RELEASED

    def check(self) -> None:
        """Raise LeaseLost if this holder leads no more; call it before and between writes."""
        loss = self._loss()
        if loss is not None:
            raise self._live().error(loss)

    def _live(self) -> Belief:
        if self._belief is None:
            raise InvalidRequest(
                f"hold of {self.key!r} was not entered: use it in a with statement"
            )
        return self._belief

    def _loss(self) -> Loss | None:
        if os.getpid() != self._pid:
            return Loss.FORKED
        return self._live().look(self._clock.now())

    # -- for the drivers ---------------------------------------------------------------------------

    def _enter_once(self) -> None:
        self._entries.append(None)
        if len(self._entries) > 1:
            raise InvalidRequest(
                f"hold of {self.key!r} was entered before; a hold is one acquisition. Make another "
                "with hold() of the client"
            )

    def _campaigning(self) -> Flow[Tenure]:
        asks = self._asks()
        return flows.campaign(
            lambda: next(asks), self._rules, wait=self._wait, sweep=self._owns_token
        )

    def _asks(self) -> Any:
        """Requests for one try after another: new ids each, but for a token that the caller owns."""
        entropy, ask = self._rules.entropy, self._ask
        while True:
            yield ask
            token = Secret(entropy.uuid()) if self._owns_token else ask.token
            ask = Request(ask.operation, ask.key, entropy.uuid(), token, ask.ttl)

    def _begin(self, tenure: Tenure) -> Belief:
        self._pid = os.getpid()
        self._belief = Belief(tenure)
        return self._belief

    def _keeping(self) -> Flow[Loss]:
        return flows.keep(self._live(), self.ttl, self._rules)

    def _ending(self, error: BaseException | None) -> tuple[Loss | None, Flow[flows.Left] | None]:
        """What the end of the body means: the loss to report, and how to leave, both if any.

        Whoever leaves first gets the way to leave; later callers only the loss.
        """
        loss = self._loss()
        if loss is Loss.FORKED:
            return loss, None
        self._exits.append(None)
        belief = self._live()
        if len(self._exits) > 1:
            # Left before, by release(): what was lost then stays lost.
            return None if belief.loss is Loss.RELEASED else belief.loss, None
        belief.lose(Loss.RELEASED)
        if loss is not None:
            # An unconfirmed renewal may have prolonged it: give it back, so that nobody waits.
            swept = loss in {Loss.EXPIRED, Loss.TERM_OVER}
            return loss, self._leaving(0.0) if swept else None
        rest = 0.0
        if error is None or isinstance(error, Exception):  # not on a signal or a cancellation
            rest = belief.tenure.began_at + self._min_hold - self._clock.now()
        return None, self._leaving(rest)

    def _leaving(self, keep_for: float) -> Flow[flows.Left]:
        return flows.leave(self._live().tenure, self._rules, keep_for=keep_for)

    def _report_left(self, left: flows.Left) -> None:
        if left is flows.Left.NOT_OURS:
            logger.warning("lock %r was not ours any more when it was released", self.key)

    def _report_stuck(self, error: BaseException) -> None:
        logger.warning(
            "lock %r could not be released, it expires by itself within %d s: %s",
            self.key,
            self.ttl,
            error,
        )


def _is_number(value: object, least: float, most: float) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and least <= value <= most and value != float("inf")  # type: ignore[operator]


def refuse_generators(where: str, function: Callable[..., Any]) -> None:
    inner = inspect.unwrap(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise unfinished(where, function)


def unfinished(where: str, work: object) -> InvalidRequest:
    """The error for work that would run after the lock is released, or was none; closes it."""
    close = getattr(work, "close", None)
    if inspect.iscoroutine(work) and close is not None:
        close()
    return InvalidRequest(
        f"{where}: this {type(work).__name__} is not work that is done when it returns. LockClient "
        "takes plain functions, AsyncLockClient takes async functions, neither takes generators: "
        "their bodies would run after the lock is released"
    )


def wants_lease(function: Callable[..., Any]) -> bool:
    """Whether the function takes the live hold: it names a parameter ``lease``."""
    return "lease" in inspect.signature(function).parameters


__all__ = [
    "LONGEST_BODY",
    "LONGEST_SLEEP",
    "ClientBase",
    "HoldBase",
    "SystemEntropy",
    "announces_too_much",
    "refuse_generators",
    "to_no_answer",
    "to_reply",
    "unfinished",
    "wants_lease",
]
