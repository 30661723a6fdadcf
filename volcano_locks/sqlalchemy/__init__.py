"""Fenced writes for SQLAlchemy 2: sessions and connections, sync and async.

The law of this package: the fence is a certain part of the statement that writes, or nothing is
sent. A row carries the token of its last fenced write and the key of the lock that issued it; a write
under a lease lands only where ``stored token <= offered token`` and the stored key is the lease's own
or still empty. Token and key are written with the values, by the same statement.

Every function takes a ``Session``, a ``scoped_session`` (Flask-SQLAlchemy's ``db.session``), a
``Connection``, or the async twin of one, and is awaited for an async one. All of them raise:

- LeaseLost before any statement, if the hold knows that it is lost; and at the commit, if it has
  ended by then;
- CannotFence before any statement, if the fence could not be certain; it says what to do instead;
- StaleFence if a newer leader has written, FenceKeyMismatch if another lock's holder has,
  FenceTargetMissing if no row matches, FenceRejected if the fence of a row is NULL;
- OutcomeUnknown if the driver does not tell what happened: roll back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from . import check as _check
from . import transaction as _transaction
from . import write as _write
from .model import FENCE_TABLE, FencedMixin, Finding, fence_table, fencing_columns
from .place import on as _on

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from typing import TypeAlias

    from sqlalchemy import Connection, Delete, Engine, MetaData, Table, Update
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from volcano_locks.fencing import Fenced

    SyncTarget: TypeAlias = Session | scoped_session[Any] | Connection
    AsyncTarget: TypeAlias = AsyncSession | async_scoped_session[Any] | AsyncConnection

__all__ = [
    "FENCE_TABLE",
    "FencedMixin",
    "Finding",
    "check_models",
    "fence_table",
    "fenced_delete",
    "fenced_save",
    "fenced_transaction",
    "fenced_update",
    "fenced_upsert",
    "fencing_columns",
]

S = TypeVar("S", bound="SyncTarget")
A = TypeVar("A", bound="AsyncTarget")


@overload
def fenced_update(session: SyncTarget, lease: Fenced, statement: Update) -> int: ...
@overload
def fenced_update(
    session: AsyncTarget, lease: Fenced, statement: Update
) -> Coroutine[Any, Any, int]: ...
def fenced_update(session: Any, lease: Fenced, statement: Update) -> Any:
    """Write the values of ``update(...)`` and the token; the number of rows, at least 1.

    One statement if its condition sets a unique key equal to values. Otherwise several rows may
    match, and all are written or none (three statements more: a savepoint, its release, a look).
    Nothing pending in the session is flushed. Instances that were loaded show the new values.
    """
    return _on(session, _write.write, lease, statement)


@overload
def fenced_delete(session: SyncTarget, lease: Fenced, statement: Delete) -> int: ...
@overload
def fenced_delete(
    session: AsyncTarget, lease: Fenced, statement: Delete
) -> Coroutine[Any, Any, int]: ...
def fenced_delete(session: Any, lease: Fenced, statement: Delete) -> Any:
    """Delete the rows of ``delete(...)``; their number, at least 1. Otherwise as ``fenced_update``.

    The token goes with the row. If a displaced leader could create the row again, write inside
    ``fenced_transaction()``. Loaded instances of deleted rows leave the session.
    """
    return _on(session, _write.write, lease, statement)


@overload
def fenced_upsert(
    session: SyncTarget,
    lease: Fenced,
    entity: type[Any] | Table,
    values: Mapping[str, Any],
    *,
    key: Sequence[str] | None = None,
) -> bool: ...
@overload
def fenced_upsert(
    session: AsyncTarget,
    lease: Fenced,
    entity: type[Any] | Table,
    values: Mapping[str, Any],
    *,
    key: Sequence[str] | None = None,
) -> Coroutine[Any, Any, bool]: ...
def fenced_upsert(
    session: Any,
    lease: Fenced,
    entity: Any,
    values: Mapping[str, Any],
    *,
    key: Sequence[str] | None = None,
) -> Any:
    """Write ``values`` to the row that they name, or insert it; whether it was new.

    ``key``: the attributes that name the row, the primary key by default; a unique constraint must
    cover them. An existing row takes one statement. A row that does not exist carries no token: if a
    newer leader could have deleted it, write inside ``fenced_transaction()``.
    """
    return _on(session, _write.upsert, lease, entity, values, key)


@overload
def fenced_save(
    session: Session | scoped_session[Any], lease: Fenced, instance: object
) -> None: ...
@overload
def fenced_save(
    session: AsyncSession | async_scoped_session[Any], lease: Fenced, instance: object
) -> Coroutine[Any, Any, None]: ...
def fenced_save(session: Any, lease: Fenced, instance: object) -> Any:
    """Save one instance in one statement, without a flush: what has changed of it, and the token.

    A loaded instance updates its row. A new one whose primary key you chose updates that row or
    inserts it. A query between the change and this call may flush the change without the fence
    (autoflush): use ``session.no_autoflush``. If the write is refused, the pending changes of the instance are dropped, so that no
    later flush writes them. Relationships, version counters and ``before_update`` listeners need a
    flush and are refused.
    """
    return _on(session, _write.save, lease, instance)


@overload
def fenced_transaction(
    session: S,
    lease: Fenced,
    *,
    table: Table | None = None,
    bind: Engine | Connection | None = None,
) -> AbstractContextManager[S]: ...
@overload
def fenced_transaction(
    session: A,
    lease: Fenced,
    *,
    table: Table | None = None,
    bind: Engine | Connection | None = None,
) -> AbstractAsyncContextManager[A]: ...
def fenced_transaction(
    session: Any, lease: Fenced, *, table: Table | None = None, bind: Any = None
) -> Any:
    """A transaction that no newer leader can overtake: ``with fenced_transaction(session, lease):``.

    It advances the fence row of the lease's key and keeps it locked until the commit, so any table
    can be written, by any statement, inserts and flushes included. It commits at its end, and rolls
    back on an exception; inside a transaction that you began yourself, that one commits, and a
    savepoint stands around the body. ``table``: your own ``fence_table(metadata, name)``. ``bind``:
    which database of a session with several.

    Raises StaleFence before the body if a newer leader has been here, LeaseLost before the body and
    before the commit, FenceRejected if the transaction was given up in the middle (a deadlock on MySQL)
    and the body swallowed that. Then nothing is committed.
    """
    if hasattr(session, "registry") and callable(session):
        session = session()
    if hasattr(session, "run_sync"):
        return _transaction.async_transaction(session, lease, table, bind)
    return _transaction.transaction(session, lease, table, bind)


def check_models(
    models: type[Any] | MetaData | Table, bind: Engine | Connection | None = None
) -> list[Finding]:
    """What would keep a fence from being certain: of a declarative base, a MetaData, a class, a Table.

    With an engine or a connection, the database's columns and rows are looked at as well; tables that
    do not exist yet are passed over. Under asyncio: ``await connection.run_sync(lambda c:
    check_models(Base, c))``. An empty list is good news.
    """
    return list(_check.findings(models, bind))
