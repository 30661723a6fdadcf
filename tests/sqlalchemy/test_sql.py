"""The SQL of each helper on each database, and how many statements it takes.

``VOLCANO_WRITE_SQL=1`` writes the files in ``sql/`` anew; read the difference before you commit it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, aliased

from volcano_locks.errors import FenceRejected
from volcano_locks.sqlalchemy import (
    fenced_delete,
    fenced_save,
    fenced_transaction,
    fenced_update,
    fenced_upsert,
)

from .sides import BIG, Bound, Note, Row, Side, lease

one = sa.update(Row).where(Row.id == 1).values(n=7)
others = aliased(Row)
many = sa.update(Row).where(Row.n < 9).values(n=Row.n + 1)


def save(session: Session) -> None:
    loaded = session.get_one(Row, 1)
    loaded.n = 9
    fenced_save(session, lease(5), loaded)


def whole(session: Session, token: int = 5) -> None:
    with fenced_transaction(session, lease(token)):
        session.add(Note(id=1, text="x"))


CASES: dict[str, Callable[[Session], Any]] = {
    "update of one row": lambda s: fenced_update(s, lease(5), one),
    "update of one row of a class bound to one lock": lambda s: fenced_update(
        s, lease(5), sa.update(Bound).where(Bound.id == 1).values(n=7)
    ),
    "update of one row, stale": lambda s: fenced_update(s, lease(4), one),
    "update of one row, missing": lambda s: fenced_update(s, lease(5), one.where(Row.n == 99)),
    "update of many rows": lambda s: fenced_update(s, lease(5), many),
    "update of rows that a subquery names": lambda s: fenced_update(
        s,
        lease(5),
        sa.update(Row).values(n=7).where(Row.id.in_(sa.select(others.id).where(others.n < 9))),
    ),
    "update of many rows, stale": lambda s: fenced_update(s, lease(4), many),
    "delete of one row": lambda s: fenced_delete(s, lease(5), sa.delete(Row).where(Row.id == 1)),
    "delete of many rows": lambda s: fenced_delete(s, lease(5), sa.delete(Row)),
    "upsert of a row that is there": lambda s: fenced_upsert(s, lease(5), Row, {"id": 1, "n": 1}),
    "upsert of a row that is not there": lambda s: fenced_upsert(
        s, lease(5), Row, {"id": 9, "n": 1}
    ),
    "save of a loaded instance": save,
    "transaction": whole,
    "transaction, stale": lambda s: whole(s, 1),
}


def test_the_sql_of_each_helper_is_what_it_was(sync_side: Side) -> None:
    text = ""
    for name, case in CASES.items():
        sync_side.empty()
        sync_side.put(
            Row(id=1, n=1, fencing_token=BIG + 5, fencing_key="rollup"), Row(id=2), Bound(id=1)
        )
        with sync_side.session() as session:
            with fenced_transaction(session, lease(2)):
                pass
            loaded = session.get_one(Row, 1)
            sync_side.statements.clear()
            with contextlib.suppress(FenceRejected):
                case(session)
            assert loaded is not None  # kept alive, so that the session knows it
        text += f"-- {name}: {len(sync_side.statements)}\n"
        text += "".join(f"{statement};\n" for statement in sync_side.statements) + "\n"
    mysql = sync_side.vendor == "mariadb" and not sync_side.core.dialect.is_mariadb  # type: ignore[attr-defined]
    path = Path(__file__).parent / "sql" / f"{'mysql' if mysql else sync_side.vendor}.sql"
    if os.environ.get("VOLCANO_WRITE_SQL"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
