"""The page about this kit runs, and a real hold is what the kit takes it for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from volcano_locks import LockClient
from volcano_locks.errors import LeaseLost
from volcano_locks.sqlalchemy import fenced_transaction, fenced_update

from .sides import Note, Row, Side

PAGE = Path(__file__).parents[2] / "docs" / "fenced-writes-sqlalchemy.md"


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = "\n".join(blocks).replace('"local:"', f'"local:{tmp_path / "locks.sqlite3"}"')
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    names["client"].close()  # type: ignore[attr-defined]
    names["engine"].dispose()  # type: ignore[attr-defined]
    assert len(blocks) == 6


def test_f7_a_real_hold_that_was_released_takes_the_commit_with_it(
    sync_side: Side, tmp_path: Path
) -> None:
    sync_side.put(Row(id=1))
    change = sa.update(Row).where(Row.id == 1).values(n=7)
    with (
        LockClient(api_url=f"local:{tmp_path / 'locks.sqlite3'}") as client,
        Session(sync_side.engine) as session,
    ):
        with client.hold("rollup", ttl=30) as hold:
            fenced_update(session, hold, change)
        with pytest.raises(LeaseLost, match="inside the hold"):
            session.commit()
        session.rollback()
        with client.hold("rollup", ttl=30) as hold:
            fenced_update(session, hold, change)
            session.commit()
            with fenced_transaction(session, hold):
                session.add(Note(text="done"))
    assert [row[1] for row in sync_side.stored()] == [7]
    assert sync_side.notes() == ["done"]
