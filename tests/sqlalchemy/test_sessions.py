"""Less usual mappings, savepoints and schemas: what a session shows and refuses around a fenced write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, undefer
from sqlalchemy.orm.exc import ObjectDeletedError

from volcano_locks.errors import CannotFence
from volcano_locks.sqlalchemy import FencedMixin, fenced_delete, fenced_save, fenced_update

from .sides import BIG, Pair, Row, Side, lease


class Base(DeclarativeBase):
    pass


class Kind(FencedMixin, Base):
    __tablename__ = "kind"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(sa.String(10))
    n: Mapped[int] = mapped_column(default=0)
    late: Mapped[str] = mapped_column(sa.String(10), default="late", deferred=True)
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "kind"}


class Single(Kind):
    extra: Mapped[str | None] = mapped_column(sa.String(10))
    __mapper_args__ = {"polymorphic_identity": "single"}


class Joined(Kind):
    __tablename__ = "joined"
    id: Mapped[int] = mapped_column(sa.ForeignKey("kind.id"), primary_key=True)
    more: Mapped[str | None] = mapped_column(sa.String(10))
    __mapper_args__ = {"polymorphic_identity": "joined"}


class Twin(Base):
    """Another class of Kind's table."""

    __table__ = Kind.__table__
    __mapper_args__ = {"include_properties": ["id", "n"]}


class ByName(FencedMixin, Base):
    """Known to sessions by another column than the table's primary key."""

    __tablename__ = "by_name"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[int] = mapped_column(unique=True)
    n: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"primary_key": [name]}


@pytest.fixture(params=["sync", "async"])
def small(request: pytest.FixtureRequest, opened: Callable[[str, str], Side]) -> Iterator[Side]:
    side = opened("sqlite", request.param)
    side.empty()
    Base.metadata.create_all(side.look)
    yield side
    Base.metadata.drop_all(side.look)


def the(entity: Any, id_: int = 1) -> sa.Update:
    return sa.update(entity).where(entity.id == id_)


@pytest.mark.parametrize(("entity", "own"), [(Single, "extra"), (Joined, "more")])
def test_f9_columns_of_a_subclass_and_deferred_ones_that_were_loaded_are_read_again(
    small: Side, entity: Any, own: str
) -> None:
    small.put(entity(id=1, **{own: "x"}))
    with small.session(expire_on_commit=False) as session:
        query = sa.select(entity).options(undefer(entity.late))
        row = small.run(session.scalars(query)).one()
        small.run(fenced_update(session, lease(5), the(Kind).values(n=4, late="later")))
        assert (row.n, getattr(row, own), row.late, row.fencing_token) == (4, "x", "later", BIG + 5)


def test_f9_more_instances_than_one_query_can_name(small: Side) -> None:
    small.put(*(Pair(one=one, two=1) for one in range(1100)))
    with small.session(expire_on_commit=False) as session:
        rows = small.run(session.scalars(sa.select(Pair))).all()
        assert small.run(fenced_update(session, lease(5), sa.update(Pair).values(n=4))) == 1100
        assert {row.n for row in rows} == {4}
        most = sa.delete(Pair).where(Pair.one > 0)
        assert small.run(fenced_delete(session, lease(5), most)) == 1099
        assert [row in session for row in rows] == [True] + 1099 * [False]


def test_f9_what_a_savepoint_took_back_is_not_shown_any_more(sync_side: Side) -> None:
    sync_side.put(Row(id=1, n=1), Row(id=2))
    with sync_side.begins(), sync_side.session() as session:
        row, deleted = (session.get(Row, id_) for id_ in (1, 2))
        new = Row(id=3, n=3)
        savepoint = session.begin_nested()
        fenced_update(session, lease(5), the(Row).values(n=3))
        fenced_delete(session, lease(5), sa.delete(Row).where(Row.id == 2))
        fenced_save(session, lease(5), new)
        assert (row.n, deleted in session, new.n) == (3, False, 3)
        savepoint.rollback()
        assert (row.n, row.fencing_token) == (1, 0)
        assert deleted in session
        assert deleted.n == 0
        with pytest.raises((ObjectDeletedError, InvalidRequestError)):
            assert new.n


def test_f9_the_rows_of_another_schema_are_looked_at_there() -> None:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    Kind.__table__.create(engine)
    there: Any = {"schema_translate_map": {None: "tenant"}}
    with Session(engine, expire_on_commit=False) as session:
        session.execute(sa.text("ATTACH ':memory:' AS tenant"))
        session.execute(sa.text("CREATE TABLE tenant.kind AS SELECT * FROM kind"))
        session.execute(
            sa.insert(Kind), [{"id": 1, "n": 1}, {"id": 2, "n": 2}], execution_options=there
        )
        session.commit()
        query = sa.select(Kind).order_by(Kind.id)
        first, second = session.scalars(query, execution_options=there).all()
        change = sa.update(Kind).values(n=Kind.n + 3).execution_options(**there)
        fenced_update(session, lease(5), change)
        assert (first.n, second.n, second.fencing_token) == (4, 5, BIG + 5)
        gone = sa.delete(Kind).where(Kind.n < 5).execution_options(**there)
        fenced_delete(session, lease(5), gone)
        assert (first in session, second in session) == (False, True)
    engine.dispose()


def test_f2_pending_changes_are_found_by_whatever_the_session_knows_the_row(small: Side) -> None:
    small.put(Kind(id=1), ByName(id=1, name=7))
    for entity, key, options, written in (
        (Twin, 1, {}, Kind),
        (Kind, 1, {"identity_token": "shard"}, Kind),
        (ByName, 7, {}, ByName),
    ):
        with small.session() as session:
            row = small.run(session.get(entity, key, **options))
            row.n = 100
            with pytest.raises(CannotFence, match="unflushed changes"):
                small.run(fenced_update(session, lease(5), the(written).values(n=7)))
            small.run(session.rollback())


def test_f9_instances_are_renewed_and_leave_by_whatever_the_session_knows_the_row(
    small: Side,
) -> None:
    small.put(Kind(id=1), Kind(id=2), ByName(id=1, name=7), ByName(id=2, name=8))
    for entity, keys, written in ((Twin, (1, 2), Kind), (ByName, (7, 8), ByName)):
        with small.session(expire_on_commit=False) as session:
            row, other = (small.run(session.get(entity, key)) for key in keys)
            small.run(fenced_update(session, lease(5), the(written).values(n=7)))
            assert (row.n, other.n) == (7, 0)
            gone = sa.delete(written).where(written.id == 1)
            small.run(fenced_delete(session, lease(5), gone))
            assert (row in session, other in session) == (False, True)


def test_a_new_value_for_the_column_that_sessions_know_the_row_by_is_refused(small: Side) -> None:
    with small.session() as session, pytest.raises(CannotFence, match="primary key"):
        small.run(fenced_update(session, lease(5), the(ByName).values(name=3)))
