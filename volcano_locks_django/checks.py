"""System checks: what would keep a fence from being certain, found before the first write.

The law of this module: models are judged by the same rules as a fenced write (``fencing.
model_faults``), tables by what the database says of them. Tables are looked at only when Django asks
for databases: in ``migrate``, and in ``check --database ALIAS``.

- volcano_locks.E001: the model inherits from another table.
- volcano_locks.E002, E003: ``fencing_token`` or ``fencing_key`` is missing or of the wrong type.
- volcano_locks.W001: the model's manager has no fenced methods.
- volcano_locks.E004: the table lacks a column of the fence.
- volcano_locks.E005: the column is too narrow, or no number (the key: no text).
- volcano_locks.E006: rows have NULL in a column of the fence.
- volcano_locks.W002: the column allows NULL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections, router

from .fencing import FencedModel, FencedQuerySet, columns, model_faults

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
            kind = introspection.get_field_type(column.type_code, column)
            kind = kind[0] if isinstance(kind, tuple) else kind
            if field is fence.token and kind not in _WIDE:
                what = "holds 32 bits at most" if kind in _NARROW else f"is no integer ({kind})"
                yield _error(
                    "E005",
                    f"{where} {what}; a fencing token is a signed 64-bit integer",
                    "change the column to BIGINT",
                    model,
                )
            elif field is fence.key and kind not in ("CharField", "TextField"):
                yield _error(
                    "E005", f"{where} is no text ({kind})", "change it to VARCHAR(128)", model
                )
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


def _error(id_: str, message: str, hint: str, model: type[models.Model]) -> Error:
    return Error(message, hint=hint, obj=model, id=f"volcano_locks.{id_}")
