"""What cannot carry the fence for certain is refused before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from volcano_locks.errors import CannotFence, StaleFence
from volcano_locks.sqlalchemy import (
    FencedMixin,
    fenced_delete,
    fenced_save,
    fenced_update,
    fenced_upsert,
    fencing_columns,
)

from .sides import Note, Row, Side, lease


class Base(DeclarativeBase):
    pass


class Parent(FencedMixin, Base):
    __tablename__ = "parent"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(sa.String(10))
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "parent"}


class Child(Parent):
    __tablename__ = "child"
    id: Mapped[int] = mapped_column(sa.ForeignKey("parent.id"), primary_key=True)
    n: Mapped[int]
    __mapper_args__ = {"polymorphic_identity": "child"}


class Single(Parent):
    """Single-table inheritance: one table, so one statement."""

    __mapper_args__ = {"polymorphic_identity": "single"}


class Textual(Base):
    __tablename__ = "textual"
    fence_key = "rollup"
    id: Mapped[int] = mapped_column(primary_key=True)
    fencing_token: Mapped[str] = mapped_column(sa.String(20))


class Narrow(Base):
    __tablename__ = "narrow"
    fence_key = "rollup"
    id: Mapped[int] = mapped_column(primary_key=True)
    fencing_token: Mapped[int] = mapped_column(sa.Integer)


class Nullable(Base):
    __tablename__ = "nullable"
    fence_key = "rollup"
    id: Mapped[int] = mapped_column(primary_key=True)
    fencing_token: Mapped[int | None] = mapped_column(sa.BigInteger)


class Keyless(FencedMixin, Base):
    __tablename__ = "keyless"
    fencing_key = None  # type: ignore[assignment]
    id: Mapped[int] = mapped_column(primary_key=True)


class Bare(Base):
    __tablename__ = "bare"
    id: Mapped[int] = mapped_column(primary_key=True)


class Owner(FencedMixin, Base):
    __tablename__ = "owner"
    id: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"version_id_col": version}


class Item(FencedMixin, Base):
    __tablename__ = "item"
    id: Mapped[int] = mapped_column(primary_key=True)
    row_id: Mapped[int | None] = mapped_column(sa.ForeignKey("item.id"))
    parent: Mapped[Item | None] = relationship(remote_side=[id])


class Family(Base):
    __tablename__ = "family"
    id: Mapped[int] = mapped_column(primary_key=True)
    kids: Mapped[list[Kid]] = relationship(cascade="all, delete-orphan")


class Kid(FencedMixin, Base):
    __tablename__ = "kid"
    id: Mapped[int] = mapped_column(primary_key=True)
    family_id: Mapped[int | None] = mapped_column(sa.ForeignKey("family.id"))
    n: Mapped[int] = mapped_column(default=0)


class Watched(FencedMixin, Base):
    __tablename__ = "watched"
    id: Mapped[int] = mapped_column(primary_key=True)
    n: Mapped[int] = mapped_column(default=0)


@sa.event.listens_for(Watched, "before_update")
def _listener(*_args: Any) -> None: ...


one = sa.update(Row).where(Row.id == 1)
STATEMENTS = {
    "a select": (sa.select(Row), "update.* or delete"),
    "raw SQL": (sa.text("UPDATE fenced_row SET n = 1"), "update.* or delete"),
    "a string": ("UPDATE fenced_row SET n = 1", "update.* or delete"),
    "a list of rows": ([{"id": 1, "n": 2}], "update.* or delete"),
    "an insert": (sa.insert(Row).values(id=1), "fenced_upsert"),
    "text in the condition": (one.where(sa.text("n = 1 OR 1 = 1")), "text"),
    "text as a value": (one.values(n=sa.text("1")), "text"),
    "a literal column": (one.where(sa.literal_column("1 = 1 OR 1") == 1), "literal_column"),
    "a literal column as a value": (one.values(n=sa.literal_column("n + 1")), "literal_column"),
    "an operator that closes a parenthesis": (
        one.where(Row.n.op("= 1) OR (1 =", is_comparison=True)(1)),
        "parenthesis",
    ),
    "an operator that begins a comment": (one.values(n=Row.n.op("+ 1 /*")(1)), "comment"),
    "a subquery that is left too early": (
        one.where(Row.id.in_(sa.select(Row.id).where(sa.text("1 = 1)) OR ((1 = 1")))),
        "parenthesis",
    ),
    "another table": (one.where(Note.id == Row.n), "columns of note"),
    "a value from another table": (one.values(n=Note.id), "columns of note"),
    "an alias": (sa.update(orm.aliased(Row)).values(n=1), "alias"),
    "returning": (one.values(n=1).returning(Row.n), "RETURNING"),
    "ordered values": (one.ordered_values((Row.n, 1)), "ordered_values"),
    "a prefix": (one.values(n=1).prefix_with("IGNORE"), "prefix"),
    "a hint": (one.values(n=1).with_hint("x"), "hint"),
    "a limit": (one.values(n=1).with_dialect_options(mysql_limit=1), "LIMIT"),
    "options": (one.options(orm.with_loader_criteria(Row, Row.n == 1)), "options"),
    "a CTE": (one.add_cte(sa.select(Row.id).cte("x")), "CTE"),
    "a CTE that deletes": (
        one.where(Row.n.in_(sa.select(sa.delete(Note).returning(Note.id).cte("x").c.id))),
        "another INSERT, UPDATE or DELETE",
    ),
    "the token as a value": (one.values(fencing_token=1), "value for fencing_token"),
    "the key as a value": (one.values({Row.fencing_key: "x"}), "value for fencing_token"),
    "the token in an expression": (one.values(n=Row.fencing_token + 1), "computed from"),
    "the primary key as a value": (one.values(id=2), "primary key"),
    "using": (sa.delete(Row).where(Row.n == Note.id), "columns of note"),
    "a joined child": (sa.update(Child).values(n=1), "not one table"),
    "a text token": (sa.update(Textual).where(Textual.id == 1), "text compares"),
    "a 32-bit token": (sa.update(Narrow).where(Narrow.id == 1), "32 bits"),
    "a nullable token": (sa.update(Nullable).where(Nullable.id == 1), "NULL"),
    "no lock": (sa.update(Keyless).where(Keyless.id == 1), "which lock"),
    "no fence": (sa.update(Bare).where(Bare.id == 1), "no fencing_token"),
    "a table without a fence": (sa.update(sa.table("x", sa.column("n"))), "as its target"),
}
if hasattr(mysql, "limit"):  # SQLAlchemy 2.1
    STATEMENTS["a limit extension"] = (one.values(n=1).ext(mysql.limit(1)), "LIMIT")


@pytest.mark.needs("postgres")
@pytest.mark.parametrize("what", STATEMENTS)
def test_a_statement_that_cannot_carry_the_fence_is_refused(what: str, opened: Any) -> None:
    statement, said = STATEMENTS[what]
    side = opened("postgresql", "sync")
    write: Any = fenced_delete if isinstance(statement, sa.Delete) else fenced_update
    with side.session() as session, side.connection() as connection:
        for place in (session, connection):
            with pytest.raises(CannotFence, match=said) as refusal:
                write(place, lease(5), statement)
            advice = str(refusal.value)
            assert (
                "nstead" in advice or "use" in advice or "belongs" in advice or "neither" in advice
            )
    assert side.statements == []


@pytest.mark.parametrize(
    "what", ["a joined child", "a text token", "another table", "a value from another table"]
)
def test_f1_f8_a_fence_in_another_table_or_as_text_is_refused_on_every_database(
    what: str, side: Side
) -> None:
    statement, said = STATEMENTS[what]
    with side.session() as session, side.connection() as connection:
        for place in (session, connection):
            with pytest.raises(CannotFence, match=said):
                side.run(fenced_update(place, lease(5), statement))
    assert side.statements == []


def test_a_subquery_may_name_the_rows(side: Side) -> None:
    side.put(Row(id=1), Row(id=2), Note(text="2"))
    named = sa.exists().where(
        Note.text == sa.cast(Row.id, sa.String(10)),
        sa.text("note.text <> ':)'"),
        Note.id.op(">")(0),
    )
    with side.session() as session:
        assert (
            side.run(fenced_update(session, lease(5), sa.update(Row).where(named).values(n=1))) == 1
        )
        side.run(session.commit())
    assert [row[1] for row in side.stored()] == [0, 1]


def test_an_operator_of_your_own_cannot_step_around_the_fence(sync_side: Side) -> None:
    sync_side.put(Row(id=1, n=1, fencing_token=2**60, fencing_key="rollup"))
    with sync_side.session() as session:
        for precedence in (0, 15):
            sly = Row.n.op("= 1 OR 1 =", precedence=precedence, is_comparison=True)(1)
            with pytest.raises(StaleFence):
                fenced_update(session, lease(5), sa.update(Row).where(sly).values(n=7))


def test_single_table_inheritance_touches_its_own_kind_only() -> None:
    engine = sa.create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Parent(id=1), Single(id=2)])
        session.commit()
        assert fenced_update(session, lease(5), sa.update(Single)) == 1
        session.commit()
        found = session.execute(sa.select(Parent.id, Parent.fencing_key).order_by(Parent.id)).all()
        assert [tuple(row) for row in found] == [(1, ""), (2, "rollup")]
    engine.dispose()


def test_a_narrow_column_is_wide_enough_on_sqlite_only() -> None:
    engine = sa.create_engine("sqlite://")
    Narrow.__table__.create(engine)
    with Session(engine) as session:
        session.add(Narrow(id=1, fencing_token=0))
        session.commit()
        assert fenced_update(session, lease(5), sa.update(Narrow).where(Narrow.id == 1)) == 1
    engine.dispose()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Owner(id=1), "counts versions"),
        (lambda: Watched(id=1), "before_update"),
        (lambda: Item(id=1, parent=Item(id=2)), "relationship"),
        (lambda: Item(), "database chooses"),
        (lambda: Child(id=1, n=1), "not one table"),
        (lambda: object(), "not an instance"),
    ],
)
def test_an_instance_that_only_a_flush_can_save_is_refused(make: Any, said: str) -> None:
    engine = sa.create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        with pytest.raises(CannotFence, match=said):
            fenced_save(session, lease(5), make())
        with engine.connect() as connection, pytest.raises(CannotFence, match="session"):
            fenced_save(connection, lease(5), make())  # type: ignore[call-overload]
    engine.dispose()


def test_an_orphan_that_the_next_flush_deletes_is_refused() -> None:
    engine = sa.create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Family(id=1, kids=[Kid(id=1)]), Kid(id=2, family_id=1)])
        session.commit()
        kid = session.get_one(Kid, 2)
        fenced_save(session, lease(5), kid)  # its parent is not loaded, and it is no orphan
        family = session.get_one(Family, 1)
        family.kids.remove(kid)
        with pytest.raises(CannotFence, match="orphan"):
            fenced_save(session, lease(5), kid)
        with pytest.raises(CannotFence, match="deletion"):
            fenced_update(session, lease(5), sa.update(Kid).where(Kid.id == 2).values(n=1))
        family.kids.append(kid)
        fenced_save(session, lease(5), kid)
    engine.dispose()


def test_a_detached_instance_is_refused(sync_side: Side) -> None:
    sync_side.put(Row(id=1))
    with sync_side.session() as session:
        row = session.get(Row, 1)
        session.expunge(row)
        with pytest.raises(CannotFence, match="detached"):
            fenced_save(session, lease(5), row)


def test_what_is_neither_a_session_nor_a_connection_is_refused() -> None:
    engine = sa.create_engine("sqlite://")
    for target in (engine, None, "session"):
        with pytest.raises(CannotFence, match="takes a Session"):
            fenced_update(target, lease(5), one.values(n=1))  # type: ignore[call-overload]


def test_a_sharded_session_is_refused() -> None:
    engine = sa.create_engine("sqlite://")
    session = ShardedSession(
        shards={"a": engine},
        shard_chooser=lambda *_a, **_k: "a",
        identity_chooser=lambda *_a, **_k: ["a"],
        execute_chooser=lambda *_a, **_k: ["a"],
    )
    with session, pytest.raises(CannotFence, match="shard"):
        fenced_update(session, lease(5), one.values(n=1))
    engine.dispose()


def test_a_core_table_must_say_which_lock_it_is() -> None:
    metadata = sa.MetaData()
    token, _key = fencing_columns()
    unbound = sa.Table("t", metadata, sa.Column("id", sa.Integer, primary_key=True), token)
    token, _key = fencing_columns()
    bound = sa.Table(
        "b",
        metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        token,
        info={"fence_key": "rollup"},
    )
    engine = sa.create_engine("sqlite://")
    metadata.create_all(engine)
    with engine.begin() as connection:
        with pytest.raises(CannotFence, match="which lock"):
            fenced_update(connection, lease(5), sa.update(unbound))
        assert fenced_upsert(connection, lease(5), bound, {"id": 1}) is True
    engine.dispose()
