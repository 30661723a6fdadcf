"""Flask-SQLAlchemy's connections around a leader-only body.

The law of this module: the lock is taken outside of the transaction, and the body's first query
works. It knows of the database what ``app.extensions["sqlalchemy"]`` tells; without Flask-SQLAlchemy
it does nothing, and it never imports SQLAlchemy by itself.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from volcano_locks.dbwait import break_wait
from volcano_locks.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flask import Flask

__all__ = ["database_waits", "drop_dead_connections", "refuse_open_transaction"]


def refuse_open_transaction(app: Flask) -> None:
    """Raise InvalidRequest if ``db.session`` is in a transaction before the lock is ours."""
    database = app.extensions.get("sqlalchemy")
    if database is None or not database.session.registry.has():
        return
    if database.session().in_transaction():
        raise InvalidRequest(
            "db.session is in a transaction that began before the lock was taken: what it has read "
            "may be out of date, and it would commit after the lock is free again. End it first "
            "with db.session.commit() or db.session.rollback()"
        )


def drop_dead_connections(app: Flask) -> None:
    """The wait for the lock may have outlived the pool's idle connections: find that out now."""
    database = app.extensions.get("sqlalchemy")
    if database is None:
        return
    from sqlalchemy import select
    from sqlalchemy.exc import DBAPIError

    for engine in _engines(database):
        if _idle(engine) == 0:
            continue
        # A lost connection empties the pool, so that the next one is new. What else may be wrong
        # will meet the body as well.
        with contextlib.suppress(DBAPIError), engine.connect() as connection:
            connection.execute(select(1))


def _engines(database: Any) -> list[Any]:
    return list(database.engines.values())


def _idle(engine: Any) -> int:
    checkedin: Callable[[], int] | None = getattr(engine.pool, "checkedin", None)
    return 0 if checkedin is None else checkedin()


@contextlib.contextmanager
def database_waits(app: Flask) -> Iterator[Callable[[], None]]:
    """A function that breaks, from another thread, the database waits of this thread."""
    database = app.extensions.get("sqlalchemy")
    if database is None:
        yield lambda: None
        return
    from sqlalchemy import event

    thread = threading.get_ident()
    busy: dict[int, Any] = {}

    def checkout(raw: Any, *_: object) -> None:
        if threading.get_ident() == thread:
            busy[id(raw)] = raw

    def checkin(raw: Any, *_: object) -> None:
        busy.pop(id(raw), None)

    def interrupt() -> None:
        for raw in list(busy.values()):
            break_wait(raw)

    engines = _engines(database)
    for engine in engines:
        event.listen(engine, "checkout", checkout)
        event.listen(engine, "checkin", checkin)
    try:
        yield interrupt
    finally:
        for engine in engines:
            event.remove(engine, "checkout", checkout)
            event.remove(engine, "checkin", checkin)
