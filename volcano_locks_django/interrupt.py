"""Breaking a database wait of the main thread, from another thread.

The law of this module: it only makes the statement fail that is running now. Why, and what is
raised instead, is decided by ``volcano_locks.command``. A driver that hears signals by itself never
comes here.

- PostgreSQL: the server is asked to cancel the statement.
- SQLite: ``interrupt()``; its busy wait ends by the signals that cut its naps short.
- MySQL and MariaDB: the socket is shut down, since a second connection would be needed to cancel.
- Other databases: the wait ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.backends.signals import connection_created

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["database_waits"]

_CANCEL_TIMEOUT = 2.0
"""Seconds to reach PostgreSQL with the request to cancel."""


@contextlib.contextmanager
def database_waits() -> Iterator[Callable[[], None]]:
    """A function that breaks the waits of all connections that this thread has or opens meanwhile."""
    wrappers = {id(wrapper): wrapper for wrapper in connections.all(initialized_only=True)}
    thread = threading.get_ident()

    def remember(connection: BaseDatabaseWrapper, **_: Any) -> None:
        if threading.get_ident() == thread:
            wrappers[id(connection)] = connection

    def interrupt() -> None:
        for wrapper in list(wrappers.values()):
            raw = wrapper.connection
            if raw is not None and (breaker := _BREAKERS.get(wrapper.vendor)):
                breaker(raw)

    connection_created.connect(remember, weak=False, dispatch_uid=(thread, id(wrappers)))
    try:
        yield interrupt
    finally:
        connection_created.disconnect(dispatch_uid=(thread, id(wrappers)))


def _sqlite(raw: Any) -> None:
    raw.interrupt()


def _postgresql(raw: Any) -> None:
    if hasattr(raw, "cancel_safe"):  # psycopg 3.2 and later
        raw.cancel_safe(timeout=_CANCEL_TIMEOUT)
    else:
        raw.cancel()


def _mysql(raw: Any) -> None:
    fileno = raw.fileno() if hasattr(raw, "fileno") else raw._sock.fileno()
    with socket.socket(fileno=os.dup(fileno)) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)


_BREAKERS: dict[str, Callable[[Any], None]] = {
    "sqlite": _sqlite,
    "postgresql": _postgresql,
    "mysql": _mysql,
}
