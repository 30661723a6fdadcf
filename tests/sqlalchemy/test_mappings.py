"""What a mapping may be like: relationships, one table for several classes, columns of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    aliased,
    mapped_column,
    registry,
    relationship,
)

from volcano_locks.errors import CannotFence, StaleFence
from volcano_locks.sqlalchemy import (
    FencedMixin,
    check_models,
    fenced_delete,
    fenced_save,
    fenced_update,
    fenced_upsert,
    fencing_columns,
)

from .sides import BIG, Row, Side, lease


class Base(DeclarativeBase):
    pass


class Shelf(Base):
    """Not fenced; its books do not know it."""

    __tablename__ = "shelf"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    books: Mapped[list[Book]] = relationship()


class Book(FencedMixin, Base):
    __tablename__ = "book"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    n: Mapped[int] = mapped_column(default=0)
    shelf_id: Mapped[int | None] = mapped_column(sa.ForeignKey("shelf.id"))
    pages: Mapped[list[Page]] = relationship(lazy="joined")


class Page(Base):
    __tablename__ = "page"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    book_id: Mapped[int] = mapped_column(sa.ForeignKey("book.id"))


class Vehicle(FencedMixin, Base):
    """One table for several classes."""

    __tablename__ = "vehicle"
    __mapper_args__: Any = {"polymorphic_on": "kind", "polymorphic_identity": "any"}
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str | None] = mapped_column(sa.String(20))
    n: Mapped[int] = mapped_column(default=0)


class Truck(Vehicle):
    __mapper_args__: Any = {"polymorphic_identity": "truck"}


class Counted(FencedMixin, Base):
    """With a version counter."""

    __tablename__ = "counted"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    n: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column("version_no")
    __mapper_args__: Any = {"version_id_col": version}


class Summed(FencedMixin, Base):
    """With a default that asks for the other values, as SQLAlchemy documents it."""

    __tablename__ = "summed"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    n: Mapped[int] = mapped_column(default=0)
    double: Mapped[int] = mapped_column(
        default=0, onupdate=lambda context: context.get_current_parameters()["n"] * 2
    )


by_hand = registry()


class Plain:
    """Mapped without FencedMixin."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)


by_hand.map_imperatively(
    Plain,
    sa.Table(
        "plain_class",
        Base.metadata,
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("n", sa.Integer, nullable=False, default=0),
        *fencing_columns(),
    ),
)


made: set[str] = set()


@pytest.fixture(autouse=True)
def tables(request: pytest.FixtureRequest) -> None:
    name = next((name for name in ("side", "sync_side") if name in request.fixturenames), None)
    if name is None:
        return
    side = request.getfixturevalue(name)
    if side.database.name not in made:
        Base.metadata.create_all(side.look)
        made.add(side.database.name)
    with side.look.begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(sa.delete(table))


def the(entity: Any) -> Any:
    return sa.update(entity).where(entity.id == 1)


def test_f9_an_instance_with_a_relationship_that_is_loaded_by_a_join_is_renewed(side: Side) -> None:
    side.put(Book(id=1, pages=[Page(id=1), Page(id=2)]))
    with side.session(expire_on_commit=False) as session:
        book = side.run(session.get(Book, 1))
        assert side.run(fenced_update(session, lease(5), the(Book).values(n=4))) == 1
        assert (book.n, book.fencing_token, len(book.pages)) == (4, BIG + 5, 2)
        book.n = 5
        side.run(fenced_save(session, lease(6), book))
        side.run(session.commit())
    assert side.stored(Book) == [(1, 5, 6, "rollup")]


def test_f9_no_lazy_load_is_left_by_what_runs_under_run_sync(opened: Any) -> None:
    side = opened("sqlite", "async")
    side.empty()
    side.put(Row(id=1))
    with side.session() as session:
        row = side.run(session.get(Row, 1))
        side.run(session.run_sync(fenced_update, lease(5), the(Row).values(n=4)))
        assert (row.n, row.fencing_token) == (4, BIG + 5)


def among(entity: Any) -> Any:
    """Every row, as long as there is one with n = 0."""
    other = aliased(entity)
    return sa.exists(sa.select(other.id).where(other.n == 0))


@pytest.mark.parametrize(
    "write",
    [
        lambda target: fenced_update(
            target, lease(5), sa.update(Row).where(among(Row)).values(n=1)
        ),
        lambda target: fenced_delete(target, lease(5), sa.delete(Row).where(among(Row))),
    ],
    ids=["update", "delete"],
)
@pytest.mark.parametrize("kind", ["session", "connection"])
def test_f11_a_write_that_changes_what_its_own_subquery_finds_is_all_or_none(
    side: Side, write: Callable[[Any], Any], kind: str
) -> None:
    side.put(Row(id=1), Row(id=2, n=7, fencing_token=BIG + 9, fencing_key="rollup"), Row(id=3, n=7))
    with getattr(side, kind)() as target:
        with pytest.raises(StaleFence) as refused:
            side.run(write(target))
        assert refused.value.stored == BIG + 9
        side.run(target.commit())
    assert [(id_, n) for id_, n, *_ in side.stored()] == [(1, 0), (2, 7), (3, 7)]


