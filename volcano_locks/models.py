"""Values that cross the public surface, and the rules for key, TTL and token.

The law of this module: every value is frozen, and a value that exists is a legal one.
Nothing here knows a clock, a network or a framework. Source of the rules: contract, Vocabulary.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from .errors import ConfigurationError, InvalidRequest

if TYPE_CHECKING:
    from datetime import datetime

__all__ = [
    "MAX_FENCING_TOKEN",
    "MAX_TTL",
    "MIN_TTL",
    "Lease",
    "LockResult",
    "LockState",
    "Secret",
    "check_key",
    "check_service_key",
    "check_ttl",
    "check_uuid",
]

MIN_TTL: Final = 5
MAX_TTL: Final = 7_776_000
"""Seconds: 90 days, also the longest life of one lease (contract rule 9)."""
MAX_FENCING_TOKEN: Final = 2**63 - 1
KEY_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}"

_KEY = re.compile(KEY_PATTERN)
_USUAL_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
T = TypeVar("T")


class Secret:
    """A string that does not show itself: not in repr, str, format, logs, tracebacks or pickles."""

    __slots__ = ("__value",)

    def __init__(self, value: str) -> None:
        self.__value = value

    def reveal(self) -> str:
        """The string itself, for the header that needs it and for nothing else."""
        return self.__value

    def __repr__(self) -> str:
        return "<secret>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.reveal() == other.reveal()

    def __hash__(self) -> int:
        return hash(self.__value)

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled; pass it on explicitly with reveal()")


@dataclass(frozen=True)
class Lease:
    """One acquisition of a lock, as the service granted it. A fact of the past: it does not age.

    ``expires_at``: the service's word in UTC, for people and logs only; None if the answer had none.
    Whether the lease still holds is computed from the local clock by a hold, never from this.
    ``fencing_token``: rises at every hand-over, stays through renewals. ``acquired_at``: this
    machine's wall clock, UTC, before the request was sent. ``token``: the ownership token; whoever
    shows it owns the lease.
    """

    key: str
    expires_at: datetime | None
    fencing_token: int
    acquired_at: datetime
    token: Secret = field(repr=False)


@dataclass(frozen=True)
class LockState:
    """What ``get`` saw. ``held`` stays true in the second of grace after ``expires_at`` (rule 5)."""

    held: bool
    expires_at: datetime | None = None
    fencing_token: int | None = None


@dataclass(frozen=True)
class LockResult(Generic[T]):
    """Whether the work ran, and what it returned. ``value`` is None if it did not run."""

    acquired: bool
    value: T | None = None

    def __bool__(self) -> bool:
        raise TypeError("ask result.acquired: a LockResult has no truth value of its own")


def check_key(key: object) -> str:
    """The key itself if it is legal; InvalidRequest with the rule if not."""
    if isinstance(key, str) and _KEY.fullmatch(key):
        return key
    shown = repr(key) if len(repr(key)) <= 140 else f"{repr(key)[:137]}..."
    raise InvalidRequest(
        f"{shown} is no lock key: 1 to 128 characters, a letter or digit first, "
        "then letters, digits and . _ : -"
    )


def check_ttl(ttl: object) -> int:
    """The TTL in whole seconds if it is legal; InvalidRequest with the rule if not."""
    if isinstance(ttl, int) and not isinstance(ttl, bool) and MIN_TTL <= ttl <= MAX_TTL:
        return ttl
    raise InvalidRequest(
        f"{ttl!r} is no TTL: whole seconds from {MIN_TTL} to {MAX_TTL:,} (90 days) are possible"
    )


def check_uuid(value: object, what: str) -> str:
    """The UUID in its usual form; InvalidRequest (which does not repeat the value) if it is none."""
    text = value.reveal() if isinstance(value, Secret) else str(value)
    if _USUAL_UUID.fullmatch(text):
        return text
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise InvalidRequest(
            f"the {what} is no UUID; leave it out, or pass str(uuid.uuid4())"
        ) from None


def check_service_key(key: object) -> Secret:
    """The credential, wrapped; ConfigurationError (which does not repeat it) if it cannot be one."""
    text = key.reveal() if isinstance(key, Secret) else key
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(
            "no service key. Set VOLCANO_SERVICE_KEY to your project's sk-... key, or develop "
            "without an account: VOLCANO_API_URL=local: needs no key"
        )
    text = text.strip()
    if text.startswith("ak-"):
        raise ConfigurationError(
            "this is an anon key (ak-...): it cannot manage locks. Set VOLCANO_SERVICE_KEY to a "
            "service key (sk-...) with the permission locks.manage, and keep it on the server"
        )
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigurationError(
            "the service key has characters that no key has (a line break, or a pasted quote?); "
            "copy it again into VOLCANO_SERVICE_KEY"
        )
    return Secret(text)
