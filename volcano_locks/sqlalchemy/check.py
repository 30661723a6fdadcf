"""Whether models and tables can be fenced, asked before the first write.

The law of this module: the mapping is judged by the rules that a fenced write is judged by; a
database is judged by what it says of its own columns and rows. It changes nothing. The ids are those
of the Django kit's system checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import registry

from .model import KEY, KEY_LENGTH, TOKEN, Finding, is_binary, is_wide, model_findings

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["findings"]


def findings(models: Any, bind: Any) -> Iterator[Finding]:
    """``check_models`` over an engine, a connection, or none."""
    entities = list(_fenced_entities(models))
    dialect = None if bind is None else bind.dialect
    fit = []
    for entity in entities:
        found = list(model_findings(entity, dialect))
        yield from found
        if not found:
            fit.append(entity)
    if bind is None:
        return
    if isinstance(bind, sa.Engine):
        with bind.connect() as connection:
            yield from _table_findings(connection, fit)
    else:
        yield from _table_findings(bind, fit)


def _fenced_entities(models: Any) -> Iterator[Any]:
    """The mapped classes and the tables that carry, or mean to carry, a fence."""
    found = getattr(models, "registry", models)
    metadata = found.metadata if isinstance(found, registry) else models
    metadata = getattr(metadata, "metadata", metadata)
    if isinstance(metadata, sa.Table):
        tables: list[sa.Table] = [metadata]
    elif isinstance(metadata, sa.MetaData):
        tables = list(metadata.tables.values())
    else:
        raise TypeError(
            "pass a declarative base, a registry, a MetaData, a mapped class or a Table"
        )
    mapped: set[Any] = set()
    if isinstance(found, registry):
        for mapper in found.mappers:
            mapped.update(mapper.tables)
            if TOKEN in mapper.attrs:
                yield mapper.class_
    for table in tables:
        if table not in mapped and TOKEN in table.c and not _is_fence_table(table):
            yield table


def _is_fence_table(table: sa.Table) -> bool:
    return {column.name for column in table.c} == {"key", TOKEN, "advanced_at"}


def _table_findings(connection: sa.Connection, entities: list[Any]) -> Iterator[Finding]:
    inspector = sa.inspect(connection)
    for entity in entities:
        table = entity if isinstance(entity, sa.Table) else sa.inspect(entity).local_table
        if not inspector.has_table(table.name, table.schema):
            continue
        yield from _column_findings(connection, inspector, table)


def _column_findings(
    connection: sa.Connection, inspector: sa.Inspector, table: sa.Table
) -> Iterator[Finding]:
    described = {
        column["name"]: column for column in inspector.get_columns(table.name, table.schema)
    }
    for own in (table.c.get(TOKEN), table.c.get(KEY)):
        if own is None:
            continue
        where = f"{table.fullname}.{own.name}"
        column = described.get(own.name)
        if column is None:
            yield Finding("volcano_locks.E004", f"{where} does not exist", "migrate the table")
            continue
        type_: Any = column["type"]
        if own.name == TOKEN and not is_wide(type_, connection.dialect):
            yield Finding(
                "volcano_locks.E005",
                f"{where} is {type_!r} in the database; a fencing token is a signed 64-bit integer",
                "change the column to BIGINT",
            )
        if own.name == KEY and not isinstance(type_, sa.String):
            yield Finding(
                "volcano_locks.E005",
                f"{where} is {type_!r} in the database, no text",
                "change the column to VARCHAR(128)",
            )
        elif own.name == KEY:
            yield from _key_column_findings(connection, own, type_)
        if not column["nullable"]:
            continue
        query = sa.select(sa.func.count()).select_from(table).where(own.is_(None))
        if nulls := connection.execute(query).scalar_one():
            yield Finding(
                "volcano_locks.E006",
                f"{where} is NULL in {nulls} row(s), which every fenced write will refuse",
                "set it to its default there, then make the column NOT NULL",
            )
        else:
            yield Finding(
                "volcano_locks.W002",
                f"{where} allows NULL in the database, which no comparison matches",
                "make the column NOT NULL with its default",
            )


def _key_column_findings(
    connection: sa.Connection, own: sa.Column[Any], type_: sa.String
) -> Iterator[Finding]:
    vendor, where = connection.dialect.name, f"{own.table.fullname}.{own.name}"
    if vendor != "sqlite" and type_.length is not None and type_.length < KEY_LENGTH:
        yield Finding(
            "volcano_locks.E005",
            f"{where} holds {type_.length} characters in the database, and a lock key has up to "
            f"{KEY_LENGTH}",
            f"change the column to VARCHAR({KEY_LENGTH})",
        )
    if vendor not in ("mysql", "mariadb"):
        return
    # Not the inspector's: it is silent about a collation that is the table's own.
    query = sa.text(
        "SELECT collation_name FROM information_schema.columns WHERE column_name = :column "
        "AND table_name = :table AND table_schema = COALESCE(:schema, DATABASE())"
    )
    names = {"column": own.name, "table": own.table.name, "schema": own.table.schema}
    collation = str(connection.scalar(query, names))
    if not is_binary(collation):
        yield Finding(
            "volcano_locks.E005",
            f"{where} has the collation {collation} in the database, which does not compare byte by "
            "byte: 'Rollup' and 'rollup' are two locks",
            f"change the column to VARCHAR({KEY_LENGTH}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
        )