def test_f11_a_row_that_is_next_after_the_write_is_no_part_of_it(side: Side) -> None:
    side.put(Row(id=1), Row(id=2, fencing_token=BIG + 9, fencing_key="rollup"))
    other = aliased(Row)
    first = sa.select(other.id).where(other.n == 0).order_by(other.id).limit(1).scalar_subquery()
    change = sa.update(Row).where(Row.id == first).values(n=1)
    with side.session() as session:
        assert side.run(fenced_update(session, lease(5), change)) == 1
        with pytest.raises(StaleFence):
            side.run(fenced_update(session, lease(5), change))
        side.run(session.commit())
    assert [n for _id, n, *_ in side.stored()] == [1, 0]


def test_f11_criteria_that_a_listener_adds_may_ask_the_rows_that_are_written(
    sync_side: Side,
) -> None:
    sync_side.put(Row(id=1), Row(id=2, n=7, fencing_token=BIG + 9, fencing_key="rollup"))
    with sync_side.session() as session:

        def narrow(state: Any) -> None:
            state.statement = state.statement.where(among(Row))

        sa.event.listen(session, "do_orm_execute", narrow)
        with pytest.raises(StaleFence):
            fenced_update(session, lease(5), sa.update(Row).values(n=1))
        session.commit()
    assert [n for _id, n, *_ in sync_side.stored()] == [0, 7]


def test_rows_that_a_subquery_names_are_all_written_if_none_is_stale(side: Side) -> None:
    side.put(Row(id=1), Row(id=2, n=7))
    other = sa.select(Row.id, Row.n).subquery()
    named = sa.select(other.c.id).where(other.c.n < 9)
    with side.session() as session:
        change = sa.update(Row).where(Row.id.in_(named)).values(n=9)
        assert side.run(fenced_update(session, lease(5), change)) == 2
        side.run(session.commit())
    assert side.stored() == [(1, 9, 5, "rollup"), (2, 9, 5, "rollup")]


def test_an_upsert_of_a_kind_inserts_a_row_of_that_kind(side: Side) -> None:
    with side.session() as session:
        assert side.run(fenced_upsert(session, lease(5), Truck, {"id": 1, "n": 1}))
        assert not side.run(fenced_upsert(session, lease(5), Truck, {"id": 1, "n": 2}))
        assert type(side.run(session.get(Vehicle, 1))) is Truck
        assert side.run(fenced_upsert(session, lease(5), Vehicle, {"id": 2, "kind": "truck"}))
        assert type(side.run(session.get(Vehicle, 2))) is Truck
        side.run(session.rollback())


def test_an_upsert_gives_a_new_row_its_first_version(side: Side) -> None:
    with side.session() as session:
        assert side.run(fenced_upsert(session, lease(5), Counted, {"id": 1, "n": 1}))
        assert not side.run(fenced_upsert(session, lease(5), Counted, {"id": 1, "n": 2}))
        row = side.run(session.get(Counted, 1))
        assert (row.n, row.version) == (2, 1)
        row.n = 3
        side.run(session.commit())
    assert side.stored(Counted) == [(1, 3, 5, "rollup")]


def test_a_default_that_asks_for_the_other_values_gets_those_of_each_write(side: Side) -> None:
    side.put(Summed(id=1), Summed(id=2))
    with side.session() as session:
        for n in (3, 4):
            assert side.run(fenced_update(session, lease(n), the(Summed).values(n=n))) == 1
        row = side.run(session.get(Summed, 1))
        assert (row.n, row.double) == (4, 8)
        row.n = 5
        side.run(fenced_save(session, lease(5), row))
        side.run(session.refresh(row))
        assert (row.n, row.double) == (5, 10)
        with pytest.raises(StaleFence):
            side.run(fenced_update(session, lease(4), the(Summed).values(n=6)))
        assert side.run(fenced_update(session, lease(5), sa.update(Summed).values(n=7))) == 2
        side.run(session.rollback())


def test_classes_of_one_table_cannot_be_bound_to_several_locks() -> None:
    class Own(DeclarativeBase):
        pass

    class Parent(FencedMixin, Own):
        __tablename__ = "parent"
        __mapper_args__: Any = {"polymorphic_on": "kind", "polymorphic_identity": "any"}
        fence_key = "one"
        fencing_key = None  # type: ignore[assignment]
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str] = mapped_column(sa.String(20))
        n: Mapped[int] = mapped_column(default=0)

    class Same(Parent):
        __mapper_args__: Any = {"polymorphic_identity": "same"}

    assert check_models(Own) == []

    class Other(Parent):
        __mapper_args__: Any = {"polymorphic_identity": "other"}
        fence_key = "two"

    assert {finding.id for finding in check_models(Own)} == {"volcano_locks.E003"}
    with (
        Session(sa.create_engine("sqlite://")) as session,
        pytest.raises(CannotFence, match="several locks"),
    ):
        fenced_update(session, lease(5, "two"), the(Other).values(n=1))


