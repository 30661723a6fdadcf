"""check_models: what would keep a fence from being certain, found before the first write."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from volcano_locks.sqlalchemy import Finding, check_models, fence_table

from . import test_refusals as odd
from .sides import Base, Row, Side


def ids(found: list[Finding]) -> set[str]:
    return {finding.id.removeprefix("volcano_locks.") for finding in found}


def test_sound_models_have_no_findings(side: Side) -> None:
    assert check_models(Base) == []
    assert check_models(Base, side.look) == []
    assert check_models(Row) == []


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (odd.Child, "E001"),
        (odd.Textual, "E002"),
        (odd.Narrow, "E002"),
        (odd.Nullable, "E002"),
        (odd.Keyless, "E003"),
    ],
)
def test_each_fault_of_a_class_is_found(model: Any, expected: str) -> None:
    found = [finding for finding in check_models(odd.Base) if model.__name__ in finding.message]
    assert ids(found) == {expected}
    assert all(finding.hint for finding in found)


def test_each_fault_of_a_table_is_found(sync_side: Side) -> None:
    metadata = sa.MetaData()
    names = ("narrow", "textual", "nulls", "nullable", "lacking")
    tables = {
        name: sa.Table(
            f"check_{name}",
            metadata,
            sa.Column("id", sa.Integer, primary_key=True),
            sa.Column("fencing_token", sa.BigInteger, nullable=False),
            info={"fence_key": "rollup"},
        )
        for name in names
    }
    wide = "" if sync_side.vendor == "sqlite" else "E005"
    types = {
        "narrow": ("INTEGER NOT NULL", wide),
        "textual": ("VARCHAR(20) NOT NULL", "E005"),
        "nulls": ("BIGINT NULL", "E006"),
        "nullable": ("BIGINT NULL", "W002"),
        "lacking": ("", "E004"),
    }
    with sync_side.look.begin() as connection:
        for name, (type_, expected) in types.items():
            token = f", fencing_token {type_}" if type_ else ""
            connection.exec_driver_sql(f"CREATE TABLE check_{name} (id INTEGER NOT NULL{token})")
            if name == "nulls":
                connection.exec_driver_sql("INSERT INTO check_nulls (id) VALUES (1)")
            found = check_models(tables[name], connection)
            assert ids(found) == ({expected} if expected else set())
            connection.exec_driver_sql(f"DROP TABLE check_{name}")


def test_tables_that_do_not_exist_yet_are_passed_over() -> None:
    engine = sa.create_engine("sqlite://")
    assert check_models(Base, engine) == []
    metadata = sa.MetaData()
    fence_table(metadata)
    assert check_models(metadata, engine) == []
    engine.dispose()


def test_it_runs_under_asyncio_as_create_all_does() -> None:
    async def main() -> list[Finding]:
        engine = create_async_engine("sqlite+aiosqlite://")
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
            found = await connection.run_sync(lambda below: check_models(Base, below))
        await engine.dispose()
        return found

    assert asyncio.run(main()) == []


def test_what_holds_no_models_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="declarative base"):
        check_models("models")  # type: ignore[arg-type]
