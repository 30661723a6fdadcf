"""What a flow asks its driver for, and what it gets back: plain values.

The law of this module: a driver performs exactly one effect at a time and answers it, or throws what
interrupted it into the flow. A flow that is interrupted may ask for more effects to clean up; the
driver performs them, shielded, and the interruption goes on when the flow ends.
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import datetime
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from ..contract import Reply, Request

T = TypeVar("T")


class Send(NamedTuple):
    """Send this request; give up after so many seconds. Answered with ``Answer``, always."""

    request: Request
    timeout: float


class Sleep(NamedTuple):
    """Wait until this instant of the clock. Answered with ``Woke``."""

    until: float


class NoAnswer(NamedTuple):
    """No reply came. ``sent`` is False if the request surely never reached the service."""

    error: Exception
    sent: bool


class Answer(NamedTuple):
    """What became of a ``Send``. ``sent_at`` was read before the first byte left (law 1)."""

    sent_at: float
    received_at: float
    sent_wall: datetime
    result: Reply | NoAnswer


class Woke(NamedTuple):
    now: float


Effect: TypeAlias = Send | Sleep
Flow: TypeAlias = Generator[Effect, Any, T]


class Entropy(Protocol):
    """Where ids and jitter come from; a test passes one that it knows."""

    def uuid(self) -> str:
        """A random UUID: request ids, and ownership tokens, so it has to be unguessable."""
        ...

    def fraction(self) -> float:
        """A number from 0 up to, not including, 1."""
        ...


def send(request: Request, timeout: float) -> Flow[Answer]:
    answer: Answer = yield Send(request, timeout)
    return answer


def sleep(until: float) -> Flow[float]:
    """Seconds on the clock at waking."""
    woke: Woke = yield Sleep(until)
    return woke.now
