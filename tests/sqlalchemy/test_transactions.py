"""Fenced transactions: the fence row first, locked until the commit."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, InvalidRequestError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from volcano_locks.errors import CannotFence, FenceRejected, LeaseLost, StaleFence
from volcano_locks.fence_testing import assert_fenced
from volcano_locks.models import Lease
from volcano_locks.sqlalchemy import fence_table, fenced_transaction, fenced_update

from .sides import BIG, Base, Note, Row, Side, fence, lease
from .test_rows import Hold


def token_of(side: Side, key: str = "rollup") -> int | None:
    with side.look.connect() as connection:
        found = connection.scalar(sa.select(fence.c.fencing_token).where(fence.c.key == key))
        return None if found is None else found - BIG


def write(side: Side, session: object, token: int, text: str = "done") -> None:
    with side.within(fenced_transaction(session, lease(token))) as inner:  # type: ignore[type-var]
        inner.add(Note(text=text))


def test_it_commits_at_its_end(side: Side) -> None:
    with side.session() as session:
        write(side, session, 5)
        assert not session.in_transaction()
    assert (side.notes(), token_of(side)) == (["done"], 5)


def test_the_usual_way_in_is_one_statement(side: Side) -> None:
    with side.session() as session:
        write(side, session, 5)
        side.statements.clear()
        with side.within(fenced_transaction(session, lease(6))):
            pass
    begun = ["BEGIN"] if side.vendor == "sqlite" else []  # no round trip there
    assert [text.split()[0] for text in side.statements] == [*begun, "UPDATE"]


def test_a_stale_leader_does_not_get_in(side: Side) -> None:
    with side.session() as session:
        write(side, session, 6)
        with pytest.raises(StaleFence) as refusal:
            write(side, session, 5)
        assert refusal.value.stored == BIG + 6
        assert not session.in_transaction()
    assert (side.notes(), token_of(side)) == (["done"], 6)


def test_locks_do_not_touch_each_other(side: Side) -> None:
    with side.session() as session:
        write(side, session, 6)
        with side.within(fenced_transaction(session, lease(1, "ROLLUP"))):
            pass
    assert (token_of(side), token_of(side, "ROLLUP")) == (6, 1)


def test_an_exception_rolls_back_the_work_and_the_fence(side: Side) -> None:
    with side.session() as session, pytest.raises(ZeroDivisionError):
        with side.within(fenced_transaction(session, lease(5))) as inner:
            inner.add(Note(text="half"))
            raise ZeroDivisionError
    assert (side.notes(), token_of(side)) == ([], None)


def test_a_cancelled_task_rolls_back(opened: Any) -> None:
    side = opened("sqlite", "async")
    side.empty()

    async def main() -> None:
        entered = asyncio.Event()

        async def work() -> None:
            async with AsyncSession(side.engine) as session:
                async with fenced_transaction(session, lease(5)) as inner:
                    inner.add(Note(text="half"))
                    await inner.flush()
                    entered.set()
                    await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    side.run(main())
    assert (side.notes(), token_of(side)) == ([], None)


def test_a_mere_read_before_does_not_leave_the_commit_to_nobody(side: Side) -> None:
    with side.session() as session:
        side.run(session.execute(sa.select(Note)))
        write(side, session, 5)
    assert side.notes() == ["done"]


@pytest.mark.parametrize("write", ["a transaction", "many rows", "a live hold"])
def test_a_savepoint_that_may_be_all_of_the_transaction_is_refused(
    sync_side: Side, write: str
) -> None:
    """Python's sqlite3 begins nothing before SAVEPOINT, so its RELEASE would let go of the fence."""

    def fenced(session: Any) -> None:
        if write == "a transaction":
            with fenced_transaction(session, lease(7)):
                pass
        elif write == "many rows":
            fenced_update(session, lease(7), sa.update(Row).values(n=7))
        else:
            fenced_update(session, Hold(7), sa.update(Row).where(Row.id == 1).values(n=7))

    sync_side.put(Row(id=1))
    with sync_side.session() as session, session.begin():
        with (
            pytest.raises(CannotFence, match="a listener that sends BEGIN")
            if sync_side.vendor == "sqlite"
            else contextlib.nullcontext(),
            session.begin_nested(),
        ):
            fenced(session)
    with sync_side.begins(), sync_side.session() as session, session.begin():
        with session.begin_nested():
            fenced(session)
        session.rollback()
    with sync_side.session() as session, session.begin():
        fenced_update(session, lease(7), sa.update(Row).values(n=7))  # which has begun one
        with session.begin_nested():
            fenced(session)


