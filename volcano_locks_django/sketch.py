"""A quick look at a queryset's conditions: how many rows they can name, and what they have in common.

The law of this module: what is said of a condition is certain, or it is not said. Only Django's own
lookups of values on the row's own columns are looked at; whatever else there is may hold an OR.

Two updates of equal shapes differ in nothing but values, so Django makes the same text of both. It is
made once: that is most of the work that a fenced update is for Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from django.core.exceptions import EmptyResultSet
from django.db.models import sql
from django.db.models.expressions import Col, Func, RawSQL, Subquery
from django.db.models.lookups import Exact, Lookup
from django.db.models.sql.where import WhereNode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["Sketch", "asks_other_rows", "pins_one_row", "sketch_of"]


class Sketch(NamedTuple):
    """An update of one row by ``column = value`` throughout: its shape, and its values in order."""

    shape: tuple[object, ...]
    new: list[Any]
    """What the columns are set to."""
    wanted: list[Any]
    """What the columns are compared with."""


def sketch_of(
    query: sql.Query,
    values: dict[str, Any],
    connection: BaseDatabaseWrapper,
    uniques: Iterable[frozenset[str]],
) -> Sketch | None:
    """The sketch of an update; None if it is of another kind. ``uniques`` as in ``pins_one_row``."""
    if type(query) is not sql.Query or len(query.alias_map) != 1:
        return None
    model: Any = query.model
    shape: list[object] = [type(connection), model, query.base_table, *values]
    new: list[Any] = []
    for name, value in values.items():
        field = model._meta.get_field(name)
        if (
            not field.concrete
            or field.generated
            or hasattr(field, "get_placeholder")
            or hasattr(value, "resolve_expression")
            or hasattr(value, "prepare_database_save")
        ):
            return None
        value = field.get_db_prep_save(value, connection=connection)
        if value is None or hasattr(value, "as_sql"):
            return None
        new.append(value)
    wanted: list[Any] = []
    pinned: set[str] = set()
    for condition in _conditions(query.where):
        if not _is_plain(condition, query) or not isinstance(condition, Exact):
            return None
        if type(condition.rhs) is bool:  # the text of such a comparison depends on it
            return None
        compiler: Any = None  # only an expression needs one
        try:
            text, parameters = condition.process_rhs(compiler, connection)
        except EmptyResultSet:
            return None
        if text != "%s":
            return None
        wanted += parameters
        pinned.add(condition.lhs.target.attname)
        shape += (type(condition), condition.lhs.target.attname)
    if not any(unique <= pinned for unique in uniques):
        return None
    return Sketch(tuple(shape), new, wanted)


def pins_one_row(query: sql.Query, uniques: Iterable[frozenset[str]]) -> bool:
    """Whether the conditions name one row at most: by all columns of one of these sets."""
    pinned: set[str] = set()
    for condition in _conditions(query.where):
        if isinstance(condition, WhereNode):
            continue  # an OR or NOT, in parentheses of Django's own
        if not _is_plain(condition, query):
            return False
        if isinstance(condition, Exact):
            pinned.add(condition.lhs.target.attname)
    return any(unique <= pinned for unique in uniques)


def asks_other_rows(query: sql.Query) -> bool:
    """Whether a write of what it finds may change what it finds: it has a sub-select, or may have one."""
    return _asks(query.where)


def _asks(part: Any) -> bool:
    if not type(part).__module__.startswith("django.") or type(part) is Func:
        return True  # its SQL can be anything
    if isinstance(part, Subquery | sql.Query | RawSQL):
        return True
    inner: list[Any] = getattr(part, "get_source_expressions", list)()
    return any(_asks(one) for one in inner if hasattr(one, "as_sql"))


def _is_plain(condition: Any, query: sql.Query) -> bool:
    """Whether it is a lookup of Django's own that compares a column of the row with values.

    Then its SQL holds no OR and no other column's name.
    """
    if not isinstance(condition, Lookup) or not type(condition).__module__.startswith("django."):
        return False
    column, value = condition.lhs, condition.rhs
    if type(column) is not Col or column.alias != query.base_table:
        return False
    values = value if isinstance(value, list | tuple) else (value,)
    model: Any = query.model
    own = column.target.model._meta.concrete_model is model._meta.concrete_model
    return own and not any(hasattr(one, "as_sql") for one in values)


def _conditions(node: Any) -> Iterator[Any]:
    """All conditions that must hold together, however deep they are nested; an OR or NOT is one."""
    joins = isinstance(node, WhereNode) and not node.negated
    if joins and (node.connector == "AND" or len(node.children) == 1):
        for child in node.children:
            yield from _conditions(child)
    else:
        yield node
