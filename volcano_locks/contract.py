"""The lock service's REST contract: routes, headers, limits, codes; both halves of it.

The law of this module: bytes become values here and values become bytes, and nothing is decided.
It knows no clock, no network and no policy. The client encodes a ``Request`` and decodes a
``Reply``; the local service decodes and encodes the other way round. What cannot be decoded is
None or a ``Malformed``, never a crash: an answer's oddity must not cost a lease.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from .errors import InvalidRequest
from .models import (
    KEY_PATTERN,
    MAX_FENCING_TOKEN,
    LockState,
    Secret,
    check_key,
    check_ttl,
    check_uuid,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_API_URL: Final = "https://api.volcano.dev"
QUOTA_PER_MINUTE: Final = 600
GRACE: Final = 1.0
"""Seconds after expiry for which the service lets nobody else lead, and before it in which it
accepts no renewal (rules 5 and 6)."""

TOKEN_HEADER: Final = "X-Volcano-Lock-Token"  # noqa: S105 - a header's name
REQUEST_ID_HEADER: Final = "X-Volcano-Request-Id"

LOCK_HELD: Final = "lock_held"
OWNERSHIP_LOST: Final = "lock_ownership_lost"
LOCK_RATE_LIMITED: Final = "lock_rate_limited"
LOCK_SERVICE_UNAVAILABLE: Final = "lock_service_unavailable"


class Operation(Enum):
    """The five operations: HTTP method, whether on the lease, success status, whether with a TTL."""

    ACQUIRE = ("POST", True, 201, True)
    RENEW = ("PATCH", True, 200, True)
    RELEASE = ("DELETE", True, 204, False)
    GET = ("GET", False, 200, False)
    FORCE_RELEASE = ("DELETE", False, 204, False)

    def __init__(self, method: str, on_lease: bool, success: int, has_ttl: bool) -> None:
        self.method = method
        self.on_lease = on_lease
        self.success = success
        self.has_ttl = has_ttl


@dataclass(frozen=True)
class Request:
    """One operation on one lock. A retry sends the same value again, ids included."""

    operation: Operation
    key: str
    request_id: str
    token: Secret | None = field(default=None, repr=False)
    ttl: int | None = None

    @property
    def path(self) -> str:
        return f"/locks/{self.key}/lease" if self.operation.on_lease else f"/locks/{self.key}"

    @property
    def headers(self) -> dict[str, str]:
        """The request's own headers. The token is in them: they go to the wire and nowhere else."""
        headers = {REQUEST_ID_HEADER: self.request_id}
        if self.token is not None:
            headers[TOKEN_HEADER] = self.token.reveal()
        if self.operation.has_ttl:
            headers["Content-Type"] = "application/json"
        return headers

    @property
    def content(self) -> bytes:
        return b'{"ttl_seconds":%d}' % self.ttl if self.ttl is not None else b""


@dataclass(frozen=True)
class Reply:
    """An answer as it came: status, ``Retry-After`` unread, body undecoded."""

    status: int
    body: bytes = field(default=b"", repr=False)
    retry_after: str | None = None


@dataclass(frozen=True)
class Grant:
    """The body of a successful acquire or renewal; a renewal's may leave out the fencing token."""

    expires_at: datetime | None
    fencing_token: int | None


@dataclass(frozen=True)
class Malformed:
    """A request that the service refuses: status 400, 404 or 405, and words for a person."""

    status: int
    message: str


def is_loopback(host: str) -> bool:
    """Whether an address or a host's name is of this machine, whatever a name server says."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# -- the client's half ---------------------------------------------------------------------------


def decode_grant(reply: Reply) -> Grant | None:
    """The grant in a 2xx body, or None if it holds none."""
    body = _decode_object(reply.body)
    if body is None or not ({"expires_at", "fencing_token"} & body.keys()):
        return None
    return Grant(parse_instant(body.get("expires_at")), _parse_token(body.get("fencing_token")))


def decode_state(reply: Reply) -> LockState | None:
    """The lock's state in a 200 body of ``get``, or None if it holds none."""
    body = _decode_object(reply.body)
    if body is None or not isinstance(body.get("held"), bool):
        return None
    if not body["held"]:
        return LockState(held=False)
    return LockState(
        held=True,
        expires_at=parse_instant(body.get("expires_at")),
        fencing_token=_parse_token(body.get("fencing_token")),
    )


def decode_code(reply: Reply) -> str | None:
    """The stable error code in an error body, or None: gateways send none."""
    body = _decode_object(reply.body)
    code = body.get("code") if body else None
    return code if isinstance(code, str) and len(code) <= 100 else None


def decode_words(reply: Reply) -> str:
    """What an error body says to a person, in one line; "" if nothing, or nothing printable."""
    body = _decode_object(reply.body)
    words = body.get("error") if body else None
    line = " ".join(words.split()) if isinstance(words, str) else ""
    return line if line.isprintable() else ""


_INSTANT = re.compile(
    r"(\d{4}-\d{2}-\d{2})[Tt ](\d{2}:\d{2}:\d{2})(?:\.(\d{1,9}))?([Zz]|[+-]\d{2}:\d{2})?"
)


