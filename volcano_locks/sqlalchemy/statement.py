"""Which statements can carry the fence, and how they carry it.

The law of this module: a statement is taken only if every part of it is known, if it writes one
table, and if nothing in it can loosen the condition that is added to it. Anything else is refused
with CannotFence before it is sent. It builds statements; it sends none.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Sized
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeAlias, cast

import sqlalchemy as sa
from sqlalchemy.exc import NoReferencedTableError
from sqlalchemy.sql import operators, visitors

from volcano_locks.errors import CannotFence, FenceKeyMismatch, FenceRejected, StaleFence
from volcano_locks.fencing import is_closed

from .model import KEY, TOKEN, Target, target_of
from .sketch import Sketch, sketch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from sqlalchemy.engine import Dialect
    from sqlalchemy.sql.dml import Delete, Update
    from sqlalchemy.sql.elements import ClauseElement, ColumnElement

    from volcano_locks.fencing import Offer

    Dml: TypeAlias = Update | Delete

__all__ = [
    "OFFERED",
    "Shape",
    "Write",
    "carries_fence",
    "check_kind",
    "fenced",
    "unique_sets",
    "with_fence",
]

OFFERED: Final = "volcano_offered"
"""The name of the bound parameter by which a fenced statement is recognized."""
OFFERED_KEY: Final = "volcano_offered_key"
_VALUE: Final = "volcano_value_"
_MOST_SHAPES: Final = 500

_TAKEN: Final = frozenset({"table", "_where_criteria", "_values", "_propagate_attrs"})
_HARMLESS: Final = frozenset(
    {
        "_execution_options",
        "_annotations",
        "_memoized_keys",
        "_all_selected_columns",
        "_generate_cache_key",
        "dialect_kwargs",
    }
)
_PLAIN: Final = _TAKEN | _HARMLESS
_NAMES: Final = {
    "_returning": "RETURNING (the result of a fenced write is the number of rows; read them after it)",
    "_return_defaults": "return_defaults()",
    "_prefixes": "a prefix",
    "_hints": "a hint",
    "_independent_ctes": "a CTE",
    "_ordered_values": "ordered_values() (use values())",
    "_maintain_values_ordering": "ordered_values() (use values())",
    "_multi_values": "several sets of values",
    "_extra_froms": "USING (name the rows by a subquery in where())",
    "_post_criteria_clause": "LIMIT or another extension (name the rows by a subquery in where())",
    "_with_options": "options() (write the criteria into where())",
    "dialect_options": "dialect options such as LIMIT (name the rows by a subquery in where())",
}


Names: TypeAlias = "tuple[tuple[str, type | None], ...]"
"""The parameters that hold the values of a key, and the type that its columns have in Python, if known."""


class Shape(NamedTuple):
    """What does not change when a statement comes again with other values: checked once, kept."""

    target: Target
    statement: Dml
    """With the fence, and with names for all its values."""
    where: ColumnElement[bool] | None
    """The caller's own condition, with the same names."""
    unique: tuple[Names, ...]
    """The unique keys that the condition sets equal to values."""
    key: Names | None = None
    """The primary key, in its order, if it is one of these."""
    by_key: ColumnElement[bool] | None = None
    """The part of the condition that names the primary key."""
    subselects: bool = False
    """Whether the condition asks other rows, which the write itself may change."""
    exact: bool = False
    """Whether two values of this primary key that differ in Python differ in the database, too."""


