"""check_models: what would keep a fence from being certain, found before the first write."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import create_async_engine

from volcano_locks.errors import CannotFence
from volcano_locks.sqlalchemy import (
    Finding,
    check_models,
    fence_table,
    fenced_update,
    fencing_columns,
)

from . import test_refusals as odd
from .sides import Base, Row, Side, lease


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


def test_a_key_column_of_your_own_must_hold_each_key_and_tell_cases_apart(side: Side) -> None:
    def own(name: str, type_: Any) -> sa.Table:
        token, _key = fencing_columns()
        number = sa.Column("id", sa.Integer, primary_key=True, autoincrement=False)
        return sa.Table(
            name, sa.MetaData(), number, token, sa.Column("fencing_key", type_, nullable=False)
        )

    folding = {
        "sqlite": sa.String(128, collation="NOCASE"),
        "postgresql": postgresql.CITEXT(),
        "mariadb": sa.String(128),
    }
    narrow, caseless = own("narrow_key", sa.String(4)), own("caseless", folding[side.vendor])
    assert ids(check_models(narrow)) == {"E003"}
    assert "128" in check_models(narrow)[0].message
    assert any("two locks" in each.message for each in check_models(caseless, side.look))
    with side.connection() as connection:
        for table, said in ((narrow, "128"), (caseless, "two locks")):
            with pytest.raises(CannotFence, match=said):
                side.run(fenced_update(connection, lease(5), sa.update(table)))
    assert side.statements == []


def test_a_key_column_that_the_database_made_narrow_or_caseless_is_found(sync_side: Side) -> None:
    number = sa.Column("id", sa.Integer, primary_key=True, autoincrement=False)
    table = sa.Table("check_key", sa.MetaData(), number, *fencing_columns())
    mysql = sync_side.vendor == "mariadb"
    types = {
        "VARCHAR(128)": ["two locks"] if mysql else [],
        "VARCHAR(20)": {"mariadb": ["128", "two locks"], "postgresql": ["128"], "sqlite": []}[
            sync_side.vendor
        ],
    }
    if mysql:
        types["VARCHAR(128) COLLATE utf8mb4_bin"] = []
    with sync_side.look.begin() as connection:
        for type_, expected in types.items():
            for end in ("", " DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin") if mysql else ("",):
                connection.exec_driver_sql(
                    "CREATE TABLE check_key (id INTEGER NOT NULL PRIMARY KEY, fencing_token BIGINT "
                    f"NOT NULL, fencing_key {type_} NOT NULL){end}"
                )
                found = check_models(table, connection)
                said = [each for each in expected if not (end and each == "two locks")]
                assert len(found) == len(said)
                assert all(word in each.message for word, each in zip(said, found, strict=True))
                assert ids(found) <= {"E005"}
                connection.exec_driver_sql("DROP TABLE check_key")


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
