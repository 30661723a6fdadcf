"""What one holder may believe about its lease, and until when.

The law of this module: belief runs from the moment *before* the request that was granted was sent
(law 1), so the service's own expiry is never earlier; it ends a margin before that (law 5); and
what was believed lost is never believed again (law 4). Looking at the clock is the judgement: no
thread has to be on time for ``lost`` to be right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from ..errors import LeaseLost
from ..models import MAX_TTL, Lease


class Loss(Enum):
    """Why a hold is over, in the words of ``LeaseLost.reason``."""

    EXPIRED = "no renewal got through before it ran out"
    REFUSED = (
        "the service says that it is not ours any more (expired, taken over or force-released)"
    )
    DENIED = "the service refuses our service key or request now"
    TERM_OVER = "a lease lives 90 days at most; campaign again"
    FORKED = "it belongs to the parent process; a forked child must acquire its own"
    RELEASED = "it has been released"


@dataclass(frozen=True)
class Tenure:
    """One lease, on this machine's clock.

    ``confirmed_at``: when the last granted request was sent. ``valid_until``: the earliest instant
    at which the service may count it as expired. ``stop_at``: when the holder must have been told.
    """

    lease: Lease
    began_at: float
    confirmed_at: float
    valid_until: float
    stop_margin: float

    @classmethod
    def granted(
        cls, lease: Lease, *, began_at: float, sent_at: float, ttl: int, stop_margin: float
    ) -> Tenure:
        """``began_at``: when the first request of this acquisition was sent, retries included."""
        until = min(sent_at + ttl, began_at + MAX_TTL)
        return cls(lease, began_at, sent_at, until, stop_margin)

    def renewed(self, lease: Lease, *, sent_at: float, ttl: int) -> Tenure:
        until = min(sent_at + ttl, self.began_at + MAX_TTL)
        return replace(self, lease=lease, confirmed_at=sent_at, valid_until=until)

    @property
    def stop_at(self) -> float:
        return self.valid_until - self.stop_margin

    @property
    def is_final(self) -> bool:
        """Whether no renewal can move its end any more (contract rule 9)."""
        return self.valid_until >= self.began_at + MAX_TTL

    def loss(self, now: float) -> Loss | None:
        if now < self.stop_at:
            return None
        return Loss.TERM_OVER if self.is_final else Loss.EXPIRED


class Belief:
    """The newest tenure of a hold, and the first loss. Shared by its body and its keeper.

    Needs no lock: ``loss`` is set once and never cleared, and every look that finds the tenure run
    out sets it before it says so. A renewal that is published meanwhile comes too late.
    """

    __slots__ = ("_loss", "_tenure")

    def __init__(self, tenure: Tenure) -> None:
        self._tenure = tenure
        self._loss: Loss | None = None

    @property
    def tenure(self) -> Tenure:
        return self._tenure

    @property
    def loss(self) -> Loss | None:
        """The loss as far as anybody has noticed; ``look`` notices."""
        return self._loss

    def look(self, now: float) -> Loss | None:
        """The loss, if there is one by now."""
        if self._loss is None:
            loss = self._tenure.loss(now)
            if loss is not None:
                self.lose(loss)
        return self._loss

    def renew(self, tenure: Tenure, now: float) -> None:
        if self.look(now) is None:
            self._tenure = tenure

    def lose(self, loss: Loss) -> None:
        if self._loss is None:
            self._loss = loss

    def remaining(self, now: float) -> float:
        return max(0.0, self._tenure.stop_at - now) if self.look(now) is None else 0.0

    def error(self, loss: Loss) -> LeaseLost:
        lease = self._tenure.lease
        return LeaseLost(lease.key, loss.value, fencing_token=lease.fencing_token)
