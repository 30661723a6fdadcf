"""System checks: what would keep a fence from being certain, found before the first write.

The law of this module: models are judged by the same rules as a fenced write (``fencing.
model_faults``), tables by what the database says of them. Tables are looked at only when Django asks
for databases: in ``migrate``, and in ``check --database ALIAS``.

- volcano_locks.E001: the model inherits from another table.
- volcano_locks.E002, E003: ``fencing_token`` or ``fencing_key`` is missing or of the wrong type.
- volcano_locks.W001: the model's manager has no fenced methods.
- volcano_locks.E004: the table lacks a column of the fence.
- volcano_locks.E005: the column is too narrow, or no number (the key: no text, or text that the
  database compares without case).
- volcano_locks.E006: rows have NULL in a column of the fence.
- volcano_locks.W002: the column allows NULL.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections, router

from .fencing import KEY_LENGTH, FencedModel, FencedQuerySet, columns, model_faults

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from django.db import models
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["check_models", "check_tables", "fenced_models"]

_NARROW = ("SmallIntegerField", "IntegerField", "PositiveSmallIntegerField", "PositiveIntegerField")
_WIDE = ("BigIntegerField", "PositiveBigIntegerField")


def fenced_models(app_configs: Sequence[Any] | None = None) -> Iterator[type[FencedModel]]:
    """The concrete models that inherit FencedModel, of these applications or of all."""
    for config in apps.get_app_configs() if app_configs is None else app_configs:
        models: Iterable[Any] = config.get_models()
        yield from (model for model in models if issubclass(model, FencedModel))


@register(Tags.models)
def check_models(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """What the classes say: E001, E002, E003, W001."""
    found: list[CheckMessage] = []
    for model in fenced_models(app_configs):
        found += [
            _error(fault.id, fault.message, fault.advice, model) for fault in model_faults(model)
        ]
        if not isinstance(model._default_manager.all(), FencedQuerySet):
            found.append(
                Warning(
                    f"the default manager of {model._meta.label} has no fenced_update()",
                    hint="inherit its queryset from FencedQuerySet (as_manager()), or its manager "
                    "from FencedManager",
                    obj=model,
                    id="volcano_locks.W001",
                )
            )
    return found


@register(Tags.database)
def check_tables(
    app_configs: Sequence[Any] | None = None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """What the databases say: E004, E005, E006, W002. Tables that are not there yet are passed over."""
    found: list[CheckMessage] = []
    for alias in databases or ():
        connection = connections[alias]
        tables = set(connection.introspection.table_names())
        for model in fenced_models(app_configs):
            meta = model._meta
            if (
                meta.proxy
                or meta.db_table not in tables
                or any(model_faults(model))
                or not router.allow_migrate_model(alias, model)
            ):
                continue
            found.extend(_table_faults(connection, model))
    return found


def _table_faults(
    connection: BaseDatabaseWrapper, model: type[models.Model]
) -> Iterator[CheckMessage]:
    meta = model._meta
    fence = columns(model)
    introspection: Any = connection.introspection
    with connection.cursor() as cursor:
        described = {
            column.name: column
            for column in introspection.get_table_description(cursor, meta.db_table)
        }
        fields = [fence.token] if fence.key is None else [fence.token, fence.key]
        for field in fields:
            where = f"{meta.db_table}.{field.column} on {connection.alias!r}"
            column = described.get(field.column)
            if column is None:
                yield _error("E004", f"{where} does not exist", "run migrate", model)
                continue
            try:
                kind = introspection.get_field_type(column.type_code, column)
            except KeyError:
                kind = "a type that Django does not know"  # PostgreSQL's citext and the like
            kind = kind[0] if isinstance(kind, tuple) else kind
            if field is fence.token and kind not in _WIDE:
                what = "holds 32 bits at most" if kind in _NARROW else f"is no integer ({kind})"
                yield _error(
                    "E005",
                    f"{where} {what}; a fencing token is a signed 64-bit integer",
                    "change the column to BIGINT",
                    model,
                )
            elif field is fence.key:
                for what, advice in _key_faults(connection, meta.db_table, column, kind):
                    yield _error("E005", f"{where} {what}", advice, model)
            if not column.null_ok:
                continue
            quote = connection.ops.quote_name
            cursor.execute(
                f"SELECT COUNT(*) FROM {quote(meta.db_table)} "  # noqa: S608 - names only
                f"WHERE {quote(field.column)} IS NULL"
            )
            if nulls := cursor.fetchone()[0]:
                yield _error(
                    "E006",
                    f"{where} is NULL in {nulls} row(s), which every fenced write will refuse",
                    f"set it to {field.get_default()!r} there, then make the column NOT NULL",
                    model,
                )
            else:
                yield Warning(
                    f"{where} allows NULL, which no comparison matches",
                    hint=f"make it NOT NULL DEFAULT {field.get_default()!r}",
                    obj=model,
                    id="volcano_locks.W002",
                )


def _key_faults(
    connection: BaseDatabaseWrapper, table: str, column: Any, kind: str
) -> Iterator[tuple[str, str]]:
    """What keeps the column from telling any two locks apart, and what to do."""
    right = "VARCHAR(128)"
    if connection.vendor == "mysql":
        right += " COLLATE utf8mb4_bin"
    if kind not in ("CharField", "TextField"):
        yield f"is no text ({kind})", f"change it to {right}"
        return
    # PostgreSQL's text has no length, and its driver says -1.
    size = column.display_size or 0
    if kind == "CharField" and 0 < size < KEY_LENGTH:
        yield (
            f"holds {size} characters, and a lock's key has up to {KEY_LENGTH}",
            f"change it to {right}",
        )
    if collation := _collation_without_case(connection, table, column):
        yield (
            f"has the collation {collation}, under which the keys of two locks can be equal",
            f"change it to {right}" if connection.vendor == "mysql" else "leave the collation out",
        )


def _collation_without_case(connection: BaseDatabaseWrapper, table: str, column: Any) -> str | None:
    """The column's collation if it does not compare byte by byte."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            # Django's own introspection misses names without quotes.
            cursor.execute(
                "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = %s", [table]
            )
            found = re.search(
                rf"\b{re.escape(column.name)}\b[^,]*?\bCOLLATE\W+(\w+)",
                cursor.fetchone()[0],
                re.IGNORECASE,
            )
            return None if not found or found[1].upper() == "BINARY" else found[1]
        if connection.vendor == "mysql":
            cursor.execute(
                "SELECT collation_name FROM information_schema.columns WHERE "
                "table_schema = DATABASE() AND table_name = %s AND column_name = %s",
                [table, column.name],
            )
            row = cursor.fetchone()  # bytes have no collation
            return None if not row[0] or row[0].endswith("_bin") else str(row[0])
        cursor.execute(
            "SELECT collname FROM pg_attribute JOIN pg_collation ON attcollation = pg_collation.oid "
            "WHERE attrelid = %s::regclass AND attname = %s AND NOT collisdeterministic",
            [connection.ops.quote_name(table), column.name],
        )
        row = cursor.fetchone()
        return str(row[0]) if row else None


def _error(id_: str, message: str, hint: str, model: type[models.Model]) -> Error:
    return Error(message, hint=hint, obj=model, id=f"volcano_locks.{id_}")
