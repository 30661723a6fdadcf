"""The fence: what both ORM kits mean by it.

The law of this module: a write under a lease lands only if no newer leader has written there. The
comparison is ``stored <= offered`` (a holder may write twice) and is part of the statement that
writes. Tokens of two locks are never compared.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

from .errors import FenceRejected, InvalidRequest
from .models import MAX_FENCING_TOKEN, Lease

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["COMMITS", "Fenced", "Offer", "gave_up", "is_closed", "offer"]


@runtime_checkable
class Fenced(Protocol):
    """What a fenced write needs: a ``Lease``, a live ``Hold``, or a test's stand-in."""

    @property
    def key(self) -> str: ...

    @property
    def fencing_token(self) -> int: ...


class Offer(NamedTuple):
    """A key and the token that a write offers, checked once before the statement is built."""

    key: str
    token: int


def offer(lease: Fenced | Lease) -> Offer:
    """What this lease may offer now.

    Raises LeaseLost, before any statement, if it is a hold that knows it is lost, and
    InvalidRequest if it carries no usable fencing token (0 is kept for "never written").
    """
    check: Callable[[], None] | None = getattr(lease, "check", None)
    if check is not None:
        check()
    token = getattr(lease, "fencing_token", None)
    key = getattr(lease, "key", None)
    if (
        not isinstance(key, str)
        or not isinstance(token, int)
        or isinstance(token, bool)
        or not 0 < token <= MAX_FENCING_TOKEN
    ):
        raise InvalidRequest(
            f"{type(lease).__name__} carries no fencing token: pass the lease or the hold that the "
            "lock gave you"
        )
    return Offer(key, token)


def gave_up(offered: Offer, otherwise: str = "") -> FenceRejected:
    """The error for a transaction that went on without its fence. ``otherwise``: what else may be why."""
    return FenceRejected(
        f"the transaction under lock {offered.key!r} lost its fence in the middle: the body has "
        f"swallowed the error with which the database gave it up{otherwise}. What came after that is "
        "not committed. Let database errors leave fenced_transaction(), and start it again"
    )


COMMITS: Final = ", or has sent a statement that commits, such as TRUNCATE or CREATE TABLE"
"""What else may be why on MySQL."""


# What only some databases take for a quote or a comment: \' and # of MySQL (which ends with the line,
# and so needs one to go on), $$ of PostgreSQL.
_TRICKY: Final = re.compile(r"""\\['"`]|\$\w*\$|\#.*\n""")


def is_closed(sql: str) -> bool:
    """Whether nothing of this SQL reaches beyond its end: a comment, a quote, a parenthesis.

    Of raw SQL beside a fence it has to be known: "a) OR (b" would step out of the parentheses that
    are put around it.
    """
    if _TRICKY.search(sql):
        return False
    depth, bare = 0, re.sub(r"""'[^']*'|"[^"]*"|`[^`]*`""", "", sql)
    for character in bare:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return False
    return depth == 0 and not any(part in bare for part in ("'", '"', "`", "--", "/*"))
