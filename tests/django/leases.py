"""Leases and holds as the fence sees them."""

from __future__ import annotations

from datetime import datetime, timezone

from volcano_locks.errors import LeaseLost
from volcano_locks.models import Lease, Secret

KEY = "rollup"


def lease(token: int, key: str = KEY) -> Lease:
    return Lease(key, None, token, datetime.now(timezone.utc), Secret("ownership"))


class Held:
    """A hold under the test's control: ``lose()`` it, and ``check()`` raises."""

    def __init__(self, token: int, key: str = KEY) -> None:
        self.key, self.fencing_token, self.lost = key, token, False

    def lose(self) -> None:
        self.lost = True

    def check(self) -> None:
        if self.lost:
            raise LeaseLost(self.key, "it has been released", fencing_token=self.fencing_token)
