"""What the fence costs an update of one row through SQLAlchemy, on PostgreSQL.

Ours is ``fenced_update`` and theirs the same update without a fence, over one connection each, in turn
and in transactions of their own: both build the statement anew, as users do, send it and commit; the
server commits without waiting for a disk, so that none of the difference hides behind one. A live hold
is looked at before the statement and, by listeners, at the commit; a ``Lease`` is not, so that row has
the price of the fence alone. Theirs, over a session, is ``session.execute()`` as SQLAlchemy has it by default, which
also looks for loaded instances to synchronize, and once more without that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks._measure import Result, compare
from tests import databases
from volcano_locks import LockClient
from volcano_locks.models import Lease, Secret
from volcano_locks.sqlalchemy import FencedMixin, fence_table, fenced_transaction, fenced_update


class Base(DeclarativeBase):
    pass


class State(FencedMixin, Base):
    __tablename__ = "state"
    id: Mapped[int] = mapped_column(primary_key=True)
    cursor: Mapped[int]


@contextmanager
def _engine() -> Iterator[tuple[sa.Engine, sa.Engine]]:
    """An engine for us and one for them, since the hold is watched by listeners on ours."""
    with databases.running(), databases.database("postgresql") as database:
        engines = (sa.create_engine(database.url()), sa.create_engine(database.url()))
        fence_table(Base.metadata)
        Base.metadata.create_all(engines[0])
        with Session(engines[0]) as session:
            session.add_all([State(id=1, cursor=0), State(id=2, cursor=0)])
            session.commit()
        try:
            yield engines
        finally:
            for engine in engines:
                engine.dispose()


def run() -> list[Result]:
    """The ratios; PostgreSQL comes out of the wheel, or from VOLCANO_TEST_POSTGRES."""
    count = itertools.count(1)
    with ExitStack() as stack:
        engines = stack.enter_context(_engine())
        ours, theirs = (stack.enter_context(Session(engine)) for engine in engines)
        our_wire, their_wire = (stack.enter_context(engine.connect()) for engine in engines)
        folder = stack.enter_context(TemporaryDirectory(prefix="volcano-bench-"))
        client = stack.enter_context(LockClient(api_url=f"local:{Path(folder, 'locks.sqlite3')}"))
        hold = stack.enter_context(client.hold("bench", ttl=60))
        lease = Lease("bench", None, hold.fencing_token, datetime.now(timezone.utc), Secret("-"))
        unwatched = stack.enter_context(sa.create_engine(engines[0].url).connect())
        table = State.__table__

        def change(id_: int) -> sa.Update:
            return sa.update(State).where(State.id == id_).values(cursor=next(count))

        def core_change(id_: int) -> sa.Update:
            return sa.update(table).where(table.c.id == id_).values(cursor=next(count))

        def fenced() -> None:
            fenced_update(ours, hold, change(1))
            ours.commit()

        def plain() -> None:
            theirs.execute(change(2))
            theirs.commit()

        def bare() -> None:
            theirs.execute(change(2).execution_options(synchronize_session=False))
            theirs.commit()

        def fenced_core() -> None:
            fenced_update(our_wire, hold, core_change(1))
            our_wire.commit()

        def fenced_by_lease() -> None:
            fenced_update(unwatched, lease, core_change(1))
            unwatched.commit()

        def plain_core() -> None:
            their_wire.execute(core_change(2))
            their_wire.commit()

        def whole() -> None:
            with fenced_transaction(ours, hold):
                ours.execute(change(1))

        session, wire = (
            "fenced update, Session, PostgreSQL",
            "fenced update, Connection, PostgreSQL",
        )
        return [
            compare(session, fenced, plain, rounds=1500, bound=1.10, note="a live hold"),
            compare(
                session,
                fenced,
                bare,
                rounds=1500,
                note="a live hold; theirs with synchronize_session=False",
            ),
            compare(wire, fenced_by_lease, plain_core, rounds=1500, bound=1.10, note="a lease"),
            compare(wire, fenced_core, plain_core, rounds=1500, note="a live hold"),
            compare("fenced transaction, Session, PostgreSQL", whole, plain, rounds=500),
        ]


if __name__ == "__main__":
    for result in run():
        print(result, f"ratio {result.ratio:.3f}")
