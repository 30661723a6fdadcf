"""Each safety property of the kit, and mutants of the kit that it catches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from volcano_locks.errors import (
    CannotFence,
    FenceKeyMismatch,
    FenceRejected,
    OutcomeUnknown,
    StaleFence,
)
from volcano_locks.fence_testing import assert_fenced
from volcano_locks.models import Lease
from volcano_locks.sqlalchemy import (
    fenced_save,
    fenced_transaction,
    fenced_update,
    fenced_upsert,
    model,
    place,
    statement,
    transaction,
    write,
)

from .sides import BIG, Note, Row, Side, lease

change = sa.update(Row).where(Row.id == 1).values(n=Row.n + 1)


def a_stale_leader_is_refused(side: Side) -> None:
    side.put(Row(id=1))

    def work(leader: Lease) -> None:
        with Session(side.engine) as session:
            fenced_update(session, leader, change)
            session.commit()

    assert_fenced(work, read=side.stored, key="rollup")


def a_stale_transaction_is_refused(side: Side) -> None:
    def work(leader: Lease) -> None:
        with Session(side.engine) as session, fenced_transaction(session, leader):
            session.add(Note(text="done"))

    assert_fenced(work, read=side.notes)


def a_holder_may_write_twice(side: Side) -> None:
    side.put(Row(id=1))
    with Session(side.engine) as session:
        fenced_update(session, lease(5), change)
        fenced_update(session, lease(5), change)
        session.commit()
    assert side.stored() == [(1, 2, 5, "rollup")]


def locks_are_not_compared(side: Side) -> None:
    side.put(Row(id=1, fencing_token=BIG + 1, fencing_key="other"))
    with Session(side.engine) as session, pytest.raises(FenceKeyMismatch):
        fenced_update(session, lease(5), change)


def many_rows_are_all_or_none(side: Side) -> None:
    side.put(Row(id=1), Row(id=2, fencing_token=BIG + 6, fencing_key="rollup"))
    with Session(side.engine) as session:
        with contextlib.suppress(StaleFence):
            fenced_update(session, lease(5), sa.update(Row).values(n=7))
        session.commit()
    assert [row[1] for row in side.stored()] == [0, 0]


def the_look_sees_what_this_transaction_wrote(side: Side) -> None:
    with Session(side.engine) as session:
        fenced_upsert(session, lease(6), Row, {"id": 1, "n": 1})
        with pytest.raises(StaleFence):
            fenced_update(session, lease(5), change)


def a_flush_cannot_roll_the_token_back(side: Side) -> None:
    side.put(Row(id=1, fencing_token=BIG + 50, fencing_key="rollup"))
    with Session(side.engine) as session:
        session.merge(Row(id=1, n=3, fencing_token=BIG + 5, fencing_key="rollup"))
        with contextlib.suppress(CannotFence):
            session.commit()
    assert side.stored()[0][2] == 50


def what_was_refused_is_not_flushed(side: Side) -> None:
    side.put(Row(id=1, fencing_token=BIG + 6, fencing_key="rollup"))
    with Session(side.engine) as session:
        row = session.get_one(Row, 1)
        row.n = 100
        with pytest.raises(StaleFence):
            fenced_save(session, lease(5), row)
        session.commit()
    assert side.stored() == [(1, 0, 6, "rollup")]


def what_is_pending_is_not_flushed(side: Side) -> None:
    side.put(Row(id=1, fencing_token=BIG + 6, fencing_key="rollup"))
    with Session(side.engine) as session:
        row = session.get_one(Row, 1)
        row.n = 100
        with contextlib.suppress(CannotFence, StaleFence):
            fenced_update(session, lease(5), change)
            raise AssertionError("a stale write was not refused")
        if session.is_modified(row):  # refused before it was sent: the caller knows of his change
            session.expire(row)
        session.commit()
    assert side.stored() == [(1, 0, 6, "rollup")]


def instances_show_the_new_values(side: Side) -> None:
    side.put(Row(id=1))
    with Session(side.engine) as session:
        row = session.get_one(Row, 1)
        fenced_update(session, lease(5), change)
        assert (row.n, row.fencing_token) == (1, BIG + 5)


LAWS: list[Callable[[Side], None]] = [
    a_stale_leader_is_refused,
    a_stale_transaction_is_refused,
    a_holder_may_write_twice,
    locks_are_not_compared,
    many_rows_are_all_or_none,
    the_look_sees_what_this_transaction_wrote,
    a_flush_cannot_roll_the_token_back,
    what_was_refused_is_not_flushed,
    what_is_pending_is_not_flushed,
    instances_show_the_new_values,
]


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    def forget() -> None:
        statement._shapes.clear()
        statement._sketched.clear()
        transaction._shapes.clear()

    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def fence_with(patch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Build the fence by another function, in both places that build it."""
    patch.setattr(statement, "with_fence", change)
    patch.setattr(transaction, "with_fence", change)


