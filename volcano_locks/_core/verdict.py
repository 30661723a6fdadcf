"""What an answer means, told apart three ways: granted, refused for good, or unknown.

The law of this module: status and code decide, never the text (contract, Errors); whatever the
contract does not know counts as unknown, because the request may have taken effect.
"""

from __future__ import annotations

from typing import Any

from ..contract import (
    LOCK_HELD,
    LOCK_SERVICE_UNAVAILABLE,
    OWNERSHIP_LOST,
    Grant,
    Operation,
    Reply,
    Request,
    decode_code,
    decode_grant,
    decode_words,
    parse_retry_after,
)
from ..errors import (
    AuthenticationFailed,
    InvalidRequest,
    LeaseLost,
    LockHeld,
    PermissionDenied,
    RateLimited,
    ServiceUnavailable,
    TransportFailed,
    UnexpectedResponse,
    VolcanoLocksError,
)
from .effects import Answer, NoAnswer
from .tenure import Loss


def problem(request: Request, answer: Answer) -> VolcanoLocksError | None:
    """None for a success (as far as the status tells), else the typed error."""
    result = answer.result
    if isinstance(result, Reply) and result.status == request.operation.success:
        return None
    what = f"{request.operation.name.lower().replace('_', ' ')} of lock {request.key!r}"
    ids = {"request_id": request.request_id}
    if isinstance(result, NoAnswer):
        return _transport_failed(what, result, ids)
    code = decode_code(result)
    details: dict[str, Any] = {"status": result.status, "code": code, **ids}
    status = result.status
    if status == 409 and code in {LOCK_HELD, OWNERSHIP_LOST, None}:
        if request.operation is Operation.ACQUIRE:
            return LockHeld(request.key, **details)
        return LeaseLost(request.key, Loss.REFUSED.value, **details)
    if status == 429:
        wait = parse_retry_after(result.retry_after, answer.sent_wall)
        hint = "a moment" if wait is None else f"{wait:.0f} s"
        return RateLimited(
            f"{what} was not done: the project's requests of this minute are used up. Try again in "
            f"{hint}; use longer TTLs or fewer holders (a holder costs 180 / TTL requests a minute)",
            retry_after=wait,
            **details,
        )
    if status == 401:
        return AuthenticationFailed(
            f"{what} refused: the service key is not valid here. Check VOLCANO_SERVICE_KEY and "
            "VOLCANO_API_URL",
            **details,
        )
    if status == 403:
        return PermissionDenied(
            f"{what} refused: the key may not manage locks. Use a service key (sk-...) with the "
            "permission locks.manage",
            **details,
        )
    if status == 400:
        return InvalidRequest(
            f"{what} refused as invalid: key, TTL, ownership token or request id",
            **details,
        )
    if status >= 500:
        # For people only, and only where it is the lock service that speaks: a full disk, say.
        words = decode_words(result) if code == LOCK_SERVICE_UNAVAILABLE else ""
        token = request.token.reveal() if request.token is not None else ""
        said = f", and says: {words[:300]}" if words and (not token or token not in words) else ""
        return ServiceUnavailable(
            f"{what}: the service could not tell who owns the lock (HTTP {status}{said}); nobody goes "
            "on as leader. Try again later",
            retry_after=parse_retry_after(result.retry_after, answer.sent_wall),
            **details,
        )
    return UnexpectedResponse(
        f"{what}: HTTP {status} is no answer of the lock service. Is VOLCANO_API_URL right, and does "
        "a proxy answer in its place?",
        **details,
    )


def grant(request: Request, reply: Reply) -> Grant | UnexpectedResponse:
    """The grant in a success, or the error for a body that holds none."""
    decoded = decode_grant(reply)
    if decoded is None or (
        request.operation is Operation.ACQUIRE and decoded.fencing_token is None
    ):
        return UnexpectedResponse(
            f"{request.operation.name.lower()} of lock {request.key!r}: HTTP {reply.status}, but the "
            "body is no grant. Does a proxy answer in the service's place?",
            status=reply.status,
            request_id=request.request_id,
        )
    return decoded


def _transport_failed(what: str, result: NoAnswer, ids: dict[str, str]) -> TransportFailed:
    kind = type(result.error).__name__
    if result.sent:
        text = f"{what}: no answer came ({kind}); whether it took effect is unknown"
    else:
        text = (
            f"{what}: the lock service cannot be reached ({kind}: {result.error}); nothing was sent"
        )
    # The library's own frames hold the request with its credential: the cause stays, its frames go.
    failed = TransportFailed(text, sent=result.sent, request_id=ids["request_id"])
    failed.__cause__ = result.error.with_traceback(None)
    return failed
