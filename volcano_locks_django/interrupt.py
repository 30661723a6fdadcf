"""The database waits of the main thread's Django connections, to be broken from another thread.

The law of this module: it only finds the connections; ``volcano_locks.dbwait`` knows the drivers.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.backends.signals import connection_created

from volcano_locks.dbwait import break_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["database_waits"]


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
            if raw is not None:
                break_wait(raw)

    connection_created.connect(remember, weak=False, dispatch_uid=(thread, id(wrappers)))
    try:
        yield interrupt
    finally:
        connection_created.disconnect(dispatch_uid=(thread, id(wrappers)))