def test_a_class_that_is_selected_from_several_tables_is_found() -> None:
    class Own(DeclarativeBase):
        pass

    class Parent(FencedMixin, Own):
        __tablename__ = "parent"
        __mapper_args__: Any = {
            "polymorphic_on": "kind",
            "polymorphic_identity": "any",
            "with_polymorphic": "*",
        }
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str] = mapped_column(sa.String(20))

    assert check_models(Own) == []

    class Child(Parent):
        __tablename__ = "child"
        __mapper_args__: Any = {"polymorphic_identity": "child"}
        id: Mapped[int] = mapped_column(sa.ForeignKey(Parent.id), primary_key=True)

    found = [finding for finding in check_models(Own) if "Parent" in finding.message]
    assert [finding.id for finding in found] == ["volcano_locks.E001"]


def hand_over(shelf: Shelf, book: Book, _session: Any) -> None:
    shelf.books.append(book)


def let_go(shelf: Shelf, book: Book, _session: Any) -> None:
    shelf.books.clear()


def delete_shelf(shelf: Shelf, _book: Book, session: Any) -> None:
    session.delete(shelf)


@pytest.mark.parametrize("change", [hand_over, let_go, delete_shelf])
def test_f2_a_book_whose_shelf_the_next_flush_sets_is_refused(
    sync_side: Side, change: Callable[[Shelf, Book, Any], None]
) -> None:
    sync_side.put(Shelf(id=1), Shelf(id=2), Book(id=1, shelf_id=2), Book(id=2))
    with sync_side.session() as session:
        shelf, book = session.get(Shelf, 1 if change is hand_over else 2), session.get(Book, 1)
        _loaded = shelf.books, book.n
        with session.no_autoflush:
            change(shelf, book, session)
            with pytest.raises(CannotFence, match="unflushed"):
                fenced_update(session, lease(5), the(Book).values(n=5))
            with pytest.raises(CannotFence, match="sets its foreign key"):
                fenced_save(session, lease(5), book)
            other = sa.update(Book).where(Book.id == 2).values(n=5)
            assert fenced_update(session, lease(5), other) == 1
        session.commit()
    assert sync_side.stored(Book) == [(1, 0, 0, ""), (2, 5, 5, "rollup")]


def test_f2_a_new_book_on_a_shelf_is_not_saved_without_the_flush_of_its_shelf(
    sync_side: Side,
) -> None:
    sync_side.put(Shelf(id=1))
    with sync_side.session() as session:
        shelf, book = session.get(Shelf, 1), Book(id=1, n=1)
        with session.no_autoflush:
            shelf.books.append(book)
            with pytest.raises(CannotFence, match="sets its foreign key"):
                fenced_save(session, lease(5), book)


def test_f5_a_class_that_is_mapped_without_the_mixin_keeps_its_token_too(side: Side) -> None:
    side.put(Plain(id=1))
    with side.session(expire_on_commit=False) as session:
        old = side.run(session.get(Plain, 1))
        session.expunge(old)
        side.run(fenced_update(session, lease(50), the(Plain).values(n=50)))
        side.run(session.commit())
        side.run(session.merge(old))
        with pytest.raises(CannotFence, match="fencing_token"):
            side.run(session.commit())
        side.run(session.rollback())
        row = side.run(session.get(Plain, 1))
        row.n = 51
        side.run(fenced_save(session, lease(51), row))
        side.run(session.commit())
    assert side.stored(Plain.__table__) == [(1, 51, 51, "rollup")]  # type: ignore[attr-defined]


def test_a_delete_that_the_database_passes_on_to_other_fenced_rows_is_refused() -> None:
    metadata = sa.MetaData()

    def table(name: str, *columns: Any) -> sa.Table:
        return sa.Table(name, metadata, sa.Column("id", sa.Integer, primary_key=True), *columns)

    def to(name: str, **options: Any) -> sa.Column[Any]:
        return sa.Column(f"{name}_id", sa.ForeignKey(f"{name}.id", **options))

    nobodys = table("nobodys", *fencing_columns())
    kept = table("kept", to("nobodys", ondelete="RESTRICT"), *fencing_columns())
    table("note", to("nobodys", ondelete="CASCADE"), to("elsewhere", ondelete="CASCADE"))
    top = table("top", *fencing_columns())
    table("middle", to("top", ondelete="CASCADE"))
    low = table("low", to("middle", ondelete="set null"), *fencing_columns())
    tree = table("tree", to("tree", ondelete="CASCADE"), *fencing_columns())
    with sa.create_engine("sqlite://").connect() as connection:
        for name in ("nobodys", "kept", "note", "top", "middle", "low", "tree"):
            columns = ", ".join(column.name for column in metadata.tables[name].c)
            connection.exec_driver_sql(f"CREATE TABLE {name} ({columns})")
        for found, other in ((top, "low"), (tree, "tree")):
            with pytest.raises(CannotFence, match=f"rows of {other} "):
                fenced_delete(connection, lease(5), sa.delete(found))
            connection.execute(sa.insert(found).values(id=1))
            assert fenced_update(connection, lease(5), sa.update(found)) == 1
        for found in (nobodys, kept, low):
            connection.execute(sa.insert(found).values(id=1))
            assert fenced_delete(connection, lease(5), sa.delete(found)) == 1
