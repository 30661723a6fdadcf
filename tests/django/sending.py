"""What is sent to a database, as it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections


@contextmanager
def statements(alias: str) -> Iterator[list[str]]:
    """The statements that are sent; BEGIN and COMMIT, which drivers send themselves, left out."""
    sent: list[str] = []

    def note(execute: Any, sql: str, *args: Any) -> Any:
        sent.append(sql)
        return execute(sql, *args)

    with connections[alias].execute_wrapper(note):
        yield sent
