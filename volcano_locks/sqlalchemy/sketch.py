"""A quick look at a statement, by which one that was checked before is known again.

The law of this module: two statements with equal sketches differ in nothing but plain values, so what
was decided of one holds for the other. A sketch names the parts by their identity and is made of a
few exact classes only; a statement with any other part has none and is known by SQLAlchemy's own
cache key, which says the same for every statement and takes several times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.sql.elements import BinaryExpression

if TYPE_CHECKING:
    from .statement import Dml

__all__ = ["Sketch", "sketch"]

_COLUMNS: Final = frozenset(
    # The second is what a mapped class' attribute stands for; its identity stays, as a column's does.
    {sa.Column, type(sa.Column("x")._annotate({"x": 1}))}
)


class Sketch(NamedTuple):
    """What a statement is made of, and its values."""

    name: tuple[object, ...]
    parts: list[Any]
    """Kept with whatever is kept under ``name``: an identity means nothing once its owner is gone."""
    binds: list[sa.BindParameter[Any]]


def sketch(statement: Dml) -> Sketch | None:
    """The sketch of an UPDATE or DELETE whose parts ``statement.check_parts`` lets pass."""
    parts: list[Any] = [
        type(statement),
        statement.table,
        statement._propagate_attrs.get("plugin_subject"),
    ]
    binds: list[sa.BindParameter[Any]] = []
    for clause in statement._where_criteria:
        if not _draw(clause, parts, binds):
            return None
    for column, value in (getattr(statement, "_values", None) or {}).items():
        parts.append(column)
        if not _draw(value, parts, binds):
            return None
    return Sketch(tuple([part if type(part) is str else id(part) for part in parts]), parts, binds)


def _draw(part: Any, parts: list[Any], binds: list[sa.BindParameter[Any]]) -> bool:
    """Add one expression, each kind of it with its own number of parts; False if it is not simple."""
    kind = type(part)
    if kind is sa.BindParameter:
        # One parameter in two places, or with a name that two may share, is left to the cache key.
        plain = part.unique and part.callable is None and not part.required
        if not plain or part.expanding or part.literal_execute:
            return False
        for other in binds:
            if other is part:
                return False
        type_ = part.type
        parts += (kind, sa.types.NullType if type(type_) is sa.types.NullType else type_)
        binds.append(part)
        return True
    if kind is BinaryExpression:
        if part.modifiers:
            return False
        parts += (kind, part.operator, part.type)
        return _draw(part.left, parts, binds) and _draw(part.right, parts, binds)
    parts.append(part)
    return kind in _COLUMNS
