"""The contract around the table and its store: credentials, permission, quota, answers.

The law of this module: a request becomes a reply, and leases are judged by the service's own clock,
never by the caller's. It knows nothing of sockets, frameworks or files. What cannot be decided is a
503 (rule 11); no answer carries a credential, a token or a traceback.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ..contract import (
    LOCK_RATE_LIMITED,
    LOCK_SERVICE_UNAVAILABLE,
    QUOTA_PER_MINUTE,
    Malformed,
    Reply,
    check_request,
    decode_request,
    encode_error,
    encode_grant,
    encode_state,
    from_milliseconds,
)
from ..models import LockState, Secret
from .store import Limited, StoreUnavailable
from .table import Granted, Refusal, Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..contract import Request
    from .store import Outcome, Store

__all__ = ["Credential", "LockService", "wall_milliseconds"]

DEFAULT_PROJECT: Final = "local"

_WORDS: Final = {
    Refusal.HELD: "the lock is held by another lease",
    Refusal.LOST: "this token does not own a live lease of the lock",
}


def wall_milliseconds() -> int:
    """The wall clock in milliseconds since 1970: the one clock that processes share over reboots."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True)
class Credential:
    """A key, the project that it opens, and whether it carries ``locks.manage``."""

    key: Secret = field(repr=False)
    project: str = DEFAULT_PROJECT
    may_manage: bool = True

    @property
    def digest(self) -> bytes:
        return _digest(self.key.reveal())


class LockService:
    """One lock service. Without credentials every caller works in the one project ``local``.

    ``clock``: milliseconds since 1970. ``quota``: operations per project and minute.
    """

    def __init__(
        self,
        store: Store,
        *,
        credentials: Sequence[Credential] | None = None,
        quota: int = QUOTA_PER_MINUTE,
        clock: Callable[[], int] = wall_milliseconds,
    ) -> None:
        self.store = store
        self.quota = quota
        self.clock = clock
        self._credentials = (
            None
            if credentials is None
            else [(item.digest, item.project, item.may_manage) for item in credentials]
        )

    @property
    def checks_keys(self) -> bool:
        """Whether a caller needs one of the credentials."""
        return self._credentials is not None

    def reply(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """The answer to an HTTP message; header names in lower case.

        ConfigurationError only if the store cannot be opened at all, on its first use.
        """
        project = self.authenticate(headers.get("authorization"))
        if isinstance(project, Reply):
            return project
        request = decode_request(method, path, headers, body)
        if isinstance(request, Malformed):
            return Reply(request.status, encode_error(request.message))
        return self.perform(request, project)

    def answer(self, request: Request) -> Reply:
        """The same for a caller in this process, who needs no message and no credential."""
        checked = check_request(request)
        if isinstance(checked, Malformed):
            return Reply(checked.status, encode_error(checked.message))
        return self.perform(checked)

    def perform(self, request: Request, project: str = DEFAULT_PROJECT) -> Reply:
        """The answer to a request of a caller who may make it."""
        try:
            outcome = self.store.transact(project, request, self.clock(), self.quota)
        except StoreUnavailable as error:
            return Reply(503, encode_error(str(error), LOCK_SERVICE_UNAVAILABLE))
        return _encode(outcome, request)

    def authenticate(self, authorization: str | None) -> str | Reply:
        """The project of an ``Authorization`` header, or the 401 or 403 that refuses it."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if key.startswith("ak-"):
            return Reply(403, encode_error("an anon key cannot manage locks; use a service key"))
        if self._credentials is None:
            return DEFAULT_PROJECT
        if scheme.lower() != "bearer" or not key:
            return Reply(401, encode_error("a bearer credential is missing"))
        offered, found = _digest(key), None
        for digest, project, may_manage in self._credentials:
            # Every key is compared, each in constant time: the time says nothing about which fits.
            if hmac.compare_digest(digest, offered):
                found = project, may_manage
        if found is None:
            return Reply(401, encode_error("the credential is not valid here"))
        if not found[1]:
            return Reply(403, encode_error("the key lacks the permission locks.manage"))
        return found[0]


def _encode(outcome: Outcome, request: Request) -> Reply:
    success = request.operation.success
    if isinstance(outcome, Granted):
        return Reply(
            success, encode_grant(from_milliseconds(outcome.expires_at), outcome.fencing_token)
        )
    if isinstance(outcome, Seen):
        return Reply(success, encode_state(_state(outcome)))
    if isinstance(outcome, Refusal):
        return Reply(409, encode_error(_WORDS[outcome], outcome.value))
    if isinstance(outcome, Limited):
        return Reply(
            429,
            encode_error("the project's operations of this minute are used up", LOCK_RATE_LIMITED),
            str(outcome.seconds),
        )
    return Reply(success)


def _state(seen: Seen) -> LockState:
    if seen.record is None:
        return LockState(held=False)
    record = seen.record
    return LockState(True, from_milliseconds(record.expires_at), record.fencing_token)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
