"""Fenced transactions: the lock's fence row is advanced first and stays locked until the commit.

The law of this module: whoever holds the fence row has the newest token that was ever seen here, and
nobody newer can commit before it does. So what the transaction writes, to any table, cannot land
after a newer leader's work. It protects the database that holds the row, and no other.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransactionOrigin

from volcano_locks.fencing import COMMITS, gave_up, offer

from .model import TOKEN, Target, fence_table
from .place import Place, lasts, on, place_for
from .statement import OFFERED, Shape, Write, with_fence
from .write import write_or_insert

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from volcano_locks.fencing import Fenced, Offer

__all__ = ["async_transaction", "transaction"]

_DEFAULT: Final = fence_table(sa.MetaData())


@contextmanager
def transaction(target: Any, lease: Fenced, table: sa.Table | None, bind: Any) -> Iterator[Any]:
    """``fenced_transaction`` over a plain session or connection."""
    offered = offer(lease)
    with _own_or_joined(target) as inner:
        advance = _advance(offered, _DEFAULT if table is None else table)
        place = place_for(target, advance.statement, bind=bind)
        place.begin("fenced_transaction()")
        place.watch(lease)
        insert = sa.insert(advance.target.table).values(
            {"key": offered.key, TOKEN: offered.token, "advanced_at": _now()}
        )
        # Straight over the connection: no listener and no routing of the session's has a say in it.
        write_or_insert(Place(place.connection), advance, insert)
        # The savepoint comes after the fence: rolling back to it must not let go of the lock.
        with inner(place, offered), _asked(place, offered):
            yield target


@contextmanager
def _kept(place: Place, offered: Offer) -> Iterator[None]:
    """FenceRejected if MySQL's transaction ends before the body does: the fence goes with it.

    It gives up the whole transaction of a deadlock's victim, and goes on in a new one if the body
    swallows the error. Then the savepoint is not there any more at the end; nor is that of a fenced
    transaction inside another.
    """
    if place.connection.dialect.name not in ("mysql", "mariadb"):
        yield
        return
    name = f"volcano_fence_{next(_numbers)}"
    place.connection.exec_driver_sql(f"SAVEPOINT {name}")
    yield
    if not place.in_transaction:
        return  # the body has ended it, under the fence, and nothing can follow
    try:
        place.connection.exec_driver_sql(f"RELEASE SAVEPOINT {name}")
    except DBAPIError as error:
        if error.connection_invalidated or "SAVEPOINT" not in str(error.orig):
            raise
        raise gave_up(offered, COMMITS) from error


_numbers: Final = itertools.count()


@contextmanager
def _asked(place: Place, offered: Offer) -> Iterator[None]:
    """FenceRejected if the driver says that the transaction is over, or cannot be committed.

    SQLite gives it up where a statement is interrupted or meets a full disk; if the body swallows the
    error, what follows is in a new transaction of the driver's, or in none, so it is asked before each
    statement. PostgreSQL takes nothing more, and turns the commit into a rollback without a word, so
    it is asked at the end.
    """
    outer = _guarded.get(place.connection)
    if place.connection.dialect.name == "sqlite":
        _guard(place.connection.engine)
        _guarded[place.connection] = offered
    try:
        yield
    finally:
        if outer is None:
            _guarded.pop(place.connection, None)
        else:
            _guarded[place.connection] = outer
    if place.in_transaction and not lasts(place.connection):
        raise gave_up(offered)


_guarded: weakref.WeakKeyDictionary[sa.Connection, Offer] = weakref.WeakKeyDictionary()
_guarding: weakref.WeakSet[sa.Engine] = weakref.WeakSet()


def _guard(engine: sa.Engine) -> None:
    # Once for an engine: a listener for each transaction would take as long as a small one.
    if engine not in _guarding:
        event.listen(engine, "before_cursor_execute", _ask)
        _guarding.add(engine)


def _ask(connection: sa.Connection, _cursor: object, text: str, *_more: object) -> None:
    offered = _guarded.get(connection)
    # Not before these: their own error tells the savepoint's owner.
    ends = text.startswith(("RELEASE", "ROLLBACK"))
    if offered is not None and not ends and not lasts(connection):
        raise gave_up(offered)


@contextmanager
def _own_or_joined(target: Any) -> Iterator[Any]:
    """Begin and end a transaction here, unless the caller has begun one that we stand in."""
    begun = None
    if isinstance(target, Session):
        begun = target.get_transaction()
        # Begun by a mere read: nobody else would commit it.
        read = begun is not None and begun.origin is SessionTransactionOrigin.AUTOBEGIN
        joined = begun is not None and not (read and not target.in_nested_transaction())
    else:
        joined = target.in_transaction()
    if joined:
        yield (
            lambda place, _: (
                target.begin_nested() if isinstance(target, Session) else place.savepoint()
            )
        )
        return
    # As a context manager, it lets nothing be written after a commit or rollback of the body's own.
    with begun or target.begin():
        yield _kept


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _advance(offered: Offer, table: sa.Table) -> Write:
    shape = _shapes.get(table)
    if shape is None:
        column = table.c[TOKEN]
        target = Target(table, table, None, column, None, None, (column,))
        where = table.c.key == sa.bindparam("volcano_key")
        statement = sa.update(table).where(where).values(advanced_at=sa.bindparam("volcano_now"))
        shape = Shape(target, with_fence(statement, target), where, unique=((),))
        _shapes[table] = shape
    parameters = {OFFERED: offered.token, "volcano_key": offered.key, "volcano_now": _now()}
    return Write(shape, offered, parameters)


_shapes: weakref.WeakKeyDictionary[sa.Table, Shape] = weakref.WeakKeyDictionary()


@asynccontextmanager
async def async_transaction(
    target: Any, lease: Fenced, table: sa.Table | None, bind: Any
) -> AsyncIterator[Any]:
    """``fenced_transaction`` over an async session or connection: the same code, below greenlets."""
    scope: Any = None

    def enter(below: Any) -> None:
        nonlocal scope
        scope = transaction(below, lease, table, bind)
        scope.__enter__()

    def leave(_below: Any, *raised: Any) -> Any:
        return scope.__exit__(*raised)

    await on(target, enter)
    try:
        yield target
    except BaseException as error:
        if not await on(target, leave, type(error), error, error.__traceback__):
            raise
    else:
        await on(target, leave, None, None, None)