class Write(NamedTuple):
    """One fenced write: checked, built, not sent."""

    shape: Shape
    offered: Offer
    parameters: dict[str, Any]
    schemas: Any = None
    """The statement's ``schema_translate_map``."""
    own_identity: tuple[Any, ...] | None = None
    """The primary key of the instance that is saved."""

    @property
    def target(self) -> Target:
        return self.shape.target

    @property
    def statement(self) -> Dml:
        return self.shape.statement

    @property
    def single(self) -> bool:
        """Whether a unique key says that at most one row can match."""
        return any(self._fits(names) for names in self.shape.unique)

    @property
    def identity(self) -> tuple[Any, ...] | None:
        """The primary key of the one row that can match, if it is certain how a session knows it."""
        key = self.shape.key
        if self.own_identity is not None or key is None:
            return self.own_identity
        if not self.shape.exact or any(
            type(self.parameters[name]) is not kind for name, kind in key
        ):
            return None
        return tuple(self.parameters[name] for name, _kind in key)

    def _fits(self, names: Names) -> bool:
        # MySQL compares 1 and "01" as numbers, and any database a float and integers beyond 2**53:
        # a value of another type than the column's may equal several that are unique.
        return all(kind is None or isinstance(self.parameters[name], kind) for name, kind in names)

    def stored_key(self) -> sa.Select[Any] | None:
        """A query for the primary key, as it is stored, of the one row that the condition names."""
        key, by_key = self.shape.key, self.shape.by_key
        if key is None or by_key is None or not self._fits(key):
            return None
        return self.placed(sa.select(*self.target.primary_key).where(by_key))

    def look(
        self, *, refused_only: bool = False, lock: bool | str = False, limit: int | None = 1
    ) -> sa.Select[Any]:
        """A query for the fence of one row that the write is after: its token and its key."""
        query = sa.select(*self.target.terms).select_from(self.target.entity).limit(limit)
        if self.shape.where is not None:
            query = query.where(self.shape.where)
        if refused_only:
            query = query.where(self._refusal())
        if lock:
            query = query.with_for_update(read=lock == "share")
        return self.placed(query)

    def tally(self) -> sa.Select[tuple[int]]:
        """A query for the number of rows that the write is after."""
        query = sa.select(sa.func.count()).select_from(self.target.entity)
        where = self.shape.where
        return self.placed(query if where is None else query.where(where))

    def placed(self, query: sa.Select[Any]) -> sa.Select[Any]:
        """The query, where this write looks for its tables, and without a flush."""
        query = query.execution_options(autoflush=False)
        if self.schemas is None:
            return query
        return query.execution_options(schema_translate_map=self.schemas)

    def _refusal(self) -> ColumnElement[bool]:
        token, key = self.target.token, self.target.key
        refusal = sa.or_(token > self.offered.token, token.is_(None))
        if key is None:
            return refusal
        return sa.or_(refusal, key.not_in(["", self.offered.key]), key.is_(None))

    def judge(self, seen: Any) -> None:
        """Raise what the fence of this row, as seen, says to the offer; return if it may be written."""
        token, *keys = seen
        if token is None or None in keys:
            column = TOKEN if token is None else KEY
            raise FenceRejected(
                f"fenced write under lock {self.offered.key!r} refused: {self.target.table.fullname} "
                f"has a row whose {column} is NULL, which no comparison matches; nothing was "
                "changed. Set it to its default and make the column NOT NULL "
                "(check_models(..., engine) shows where)"
            )
        if keys and keys[0] not in ("", self.offered.key):
            raise FenceKeyMismatch(self.offered.key, stored_key=keys[0], target=self.target.label)
        if token > self.offered.token:
            raise StaleFence(
                self.offered.key,
                offered=self.offered.token,
                stored=token,
                target=self.target.label,
            )


def check_kind(statement: object) -> None:
    """CannotFence unless it is an UPDATE or a DELETE."""
    if not isinstance(statement, (sa.Update, sa.Delete)):
        raise CannotFence(
            f"a fenced write takes update(...) or delete(...), not a {type(statement).__name__}. "
            "For new rows use fenced_upsert(), for anything else fenced_transaction()"
        )


def fenced(statement: Dml, offered: Offer, dialect: Dialect) -> Write:
    """The write that this UPDATE or DELETE becomes under this offer.

    CannotFence if the fence would not be certain to be part of it; FenceKeyMismatch if the table is
    bound to another lock.
    """
    _check_parts(statement)
    drawn = sketch(statement)
    known = None if drawn is None else _sketched.get((dialect.name, drawn.name))
    if drawn is not None and known is not None:
        shape, names, _parts = known
        parameters = {name: bind.value for name, bind in zip(names, drawn.binds, strict=True)}
    else:
        shape, named = _shape_of(statement, dialect)
        parameters = {name: bind.effective_value for name, bind in named.items()}
        _remember(drawn, dialect, shape, named)
    target = shape.target
    if target.bound_to is not None and target.bound_to != offered.key:
        raise FenceKeyMismatch(offered.key, stored_key=target.bound_to, target=target.label)
    parameters[OFFERED] = offered.token
    if target.key is not None:
        parameters[OFFERED_KEY] = offered.key
    schemas = statement.get_execution_options().get("schema_translate_map")
    return Write(shape, offered, parameters, schemas)


_shapes: dict[Any, Shape] = {}
_sketched: dict[Any, tuple[Shape, list[str], list[Any]]] = {}


def _keep(where: dict[Any, Any], key: Any, what: Any) -> None:
    if len(where) >= _MOST_SHAPES:
        where.clear()
    where[key] = what


