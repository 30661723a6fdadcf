"""Time, as one value that is passed in.

The law of this module: a lease is judged on a clock that never goes back and that counts the time
in which the machine was suspended. The wall clock is for people: for ``acquired_at``, logs, HTTP
dates and the guess at another holder's expiry, never for the question whether we still lead.

Linux has such a clock (CLOCK_BOOTTIME). Elsewhere the monotonic clock may stand still while the
machine sleeps, so it is joined with the wall clock: elapsed time is the larger of the two. A wall
clock that is set forward then looks like a suspension and costs a lease; one that is set back
costs nothing. Erring that way is safe.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from threading import Event

__all__ = ["SYSTEM_CLOCK", "Clock", "JoinedClock", "SystemClock"]

_LONGEST_NAP: Final = 5.0
"""Seconds. Waits of the operating system do not count suspension, so a long wait looks at the
clock this often: after a resume, a sleeper is at most this late."""


class Clock(Protocol):
    """What the clients know of time. ``volcano_locks.testing.ManualClock`` is one for tests."""

    def now(self) -> float:
        """Seconds since some fixed instant; never goes back; counts suspended time."""
        ...

    def wall(self) -> datetime:
        """The wall clock, aware, in UTC."""
        ...

    def wait(self, event: Event, seconds: float) -> bool:
        """Block this thread until the event is set (True) or the seconds are over (False)."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspend this task (asyncio or trio) for so many seconds."""
        ...


class SystemClock:
    """The machine's clock: CLOCK_BOOTTIME."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> datetime:
        return datetime.now(timezone.utc)

    def wait(self, event: Event, seconds: float) -> bool:
        end = self.now() + seconds
        while (left := end - self.now()) > 0:
            if event.wait(min(left, _LONGEST_NAP)):
                return True
        return event.is_set()

    async def sleep(self, seconds: float) -> None:
        import anyio

        end = self.now() + seconds
        while (left := end - self.now()) > 0:  # noqa: ASYNC110 - time is awaited, not a state
            await anyio.sleep(min(left, _LONGEST_NAP))


class JoinedClock(SystemClock):
    """For systems without CLOCK_BOOTTIME: the monotonic clock, moved on by jumps of the wall clock."""

    def __init__(self) -> None:
        self._last = (time.monotonic(), time.time(), 0.0)

    def now(self) -> float:
        # One tuple is swapped at once, so that threads need no lock; a lost race repeats a step
        # that another thread has counted already, which max() below makes harmless.
        monotonic, wall, elapsed = self._last
        new_monotonic, new_wall = time.monotonic(), time.time()
        elapsed += max(new_monotonic - monotonic, new_wall - wall, 0.0)
        elapsed = max(elapsed, self._last[2])
        self._last = (new_monotonic, new_wall, elapsed)
        return elapsed


SYSTEM_CLOCK: Final[Clock] = SystemClock() if hasattr(time, "CLOCK_BOOTTIME") else JoinedClock()
