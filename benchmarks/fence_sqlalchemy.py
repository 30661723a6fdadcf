"""What the fence costs an update of one row through SQLAlchemy, on PostgreSQL.

Ours is ``fenced_update`` and theirs the same update without a fence, in transactions of their own
and in turn, over one connection each. The statement is built anew each time, as users do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks._measure import Result, compare
from tests import databases
from volcano_locks.models import Lease, Secret
from volcano_locks.sqlalchemy import FencedMixin, fence_table, fenced_transaction, fenced_update

LEASE = Lease("bench", None, 4_503_599_627_370_497, datetime.now(timezone.utc), Secret("-"))


class Base(DeclarativeBase):
    pass


class State(FencedMixin, Base):
    __tablename__ = "state"
    id: Mapped[int] = mapped_column(primary_key=True)
    cursor: Mapped[int]


@contextmanager
def _engine() -> Iterator[sa.Engine]:
    with databases.running(), databases.database("postgresql") as database:
        engine = sa.create_engine(database.url())
        fence_table(Base.metadata)
        Base.metadata.create_all(engine)
        with Session(engine) as session:
            session.add_all([State(id=1, cursor=0), State(id=2, cursor=0)])
            session.commit()
        try:
            yield engine
        finally:
            engine.dispose()


def run() -> list[Result]:
    """The ratios; PostgreSQL comes out of the wheel, or from VOLCANO_TEST_POSTGRES."""
    count = itertools.count(1)
    with ExitStack() as stack:
        engine = stack.enter_context(_engine())
        ours, theirs = (stack.enter_context(Session(engine)) for _ in range(2))
        our_wire, their_wire = (stack.enter_context(engine.connect()) for _ in range(2))

        def change(id_: int) -> sa.Update:
            return sa.update(State).where(State.id == id_).values(cursor=next(count))

        def core_change(id_: int) -> sa.Update:
            table = State.__table__
            return sa.update(table).where(table.c.id == id_).values(cursor=next(count))

        def fenced() -> None:
            fenced_update(ours, LEASE, change(1))
            ours.commit()

        def plain() -> None:
            theirs.execute(change(2))
            theirs.commit()

        def fenced_core() -> None:
            fenced_update(our_wire, LEASE, change(1))
            our_wire.commit()

        def plain_core() -> None:
            their_wire.execute(change(2))
            their_wire.commit()

        def whole() -> None:
            with fenced_transaction(ours, LEASE):
                ours.execute(change(1))

        return [
            compare("fenced update, Session, PostgreSQL", fenced, plain, rounds=1500, bound=1.10),
            compare(
                "fenced update, Connection, PostgreSQL",
                fenced_core,
                plain_core,
                rounds=1500,
            ),
            compare("fenced transaction, Session, PostgreSQL", whole, plain, rounds=500),
        ]


if __name__ == "__main__":
    for result in run():
        print(result, f"ratio {result.ratio:.3f}")