@pytest.mark.needs("mariadb")
@pytest.mark.parametrize("mode", ["conditional_savepoint", "create_savepoint"])
def test_a_session_in_a_fenced_connection_has_a_fence_of_its_own(opened: Any, mode: Any) -> None:
    side = opened("mariadb", "sync")
    side.empty()
    with side.engine.connect() as connection, fenced_transaction(connection, lease(7)):
        with Session(connection, join_transaction_mode=mode) as session:
            with fenced_transaction(session, lease(7)) as inner:
                inner.add(Note(text="ended"))
                session.commit()
            write(side, session, 7, "inner")
    assert side.notes() == ["ended", "inner"]


@pytest.mark.needs("postgres")
@pytest.mark.parametrize("end", ["SELECT 1/0", "ROLLBACK"])
def test_a_body_that_goes_on_where_postgresql_would_roll_back_is_told(
    opened: Any, end: str
) -> None:
    side = opened("postgresql", "sync")
    side.empty()
    with (
        pytest.raises(FenceRejected, match="What came after that is not committed"),
        side.engine.connect() as connection,
        fenced_transaction(connection, lease(7)),
    ):
        connection.execute(sa.insert(Note).values(text="lost"))
        with contextlib.suppress(sa.exc.DBAPIError):
            connection.exec_driver_sql(end)
    assert (side.notes(), token_of(side)) == ([], None)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("ends", ["with another write", "with a savepoint", "at once"])
@pytest.mark.parametrize("joined", [False, True], ids=["outermost", "inside another"])
def test_a_body_that_goes_on_where_sqlite_gave_up_writes_nothing(
    opened: Any, mode: str, ends: str, joined: bool
) -> None:
    """As after an interrupted statement or on a full disk."""
    side = opened("sqlite", mode)
    side.empty()
    side.put(Note(id=1, text="first"))
    with contextlib.ExitStack() as stack:
        error, words = (FenceRejected, "swallowed the error")
        if joined:  # then it is noticed, and rolling back to the savepoint tells so
            error, words = (OperationalError, "no such savepoint")
        stack.enter_context(pytest.raises(error, match=words))
        session = stack.enter_context(side.session())
        if joined:
            stack.enter_context(side.within(session.begin()))
        inner = stack.enter_context(side.within(fenced_transaction(session, lease(7))))
        side.run(inner.execute(sa.insert(Note).values(id=2, text="before")))
        with pytest.raises(IntegrityError):
            again = sa.insert(Note).prefix_with("OR ROLLBACK").values(id=1, text="again")
            side.run(inner.execute(again))
        if ends == "with a savepoint":
            stack.enter_context(side.within(inner.begin_nested()))
        if ends != "at once":
            side.run(inner.execute(sa.insert(Note).values(id=3, text="after")))
    assert (side.notes(), token_of(side)) == (["first"], None)


@pytest.mark.needs("mariadb")
def test_a_statement_that_commits_the_transaction_ends_its_fence(opened: Any) -> None:
    side = opened("mariadb", "sync")
    side.empty()
    with (
        pytest.raises(FenceRejected, match="a statement that commits, such as TRUNCATE"),
        side.session() as session,
        fenced_transaction(session, lease(7)),
    ):
        session.execute(sa.text("TRUNCATE TABLE core_row"))
        with Session(side.look) as other, fenced_transaction(other, lease(8)):
            other.add(Note(text="newer"))
        session.add(Note(text="stale"))
        session.flush()
    assert (side.notes(), token_of(side)) == (["newer"], 8)


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("read", [True, False], ids=["after a read", "fresh"])
def test_nothing_is_written_after_the_body_has_ended_the_transaction_itself(
    side: Side, end: str, read: bool
) -> None:
    with side.session() as session:
        if read:
            side.run(session.execute(sa.select(Note)))
        with (
            pytest.raises(InvalidRequestError, match="closed transaction"),
            side.within(fenced_transaction(session, lease(7))) as inner,
        ):
            inner.add(Note(text="own"))
            side.run(getattr(session, end)())
            with Session(side.look) as other, fenced_transaction(other, lease(8)) as newer:
                newer.add(Note(text="newer"))
            inner.add(Note(text="stale"))
            side.run(session.flush())
    assert side.notes() == (["own"] if end == "commit" else []) + ["newer"]


def test_inside_your_own_transaction_that_one_commits(side: Side) -> None:
    with side.session() as session, side.within(session.begin()):
        session.add(Note(text="yours"))
        write(side, session, 5)
        assert side.vendor == "sqlite" or side.notes() == []
    assert side.notes() == ["yours", "done"]


