"""What a job's code finds: a hold under the test's control, ``lead``, which runs a body under it, and
``watched``, with which a body sees that it was left alone."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
import threading
import time
from typing import Any

from volcano_locks import command
from volcano_locks.command import CommandEnded, LeaderOptions, Terminated, run_leader_only
from volcano_locks.errors import LeaseLost, LockHeld

__all__ = [
    "CommandEnded",
    "LeaseLost",
    "LockHeld",
    "StandIn",
    "Terminated",
    "command",
    "contextlib",
    "lead",
    "os",
    "run_leader_only",
    "say",
    "signal",
    "sqlite3",
    "sys",
    "threading",
    "time",
    "told",
    "watched",
]


def say(*words: object) -> None:
    # One write: two threads' lines stay apart. os.write has no lock that a handler could find taken.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def told() -> None:
    """Wait for the test's ``Job.tell()``. Signals that it sent before are heard inside of this."""
    os.read(0, 1)


class StandIn:
    """A hold that is lost when its body says so, and whose entering and release take their time."""

    def __init__(self, key: str, entering: Any, releasing: Any) -> None:
        self.key, self.fencing_token, self.lost, self.released = key, 7, False, False
        self.entering, self.releasing = entering, releasing
        self.on_lost: Any = None

    def __enter__(self) -> StandIn:
        if self.entering is not None:
            self.entering()
        return self

    def lose(self) -> None:
        self.lost = True
        if self.on_lost:
            self.on_lost(self)

    def lose_soon(self) -> None:
        """From another thread, once the caller is where it is to be found."""
        timer = threading.Timer(0.1, self.lose)
        timer.daemon = True
        timer.start()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        lost = self.lost
        say("releasing", kind.__name__ if kind else None)
        if self.releasing is not None:
            self.releasing()
        say("released")
        if lost and error is None:
            raise LeaseLost(self.key, "it was taken", fencing_token=7)

    def release(self) -> None:
        say("released what was half entered")

    def remaining(self) -> float:
        return 0.0 if self.lost else 30.0

    def check(self) -> None:
        if self.lost:
            raise LeaseLost(self.key, "it was taken", fencing_token=7)


class Client:
    def __init__(self, *hold: Any) -> None:
        self._hold = hold

    def hold(self, key: str, *, on_lost: Any, **_: Any) -> StandIn:
        hold = StandIn(key, *self._hold)
        hold.on_lost = on_lost
        return hold


def lead(
    work: Any,
    *,
    key: str = "job",
    entering: Any = None,
    releasing: Any = None,
    interrupts: Any = (),
    **options: Any,
) -> Any:
    """Run ``work(hold)``; exit as a command line would if it ended with words and a code."""
    client: Any = Client(entering, releasing)
    try:
        return run_leader_only(
            lambda: client,
            lambda: key,
            LeaderOptions(**options),
            work,
            say=say,
            interrupts=interrupts,
        )
    except CommandEnded as ended:
        sys.stderr.write(f"{ended}\n")
        sys.exit(ended.exit_code)


def watched() -> None:
    """Wait until the watcher has looked at the lease five more times: it listens between two looks,
    and after a look or a signal that it acts upon it does not look on. Set ``command._NAP`` before."""
    looks, look = threading.Semaphore(0), command._lost

    def counted(hold: Any) -> bool:
        looks.release()
        return look(hold)

    command._lost = counted
    try:
        for _ in range(5):
            assert looks.acquire(timeout=60), "the watcher looks no more"
    finally:
        command._lost = look
