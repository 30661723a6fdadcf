"""One database and one way to it, so that a test reads the same for sync and async sessions.

``side.run(x)`` gives a plain result back as it is and waits for an awaitable; ``side.within(cm)``
enters a context manager of either kind. Instances are used outside of ``run``, as under asyncio: a
lazy load there raises MissingGreenlet.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tests.databases import Database
from volcano_locks.models import Lease, Secret
from volcano_locks.sqlalchemy import FencedMixin, fence_table, fencing_columns

BIG = 4_503_599_627_370_497
"""A real fencing token's size: beyond 32 bits, and beyond what a float holds exactly."""
DRIVERS = {
    "sync": {"sqlite": "pysqlite", "postgresql": "psycopg", "mariadb": "pymysql"},
    "async": {"sqlite": "aiosqlite", "postgresql": "psycopg", "mariadb": "aiomysql"},
}


class Base(DeclarativeBase):
    pass


class Row(FencedMixin, Base):
    """A row that says itself which lock fences it."""

    __tablename__ = "fenced_row"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str | None] = mapped_column(sa.String(20), unique=True)
    n: Mapped[int] = mapped_column(default=0)


class Bound(FencedMixin, Base):
    """A class that belongs to one lock."""

    __tablename__ = "bound_row"
    fence_key = "rollup"
    fencing_key = None  # type: ignore[assignment]
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    n: Mapped[int] = mapped_column(default=0)


class Pair(FencedMixin, Base):
    __tablename__ = "fenced_pair"
    one: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    two: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    n: Mapped[int] = mapped_column(default=0)


class Note(Base):
    """A table without a fence of its own."""

    __tablename__ = "note"
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(sa.String(40))


core = sa.Table(
    "core_row",
    Base.metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("n", sa.Integer, nullable=False, default=0),
    *fencing_columns(),
)
fence = fence_table(Base.metadata)


def lease(token: int, key: str = "rollup") -> Lease:
    return Lease(key, None, BIG + token, datetime.now(timezone.utc), Secret("not shown"))


class Side:
    """A vendor, a mode, its engine, and a sync engine to look at the outcome with."""

    def __init__(self, database: Database, mode: str) -> None:
        self.vendor, self.mode, self.database = database.vendor, mode, database
        url = database.url(DRIVERS[mode][database.vendor])
        self.look = sa.create_engine(database.url(DRIVERS["sync"][database.vendor]))
        self.loop = asyncio.new_event_loop() if mode == "async" else None
        self.engine: Any = create_async_engine(url) if self.loop else sa.create_engine(url)
        self.core: sa.Engine = self.engine.sync_engine if self.loop else self.engine
        self.statements: list[str] = []
        sa.event.listen(self.core, "before_cursor_execute", self._record)
        for name in ("savepoint", "release_savepoint", "rollback_savepoint"):
            sa.event.listen(self.core, name, self._recorder(name))

    def _record(self, _c: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        if not statement.startswith(("SAVEPOINT", "RELEASE", "ROLLBACK")):
            self.statements.append(" ".join(statement.split()))

    def _recorder(self, name: str) -> Any:
        return lambda *_args: self.statements.append(name.replace("_", " "))

    def __repr__(self) -> str:
        return f"{self.vendor}-{self.mode}"

    def run(self, value: Any) -> Any:
        if inspect.isawaitable(value):
            assert self.loop is not None, "a sync session must not be awaited"
            return self.loop.run_until_complete(value)
        return value

    @contextlib.contextmanager
    def within(self, manager: Any) -> Iterator[Any]:
        if not hasattr(manager, "__aenter__"):
            with manager as entered:
                yield entered
            return
        entered = self.run(manager.__aenter__())
        try:
            yield entered
        except BaseException as error:
            if not self.run(manager.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self.run(manager.__aexit__(None, None, None))

    @contextlib.contextmanager
    def session(self, **options: Any) -> Iterator[Any]:
        kind: Any = AsyncSession if self.loop else Session
        with self.within(kind(self.engine, **options)) as opened:
            self.statements.clear()
            yield opened

    @contextlib.contextmanager
    def connection(self, **options: Any) -> Iterator[Any]:
        with self.within(self.engine.connect()) as opened:
            if options:
                opened = self.run(opened.execution_options(**options))
            self.statements.clear()
            yield opened

    @contextlib.contextmanager
    def begins(self) -> Iterator[None]:
        """Python's sqlite3 is told to begin each transaction, as SQLAlchemy documents it."""

        def begin(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN")

        if self.vendor != "sqlite":
            yield
            return
        sa.event.listen(self.core, "begin", begin)
        try:
            yield
        finally:
            sa.event.remove(self.core, "begin", begin)

    def put(self, *instances: Any) -> None:
        with Session(self.look) as session:
            session.add_all(instances)
            session.commit()

    def stored(self, entity: Any = Row) -> list[tuple[Any, ...]]:
        """Primary key, n, token (less BIG) and key of what is committed."""
        table = entity if isinstance(entity, sa.Table) else entity.__table__
        with self.look.connect() as connection:
            rows = connection.execute(sa.select(table).order_by(*table.primary_key)).mappings()
            return [
                (
                    *(row[column.name] for column in table.primary_key),
                    row["n"],
                    row["fencing_token"] - BIG if row["fencing_token"] else row["fencing_token"],
                    row.get("fencing_key", "rollup"),
                )
                for row in rows
            ]

    def notes(self) -> list[str]:
        with self.look.connect() as connection:
            return list(connection.scalars(sa.select(Note.text).order_by(Note.id)))

    def empty(self) -> None:
        with self.look.begin() as connection:
            for table in reversed(Base.metadata.sorted_tables):
                connection.execute(sa.delete(table))
        self.statements.clear()

    def close(self) -> None:
        self.run(self.engine.dispose())
        self.look.dispose()
        if self.loop is not None:
            self.loop.close()
