"""Which instances a write may have touched is not judged by equality in Python where that differs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from volcano_locks.errors import CannotFence, FenceTargetMissing, StaleFence
from volcano_locks.sqlalchemy import (
    FencedMixin,
    fenced_delete,
    fenced_save,
    fenced_update,
    fenced_upsert,
)

from .sides import BIG, Row, Side, lease

UUIDS = ["0b5a2c1e-9d9f-4d8e-8a57-2f6a3e0c7b11", "0b5a2c1e-9d9f-4d8e-8a57-2f6a3e0c7b12"]


class Modulo(sa.types.TypeDecorator[int]):
    """A type that sends several values as one."""

    impl = sa.Integer
    cache_ok = True

    def process_bind_param(self, value: Any, _dialect: Any) -> Any:
        return value % 10


class Base(DeclarativeBase):
    pass


class Word(FencedMixin, Base):
    """Named without regard to case and trailing spaces: MariaDB does so unless it is told otherwise."""

    __tablename__ = "word"
    id: Mapped[str] = mapped_column(
        sa.String(40)
        .with_variant(sa.String(40, "NOCASE"), "sqlite")
        .with_variant(sa.String(40, "utf8mb4_general_ci"), "mysql"),
        primary_key=True,
    )
    n: Mapped[int] = mapped_column(default=0)


class Trimmed(FencedMixin, Base):
    __tablename__ = "trimmed"
    id: Mapped[str] = mapped_column(sa.String(40, "RTRIM"), primary_key=True)
    n: Mapped[int] = mapped_column(default=0)


class Padded(FencedMixin, Base):
    __tablename__ = "padded"
    id: Mapped[str] = mapped_column(sa.CHAR(5), primary_key=True)
    n: Mapped[int] = mapped_column(default=0)


class Hex(FencedMixin, Base):
    """A UUID that Python knows as text."""

    __tablename__ = "hex"
    id: Mapped[str] = mapped_column(sa.Uuid(as_uuid=False), primary_key=True)
    n: Mapped[int] = mapped_column(default=0)


class Unique(FencedMixin, Base):
    __tablename__ = "unique_uuid"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    n: Mapped[int] = mapped_column(default=0)


class Digit(FencedMixin, Base):
    __tablename__ = "digit"
    id: Mapped[int] = mapped_column(Modulo, primary_key=True, autoincrement=False)
    n: Mapped[int] = mapped_column(default=0)


VENDORS = {
    "sqlite": (),
    "postgresql": pytest.mark.needs("postgres"),
    "mariadb": pytest.mark.needs("mariadb"),
}
SAME = {
    "case on SQLite": ("sqlite", Word, "abc", "ABC"),
    "trailing space on SQLite": ("sqlite", Trimmed, "abc", "abc "),
    "a type of one's own": ("sqlite", Digit, 3, 13),
    "case on MariaDB": ("mariadb", Word, "abc", "ABC"),
    "accent on MariaDB": ("mariadb", Word, "cafe", "café"),
    "trailing space on MariaDB": ("mariadb", Word, "abc", "abc "),
    "number and text on MariaDB": ("mariadb", Word, "1", 1),
    "case of a UUID on PostgreSQL": ("postgresql", Hex, UUIDS[0], UUIDS[0].upper()),
    "padding on PostgreSQL": ("postgresql", Padded, "abc  ", "abc"),
}


@pytest.fixture(
    params=[
        pytest.param((what, mode), id=f"{what}-{mode}", marks=VENDORS[SAME[what][0]])
        for what in SAME
        for mode in ("sync", "async")
    ]
)
def same(request: pytest.FixtureRequest, opened: Callable[[str, str], Side]) -> Iterator[Any]:
    """A side, a class, and two keys that the database says are one."""
    what, mode = request.param
    vendor, entity, stored, named = SAME[what]
    side = opened(vendor, mode)
    entity.__table__.drop(side.look, checkfirst=True)
    entity.__table__.create(side.look)
    yield side, entity, stored, named
    entity.__table__.drop(side.look)


def test_f2_a_pending_change_is_found_under_each_name_of_the_row(same: Any) -> None:
    side, entity, stored, named = same
    side.put(entity(id=stored, n=1))
    change = sa.update(entity).where(entity.id == named).values(n=7)
    with side.session() as session:
        row = side.run(session.get(entity, stored))
        row.n = 100
        side.statements.clear()
        for write in (
            lambda: fenced_update(session, lease(5), change),
            lambda: fenced_delete(session, lease(5), sa.delete(entity).where(entity.id == named)),
            lambda: fenced_upsert(session, lease(5), entity, {"id": named, "n": 7}),
            lambda: fenced_save(session, lease(5), entity(id=named, n=7)),
        ):
            with pytest.raises(CannotFence, match="unflushed changes"):
                side.run(write())
        assert side.statements == []


def test_f9_a_loaded_instance_shows_what_was_written_under_another_name(same: Any) -> None:
    side, entity, stored, named = same
    side.put(entity(id=stored, n=1))
    with side.session(expire_on_commit=False) as session:
        row = side.run(session.get(entity, stored))
        change = sa.update(entity).where(entity.id == named).values(n=7)
        side.run(fenced_update(session, lease(5), change))
        assert (row.n, row.fencing_token) == (7, BIG + 5)
        side.run(fenced_delete(session, lease(5), sa.delete(entity).where(entity.id == named)))
        assert row not in session


def test_f2_where_no_key_is_certain_a_pending_change_of_any_row_is_refused(same: Any) -> None:
    side, entity, stored, named = same
    other = UUIDS[1] if entity is Hex else type(stored)(4)
    side.put(entity(id=stored, n=1), entity(id=other, n=1))
    change = sa.update(entity).where(entity.id == named).values(n=7)
    with side.session(expire_on_commit=False) as session:
        row, bystander = (side.run(session.get(entity, key)) for key in (stored, other))
        bystander.n = 2
        with pytest.raises(CannotFence, match="unflushed changes"):
            side.run(fenced_update(session, lease(5), change))
        side.run(fenced_save(session, lease(5), bystander))
        side.statements.clear()
        side.run(fenced_update(session, lease(5), change))
        assert (row.n, bystander.n) == (7, 2)
        assert len(side.statements) == (5 if type(named) is not type(stored) else 3)


def test_a_new_instance_takes_the_name_that_its_row_has(same: Any) -> None:
    side, entity, stored, named = same
    side.put(entity(id=stored, n=1))
    with side.session(expire_on_commit=False) as session:
        row = entity(id=named, n=7)
        if type(named) is not type(stored):
            with pytest.raises(CannotFence, match="several rows"):
                side.run(fenced_save(session, lease(5), row))
            return
        side.run(fenced_save(session, lease(5), row))
        assert (row.id, row.n, row.fencing_token) == (stored, 7, BIG + 5)
        with pytest.raises(CannotFence, match="has loaded the row"):
            side.run(fenced_save(session, lease(5), entity(id=named, n=8)))
        side.run(session.commit())
    assert side.stored(entity) == [(stored, 7, 5, "rollup")]


def test_a_new_instance_of_a_row_that_was_loaded_is_refused(side: Side) -> None:
    side.put(Row(id=1))
    with side.session() as session:
        row = side.run(session.get(Row, 1))
        side.statements.clear()
        with pytest.raises(CannotFence, match="has loaded the row"):
            side.run(fenced_save(session, lease(5), Row(id=1, n=3)))
        assert side.statements == []
        assert row in session


def test_an_integer_or_a_uuid_is_the_one_row_and_no_other(side: Side) -> None:
    Unique.__table__.create(side.look, checkfirst=True)
    for entity, keys in ((Row, (1, 2)), (Unique, tuple(map(uuid.UUID, UUIDS)))):
        with side.look.begin() as connection:
            connection.execute(sa.delete(entity))
        side.put(*(entity(id=key) for key in keys))
        with side.session(expire_on_commit=False) as session:
            row, bystander = (side.run(session.get(entity, key)) for key in keys)
            bystander.n = 2
            side.statements.clear()
            change = sa.update(entity).where(entity.id == keys[0]).values(n=7)
            side.run(fenced_update(session, lease(5), change))
            assert (row.n, bystander.n, len(side.statements)) == (7, 2, 2)
            row.n = 100
            with pytest.raises(CannotFence, match="unflushed changes"):
                side.run(fenced_update(session, lease(5), change))
            side.run(session.rollback())


@pytest.mark.needs("mariadb")
def test_f11_a_number_equals_several_texts_on_mariadb_and_all_are_written_or_none(
    opened: Any,
) -> None:
    side = opened("mariadb", "sync")
    Word.__table__.drop(side.look, checkfirst=True)
    Word.__table__.create(side.look)
    side.put(Word(id="1"), Word(id="01", fencing_token=BIG + 6, fencing_key="rollup"))
    change: Any = sa.update(Word).where(Word.id == 1).values(n=7)
    with side.session() as session:
        with pytest.raises(StaleFence):
            fenced_update(session, lease(5), change)
        assert fenced_update(session, lease(6), change) == 2


@pytest.mark.parametrize("value", [9007199254740992.0, sa.literal(13, Modulo)])
def test_f11_a_value_of_another_type_may_equal_several_integers(side: Side, value: Any) -> None:
    side.put(Row(id=1))
    with side.session() as session:
        change = sa.update(Row).where(Row.id == value, Row.n == 0)
        with pytest.raises(FenceTargetMissing):
            side.run(fenced_update(session, lease(5), change.values(n=7)))
    assert side.statements[0] == "SAVEPOINT" or "savepoint" in side.statements
