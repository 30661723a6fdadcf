"""The lease table: one lock, one request, one instant, one answer.

The law of this module: it decides, and performs nothing. It knows no clock, no file, no project and
no quota; time comes in as whole milliseconds since 1970, by the service's clock, which is the only
one that counts. The record outlives its lease, because the fencing token must never go back.

::

    acquired          expires - 1 s    expires       expires + 1 s
       |-- owner renews ----|             |               |
       |-- owner re-acquires -------------|               |
       |-- held, for everybody else ----------------------|-- free: next token -->

Between ``expires`` and one second later nobody leads: the owner must have stopped, and nobody else
may start, because clocks differ.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ..contract import Operation
from ..models import MAX_TTL

if TYPE_CHECKING:
    from ..contract import Request

__all__ = ["Answer", "Done", "Granted", "Record", "Refusal", "Seen", "decide", "fingerprint"]

GRACE_MS: Final = 1_000
LONGEST_LIFE_MS: Final = MAX_TTL * 1_000


@dataclass(frozen=True)
class Record:
    """One lock's row. ``owner`` is None once the lease was released; all else is then history.

    ``owner``: fingerprint of the ownership token, so that no store holds a token. ``acquired_at``
    and ``expires_at``: milliseconds. ``fencing_token``: the last one given.
    """

    owner: bytes | None
    fencing_token: int
    acquired_at: int
    expires_at: int

    @property
    def deadline(self) -> int:
        """Milliseconds: no renewal and no re-acquire reaches beyond it (rule 9)."""
        return self.acquired_at + LONGEST_LIFE_MS

    def free(self, now: int) -> bool:
        """Whether an acquire by anybody would succeed now (rules 1 and 5)."""
        return self.owner is None or now >= self.expires_at + GRACE_MS


class Granted(NamedTuple):
    """A new lease, or one that goes on; ``expires_at`` in milliseconds."""

    expires_at: int
    fencing_token: int


class Seen(NamedTuple):
    """What a read saw: the record if the lock is held, else None."""

    record: Record | None


class Done(Enum):
    """Released; there is nothing more to say about it."""

    DONE = "done"


class Refusal(Enum):
    """Why not, by the service's own two words for it."""

    HELD = "lock_held"
    LOST = "lock_ownership_lost"


Answer: TypeAlias = Granted | Seen | Done | Refusal


def decide(record: Record | None, request: Request, now: int) -> tuple[Record | None, Answer]:
    """The record afterwards and the answer. A refusal or a read leaves the record as it was."""
    operation = request.operation
    current = None if record is None or record.free(now) else record
    if operation is Operation.GET:
        return record, Seen(current)
    if operation is Operation.FORCE_RELEASE:
        return _released(record), Done.DONE
    owner = fingerprint(request)
    owned = current is not None and current.owner == owner
    if operation is Operation.RELEASE:
        if current is not None and not owned:
            return record, Refusal.LOST
        return _released(record), Done.DONE
    expires_at = now + (request.ttl or 0) * 1_000
    if operation is Operation.ACQUIRE:
        if current is None:
            last = 0 if record is None else record.fencing_token
            # The clock joins in so that tokens rise even if the file with the last one is deleted.
            new = Record(owner, max(last + 1, now), now, expires_at)
            return new, Granted(new.expires_at, new.fencing_token)
        if not owned:
            return record, Refusal.HELD
        if now >= current.expires_at:
            return record, Refusal.LOST
    elif current is None or not owned or now >= current.expires_at - GRACE_MS:
        return record, Refusal.LOST
    until = min(expires_at, current.deadline)
    longer = Record(current.owner, current.fencing_token, current.acquired_at, until)
    return longer, Granted(longer.expires_at, longer.fencing_token)


def fingerprint(request: Request) -> bytes:
    """What stands for the request's ownership token: equal for equal tokens, and no way back."""
    token = "" if request.token is None else request.token.reveal()
    return hashlib.sha256(token.encode()).digest()


def _released(record: Record | None) -> Record | None:
    if record is None:
        return None
    return Record(None, record.fencing_token, record.acquired_at, record.expires_at)
