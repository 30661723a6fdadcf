"""Every number of the client, and how holders and waiters share the quota.

The law of this module: unsafe combinations are refused at construction, with advice. The bound that
matters, for the shortest TTL T and all numbers below: a renewal begins at the latest at
``T * latest_renewal * (1 + jitter)``, and after that there is still time for two tries before
``T - stop_margin``, when the service (contract rule 6) takes no renewal any more. The service in
turn lets nobody else lead before ``T + 1`` s, so a holder that is told in time has
``stop_margin + 1`` seconds to wind down, whatever its clock's offset; only the clocks' *rates* count,
and a rate error of one in a thousand costs 0.03 s at a TTL of 30 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..contract import GRACE, QUOTA_PER_MINUTE
from ..errors import ConfigurationError
from ..models import MIN_TTL

_SHORTEST_TRY: Final = 0.2


@dataclass(frozen=True)
class Policy:
    """Numbers of a client. Seconds, where nothing else is said; shares are of the TTL.

    Raises ConfigurationError for a combination that could cost a lease or mutual exclusion.
    """

    first_renewal: float = 1 / 3
    """Share of the TTL after which a lease is renewed (law 2)."""
    latest_renewal: float = 0.55
    """Share to which renewals are stretched if this client's holds would use up the quota."""
    jitter: float = 0.1
    longest_interval: float = 120.0
    """At most so long between renewals, so that a force release is noticed at long TTLs too."""
    stop_margin: float = 1.0
    timeout: float = 5.0
    """The longest that one try may take."""
    first_backoff: float = 0.2
    longest_backoff: float = 5.0
    acquire_retries: int = 1
    release_tries: int = 3
    release_budget: float = 3.0
    """All tries of a release together."""
    poll_interval: float = 5.0
    """A waiter looks so often whether the lock was released."""
    quota_per_minute: int = QUOTA_PER_MINUTE
    holders_share: float = 0.75
    """Share of the quota up to which renewals of one client go; the rest is for waiters and others."""

    def __post_init__(self) -> None:
        def need(fine: bool, advice: str) -> None:
            if not fine:
                raise ConfigurationError(f"unsafe policy: {advice}")

        need(0 <= self.jitter <= 0.3, "keep jitter between 0 and 0.3")
        need(
            0 < self.first_renewal <= self.latest_renewal,
            "first_renewal must be above 0 and at most latest_renewal",
        )
        need(
            self.stop_margin >= GRACE,
            f"stop_margin must be at least {GRACE:g} s: later renewals are refused by the service",
        )
        last_start = MIN_TTL * self.latest_renewal * (1 + self.jitter)
        need(
            last_start + 2 * _SHORTEST_TRY + self.first_backoff <= MIN_TTL - self.stop_margin,
            "latest_renewal, jitter and stop_margin leave no time for two tries at the shortest TTL; "
            "lower one of them",
        )
        need(0 < self.first_backoff <= self.longest_backoff, "backoff must be above 0 and grow")
        need(self.timeout > 0 and self.release_budget > 0, "timeouts must be above 0")
        need(self.acquire_retries >= 0 and self.release_tries >= 1, "tries cannot be negative")
        need(self.poll_interval >= 0.1, "poll_interval below 0.1 s only burns the quota")
        need(self.longest_interval > 0, "longest_interval must be above 0")
        need(self.quota_per_minute > 0 and 0 < self.holders_share < 1, "the quota must be above 0")

    def jittered(self, seconds: float, chance: float) -> float:
        """Up to ``jitter`` more or less; ``chance`` from 0 to 1."""
        return seconds * (1 + self.jitter * (2 * chance - 1))

    def backoff(self, failures: int, chance: float) -> float:
        """Seconds after this many failures in a row, from half to all of a doubling step."""
        step = min(self.first_backoff * 2.0 ** min(failures - 1, 30), self.longest_backoff)
        return step * (0.5 + chance / 2)

    def renewal_timeout(self, left: float) -> float:
        """For one try, with ``left`` seconds until the holder must stop: half, so that another try
        fits in, or all of what is left once halves get too short."""
        return min(self.timeout, left, max(left / 2, _SHORTEST_TRY * 2))

    def acquire_timeout(self, ttl: int) -> float:
        """For one try: an answer that takes longer would leave little of the lease."""
        return min(self.timeout, max(ttl / 3, 1.0))


class Quota:
    """How the holds and waiters of one client share the project's quota (contract rule 10).

    It only counts. Renewals come first: they are stretched a little when many short leases are held;
    waiters poll less often and pause altogether while the service says 429.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._holders: dict[object, int] = {}
        self._waiters: set[object] = set()
        self._demand = 0.0
        self.quiet_until = float("-inf")

    def hold(self, holder: object, ttl: int) -> None:
        self._holders[holder] = ttl
        self._count()

    def wait(self, waiter: object) -> None:
        self._waiters.add(waiter)

    def leave(self, who: object) -> None:
        self._waiters.discard(who)
        if self._holders.pop(who, None) is not None:
            self._count()

    def _count(self) -> None:
        policy = self._policy
        self._demand = sum(
            60 / min(ttl * policy.first_renewal, policy.longest_interval)
            for ttl in tuple(self._holders.values())
        )

    def renewal_interval(self, ttl: int) -> float:
        policy = self._policy
        allowed = policy.quota_per_minute * policy.holders_share
        stretch = max(1.0, self._demand / allowed)
        share = min(policy.first_renewal * stretch, policy.latest_renewal)
        return min(ttl * share, policy.longest_interval * max(1.0, stretch))

    def poll_interval(self) -> float:
        policy = self._policy
        rest = policy.quota_per_minute * (1 - policy.holders_share)
        return max(policy.poll_interval, 2 * 60 * len(self._waiters) / rest)