def strictly_lower(patch: pytest.MonkeyPatch) -> None:
    def mutant(taken: Any, target: Any) -> Any:
        token = sa.bindparam(statement.OFFERED, type_=sa.BigInteger)
        return taken.where(target.token < token).values({target.token: token})

    fence_with(patch, mutant)


def no_predicate(patch: pytest.MonkeyPatch) -> None:
    fence_with(
        patch,
        lambda taken, target: taken.values(
            {target.token: sa.bindparam(statement.OFFERED, type_=sa.BigInteger)}
        ),
    )


def token_not_written(patch: pytest.MonkeyPatch) -> None:
    fence_with(
        patch,
        lambda taken, target: taken.where(
            target.token <= sa.bindparam(statement.OFFERED, type_=sa.BigInteger)
        ),
    )


def key_not_compared(patch: pytest.MonkeyPatch) -> None:
    def mutant(taken: Any, target: Any) -> Any:
        token = sa.bindparam(statement.OFFERED, type_=sa.BigInteger)
        return taken.where(target.token <= token).values({target.token: token})

    fence_with(patch, mutant)


def look_over_another_connection(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: place.Place, query: Any, parameters: Any) -> Any:
        with self.connection.engine.connect() as other:
            return other.execute(query, parameters).first()

    patch.setattr(place.Place, "first", mutant)


def no_look_after_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        write, "perform", lambda where, what: where.send(what) or write._second_look(where, what)
    )


def no_guard_at_the_flush(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model._keep_token, "__code__", (lambda mapper, connection, state: None).__code__)


def instances_left_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(write, "_renew", lambda where, what, **_more: None)


def pending_changes_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """As a plain session.execute() would do it: flush first, then ask."""

    def mutant(session: Session, what: Any) -> None:
        session.flush()

    patch.setattr(write, "_refuse_pending", mutant)


MUTANTS = {
    strictly_lower: {a_holder_may_write_twice},
    no_predicate: {a_stale_leader_is_refused, a_stale_transaction_is_refused},
    token_not_written: {a_stale_leader_is_refused, a_stale_transaction_is_refused},
    key_not_compared: {locks_are_not_compared},
    look_over_another_connection: {the_look_sees_what_this_transaction_wrote},
    no_look_after_many: {many_rows_are_all_or_none},
    no_guard_at_the_flush: {a_flush_cannot_roll_the_token_back},
    instances_left_alone: {what_was_refused_is_not_flushed, instances_show_the_new_values},
    pending_changes_not_looked_at: {what_is_pending_is_not_flushed},
}


@pytest.mark.needs("postgres")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_kit_keeps(law: Callable[[Side], None], opened: Any) -> None:
    side = opened("postgresql", "sync")
    side.empty()
    law(side)


@pytest.mark.needs("postgres")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], patched: pytest.MonkeyPatch, opened: Any
) -> None:
    side = opened("postgresql", "sync")
    mutant(patched)
    for law in MUTANTS[mutant]:
        side.empty()
        with pytest.raises((AssertionError, pytest.fail.Exception, FenceRejected, OutcomeUnknown)):
            law(side)
