"""The sides that the tests of SQLAlchemy's kit run on: three databases, sync and async."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest

from tests.databases import database

from .sides import Base, Side

SIDES = [
    pytest.param((vendor, mode), id=f"{vendor}-{mode}", marks=marks)
    for vendor, marks in (
        ("sqlite", ()),
        ("postgresql", pytest.mark.needs("postgres")),
        ("mariadb", pytest.mark.needs("mariadb")),
    )
    for mode in ("sync", "async")
]
SYNC = [param for param in SIDES if param.id.endswith("-sync")]


@pytest.fixture(scope="session")
def opened() -> Iterator[Callable[[str, str], Side]]:
    """Each worker's databases and sides, made when they are first asked for."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def of_vendor(vendor: str) -> object:
            db = stack.enter_context(database(vendor))
            first = Side(db, "sync")
            Base.metadata.create_all(first.look)
            first.close()
            return db

        @functools.cache
        def get(vendor: str, mode: str) -> Side:
            side = Side(of_vendor(vendor), mode)  # type: ignore[arg-type]
            stack.callback(side.close)
            return side

        yield get


@pytest.fixture(params=SIDES)
def side(request: pytest.FixtureRequest, opened: Callable[[str, str], Side]) -> Side:
    found = opened(*request.param)
    found.empty()
    return found


@pytest.fixture(params=SYNC)
def sync_side(request: pytest.FixtureRequest, opened: Callable[[str, str], Side]) -> Side:
    found = opened(*request.param)
    found.empty()
    return found