def test_inside_your_own_transaction_only_the_body_is_undone_and_the_lock_stays(side: Side) -> None:
    with side.session() as session, side.within(session.begin()):
        session.add(Note(text="yours"))
        with contextlib.suppress(ZeroDivisionError):
            with side.within(fenced_transaction(session, lease(5))) as inner:
                inner.add(Note(text="half"))
                side.run(inner.flush())
                raise ZeroDivisionError
    assert (side.notes(), token_of(side)) == (["yours"], 5)


def test_inside_your_own_transaction_a_stale_leader_flushes_nothing(side: Side) -> None:
    with side.session() as session:
        write(side, session, 6)
        side.statements.clear()
        with pytest.raises(StaleFence):
            with side.within(session.begin()):
                session.add(Note(text="pending"))
                write(side, session, 5)
        assert not [text for text in side.statements if "note" in text]
    assert side.notes() == ["done"]


def test_over_a_connection_with_and_without_a_transaction_of_its_own(side: Side) -> None:
    insert = sa.insert(Note)
    with side.connection() as connection:
        with side.within(fenced_transaction(connection, lease(5))):
            side.run(connection.execute(insert, {"text": "one"}))
        assert not connection.in_transaction()
        with side.within(connection.begin()):
            with side.within(fenced_transaction(connection, lease(5))):
                side.run(connection.execute(insert, {"text": "two"}))
            with contextlib.suppress(ZeroDivisionError):
                with side.within(fenced_transaction(connection, lease(5))):
                    side.run(connection.execute(insert, {"text": "half"}))
                    raise ZeroDivisionError
    assert side.notes() == ["one", "two"]


def test_row_fences_work_inside(side: Side) -> None:
    side.put(Row(id=1))
    with side.session() as session, side.within(fenced_transaction(session, lease(5))):
        side.run(fenced_update(session, lease(5), sa.update(Row).values(n=1)))
    assert side.stored() == [(1, 1, 5, "rollup")]


def test_f7_the_lease_must_last_until_the_commit(side: Side) -> None:
    hold = Hold(5)
    with side.session() as session, pytest.raises(LeaseLost, match="inside the hold"):
        with side.within(fenced_transaction(session, hold)) as inner:
            inner.add(Note(text="late"))
            hold.ended = True
    assert (side.notes(), token_of(side)) == ([], None)


def test_a_table_and_a_bind_of_your_own(sync_side: Side) -> None:
    table = fence_table(sa.MetaData(), "my_fence")
    table.create(sync_side.look, checkfirst=True)
    with Session() as session:
        with fenced_transaction(session, lease(5), table=table, bind=sync_side.engine):
            pass
    with sync_side.look.begin() as connection:
        assert connection.scalar(sa.select(table.c.fencing_token)) == BIG + 5
        table.drop(connection)


def test_which_of_several_databases_has_the_fence_must_be_said(sync_side: Side) -> None:
    with (
        Session(binds={Row: sync_side.engine}) as session,
        pytest.raises(CannotFence, match="bind=engine"),
        fenced_transaction(session, lease(5)),
    ):
        pass


def test_a_newer_leader_waits_for_the_commit_of_the_older_one(sync_side: Side) -> None:
    side, order = sync_side, []
    if side.vendor == "sqlite":
        wait = {"timeout": 60}
        side_engine = sa.create_engine(side.database.url(), connect_args=wait)
    else:
        side_engine = sa.create_engine(side.database.url())
    with Session(side_engine) as session:
        write(side, session, 1)
    entered, started = threading.Event(), threading.Event()

    def newer() -> None:
        assert entered.wait(60)
        started.set()
        with Session(side_engine) as session, fenced_transaction(session, lease(6)):
            order.append("newer")

    thread = threading.Thread(target=newer)
    thread.start()
    with Session(side_engine) as session, fenced_transaction(session, lease(5)):
        entered.set()
        assert started.wait(60)
        order.append("older")
    thread.join(60)
    side_engine.dispose()
    assert order == ["older", "newer"]
    assert token_of(side) == 6