def _shape_of(statement: Dml, dialect: Dialect) -> tuple[Shape, dict[str, sa.BindParameter[Any]]]:
    """The shape of a statement, and its values by the names that they have there."""
    # SQLAlchemy's own key of a statement's shape, by which it keeps compiled statements, too.
    cache_key = statement._generate_cache_key()
    # No two are alike, or a default looks up the values by their columns: this shape has them in it.
    if cache_key is None or _has_curious_default(statement.table):
        return _shape(statement, (), dialect), {}
    known, binds = (dialect.name, cache_key.key), cache_key.bindparams
    shape = _shapes.get(known)
    if shape is None:
        shape = _shape(statement, binds, dialect)
        _keep(_shapes, known, shape)
    return shape, {f"{_VALUE}{at}": bind for at, bind in enumerate(binds)}


def _has_curious_default(table: Any) -> bool:
    """Whether an ``onupdate`` function takes the context, which tells it the other values by name."""
    functions = [
        column.onupdate.arg for column in table.c if getattr(column.onupdate, "is_callable", 0)
    ]
    for function in functions:
        with suppress(ValueError):  # a builtin; SQLAlchemy wraps what takes no argument
            parameters = inspect.signature(function).parameters.values()
            if any(one.default is one.empty for one in parameters):
                return True
    return False


def _remember(
    drawn: Sketch | None, dialect: Dialect, shape: Shape, named: dict[str, sa.BindParameter[Any]]
) -> None:
    names = {id(bind): name for name, bind in named.items()}
    # Equal sets: a shape with values in it would write them again for the next statement.
    if drawn is not None and names.keys() == {id(bind) for bind in drawn.binds}:
        ordered = [names[id(bind)] for bind in drawn.binds]
        _keep(_sketched, (dialect.name, drawn.name), (shape, ordered, drawn.parts))


def _check_parts(statement: Dml) -> None:
    parts = vars(statement)
    if parts.keys() <= _PLAIN:  # nearly always; the check is made for each statement, shape or not
        return
    for name, value in parts.items():
        if name in _PLAIN:
            continue
        empty = value is None or value is False or (isinstance(value, Sized) and not len(value))
        if empty or (name not in _NAMES and name in getattr(statement, "_memoized_keys", ())):
            continue
        # 2.1 keeps the clauses of extensions here: what is not known is not let through.
        _refuse(_NAMES.get(name, f"a part ({name}) that this kit does not know"))


def _shape(statement: Dml, binds: Sequence[sa.BindParameter[Any]], dialect: Dialect) -> Shape:
    described = statement.entity_description
    table = described["table"]
    if not isinstance(table, sa.Table) or not isinstance(statement.table, sa.Table):
        _refuse("an alias, a join or a subquery as its target (name the class or the table itself)")
    target = target_of(described.get("entity", table), dialect)
    if isinstance(statement, sa.Delete) and (other := _cascades_to(table)) is not None:
        _refuse(
            f"a delete that the database passes on to rows of {other.fullname} (ON DELETE), which carry "
            "tokens of their own: it does not compare them"
        )
    values: dict[Any, Any] = dict(getattr(statement, "_values", None) or {})
    kept = {name for column in target.columns for name in (column.key, column.name)}
    own = [column.key for column in target.primary_key]
    if statement.whereclause is not None:
        _look_through(table, statement.whereclause)
    for value in values.values():
        _look_through(table, value, kept)
    for name in values:
        column = table.c.get(name) if isinstance(name, str) else name
        if not kept.isdisjoint((getattr(column, "key", name), getattr(column, "name", name))):
            _refuse(f"a value for {TOKEN} or {KEY} (the fenced write sets them)")
        if getattr(column, "primary_key", False) or getattr(column, "key", None) in own:
            _refuse("a new value for the primary key")
    names: dict[int, str] = {}
    for at, bind in enumerate(binds):
        if bind.required:
            _refuse(f"the parameter {bind.key!r}, which has no value")
        names.setdefault(id(bind), f"{_VALUE}{at}")
    given = _equalities(statement.whereclause)
    sets = unique_sets(table)
    unique = [_names(columns, given, names) for columns in sets]
    key = _names(own, given, names) if frozenset(own) in sets else None
    named_key = [given[name] for name in own if key is not None]
    is_update = isinstance(statement, sa.Update)
    named: Dml = sa.update(target.entity) if is_update else sa.delete(target.entity)
    where: Any = None
    if statement.whereclause is not None:
        # In parentheses, whatever the precedence of an operator of the caller's own making.
        where = sa.sql.elements.Grouping(_with_names(statement.whereclause, names))
        named = named.where(where)
    if isinstance(named, sa.Update) and values:
        named = named.values({to: _with_names(value, names) for to, value in values.items()})
    return Shape(
        target,
        with_fence(named, target),
        where,
        tuple(found for found in unique if found is not None),
        key,
        sa.and_(*(_with_names(clause, names) for clause in named_key)) if named_key else None,
        where is not None
        and any(isinstance(part, sa.sql.expression.SelectBase) for part in visitors.iterate(where)),
        bool(key) and all(_is_exact(clause, dialect) for clause in named_key),
    )


