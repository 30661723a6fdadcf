"""The service as contract.md tells it, for judging the table: written from its rules alone.

It keeps one lease and a history of fencing tokens, and says of each answer whether it is right. It
shares no code with the table, and is told the time in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

SECOND = 1_000
NINETY_DAYS = 90 * 24 * 3_600 * SECOND


@dataclass
class ModelLease:
    token: str
    fence: int
    since: int
    until: int


class Model:
    """One lock. ``expect_*`` gives (kind, until, fence), with None for what the rules leave open."""

    def __init__(self) -> None:
        self.lease: ModelLease | None = None
        self.fences: list[int] = []

    def standing(self, now: int) -> ModelLease | None:
        """The lease that keeps others out: until one second after its expiry (rule 5)."""
        if self.lease is not None and now - self.lease.until >= SECOND:
            return None
        return self.lease

    def acquire(self, token: str, ttl: int, now: int, answer: tuple[object, ...]) -> None:
        standing = self.standing(now)
        if standing is None:  # rule 1
            kind, until, fence = answer
            assert kind == "granted", "rule 1: a free lock is granted"
            assert until == now + ttl * SECOND
            assert isinstance(fence, int)
            assert all(fence > old for old in self.fences), "rule 1: a new, higher fencing token"
            assert fence > 2**32, "tokens overflow a 32-bit column, as real ones do"
            assert fence < 2**63
            self.fences.append(fence)
            self.lease = ModelLease(token, fence, now, until)
        elif standing.token != token:  # rules 3 and 5
            assert answer == ("lock_held",), "rule 3: another lease keeps the lock"
        elif now >= standing.until:  # rule 4
            assert answer == ("lock_ownership_lost",), "rule 4: one's own lapsed lease is lost"
        else:  # rules 2 and 9
            until = min(now + ttl * SECOND, standing.since + NINETY_DAYS)
            assert answer == ("granted", until, standing.fence), "rule 2: same token, same lease"
            standing.until = until

    def renew(self, token: str, ttl: int, now: int, answer: tuple[object, ...]) -> None:
        standing = self.standing(now)
        mine = standing is not None and standing.token == token
        if standing is None or not mine or not standing.until - now > SECOND:
            assert answer == ("lock_ownership_lost",), "rule 6: late, expired, absent, another's"
            return
        until = min(now + ttl * SECOND, standing.since + NINETY_DAYS)
        assert answer == ("granted", until, standing.fence), "rules 6 and 9: set, and clamped"
        standing.until = until

    def release(self, token: str, now: int, answer: tuple[object, ...]) -> None:
        standing = self.standing(now)
        if standing is not None and standing.token != token:
            assert answer == ("lock_ownership_lost",), "rule 7: only the owner releases"
            return
        assert answer == ("done",), "rule 7: the owner's release, and one of nothing, succeed"
        self.lease = None

    def force_release(self, answer: tuple[object, ...]) -> None:
        assert answer == ("done",), "rule 8: any lease is dropped, also none"
        self.lease = None

    def get(self, now: int, answer: tuple[object, ...]) -> None:
        standing = self.standing(now)
        if standing is None:
            assert answer == ("free",), "rule 5: free means that an acquire would succeed now"
        else:
            assert answer == ("held", standing.until, standing.fence), "rule 5: held in the grace"