def parse_instant(text: object) -> datetime | None:
    """An RFC 3339 instant as aware UTC; without a zone it is read as UTC; None if it is none.

    Python 3.10's own parser takes neither ``Z`` nor one or nine fraction digits.
    """
    match = _INSTANT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    date, clock, fraction, zone = match.groups()
    zone = "+00:00" if zone in (None, "Z", "z") else zone
    micros = (fraction or "0").ljust(6, "0")[:6]
    try:
        return datetime.fromisoformat(f"{date}T{clock}.{micros}{zone}").astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def parse_retry_after(text: str | None, wall: datetime) -> float | None:
    """Seconds to wait by a ``Retry-After`` header: finite, at least 0; None if absent or senseless.

    Takes seconds (fractions as well) and HTTP dates, the latter against ``wall``. The caller caps it.
    """
    if text is None or len(text) > 100:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = parsedate_to_datetime(text)
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
        if date.tzinfo is None:
            date = date.replace(tzinfo=timezone.utc)
        return max(0.0, (date - wall).total_seconds())
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _decode_object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _parse_token(value: object) -> int | None:
    """A fencing token; a JSON string of digits is taken too, for hosts that guard 64-bit numbers so."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 19:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_FENCING_TOKEN:
        return value
    return None


# -- the service's half --------------------------------------------------------------------------

_PATH = re.compile(r"/locks/([^/]*)(/lease)?")
_ROUTES: Final = {
    on_lease: {op.method: op for op in Operation if op.on_lease is on_lease}
    for on_lease in (False, True)
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)


def decode_request(
    method: str, path: str, headers: Mapping[str, str], body: bytes
) -> Request | Malformed:
    """The request behind an HTTP message, or what is wrong with it. Header names: any case.

    ``path`` is percent-decoded and has no deployment prefix. Credentials are not looked at here.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        return Malformed(404, "no such route")
    key, on_lease = match.group(1), match.group(2) is not None
    named = _ROUTES[on_lease]
    operation = named.get(method.upper())
    if operation is None:
        return Malformed(405, f"this route takes {', '.join(sorted(named))}")
    lower = {name.lower(): value for name, value in headers.items()}
    request_id = lower.get(REQUEST_ID_HEADER.lower())
    token = lower.get(TOKEN_HEADER.lower())
    if request_id is None:
        return Malformed(400, f"the header {REQUEST_ID_HEADER} is missing")
    if on_lease and token is None:
        return Malformed(400, f"the header {TOKEN_HEADER} is missing")
    try:
        ttl = _decode_ttl(body) if operation.has_ttl else None
        return _checked(operation, key, request_id, token, ttl)
    except InvalidRequest as error:
        return Malformed(400, str(error))


def check_request(request: Request) -> Request | Malformed:
    """What ``decode_request`` would find behind the request's own HTTP message, without the message."""
    try:
        return _checked(
            request.operation, request.key, request.request_id, request.token, request.ttl
        )
    except InvalidRequest as error:
        return Malformed(400, str(error))


def _checked(
    operation: Operation, key: str, request_id: str, token: str | Secret | None, ttl: int | None
) -> Request:
    return Request(
        operation,
        check_key(key),
        check_uuid(request_id, "request id"),
        Secret(check_uuid(token, "ownership token")) if operation.on_lease else None,
        check_ttl(ttl) if operation.has_ttl else None,
    )


def _decode_ttl(body: bytes) -> Any:
    fields = _decode_object(body)
    if fields is None:
        raise InvalidRequest('the body is no JSON object: {"ttl_seconds": N} is expected')
    if unknown := sorted(fields.keys() - {"ttl_seconds"}):
        raise InvalidRequest(f"unknown field {unknown[0]!r:.60}: only ttl_seconds is known")
    return fields.get("ttl_seconds")


def encode_grant(expires_at: datetime, fencing_token: int) -> bytes:
    text = f'{{"expires_at": "{format_instant(expires_at)}", "fencing_token": {fencing_token}}}'
    return text.encode()


def encode_state(state: LockState) -> bytes:
    if not state.held or state.expires_at is None:
        return b'{"held": false}'
    fields = {
        "held": True,
        "expires_at": format_instant(state.expires_at),
        "fencing_token": state.fencing_token,
    }
    return json.dumps(fields).encode()


def encode_error(message: str, code: str | None = None) -> bytes:
    return json.dumps({"error": message} | ({"code": code} if code else {})).encode()


def format_instant(instant: datetime) -> str:
    """RFC 3339 in UTC with ``Z``; fraction digits only where there is a fraction."""
    return instant.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")


def from_milliseconds(milliseconds: int) -> datetime:
    """The instant so many milliseconds after 1970 in UTC, exactly."""
    return _EPOCH + timedelta(milliseconds=milliseconds)


__all__ = [
    "DEFAULT_API_URL",
    "GRACE",
    "KEY_PATTERN",
    "LOCK_HELD",
    "LOCK_RATE_LIMITED",
    "LOCK_SERVICE_UNAVAILABLE",
    "OWNERSHIP_LOST",
    "QUOTA_PER_MINUTE",
    "REQUEST_ID_HEADER",
    "TOKEN_HEADER",
    "Grant",
    "Malformed",
    "Operation",
    "Reply",
    "Request",
    "check_request",
    "decode_code",
    "decode_grant",
    "decode_request",
    "decode_state",
    "decode_words",
    "encode_error",
    "encode_grant",
    "encode_state",
    "format_instant",
    "from_milliseconds",
    "is_loopback",
    "parse_instant",
    "parse_retry_after",
]