def _cascades_to(table: sa.Table) -> sa.Table | None:
    """A fenced table, this one included, of which a delete deletes or changes rows by foreign keys."""
    reached = [table]
    for parent in reached:
        for other in table.metadata.tables.values():
            actions = {
                (key.ondelete or "").upper() for key in other.foreign_keys if _leads_to(key, parent)
            }
            if TOKEN in other.c and actions & {"CASCADE", "SET NULL", "SET DEFAULT"}:
                return other
            if "CASCADE" in actions and other not in reached:
                reached.append(other)
    return None


def _leads_to(key: sa.ForeignKey, parent: sa.Table) -> bool:
    with suppress(NoReferencedTableError):
        return key.column.table is parent
    return False


def _with_names(part: Any, names: dict[int, str]) -> Any:
    """The expression with parameters, to be given when it is sent, in the place of its values."""

    def name(element: Any, **_options: Any) -> Any:
        if id(element) not in names:
            return None
        return sa.bindparam(
            names[id(element)],
            type_=element.type,
            expanding=element.expanding,
            literal_execute=element.literal_execute,
        )

    return visitors.replacement_traverse(part, {}, name)


def _refuse(what: str) -> NoReturn:
    raise CannotFence(
        f"a fenced write cannot carry {what}. Nothing was sent. Whatever a single plain statement "
        "cannot say belongs inside fenced_transaction()"
    )


def with_fence(statement: Dml, target: Target) -> Dml:
    """The statement with the fence in its WHERE and, if it updates, in its SET."""
    # Names of their own, so that a statement that lost its fence on the way is recognized.
    token: Any = sa.bindparam(OFFERED, type_=sa.BigInteger)
    key: Any = sa.bindparam(OFFERED_KEY, type_=sa.String)
    guarded = statement.where(target.token <= token)
    if target.key is not None:
        guarded = guarded.where(sa.or_(target.key == key, target.key == sa.literal_column("''")))
    if isinstance(guarded, sa.Update):
        guarded = guarded.values(dict(zip(target.terms, (token, key), strict=False)))
    # The unit of work stays out of it: a refused write must not flush what else is pending, and
    # values evaluated in Python would be guesses about a row that another leader may have written.
    return guarded.execution_options(synchronize_session=False, autoflush=False)


def carries_fence(statement: Any, write: Write) -> bool:
    """Whether this is the fenced statement, or one derived from it that kept the whole fence.

    That is: each condition of the fence is joined to the rest by AND, and an update sets token and
    key to what was offered. A condition that became a part of an OR would let stale writes in.
    """
    if not isinstance(statement, type(write.statement)):
        return False
    kept = [one for part in statement._where_criteria for one in _conjuncts(part)]
    fence = write.statement._where_criteria[-len(write.target.terms) :]
    if not all(any(one.compare(condition) for one in kept) for condition in fence):
        return False
    values: dict[Any, Any] = dict(getattr(statement, "_values", None) or {})
    own = {name for column in write.target.columns for name in (column.key, column.name)}
    stamps = [
        getattr(value, "key", None)
        for name, value in values.items()
        if not own.isdisjoint((getattr(name, "key", name), getattr(name, "name", name)))
    ]
    if isinstance(statement, sa.Delete):
        return not stamps
    return sorted(map(str, stamps)) == sorted((OFFERED, OFFERED_KEY)[: len(write.target.terms)])


def _conjuncts(part: Any) -> Iterator[Any]:
    if getattr(part, "operator", None) is operators.and_:
        for one in part.get_children():
            yield from _conjuncts(one)
    else:
        yield part


