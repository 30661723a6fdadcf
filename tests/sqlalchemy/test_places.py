"""Where a fenced write and the look after it go: replicas, listeners, drivers that do not count."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, with_loader_criteria
from sqlalchemy.sql.dml import UpdateBase

from volcano_locks.errors import CannotFence, FenceTargetMissing, OutcomeUnknown, StaleFence
from volcano_locks.sqlalchemy import fenced_transaction, fenced_update

from .sides import BIG, Base, Note, Row, Side, lease

change = sa.update(Row).where(Row.id == 1).values(n=7)


@pytest.fixture
def replica() -> Iterator[sa.Engine]:
    """Another database, in which the row has no fence yet: a replica that lags behind."""
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(Row(id=1, n=1))
        session.commit()
    yield engine
    engine.dispose()


def routed(primary: sa.Engine, replica: sa.Engine) -> Session:
    """The routing session of SQLAlchemy's documentation: what is no write goes to a replica."""

    class Routed(Session):
        def get_bind(self, mapper: Any = None, clause: Any = None, **_more: Any) -> Any:
            writes = self._flushing or isinstance(clause, UpdateBase)
            return primary if writes else replica

    return Routed()


def test_f10_the_look_after_a_refusal_is_at_the_primary(
    sync_side: Side, replica: sa.Engine
) -> None:
    sync_side.put(Row(id=1, n=1, fencing_token=BIG + 6, fencing_key="rollup"))
    with routed(sync_side.engine, replica) as session:
        with pytest.raises(StaleFence) as refusal:
            fenced_update(session, lease(5), change)
        assert refusal.value.stored == BIG + 6
        with pytest.raises(FenceTargetMissing):
            fenced_update(session, lease(5), change.where(Row.n == 99))
        assert fenced_update(session, lease(6), sa.update(Row).values(n=7)) == 1
        session.commit()
        with fenced_transaction(session, lease(6)):
            session.add(Note(text="primary"))
    assert sync_side.stored() == [(1, 7, 6, "rollup")]
    assert sync_side.notes() == ["primary"]
    with replica.connect() as connection:
        assert connection.scalar(sa.select(Row.fencing_token)) == 0


def test_f10_under_asyncio(opened: Any, replica: sa.Engine) -> None:
    side = opened("sqlite", "async")
    side.empty()
    side.put(Row(id=1, n=1, fencing_token=BIG + 6, fencing_key="rollup"))
    made = type(routed(side.core, replica))
    with side.session(sync_session_class=made, expire_on_commit=False) as session:
        with pytest.raises(StaleFence):
            side.run(fenced_update(session, lease(5), change))
        assert side.run(fenced_update(session, lease(6), change)) == 1
        side.run(session.commit())
    assert side.stored() == [(1, 7, 6, "rollup")]


def test_a_session_on_one_connection_with_savepoints_of_its_own(sync_side: Side) -> None:
    sync_side.put(Row(id=1))
    with sync_side.begins(), sync_side.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            with fenced_transaction(session, lease(5)):
                fenced_update(session, lease(5), change)
            assert session.get_one(Row, 1).n == 7
        outer.rollback()
    assert sync_side.stored() == [(1, 0, 0, "")]


def rewritten(statement: Any, condition: Any) -> Any:
    """The update with another condition, and the same values."""
    made = sa.update(Row).where(condition).values(statement._values)
    return made.execution_options(**statement.get_execution_options())


