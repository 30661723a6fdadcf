"""What each function of the kit returns for each kind of session; `make types` checks it, nothing runs it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager

from sqlalchemy import Connection, Delete, Table, Update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session
from typing_extensions import assert_type

from volcano_locks.fencing import Fenced
from volcano_locks.sqlalchemy import (
    fenced_delete,
    fenced_save,
    fenced_transaction,
    fenced_update,
    fenced_upsert,
)


def plain(
    target: Session | scoped_session[Session] | Connection,
    lease: Fenced,
    update: Update,
    delete: Delete,
    table: Table,
) -> None:
    assert_type(fenced_update(target, lease, update), int)
    assert_type(fenced_delete(target, lease, delete), int)
    assert_type(fenced_upsert(target, lease, table, {"id": 1}), bool)


async def awaited(
    target: AsyncSession | async_scoped_session[AsyncSession] | AsyncConnection,
    lease: Fenced,
    update: Update,
    delete: Delete,
    table: Table,
) -> None:
    assert_type(await fenced_update(target, lease, update), int)
    assert_type(await fenced_delete(target, lease, delete), int)
    assert_type(await fenced_upsert(target, lease, table, {"id": 1}), bool)


async def sessions(session: Session, other: AsyncSession, lease: Fenced, row: object) -> None:
    fenced_save(session, lease, row)
    await fenced_save(other, lease, row)
    assert_type(fenced_transaction(session, lease), AbstractContextManager[Session])
    assert_type(fenced_transaction(other, lease), AbstractAsyncContextManager[AsyncSession])


def connections(connection: Connection, other: AsyncConnection, lease: Fenced, row: object) -> None:
    assert_type(fenced_transaction(connection, lease), AbstractContextManager[Connection])
    assert_type(fenced_transaction(other, lease), AbstractAsyncContextManager[AsyncConnection])
    fenced_save(connection, lease, row)  # type: ignore[call-overload]
    fenced_save(other, lease, row)  # type: ignore[call-overload]
