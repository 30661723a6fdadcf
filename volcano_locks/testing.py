"""For tests of code that leads: time that stands still until the test moves it.

The law of this module: a test owns its clock. Nothing here sleeps, and nothing here is imported by
the library itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

__all__ = ["ManualClock"]

_PATIENCE = 10.0
"""Real seconds after which ``advance`` gives up on a thread that does not come back to the clock."""
_THREADS = "volcano-locks "


@dataclass(frozen=True, eq=False)
class _Sleeper:
    due: float
    wake: Callable[[], None]
    thread: threading.Thread | None


class ManualClock:
    """A Clock that moves only by ``advance`` (threads) or ``aadvance`` (tasks).

    Sleepers are woken one by one in the order in which they are due, each with the clock at its own
    instant, and each is given the time to come back to the clock (or end) before it moves on.
    """

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=timezone.utc)) -> None:
        self._start = start
        self._now = 1_000.0
        self._wall_shift = -1_000.0
        self._changed = threading.Condition()
        self._sleepers: list[_Sleeper] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> datetime:
        return self._start + timedelta(seconds=self._now + self._wall_shift)

    def shift_wall(self, seconds: float) -> None:
        """Set the wall clock forward (or back), while time itself stands."""
        self._wall_shift += seconds

    def wait(self, event: threading.Event, seconds: float) -> bool:
        due = self._now + seconds
        sleeper = _Sleeper(due, _nothing, threading.current_thread())
        with self._changed:
            self._sleepers.append(sleeper)
            self._changed.notify_all()
            while not event.is_set() and self._now < due:
                # The event is set without our knowing; look at it often.
                self._changed.wait(0.002)
            self._sleepers.remove(sleeper)
        return event.is_set()

    async def sleep(self, seconds: float) -> None:
        import anyio

        woken = anyio.Event()
        sleeper = _Sleeper(self._now + seconds, woken.set, None)
        self._sleepers.append(sleeper)
        try:
            await woken.wait()
        finally:
            self._sleepers.remove(sleeper)

    def advance(self, seconds: float, *, settle: bool = True) -> None:
        """Let time pass for threads. ``settle=False``: jump, as after a suspension of the process."""
        target = self._now + seconds
        if not settle:
            self._move(target)
            return
        self._settle()
        while (due := self._next_due()) <= target:
            self._move(due)
            self._settle()
        self._move(target)
        self._settle()

    async def aadvance(self, seconds: float, *, settle: bool = True) -> None:
        """Let time pass for the tasks of this event loop."""
        import anyio

        target = self._now + seconds
        if settle:
            await anyio.wait_all_tasks_blocked()
            while (due := self._next_due()) <= target:
                self._move(due)
                await anyio.wait_all_tasks_blocked()
        self._move(target)
        await anyio.wait_all_tasks_blocked()

    def _next_due(self) -> float:
        return min(
            (max(sleeper.due, self._now) for sleeper in list(self._sleepers)), default=float("inf")
        )

    def _move(self, now: float) -> None:
        with self._changed:
            self._now = now
            for sleeper in self._sleepers:
                if sleeper.due <= now:
                    sleeper.wake()
            self._changed.notify_all()

    def _settle(self) -> None:
        """Wait until every thread of ours waits on the clock for something later, or has ended."""
        with self._changed:
            if not self._changed.wait_for(self._is_quiet, _PATIENCE):
                raise AssertionError(f"busy for {_PATIENCE:g} s: {self._busy()}")

    def _is_quiet(self) -> bool:
        return not self._busy()

    def _busy(self) -> list[str]:
        asleep = {sleeper.thread for sleeper in self._sleepers if sleeper.due > self._now}
        return [
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith(_THREADS) and thread not in asleep
        ]


def _nothing() -> None:
    """A thread looks for itself."""
