"""The SQL of every fenced write on every database, and how many statements it takes.

The snapshots are ``sql/<vendor>.txt``. After a change that is meant, write them anew with
``VOLCANO_UPDATE_SNAPSHOTS=1`` and read the difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.db import connections

from tests.django.app.models import Bound, Note, Pair, Row, State
from tests.django.leases import lease
from tests.django.sending import statements
from volcano_locks.errors import FenceRejected
from volcano_locks_django import fenced_transaction

SNAPSHOTS = Path(__file__).parent / "sql"


def cases(alias: str) -> dict[str, tuple[int, Callable[[], Any]]]:
    """What is written, in this order: how many statements it may take, and the write."""
    rows, states = Row.objects.db_manager(alias), State.objects.db_manager(alias)
    bound, pairs = Bound.objects.using(alias), Pair.objects.using(alias)

    def transaction(token: int) -> None:
        with fenced_transaction(lease(token), using=alias):
            pass

    def save(token: int) -> None:
        row = states.get(pk="a")
        row.fenced_save(lease(token))

    def atomic_update() -> None:
        from django.db import transaction

        with transaction.atomic(using=alias):
            rows.filter(slug="a").fenced_update(lease(7), n=6)

    return {
        "update of a row that was never fenced": (
            2,
            lambda: rows.filter(pk=1).fenced_update(lease(7), n=0),
        ),
        "update by primary key": (1, lambda: rows.filter(pk=1).fenced_update(lease(7), n=1)),
        "update by a unique column": (
            1,
            lambda: rows.filter(slug="a").fenced_update(lease(7), n=2),
        ),
        "update by a unique constraint": (
            1,
            lambda: rows.filter(tenant=0, slug="a").filter(day=0).fenced_update(lease(7), n=3),
        ),
        "update by primary key and more": (
            1,
            lambda: rows.filter(n=3).exclude(day=4).filter(pk=1).fenced_update(lease(7), n=4),
        ),
        "update in a transaction": (1, atomic_update),
        "update of a class bound to one lock": (
            1,
            lambda: bound.filter(pk=1).fenced_update(lease(7), n=1),
        ),
        "update of many rows": (2, lambda: rows.filter(n__gt=0).fenced_update(lease(7), n=5)),
        "update of rows that a sub-select names": (
            3,
            lambda: rows.filter(pk__in=rows.filter(n=5).values("pk")).fenced_update(lease(7), n=5),
        ),
        "update by a key of two columns": (
            1,
            lambda: pairs.filter(right=2).filter(left=1).fenced_update(lease(7), n=1),
        ),
        "update that is stale": (4, lambda: rows.filter(pk=1).fenced_update(lease(6), n=1)),
        "update of a missing row": (5, lambda: rows.filter(pk=9).fenced_update(lease(7), n=1)),
        "save": (2, lambda: save(7)),
        "upsert of a row that is there": (
            1,
            lambda: states.fenced_upsert(lease(7), {"n": 1}, name="a"),
        ),
        "upsert of a new row": (6, lambda: states.fenced_upsert(lease(7), {"n": 1}, name="b")),
        "delete": (1, lambda: rows.filter(pk=1).fenced_delete(lease(7))),
        "delete of many rows": (2, lambda: rows.filter(n=0).fenced_delete(lease(7))),
        "delete with cascades": (6, lambda: states.filter(pk="a").fenced_delete(lease(7))),
        "transaction, the first": (1, lambda: transaction(7)),
        "transaction, later": (1, lambda: transaction(7)),
        "transaction that is stale": (2, lambda: transaction(6)),
    }


def test_the_sql_of_every_write_is_as_it_was_reviewed(alias: str) -> None:
    connection = connections[alias]
    Row.objects.using(alias).create(pk=1, slug="a")
    Row.objects.using(alias).create(pk=2, slug="b")
    State.objects.using(alias).create(name="a", fencing_key="rollup")
    Note.objects.using(alias).create(state_id="a")
    Bound.objects.using(alias).create(pk=1)
    Pair.objects.using(alias).create(left=1, right=2, fencing_key="rollup")
    connection.ensure_connection()
    text = ""
    for name, (count, write) in cases(alias).items():
        with statements(alias) as sent:
            try:
                write()
            except FenceRejected as error:
                name += f" ({type(error).__name__})"
        sent = [sql for sql in sent if not re.match("BEGIN|SAVEPOINT|RELEASE|ROLLBACK", sql)]
        if name.startswith("transaction, the first") and connection.vendor == "mysql":
            count += 1  # a new row and a refused one count alike there, so it looks
        assert len(sent) <= count, name
        text += f"-- {name}\n" + "".join(f"{sql}\n" for sql in sent) + "\n"
    mariadb = connection.vendor == "mysql" and connection.mysql_is_mariadb  # type: ignore[attr-defined]
    snapshot = SNAPSHOTS / f"{'mariadb' if mariadb else connection.vendor}.txt"
    if os.environ.get("VOLCANO_UPDATE_SNAPSHOTS"):
        snapshot.parent.mkdir(exist_ok=True)
        snapshot.write_text(text)
    assert text == snapshot.read_text()