@pytest.mark.needs("mariadb")
@pytest.mark.parametrize("way", ["session", "session that has read", "connection", "joined"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_body_that_swallows_a_deadlock_commits_nothing(opened: Any, mode: str, way: str) -> None:
    """The database ends the transaction there, and the driver begins another without a word."""
    side = opened("mariadb", mode)
    side.empty()
    side.put(Row(id=1), Row(id=2))
    has_one, has_two = threading.Event(), threading.Event()

    def bystander() -> None:
        with side.look.begin() as connection:
            # The database spares the one that has written more.
            connection.execute(sa.insert(Note), [{"text": ""}] * 9)
            connection.execute(sa.update(Row.__table__).where(Row.id == 1).values(n=1))
            has_one.set()
            assert has_two.wait(60)
            connection.execute(sa.update(Row.__table__).where(Row.id == 2).values(n=1))
            connection.rollback()

    def lock(target: Any, number: int) -> None:
        side.run(target.execute(sa.select(Row.n).where(Row.id == number).with_for_update()))

    def stale(target: Any) -> None:
        thread.start()
        assert has_one.wait(60)
        lock(target, 2)
        has_two.set()
        with pytest.raises(OperationalError, match="Deadlock"):
            lock(target, 1)
        thread.join(60)
        with Session(side.look) as other, fenced_transaction(other, lease(8)) as inner:
            inner.add(Note(text="newer"))
        side.run(target.execute(sa.insert(Note).values(text="stale")))

    thread = threading.Thread(target=bystander)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            pytest.raises(FenceRejected, match="lost its fence")
            if way != "joined"
            else pytest.raises(OperationalError, match="SAVEPOINT")
        )
        target = stack.enter_context(side.connection() if way == "connection" else side.session())
        if way == "session that has read":
            side.run(target.execute(sa.select(Note)))
        if way == "joined":
            stack.enter_context(side.within(target.begin()))
        stack.enter_context(side.within(fenced_transaction(target, lease(7))))
        stale(target)
    assert (side.notes(), token_of(side)) == (["newer"], 8)


@pytest.mark.parametrize("driver", ["pysqlite", "aiosqlite"])
def test_sqlite_in_its_drivers_own_autocommit_keeps_the_fence_to_the_end(
    driver: str, tmp_path: Path
) -> None:
    make: Any = create_async_engine if driver == "aiosqlite" else sa.create_engine
    url = f"sqlite+{driver}:///{tmp_path}/own.db"
    engine = make(url, connect_args={"isolation_level": None, "timeout": 0.1})
    looker = sa.create_engine(f"sqlite:///{tmp_path}/own.db", connect_args={"timeout": 0.1})
    Base.metadata.create_all(looker)
    with Session(looker) as session, fenced_transaction(session, lease(1)):
        pass  # the fence row of a new key is inserted in a savepoint, which opens a transaction

    def newer() -> None:
        with Session(looker) as session, fenced_transaction(session, lease(9)):
            session.add(Note(text="newer"))

    async def main() -> None:
        async with engine.connect() as connection, fenced_transaction(connection, lease(5)):
            with pytest.raises(sa.exc.OperationalError, match="locked"):
                newer()
            await connection.execute(sa.insert(Note), {"text": "older"})

    if driver == "aiosqlite":
        asyncio.run(main())
        asyncio.run(engine.dispose())
    else:
        with Session(engine) as session, fenced_transaction(session, lease(5)):
            with pytest.raises(sa.exc.OperationalError, match="locked"):
                newer()
            session.add(Note(text="older"))
        with pytest.raises(ZeroDivisionError):
            with Session(engine) as session, fenced_transaction(session, lease(5)):
                session.add(Note(text="half"))
                raise ZeroDivisionError
        engine.dispose()
    newer()
    with looker.connect() as connection:
        assert list(connection.scalars(sa.select(Note.text).order_by(Note.id))) == [
            "older",
            "newer",
        ]
    looker.dispose()


def test_a_sqlite_driver_that_commits_each_statement_whatever_is_asked_is_refused() -> None:
    options: dict[str, Any] = {"autocommit": True}
    if sys.version_info < (3, 12):  # where the driver knows no such setting yet

        class Commits(sqlite3.Connection):
            autocommit = True

        options = {"factory": Commits}
    engine = sa.create_engine("sqlite://", connect_args=options)
    with Session(engine) as session, pytest.raises(CannotFence, match="AUTOCOMMIT"):
        with fenced_transaction(session, lease(5)):
            pass
    engine.dispose()


def test_server_drivers_that_commit_each_statement_are_refused(sync_side: Side) -> None:
    if sync_side.vendor == "sqlite":
        return
    engine = sa.create_engine(sync_side.database.url(), connect_args={"autocommit": True})
    with Session(engine) as session, pytest.raises(CannotFence, match="AUTOCOMMIT"):
        with fenced_transaction(session, lease(5)):
            pass
    engine.dispose()


def test_the_replay_of_a_stale_writer_passes(sync_side: Side) -> None:
    def work(leader: Lease) -> None:
        with Session(sync_side.engine) as session, fenced_transaction(session, leader):
            session.add(Note(text=str(leader.fencing_token)))

    assert_fenced(work, read=sync_side.notes)