class TestListeners:
    def test_criteria_added_to_all_statements_hold_for_the_look_as_well(self, side: Side) -> None:
        side.put(Row(id=1, n=1, fencing_token=BIG + 6, fencing_key="rollup"), Row(id=2, n=2))
        with side.session() as session:
            below = getattr(session, "sync_session", session)

            @sa.event.listens_for(below, "do_orm_execute")
            def only_twos(state: Any) -> None:
                state.statement = state.statement.options(with_loader_criteria(Row, Row.n == 2))

            with pytest.raises(FenceTargetMissing):
                side.run(fenced_update(session, lease(5), change))
            assert side.run(fenced_update(session, lease(5), sa.update(Row).values(n=3))) == 1
            side.run(session.commit())
        assert [row[1] for row in side.stored()] == [1, 3]

    def test_a_statement_that_lost_its_fence_is_not_sent(self, side: Side) -> None:
        side.put(Row(id=1, fencing_token=BIG + 6, fencing_key="rollup"))
        with side.session() as session:
            below = getattr(session, "sync_session", session)

            @sa.event.listens_for(below, "do_orm_execute")
            def replace(state: Any) -> Any:
                return state.invoke_statement(sa.update(Row).values(n=9))

            with pytest.raises(CannotFence, match="without the fence"):
                side.run(fenced_update(session, lease(5), change))
            assert side.statements == []

    @pytest.mark.parametrize(
        "loosen",
        [
            lambda kept: sa.update(Row).where(sa.or_(kept.whereclause, Row.id > 0)).values(n=9),
            lambda kept: rewritten(kept, sa.or_(kept.whereclause, Row.id > 0)),
            lambda kept: rewritten(kept, sa.not_(kept.whereclause)),
            lambda kept: sa.update(Row).where(kept.whereclause).values(n=9),
            lambda kept: kept.values(fencing_token=1),
            lambda kept: kept.values({Row.fencing_token: 1}),
            lambda kept: kept.values(fencing_key="other"),
            lambda kept: rewritten(kept, Row.fencing_token <= sa.bindparam("volcano_offered")),
            lambda kept: sa.delete(Row).where(kept.whereclause),
        ],
    )
    def test_a_fence_that_a_listener_loosened_is_not_sent(self, loosen: Any, side: Side) -> None:
        side.put(Row(id=1, fencing_token=BIG + 6, fencing_key="rollup"))
        with side.session() as session:
            below = getattr(session, "sync_session", session)

            @sa.event.listens_for(below, "do_orm_execute")
            def replace(state: Any) -> None:
                if state.is_update:
                    state.statement = loosen(state.statement)

            with pytest.raises(CannotFence, match="without the fence"):
                side.run(fenced_update(session, lease(5), change))
            assert not [text for text in side.statements if not text.startswith("SELECT")]

    def test_a_listener_may_narrow_the_statement_and_write_more(self, side: Side) -> None:
        side.put(Row(id=1), Row(id=2))
        with side.session() as session:
            below = getattr(session, "sync_session", session)

            @sa.event.listens_for(below, "do_orm_execute")
            def narrow(state: Any) -> None:
                if state.is_update:
                    state.statement = state.statement.where(Row.n == 0).values(name="seen")

            assert side.run(fenced_update(session, lease(5), change)) == 1
            side.run(session.commit())
        assert [row[1:3] for row in side.stored()] == [(7, 5), (0, 0)]

    def test_an_answer_that_was_not_sent_is_no_success(self, sync_side: Side) -> None:
        sync_side.put(Row(id=1))
        with sync_side.session() as session:

            @sa.event.listens_for(session, "do_orm_execute")
            def answer(_state: Any) -> Any:
                return session.connection().execute(sa.select(1))

            with pytest.raises(OutcomeUnknown, match="answered it"):
                fenced_update(session, lease(5), change)

    def test_criteria_and_a_routing_that_ignores_bind_do_not_go_together(
        self, sync_side: Side, replica: sa.Engine
    ) -> None:
        sync_side.put(Row(id=1, fencing_token=BIG + 6, fencing_key="rollup"))
        with routed(sync_side.engine, replica) as session:
            sa.event.listen(session, "do_orm_execute", lambda _state: None)
            with pytest.raises(CannotFence, match="replica"):
                fenced_update(session, lease(5), change)


