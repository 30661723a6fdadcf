"""Breaking a database wait of one thread from another, whatever the framework around it.

The law of this module: it only makes the statement fail that a DBAPI connection is waiting for. Why,
and what is raised instead, is decided by ``command``. A driver that hears signals by itself never
comes here.

- PostgreSQL (psycopg, psycopg2): the server is asked to cancel the statement.
- SQLite: ``interrupt()``; its busy wait ends by the signals that cut its naps short.
- MySQL and MariaDB: the socket is shut down, since a second connection would be needed to cancel.
- Other databases: the wait ends by itself.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Final

__all__ = ["break_wait"]

_CANCEL_TIMEOUT: Final = 2.0
"""Seconds to reach PostgreSQL with the request to cancel."""


def break_wait(raw: Any) -> None:
    """Make the statement fail that this DBAPI connection waits for, where its driver can do that.

    May raise what the driver raises.
    """
    if hasattr(raw, "cancel_safe"):  # psycopg 3.2 and later
        raw.cancel_safe(timeout=_CANCEL_TIMEOUT)
    elif hasattr(raw, "cancel"):  # psycopg2, psycopg 3.1
        raw.cancel()
    elif hasattr(raw, "interrupt"):  # sqlite3
        raw.interrupt()
    elif hasattr(raw, "fileno") or hasattr(raw, "_sock"):  # mysqlclient, PyMySQL
        number = raw.fileno() if hasattr(raw, "fileno") else raw._sock.fileno()
        with socket.socket(fileno=os.dup(number)) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
