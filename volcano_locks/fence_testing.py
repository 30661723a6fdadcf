"""Replay the stale writer against your own function and your own database.

The law of this module: a write is fenced if a leader that was paused, was replaced and woke up again
is refused, and if its attempt leaves no trace. Both are looked at; neither is taken on trust. The
module knows no framework: a write is a function of a lease, a state is whatever ``read`` returns.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final, TypeVar

from .errors import FenceRejected
from .models import Lease, Secret

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["assert_fenced", "assert_fenced_async"]

T = TypeVar("T")

OLDER: Final = 2**52 + 1
NEWER: Final = OLDER + 1
"""As large as the service's own tokens: a 32-bit column or a float in between is found out."""


def assert_fenced(
    write: Callable[[Lease], object],
    *,
    read: Callable[[], T],
    key: str = "assert-fenced",
    tokens: tuple[int, int] = (OLDER, NEWER),
) -> None:
    """Fail unless ``write`` is fenced.

    ``write(lease)`` is called three times: by leader 1 with the older token, by leader 2 with the
    newer one, and again by leader 1, which must raise FenceRejected. ``read()`` returns a state that
    can be compared with ``==`` (lists and tuples of values; no lazy query, and no instances: those of
    one row are equal whatever it holds) and must be the same before and after the third call. ``key``
    is the lock's key, ``tokens`` the two fencing tokens.

    AssertionError says what landed; what the first two writes raise is passed on, for they must
    succeed on the data that the test prepared.
    """
    leader_1, leader_2 = _leaders(key, tokens)
    write(leader_1)
    write(leader_2)
    before = read()
    refusal: BaseException | None = None
    try:
        write(leader_1)
    except Exception as error:
        refusal = error
    _judge(key, tokens, before, read(), refusal)


async def assert_fenced_async(
    write: Callable[[Lease], Awaitable[object]],
    *,
    read: Callable[[], Awaitable[T]],
    key: str = "assert-fenced",
    tokens: tuple[int, int] = (OLDER, NEWER),
) -> None:
    """``assert_fenced`` for a coroutine function ``write`` and a coroutine function ``read``."""
    leader_1, leader_2 = _leaders(key, tokens)
    await write(leader_1)
    await write(leader_2)
    before = await read()
    refusal: BaseException | None = None
    try:
        await write(leader_1)
    except Exception as error:
        refusal = error
    _judge(key, tokens, before, await read(), refusal)


def _leaders(key: str, tokens: tuple[int, int]) -> tuple[Lease, Lease]:
    older, newer = tokens
    if not 0 < older < newer:
        raise ValueError(f"tokens must rise from above 0: {tokens}")
    now = datetime.now(timezone.utc)
    return (
        Lease(key, None, older, now, Secret(str(uuid.uuid4()))),
        Lease(key, None, newer, now, Secret(str(uuid.uuid4()))),
    )


def _judge(
    key: str, tokens: tuple[int, int], before: object, after: object, refusal: BaseException | None
) -> None:
    older, newer = tokens
    who = f"leader 1 of lock {key!r} (fencing token {older}, displaced by {newer})"
    if before != after:
        how = "was refused, but" if isinstance(refusal, FenceRejected) else "was not refused:"
        raise AssertionError(
            f"the write is not fenced. {who} {how} its write landed.\n"
            f"  before: {before!r}\n  after:  {after!r}"
        ) from refusal
    if refusal is None:
        raise AssertionError(
            f"the write is not fenced. {who} wrote again and nothing refused it; the state that "
            f"read() shows stayed the same ({after!r}), so let each write change it"
        )
    if not isinstance(refusal, FenceRejected):
        raise AssertionError(
            f"{who} was stopped by {type(refusal).__name__}, not by the fence: {refusal}"
        ) from refusal