class TestCounting:
    def test_f3_a_driver_that_does_not_count_is_no_success(self) -> None:
        class Blind(sqlite3.Cursor):
            rowcount = -1  # type: ignore[assignment]

        class Connection(sqlite3.Connection):
            def cursor(self, *_args: Any) -> Any:  # type: ignore[override]
                return super().cursor(Blind)

        engine = sa.create_engine("sqlite://", connect_args={"factory": Connection})
        Base.metadata.create_all(engine)
        with engine.begin() as connection:
            connection.execute(sa.insert(Row).values(id=1))
            with pytest.raises(OutcomeUnknown, match="did not count"):
                fenced_update(connection, lease(5), change)
        engine.dispose()

    def test_f3_where_rowcount_is_not_to_be_trusted_returned_rows_are_counted(
        self, sync_side: Side, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sync_side.put(Row(id=1), Row(id=2))
        monkeypatch.setattr(sync_side.core.dialect, "supports_sane_rowcount", False)
        with sync_side.session() as session:
            if sync_side.vendor == "mariadb":  # no UPDATE ... RETURNING
                with pytest.raises(CannotFence, match="does not count"):
                    fenced_update(session, lease(5), change)
                assert sync_side.statements == []
                return
            assert fenced_update(session, lease(5), change) == 1
            assert fenced_update(session, lease(5), sa.update(Row).values(n=7)) == 2
            assert "RETURNING" in sync_side.statements[0]
            with pytest.raises(StaleFence):
                fenced_update(session, lease(4), change)

    @pytest.mark.needs("postgres")
    def test_f3_a_trigger_that_swallows_the_write_is_no_success(self, opened: Any) -> None:
        side = opened("postgresql", "sync")
        side.empty()
        side.put(Row(id=1))
        with side.session() as session:
            wire = session.connection()
            wire.exec_driver_sql(
                "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql "
                "AS 'BEGIN RETURN NULL; END'"
            )
            wire.exec_driver_sql(
                "CREATE TRIGGER swallow BEFORE UPDATE ON fenced_row "
                "FOR EACH ROW EXECUTE FUNCTION swallow()"
            )
            with pytest.raises(OutcomeUnknown, match="trigger"):
                fenced_update(session, lease(5), change)

    @pytest.mark.needs("mariadb")
    def test_f6_where_rows_changed_are_counted_the_same_write_again_is_no_refusal(
        self, opened: Any
    ) -> None:
        side = opened("mariadb", "sync")
        side.empty()
        side.put(Row(id=1), Row(id=2))
        engine = sa.create_engine(side.database.url())

        @sa.event.listens_for(engine, "do_connect")
        def count_changes(_dialect: Any, _record: Any, _args: Any, parameters: Any) -> None:
            parameters["client_flag"] = 0  # without CLIENT.FOUND_ROWS

        with Session(engine) as session:
            for _ in range(2):
                assert fenced_update(session, lease(5), change) == 1
            for _ in range(2):
                assert fenced_update(session, lease(5), sa.update(Row).values(n=8)) == 2
            with pytest.raises(StaleFence):
                fenced_update(session, lease(4), change)
            with pytest.raises(FenceTargetMissing):
                fenced_update(session, lease(5), change.where(Row.n == 99))
        engine.dispose()

    @pytest.mark.needs("mariadb")
    def test_an_old_snapshot_does_not_hide_a_newer_leader(self, opened: Any) -> None:
        side = opened("mariadb", "sync")
        side.empty()
        side.put(Row(id=1), Row(id=2))
        with Session(side.engine) as old, Session(side.engine) as new:
            if old.scalar(sa.text("SELECT @@innodb_snapshot_isolation")) == 1:
                old.connection().exec_driver_sql("SET SESSION innodb_snapshot_isolation = 0")
            old.rollback()
            assert old.scalar(sa.select(Row.fencing_token).where(Row.id == 1)) == 0
            fenced_update(new, lease(6), change)
            new.commit()
            with pytest.raises(StaleFence):
                fenced_update(old, lease(5), sa.update(Row).values(n=8))
            with pytest.raises(StaleFence) as refusal:
                fenced_update(old, lease(5), change)
            assert refusal.value.stored == BIG + 6
            old.commit()
        assert [row[1] for row in side.stored()] == [7, 0]
