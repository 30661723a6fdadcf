"""What can go wrong, as nouns that a caller acts on.

The law of this module: one question decides the type, "what may the caller believe now?"

- ``LockHeld``: somebody else leads. An answer, not a fault.
- ``LeaseLost``: we led and must stop.
- ``OutcomeUnknown`` and below: nobody knows. Fail closed, try again later.
- ``Refused`` and below: the service understood and said no; trying again changes nothing.
- ``FenceRejected`` and below: the database said no; a newer leader has been there.

"Held by another" and "could not find out" share no base but ``VolcanoLocksError``. No message
carries a credential or an ownership token.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AuthenticationFailed",
    "CannotFence",
    "ConfigurationError",
    "FenceKeyMismatch",
    "FenceRejected",
    "FenceTargetMissing",
    "InvalidRequest",
    "LeaseLost",
    "LockHeld",
    "OutcomeUnknown",
    "PermissionDenied",
    "RateLimited",
    "Refused",
    "ServiceUnavailable",
    "StaleFence",
    "TransportFailed",
    "UnexpectedResponse",
    "VolcanoLocksError",
]


class VolcanoLocksError(Exception):
    """Base of all errors here.

    ``status`` and ``code`` are those of the service's answer, ``request_id`` correlates it with the
    service's logs; each is None where there was none. ``exit_code`` is what a command that ends with
    this error should exit with (sysexits.h where one fits).
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.request_id = request_id

    def __reduce__(self) -> tuple[object, ...]:
        # Subclasses add keyword arguments; rebuilding from __dict__ keeps all of them picklable.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    cls: type[VolcanoLocksError], args: tuple[object, ...], state: dict[str, object]
) -> VolcanoLocksError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class LockHeld(VolcanoLocksError):
    """Another holder leads, or did until a moment ago. Source: contract rules 3 and 4."""

    exit_code = 75

    def __init__(self, key: str, message: str | None = None, **details: Any) -> None:
        super().__init__(message or f"lock {key!r} is held by another holder", **details)
        self.key = key


class LeaseLost(VolcanoLocksError):
    """This holder leads no more and must stop writing. ``reason`` says why, in a few words."""

    exit_code = 76

    def __init__(
        self, key: str, reason: str, *, fencing_token: int | None = None, **details: Any
    ) -> None:
        fence = "" if fencing_token is None else f" (fencing token {fencing_token})"
        super().__init__(f"lease of {key!r}{fence} is lost: {reason}", **details)
        self.key = key
        self.reason = reason
        self.fencing_token = fencing_token


class OutcomeUnknown(VolcanoLocksError):
    """Whether the request took effect could not be found out. Fail closed; trying later may help."""

    exit_code = 69
    retry_after: float | None = None
    """Seconds after which the service asked to be tried again; None if it did not say."""


class ServiceUnavailable(OutcomeUnknown):
    """The service, or a gateway before it, answered 5xx. Source: contract rule 11."""

    def __init__(self, message: str, *, retry_after: float | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.retry_after = retry_after


class RateLimited(OutcomeUnknown):
    """The project's quota of this minute is used up: the request had no effect. Source: rule 10."""

    def __init__(self, message: str, *, retry_after: float | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.retry_after = retry_after


class TransportFailed(OutcomeUnknown):
    """No answer arrived. ``sent`` is False if the request cannot have reached the service."""

    def __init__(self, message: str, *, sent: bool = True, **details: Any) -> None:
        super().__init__(message, **details)
        self.sent = sent


class UnexpectedResponse(OutcomeUnknown):
    """An answer that the contract does not know: a proxy's page, a redirect, a broken body."""


class Refused(VolcanoLocksError):
    """The service understood the request and will not do it; repeating it changes nothing."""


class AuthenticationFailed(Refused):
    """401: the service key is missing, wrong or revoked."""

    exit_code = 77


class PermissionDenied(Refused):
    """403: not a service key, or one without ``locks.manage``."""

    exit_code = 77


class InvalidRequest(Refused, ValueError):
    """A bad key, TTL, token or request id: found before sending where possible, else the 400."""

    exit_code = 64


class ConfigurationError(VolcanoLocksError, ValueError):
    """Settings that cannot work, or are not safe. The message says which one and what to do."""

    exit_code = 78


class FenceRejected(VolcanoLocksError):
    """The database refused a fenced write; nothing was written."""

    exit_code = 76


class StaleFence(FenceRejected):
    """A newer leader has written: the stored fencing token is higher than the one offered."""

    def __init__(self, key: str, *, offered: int, stored: int | None, target: str = "row") -> None:
        stored_text = "a higher one" if stored is None else str(stored)
        super().__init__(
            f"stale write refused: lock {key!r} offered fencing token {offered}, but the {target} "
            f"carries {stored_text}; a newer leader has written. Stop this work; nothing was changed."
        )
        self.key = key
        self.offered = offered
        self.stored = stored


class FenceTargetMissing(FenceRejected):
    """No row matched, stale or not: there was nothing to write to."""

    exit_code = 1

    def __init__(self, key: str, *, target: str = "row") -> None:
        super().__init__(
            f"fenced write under lock {key!r} matched no {target}; nothing was changed. "
            f"Create it first, or mend the filter."
        )
        self.key = key


class FenceKeyMismatch(FenceRejected):
    """The row was last written under another lock: tokens of two locks cannot be compared."""

    exit_code = 78

    def __init__(self, key: str, *, stored_key: str, target: str = "row") -> None:
        super().__init__(
            f"write under lock {key!r} refused: the {target} is fenced by lock {stored_key!r}, and "
            "tokens of two locks cannot be compared; nothing was changed. Write it under one lock "
            "only, or hand it over by resetting its fence."
        )
        self.key = key
        self.stored_key = stored_key


class CannotFence(VolcanoLocksError, TypeError):
    """The fence could not be a certain part of this write, so it was refused before any statement.

    A fault of the program, not of the moment. The message says what to do instead.
    """

    exit_code = 70