def _look_through(table: sa.Table, part: ClauseElement, kept: Collection[str] = ()) -> None:
    for element in visitors.iterate(part):
        if getattr(element, "is_dml", False):
            _refuse("another INSERT, UPDATE or DELETE inside it")
        for raw in _raw(element):
            if not is_closed(raw):
                # The fence would stand behind a parenthesis that is not its own: "a) OR (b".
                _refuse(f"SQL with a comment or a parenthesis left open ({raw!r})")
    for element in _outermost(part):
        if isinstance(element, sa.TextClause) or getattr(element, "is_literal", False):
            # It is rendered without parentheses: "a OR b" would step around the fence.
            _refuse("text() or literal_column() (write it as SQL expressions)")
        if not isinstance(element, sa.ColumnClause):
            continue
        home = element.table
        if home is not None and not (isinstance(home, sa.Table) and home.key == table.key):
            _refuse(f"columns of {home} (name the rows by a subquery in where())")
        if element.key in kept:
            # MySQL would compute it from the new token, or from the old one, by column order.
            _refuse(f"a value computed from {element.key} (read it first)")


def _raw(element: Any) -> Iterator[str]:
    """What is rendered of this element as the caller wrote it."""
    if isinstance(element, sa.TextClause):
        yield element.text
    elif getattr(element, "is_literal", False):
        yield element.name
    for one in (getattr(element, "operator", None), getattr(element, "modifier", None)):
        if isinstance(one, operators.custom_op):
            yield one.opstring


def _outermost(part: ClauseElement) -> Iterator[Any]:
    """The elements outside of subqueries, which have their own FROM and their own parentheses."""
    stack: list[Any] = [part]
    while stack:
        element = stack.pop()
        yield element
        if not isinstance(element, (sa.ScalarSelect, sa.Exists, sa.sql.Select)):
            stack.extend(element.get_children())


def _equalities(where: ColumnElement[bool] | None) -> dict[str, Any]:
    """The clauses of the condition that set a column equal to a value, by the columns' keys."""
    if where is None:
        return {}
    conjunction = getattr(where, "operator", None) is operators.and_
    found: dict[str, Any] = {}
    for clause in where.get_children() if conjunction else [where]:
        if getattr(clause, "operator", None) is not operators.eq:
            continue
        column, value = getattr(clause, "left", None), getattr(clause, "right", None)
        if isinstance(column, sa.Column) and isinstance(value, sa.BindParameter):
            found[column.key] = clause
    return found


def _names(columns: Collection[str], given: dict[str, Any], names: dict[int, str]) -> Names | None:
    """The parameters that hold these columns' values; None if at most one row is not certain."""
    found = []
    for column in columns:  # their keys
        clause = given.get(column)
        if clause is None:
            return None
        own, value = clause.left.type, clause.right
        kind = _kind(own)
        if kind is float or kind is not _kind(value.type):
            return None
        if kind is None and type(value.type) is not type(own):
            return None
        name = names.get(id(value))
        if name is not None:
            found.append((name, kind))
        elif kind is not None and not isinstance(value.effective_value, kind):
            return None
    return tuple(found)


def _kind(type_: Any) -> type | None:
    """What a value of this type is in Python when it is sent; None if that is the type's own affair."""
    while isinstance(type_, sa.types.TypeDecorator):
        if type(type_).process_bind_param is not sa.types.TypeDecorator.process_bind_param:
            return None
        type_ = type_.impl_instance
    try:
        return cast("type", type_.python_type)
    except NotImplementedError:
        return None


def _is_exact(clause: Any, dialect: Dialect) -> bool:
    """Whether other values than this one, in Python, are other values to the database as well.

    True of integers and of UUIDs as such. Text is equal by collation, which a mapping does not tell:
    without case, accents or trailing spaces. Numbers equal text on MySQL; what is a date, a decimal or
    a boolean to Python is text, a float or an integer to some database; bytes may be padded; and a
    type of the user's own sends and loads what it likes.
    """
    types = (clause.left.type, clause.right.type)
    return all(
        type(one).__module__.startswith("sqlalchemy.")
        and isinstance(one, (sa.Integer, sa.Uuid))
        and one.python_type in (int, uuid.UUID)
        for type_ in types
        for one in (type_, type_.dialect_impl(dialect))
    )


def unique_sets(table: sa.Table) -> list[frozenset[str]]:
    """Sets of columns, by their keys, that name at most one row each."""
    sets = [list(table.primary_key)] if table.primary_key else []
    sets += [list(rule) for rule in table.constraints if isinstance(rule, sa.UniqueConstraint)]
    for index in table.indexes:
        whole = not index.dialect_kwargs and len(index.columns) == len(index.expressions)
        if index.unique and whole:
            sets.append(list(index.columns))
    return [frozenset(column.key for column in columns) for columns in sets if columns]
