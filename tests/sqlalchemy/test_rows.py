"""Rows that carry their own fence: F1 to F11 on three databases, sync and async."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from volcano_locks.errors import (
    CannotFence,
    FenceKeyMismatch,
    FenceRejected,
    FenceTargetMissing,
    InvalidRequest,
    LeaseLost,
    StaleFence,
)
from volcano_locks.sqlalchemy import (
    fenced_delete,
    fenced_save,
    fenced_transaction,
    fenced_update,
    fenced_upsert,
)

from .sides import BIG, Bound, Note, Pair, Row, Side, core, lease


def set_n(n: Any, id_: int = 1) -> sa.Update:
    return sa.update(Row).where(Row.id == id_).values(n=n)


class TestOneRow:
    def test_an_update_writes_values_token_and_key_in_one_statement(self, side: Side) -> None:
        side.put(Row(id=1))
        with side.session() as session:
            assert side.run(fenced_update(session, lease(5), set_n(7))) == 1
            side.run(session.commit())
        assert len(side.statements) == 1
        assert side.stored() == [(1, 7, 5, "rollup")]

    def test_a_stale_leader_is_refused_and_told_both_tokens(self, side: Side) -> None:
        side.put(Row(id=1, n=1, fencing_token=BIG + 6, fencing_key="rollup"))
        with side.session() as session:
            with pytest.raises(StaleFence) as refusal:
                side.run(fenced_update(session, lease(5), set_n(7)))
            side.run(session.commit())
        assert (refusal.value.key, refusal.value.offered, refusal.value.stored) == (
            "rollup",
            BIG + 5,
            BIG + 6,
        )
        assert len(side.statements) == 2
        assert side.stored() == [(1, 1, 6, "rollup")]

    def test_f6_a_holder_may_write_the_very_same_twice(self, side: Side) -> None:
        side.put(Row(id=1))
        with side.session() as session:
            for _ in range(3):
                assert side.run(fenced_update(session, lease(5), set_n(7))) == 1
            side.run(session.commit())
        assert side.stored() == [(1, 7, 5, "rollup")]

    def test_f6_a_missing_row_is_told_apart_from_a_stale_token(self, side: Side) -> None:
        with side.session() as session, pytest.raises(FenceTargetMissing):
            side.run(fenced_update(session, lease(5), set_n(7)))

    def test_a_row_of_another_lock_is_not_compared(self, side: Side) -> None:
        side.put(Row(id=1, n=1, fencing_token=BIG + 1, fencing_key="other"))
        with side.session() as session:
            with pytest.raises(FenceKeyMismatch, match="other"):
                side.run(fenced_update(session, lease(5), set_n(7)))
            side.run(session.commit())
        assert side.stored() == [(1, 1, 1, "other")]

    def test_lock_keys_that_differ_in_case_are_two_locks(self, side: Side) -> None:
        side.put(Row(id=1, n=1, fencing_token=BIG + 1, fencing_key="ROLLUP"))
        with side.session() as session, pytest.raises(FenceKeyMismatch):
            side.run(fenced_update(session, lease(5), set_n(7)))

    def test_a_bound_class_takes_its_own_lock_only(self, side: Side) -> None:
        side.put(Bound(id=1))
        change = sa.update(Bound).where(Bound.id == 1).values(n=7)
        with side.session() as session:
            with pytest.raises(FenceKeyMismatch):
                side.run(fenced_update(session, lease(5, "other"), change))
            assert side.statements == []
            assert side.run(fenced_update(session, lease(5), change)) == 1
            side.run(session.commit())
        assert side.stored(Bound) == [(1, 7, 5, "rollup")]

    def test_a_unique_column_names_one_row_as_well(self, side: Side) -> None:
        side.put(Row(id=1, name="a"))
        with side.session() as session:
            change = sa.update(Row).where(Row.name == "a").values(n=Row.n + 1)
            assert side.run(fenced_update(session, lease(5), change)) == 1
        assert len(side.statements) == 1

    def test_a_composite_key_names_one_row_if_it_is_whole(self, side: Side) -> None:
        side.put(Pair(one=1, two=1), Pair(one=1, two=2))
        both = sa.update(Pair).where(Pair.one == 1)
        with side.session() as session:
            assert side.run(fenced_update(session, lease(5), both.where(Pair.two == 2))) == 1
            assert len(side.statements) == 1
            assert side.run(fenced_update(session, lease(5), both)) == 2
            assert "savepoint" in side.statements

    def test_tokens_at_the_end_of_the_range_stay_exact(self, side: Side) -> None:
        side.put(Row(id=1, fencing_token=2**63 - 2, fencing_key="rollup"))
        with side.session() as session:
            side.run(fenced_update(session, lease(2**63 - 1 - BIG), set_n(7)))
            side.run(session.commit())
            with pytest.raises(StaleFence):
                side.run(fenced_update(session, lease(2**63 - 2 - BIG), set_n(8)))
        assert side.stored() == [(1, 7, 2**63 - 1 - BIG, "rollup")]

    @pytest.mark.parametrize("token", [0, -1, 2**63, True, "7", None])
    def test_what_is_no_fencing_token_is_not_offered(self, sync_side: Side, token: Any) -> None:
        class Odd:
            key = "rollup"
            fencing_token = token

        with sync_side.session() as session, pytest.raises(InvalidRequest):
            fenced_update(session, Odd(), set_n(7))
        assert sync_side.statements == []

    def test_a_delete_is_fenced_too(self, side: Side) -> None:
        side.put(Row(id=1, fencing_token=BIG + 6, fencing_key="rollup"))
        gone = sa.delete(Row).where(Row.id == 1)
        with side.session() as session:
            with pytest.raises(StaleFence):
                side.run(fenced_delete(session, lease(5), gone))
            side.statements.clear()
            assert side.run(fenced_delete(session, lease(6), gone)) == 1
            assert len(side.statements) == 1
            side.run(session.commit())
        assert side.stored() == []

    def test_a_core_table_over_a_connection(self, side: Side) -> None:
        with side.connection() as connection:
            new = {"id": 1, "n": 1}
            assert side.run(fenced_upsert(connection, lease(5), core, new)) is True
            change = sa.update(core).where(core.c.id == 1).values(n=core.c.n + 1)
            assert side.run(fenced_update(connection, lease(6), change)) == 1
            with pytest.raises(StaleFence):
                side.run(fenced_update(connection, lease(5), change))
            side.run(connection.commit())
            assert side.stored(core) == [(1, 2, 6, "rollup")]
            assert side.run(fenced_delete(connection, lease(6), sa.delete(core))) == 1


class TestManyRows:
    def test_f11_one_stale_row_keeps_all_from_being_written(self, side: Side) -> None:
        side.put(Row(id=1), Row(id=2, fencing_token=BIG + 6, fencing_key="rollup"), Row(id=3))
        before = side.stored()
        with side.session() as session:
            with pytest.raises(StaleFence):
                side.run(fenced_update(session, lease(5), sa.update(Row).values(n=7)))
            with pytest.raises(StaleFence):
                side.run(fenced_delete(session, lease(5), sa.delete(Row)))
            side.run(session.commit())
        assert side.stored() == before

    def test_all_are_written_if_none_is_stale(self, side: Side) -> None:
        side.put(Row(id=1), Row(id=2, fencing_token=BIG + 5, fencing_key="rollup"))
        with side.session() as session:
            assert side.run(fenced_update(session, lease(5), sa.update(Row).values(n=7))) == 2
            side.run(session.commit())
        words = [text.split()[0] for text in side.statements if text != "BEGIN IMMEDIATE"]
        assert words == ["savepoint", "UPDATE", "SELECT", "release"]
        assert side.stored() == [(1, 7, 5, "rollup"), (2, 7, 5, "rollup")]

    def test_a_rollback_undoes_them_although_a_savepoint_was_released(self, side: Side) -> None:
        side.put(Row(id=1))
        with side.session() as session:
            side.run(fenced_update(session, lease(5), sa.update(Row).values(n=7)))
            side.run(session.rollback())
        assert side.stored() == [(1, 0, 0, "")]

    def test_none_at_all_is_a_missing_target(self, side: Side) -> None:
        with side.session() as session, pytest.raises(FenceTargetMissing):
            side.run(fenced_update(session, lease(5), sa.update(Row).values(n=7)))

    def test_autocommit_takes_single_rows_but_not_many(self, side: Side) -> None:
        side.put(Row(id=1))
        with side.connection(isolation_level="AUTOCOMMIT") as connection:
            assert side.run(fenced_update(connection, lease(5), set_n(7))) == 1
            with pytest.raises(CannotFence, match="AUTOCOMMIT"):
                side.run(fenced_update(connection, lease(5), sa.update(Row).values(n=8)))
            with pytest.raises(CannotFence, match="AUTOCOMMIT"):
                with side.within(fenced_transaction(connection, lease(5))):
                    pass
        assert side.stored() == [(1, 7, 5, "rollup")]


class TestNulls:
    def test_f4_a_null_token_is_named(self, side: Side) -> None:
        with nullable_token(side):
            with side.session() as session:
                with pytest.raises(FenceRejected, match="fencing_token is NULL") as one:
                    side.run(fenced_update(session, lease(5), set_n(7)))
                with pytest.raises(FenceRejected, match="fencing_token is NULL"):
                    side.run(fenced_update(session, lease(5), sa.update(Row).values(n=7)))
            assert type(one.value) is FenceRejected


@contextlib.contextmanager
def nullable_token(side: Side) -> Any:
    """The table as a hasty migration leaves it: the mapping says NOT NULL, the database does not."""
    with side.look.begin() as connection:
        Row.__table__.drop(connection)
        ddl = str(sa.schema.CreateTable(Row.__table__).compile(side.look))
        ddl = re.sub(r"fencing_token BIGINT[^,]*", "fencing_token BIGINT NULL", ddl)
        connection.exec_driver_sql(ddl)
        connection.exec_driver_sql("INSERT INTO fenced_row (id, n) VALUES (1, 0)")
    try:
        yield
    finally:
        with side.look.begin() as connection:
            Row.__table__.drop(connection)
            Row.__table__.create(connection)


class TestUpsert:
    def test_it_inserts_then_updates_then_refuses(self, side: Side) -> None:
        with side.session() as session:
            assert side.run(fenced_upsert(session, lease(5), Row, {"id": 1, "n": 1})) is True
            side.statements.clear()
            assert side.run(fenced_upsert(session, lease(6), Row, {"id": 1, "n": 2})) is False
            assert len(side.statements) == 1
            with pytest.raises(StaleFence):
                side.run(fenced_upsert(session, lease(5), Row, {"id": 1, "n": 3}))
            side.run(session.commit())
        assert side.stored() == [(1, 2, 6, "rollup")]

    def test_its_key_must_be_unique_and_whole(self, sync_side: Side) -> None:
        with sync_side.session() as session:
            for key, values in (
                (["n"], {"id": 1, "n": 1}),
                (None, {"n": 1}),
                (["name"], {"id": 1, "name": None}),
                (["nom"], {"nom": 1}),
            ):
                with pytest.raises(CannotFence):
                    fenced_upsert(session, lease(5), Row, values, key=key)
            with pytest.raises(CannotFence, match="one row"):
                fenced_upsert(session, lease(5), Row, [{"id": 1}])  # type: ignore[call-overload]
        assert sync_side.statements == []

    def test_another_unique_key_may_name_the_row(self, side: Side) -> None:
        side.put(Row(id=1, name="a"))
        with side.session() as session:
            values = {"name": "a", "n": 4}
            assert side.run(fenced_upsert(session, lease(5), Row, values, key=["name"])) is False
            side.run(session.commit())
        assert side.stored() == [(1, 4, 5, "rollup")]

    def test_a_violation_of_another_constraint_comes_out_as_it_is(self, side: Side) -> None:
        side.put(Row(id=1, name="a"))
        with side.session() as session, pytest.raises(sa.exc.IntegrityError):
            side.run(fenced_upsert(session, lease(5), Row, {"id": 2, "name": "a"}))


class TestSave:
    def test_a_loaded_instance_is_saved_in_one_statement(self, side: Side) -> None:
        side.put(Row(id=1))
        with side.session(expire_on_commit=False) as session:
            row = side.run(session.get(Row, 1))
            row.n = 7
            side.statements.clear()
            side.run(fenced_save(session, lease(5), row))
            assert [text.split()[0] for text in side.statements] == ["UPDATE", "SELECT"]
            assert (row.n, row.fencing_token, row.fencing_key) == (7, BIG + 5, "rollup")
            side.run(session.commit())
        assert side.stored() == [(1, 7, 5, "rollup")]

    def test_what_was_refused_is_not_flushed_later(self, side: Side) -> None:
        side.put(Row(id=1, fencing_token=BIG + 6, fencing_key="rollup"))
        with side.session() as session:
            row = side.run(session.get(Row, 1))
            row.n = 100
            with pytest.raises(StaleFence):
                side.run(fenced_save(session, lease(5), row))
            side.run(session.commit())
        assert side.stored() == [(1, 0, 6, "rollup")]

    def test_an_error_of_the_database_comes_out_and_the_change_is_dropped(self, side: Side) -> None:
        side.put(Row(id=1, name="a"), Row(id=2, name="b"))
        with side.session(expire_on_commit=False) as session:
            row = side.run(session.get(Row, 1))
            row.name = "b"
            with pytest.raises(sa.exc.IntegrityError):
                side.run(fenced_save(session, lease(5), row))
            side.run(session.rollback())
            side.run(session.commit())
        assert [row[2] for row in side.stored()] == [0, 0]

    def test_a_new_instance_with_a_key_of_its_own_is_inserted(self, side: Side) -> None:
        with side.session() as session:
            row = Row(id=1, n=3)
            session.add(row)
            side.run(fenced_save(session, lease(5), row))
            assert (row.n, row.fencing_token) == (3, BIG + 5)
            assert row in session
            side.run(session.commit())
        assert side.stored() == [(1, 3, 5, "rollup")]

    def test_a_new_instance_of_an_existing_row_is_compared_with_it(self, side: Side) -> None:
        side.put(Row(id=1, fencing_token=BIG + 6, fencing_key="rollup"))
        with side.session() as session:
            with pytest.raises(StaleFence):
                side.run(fenced_save(session, lease(5), Row(id=1, n=3)))
            side.run(session.commit())
        assert side.stored() == [(1, 0, 6, "rollup")]


class TestSessions:
    def test_f2_a_pending_change_of_the_row_is_refused_and_not_flushed(self, side: Side) -> None:
        side.put(Row(id=1, n=1, fencing_token=BIG + 6, fencing_key="rollup"))
        with side.session() as session:
            row = side.run(session.get(Row, 1))
            row.n = 100
            side.statements.clear()
            with pytest.raises(CannotFence, match="unflushed changes of a Row"):
                side.run(fenced_update(session, lease(5), set_n(7)))
            assert side.statements == []
            side.run(session.rollback())
        assert side.stored() == [(1, 1, 6, "rollup")]

    def test_f2_a_refusal_says_that_a_query_before_it_has_flushed_the_row(self, side: Side) -> None:
        side.put(
            Row(id=1, n=1, fencing_token=BIG + 6, fencing_key="rollup"),
            Row(id=2, n=1, fencing_token=BIG + 6, fencing_key="rollup"),
        )
        with side.session() as session:
            row, other = (side.run(session.get(Row, number)) for number in (1, 2))
            row.n = 100
            side.run(session.execute(sa.select(Note.id)))  # an ordinary query flushes by itself
            for write in (
                lambda: fenced_save(session, lease(5), row),
                lambda: fenced_update(session, lease(5), set_n(7)),
            ):
                with pytest.raises(StaleFence, match="Roll back; next time") as refusal:
                    side.run(write())
                assert refusal.value.stored == BIG + 6
            other.n = 100
            with pytest.raises(StaleFence) as refusal:
                side.run(fenced_save(session, lease(5), other))
            assert "Roll back" not in str(refusal.value)
            side.run(session.rollback())
            with pytest.raises(StaleFence) as refusal:
                side.run(fenced_update(session, lease(5), set_n(7)))
            assert "Roll back" not in str(refusal.value)
            side.run(session.commit())
        assert [kept[1] for kept in side.stored()] == [1, 1]

    def test_f2_no_autoflush_keeps_a_pending_change_for_the_fenced_save(self, side: Side) -> None:
        side.put(Row(id=1, n=1, fencing_token=BIG + 6, fencing_key="rollup"))
        with side.session() as session:
            row = side.run(session.get(Row, 1))
            with session.no_autoflush:
                row.n = 100
                side.run(session.execute(sa.select(Note.id)))
                with pytest.raises(StaleFence):
                    side.run(fenced_save(session, lease(5), row))
            side.run(session.commit())
        assert side.stored() == [(1, 1, 6, "rollup")]

    def test_f2_an_instance_that_the_next_flush_deletes_is_refused(self, side: Side) -> None:
        side.put(Row(id=1, n=1, fencing_token=BIG + 6, fencing_key="rollup"))
        with side.session() as session:
            row = side.run(session.get(Row, 1))
            side.run(session.delete(row))
            side.statements.clear()
            for write in (
                lambda: fenced_save(session, lease(5), row),
                lambda: fenced_save(session, lease(7), row),
                lambda: fenced_update(session, lease(5), sa.update(Row).values(n=7)),
            ):
                with pytest.raises(CannotFence, match="deletion"):
                    side.run(write())
            assert side.statements == []
            session.add(row)
            with pytest.raises(StaleFence):
                side.run(fenced_save(session, lease(5), row))
            side.run(session.commit())
        assert side.stored() == [(1, 1, 6, "rollup")]

    def test_f2_what_else_is_pending_is_not_flushed_by_a_refused_write(self, side: Side) -> None:
        side.put(Row(id=1, n=1, fencing_token=BIG + 6, fencing_key="rollup"))
        with side.session() as session:
            session.add(Note(text="pending"))
            for statement in (set_n(7), sa.update(Row).values(n=7)):
                with pytest.raises(StaleFence):
                    side.run(fenced_update(session, lease(5), statement))
            assert not [text for text in side.statements if text.startswith("INSERT")]

    def test_f5_a_later_flush_of_an_old_instance_cannot_roll_the_token_back(
        self, side: Side
    ) -> None:
        side.put(Row(id=1, fencing_token=BIG + 5, fencing_key="rollup"))
        with side.session(expire_on_commit=False) as earlier, side.session() as session:
            old = side.run(earlier.get(Row, 1))
            side.run(earlier.commit())
            side.run(fenced_update(session, lease(50), set_n(1)))
            side.run(session.commit())
            assert old.fencing_token == BIG + 5
            old.n = 2
            side.run(earlier.commit())
        assert side.stored() == [(1, 2, 50, "rollup")]

    def test_f5_a_merge_of_an_old_copy_is_refused_at_the_flush(self, side: Side) -> None:
        side.put(Row(id=1, fencing_token=BIG + 5, fencing_key="rollup"))
        with side.session() as session:
            copy = Row(id=1, n=3, fencing_token=BIG + 5, fencing_key="rollup")
            side.run(fenced_update(session, lease(50), set_n(1)))
            side.run(session.commit())
            side.run(session.merge(copy))
            with pytest.raises(CannotFence, match="fencing_token"):
                side.run(session.commit())
            side.run(session.rollback())
        assert side.stored() == [(1, 1, 50, "rollup")]

    def test_f7_a_commit_after_the_lease_has_ended_is_refused(self, side: Side) -> None:
        side.put(Row(id=1))
        hold = Hold(5)
        with side.session() as session:
            side.run(fenced_update(session, hold, set_n(7)))
            hold.ended = True
            with pytest.raises(LeaseLost, match="belongs inside the hold"):
                side.run(session.commit())
            side.run(session.rollback())
            assert side.run(fenced_update(session, lease(6), set_n(8))) == 1
            side.run(session.commit())
        assert side.stored() == [(1, 8, 6, "rollup")]

    @pytest.mark.parametrize("kind", ["session", "connection"])
    def test_f7_what_was_refused_at_the_commit_is_not_left_to_the_next_user_of_the_pool(
        self, side: Side, kind: str
    ) -> None:
        side.put(Row(id=1))
        hold = Hold(5)
        with getattr(side, kind)() as place:
            side.run(fenced_update(place, hold, set_n(7)))
            hold.ended = True
            with pytest.raises(LeaseLost):
                side.run(place.commit())
        with side.connection() as next_one:
            side.run(next_one.execute(sa.select(Note)))
            side.run(next_one.commit())
        assert side.stored() == [(1, 0, 0, "")]

    def test_f7_over_a_connection_and_its_begin_block(self, side: Side) -> None:
        side.put(Row(id=1))
        hold = Hold(5)
        with pytest.raises(LeaseLost), side.within(side.engine.begin()) as connection:
            side.run(fenced_update(connection, hold, set_n(7)))
            hold.ended = True
        with side.within(side.engine.begin()) as connection:
            side.run(fenced_update(connection, Hold(5), set_n(8)))
        assert side.stored() == [(1, 8, 5, "rollup")]

    def test_f7_other_transactions_of_the_engine_are_not_held_to_it(self, sync_side: Side) -> None:
        sync_side.put(Row(id=1), Note(id=1, text="old"))
        engine = sa.create_engine(sync_side.database.url())
        earlier = engine.connect()  # before anything watches this engine
        hold, later = Hold(5), Hold(6)
        with Session(engine) as session:
            fenced_update(session, hold, set_n(7))
            hold.ended = True
            with pytest.raises(LeaseLost):
                session.commit()
        fenced_update(earlier, later, set_n(8))
        earlier.commit()
        with Session(engine) as session:
            session.execute(sa.update(Note).values(text="new"))
            session.commit()
        fenced_update(earlier, later, set_n(9))
        later.ended = True
        with pytest.raises(LeaseLost):
            earlier.commit()
        earlier.close()
        engine.dispose()
        assert sync_side.stored() == [(1, 8, 6, "rollup")]
        assert sync_side.notes() == ["new"]

    def test_a_hold_that_knows_it_is_lost_sends_nothing(self, side: Side) -> None:
        hold = Hold(5)
        hold.ended = True
        with side.session() as session, pytest.raises(LeaseLost):
            side.run(fenced_update(session, hold, set_n(7)))
        assert side.statements == []

    @pytest.mark.parametrize("value", [9, Row.n + 4], ids=["literal", "expression"])
    def test_f9_loaded_instances_show_the_new_values(self, side: Side, value: Any) -> None:
        side.put(Row(id=1, n=5), Row(id=2, n=5))
        with side.session(expire_on_commit=False) as session:
            first, second = side.run(session.get(Row, 1)), side.run(session.get(Row, 2))
            side.run(fenced_update(session, lease(5), set_n(value)))
            assert (first.n, first.fencing_token, second.n) == (9, BIG + 5, 5)
            side.run(fenced_update(session, lease(6), sa.update(Row).values(n=value)))
            assert (first.n, second.n, second.fencing_token) == (
                *((9, 9) if value == 9 else (13, 9)),
                BIG + 6,
            )
            side.run(session.commit())
            assert second.fencing_key == "rollup"

    def test_f9_instances_of_deleted_rows_leave_the_session(self, side: Side) -> None:
        side.put(Row(id=1), Row(id=2), Row(id=3, n=9))
        with side.session() as session:
            rows = [side.run(session.get(Row, id_)) for id_ in (1, 2, 3)]
            side.run(fenced_delete(session, lease(5), sa.delete(Row).where(Row.id == 1)))
            assert [row in session for row in rows] == [False, True, True]
            side.run(fenced_delete(session, lease(5), sa.delete(Row).where(Row.n < 9)))
            assert [row in session for row in rows] == [False, False, True]
            assert side.run(session.get(Row, 1)) is None

    def test_a_scoped_session_is_the_session_of_its_scope(self, sync_side: Side) -> None:
        sync_side.put(Row(id=1))
        scoped = scoped_session(sessionmaker(sync_side.engine))
        assert fenced_update(scoped, lease(5), set_n(7)) == 1
        with fenced_transaction(scoped, lease(5)) as session:
            assert session is scoped()
        scoped.remove()
        assert sync_side.stored() == [(1, 7, 5, "rollup")]

    def test_an_async_scoped_session_as_well(self, opened: Any) -> None:
        from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker

        side = opened("sqlite", "async")
        side.empty()
        side.put(Row(id=1))
        scoped = async_scoped_session(async_sessionmaker(side.engine), lambda: 1)
        assert side.run(fenced_update(scoped, lease(5), set_n(7))) == 1
        side.run(scoped.commit())
        side.run(scoped.remove())
        assert side.stored() == [(1, 7, 5, "rollup")]


class Hold:
    """What a hold is to the kit."""

    key = "rollup"

    def __init__(self, token: int) -> None:
        self.fencing_token = BIG + token
        self.ended = False

    def check(self) -> None:
        if self.ended:
            raise LeaseLost(self.key, "released", fencing_token=self.fencing_token)
