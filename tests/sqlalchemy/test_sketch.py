"""A statement is taken for one that was checked before only if it differs in values alone."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from volcano_locks.errors import CannotFence
from volcano_locks.sqlalchemy import FencedMixin, fenced_update, statement
from volcano_locks.sqlalchemy.sketch import sketch

from .sides import Bound, Pair, Row, Side, core, lease

shared = sa.literal(1)


def of(model: Any) -> Any:
    return model.c if isinstance(model, sa.Table) else model


def simple() -> list[Any]:
    return [
        make(model)
        for model in (Row, Bound, core)
        for make in (
            lambda m: sa.update(m),
            lambda m: sa.delete(m),
            lambda m: sa.update(m).where(of(m).id == 1),
            lambda m: sa.delete(m).where(of(m).id == 1),
            lambda m: sa.update(m).where(of(m).id != 1),
            lambda m: sa.update(m).where(of(m).n == 1),
            lambda m: sa.update(m).where(of(m).n == "1"),
            lambda m: sa.update(m).where(of(m).id == of(m).n),
            lambda m: sa.update(m).where(of(m).id == 1, of(m).n == 2),
            lambda m: sa.update(m).where(of(m).n == 2, of(m).id == 1),
            lambda m: sa.update(m).where(of(m).id == 1).values(n=7),
            lambda m: sa.update(m).where(of(m).id == 1).values({of(m).n: 7}),
            lambda m: sa.update(m).where(of(m).id == 1).values(n=of(m).n + 7),
            lambda m: sa.update(m).where(of(m).id == 1).values(n=of(m).n - 7),
            lambda m: sa.update(m).where(of(m).id == 1).values(n=7 + of(m).n),
            lambda m: sa.update(m).where(of(m).id == 1).values(n=of(m).n),
            lambda m: sa.update(m).where(of(m).id + 1 == 1).values(n=7),
            lambda m: sa.update(m).where(of(m).id == of(m).n + 1).values(n=7),
            lambda m: sa.update(m).where(of(m).id == 2**40).values(n=7),
        )
    ] + [
        sa.update(Row).where(Row.id == 1).values(name="a"),
        sa.update(Row).where(Row.id == 1).values(name="a", n=1),
        sa.update(Row).where(Row.id == 1).values(n=1, name="a"),
        sa.update(Pair).where(Pair.one == 1, Pair.two == 1),
        sa.update(Row.__table__).where(Row.__table__.c.id == 1).values(n=7),
    ]


OTHER: list[Any] = [
    sa.update(Row).where(Row.id.in_([1, 2])),
    sa.update(Row).where(sa.or_(Row.id == 1, Row.id == 2)),
    sa.update(Row).where(sa.not_(Row.id == 1)).where(sa.func.abs(Row.n) == 1),
    sa.update(Row).where(Row.id == sa.bindparam("x", 1)),
    sa.update(Row).where(Row.id == sa.bindparam("x", callable_=lambda: 1)),
    sa.update(Row).where(Row.id == sa.literal(1, literal_execute=True)),
    sa.update(Row).where(Row.id == shared).values(n=shared),
    sa.update(Row).where(Row.id == sa.select(sa.func.max(Row.id)).scalar_subquery()),
    sa.update(Row).where(Row.name == sa.null()),
    sa.update(Row).where(Row.name.ilike("a", escape="/")),
    sa.update(Row).where(Row.id == sa.text("1")),
    sa.update(Row).where(orm.aliased(Row).id == 1).values(n=sa.text("1")),
    sa.update(Row).where(Row.id == 1).values(n=sa.cast("1", sa.Integer)),
]


def test_equal_sketches_are_equal_shapes_to_sqlalchemy_too() -> None:
    shapes: dict[Any, Any] = {}
    for one in simple() + simple():
        drawn, key = sketch(one), one._generate_cache_key()
        assert drawn is not None
        assert shapes.setdefault(drawn.name, key.key) == key.key
    assert len(shapes) > len(simple()) * 0.9


def test_a_statement_that_is_built_anew_has_the_same_sketch() -> None:
    for one, again in zip(simple(), simple(), strict=True):
        first, second = sketch(one), sketch(again)
        assert first is not None
        assert second is not None
        assert first.name == second.name


def test_only_what_is_known_whole_has_a_sketch() -> None:
    assert [one for one in OTHER if sketch(one) is not None] == []


@pytest.mark.parametrize("entity", [Row, core], ids=["class", "table"])
def test_the_same_shape_with_other_values_is_found_again_and_writes_those(
    sync_side: Side, entity: Any
) -> None:
    columns = of(entity)
    with sync_side.look.begin() as connection:
        connection.execute(sa.insert(entity), [{"id": id_} for id_ in (1, 2, 3)])
    with sync_side.connection() as connection:
        statement._sketched.clear()
        for id_ in (1, 2, 3):
            change = sa.update(entity).where(columns.id == id_)
            assert fenced_update(connection, lease(5), change.values(n=id_ * 7)) == 1
            assert fenced_update(connection, lease(5), change.values(n=columns.n + id_)) == 1
            assert len(statement._sketched) == 2
        connection.commit()
    assert [row[1] for row in sync_side.stored(entity)] == [8, 16, 24]


def test_a_refusal_is_no_matter_of_what_was_written_before(sync_side: Side) -> None:
    sync_side.put(Row(id=1))
    change = sa.update(Row).where(Row.id == 1).values(n=7)
    with sync_side.session() as session:
        for _ in range(2):
            assert fenced_update(session, lease(5), change) == 1
            for more in (change.returning(Row.n), change.prefix_with("x"), change.with_hint("x")):
                with pytest.raises(CannotFence):
                    fenced_update(session, lease(5), more)
            for more in (change.values(fencing_token=1), change.values(id=3)):
                with pytest.raises(CannotFence):
                    fenced_update(session, lease(5), more)


class Uncached(sa.types.TypeDecorator[int]):
    """A type that SQLAlchemy keeps no compiled statements of."""

    impl = sa.Integer
    cache_ok = False


def test_values_of_a_type_that_is_not_cached_are_not_kept_either() -> None:
    class Base(DeclarativeBase):
        pass

    class Odd(FencedMixin, Base):
        __tablename__ = "odd"
        id: Mapped[int] = mapped_column(primary_key=True)
        n: Mapped[int] = mapped_column(Uncached)

    engine = sa.create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with orm.Session(engine) as session:
        session.add_all([Odd(id=1, n=0), Odd(id=2, n=0)])
        session.commit()
        for id_ in (1, 2):
            odd = sa.update(Odd).where(Odd.id == id_, Odd.n == 0).values(n=id_)
            assert sketch(odd) is not None
            assert fenced_update(session, lease(5), odd) == 1
        session.commit()
        assert session.scalars(sa.select(Odd.n).order_by(Odd.id)).all() == [1, 2]
    engine.dispose()


def test_no_more_than_so_many_shapes_are_kept(
    sync_side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statement, "_MOST_SHAPES", 3)
    sync_side.put(Row(id=1))
    with sync_side.session() as session:
        for most in range(10):
            change = sa.update(Row).where(Row.id == 1, *[Row.n >= 0] * most)
            assert fenced_update(session, lease(5), change) == 1
            assert len(statement._sketched) <= 3
            assert len(statement._shapes) <= 3
