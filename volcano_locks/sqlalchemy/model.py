"""Where a table keeps its fence.

The law of this module: a table can be fenced if one statement can hold both the write and the fence,
if its token is a 64-bit integer that no NULL escapes, and if it says which lock its tokens belong to.
It decides that from the mapping alone, once per table; it sends nothing.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, cast

import sqlalchemy as sa
from sqlalchemy import event, orm
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.orm import Mapped, mapped_column

from volcano_locks.errors import CannotFence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Dialect

__all__ = [
    "FENCE_TABLE",
    "FencedMixin",
    "Finding",
    "Target",
    "fence_table",
    "fencing_columns",
    "model_findings",
    "target_of",
]

TOKEN: Final = "fencing_token"  # noqa: S105 - a column's name
KEY: Final = "fencing_key"
KEY_LENGTH: Final = 128
FENCE_TABLE: Final = "volcano_locks_fence"


def _key_type() -> sa.String:
    # MySQL compares text without case by default: "Rollup" and "rollup" are two locks.
    exact = mysql.VARCHAR(KEY_LENGTH, charset="utf8mb4", collation="utf8mb4_bin")
    return sa.String(KEY_LENGTH).with_variant(exact, "mysql", "mariadb")


def fencing_columns() -> tuple[sa.Column[int], sa.Column[str]]:
    """New ``fencing_token`` and ``fencing_key`` columns, for a Core ``Table`` or an SQLModel class.

    The token is signed 64-bit, not null, 0 for "never written". The key is the lock that issued the
    token, "" for none yet; leave the column out where ``fence_key`` binds the table to one lock.
    """
    return (
        sa.Column(TOKEN, sa.BigInteger, nullable=False, default=0, server_default=sa.text("0")),
        sa.Column(KEY, _key_type(), nullable=False, default="", server_default=sa.text("''")),
    )


class FencedMixin:
    """Gives a mapped class its fence: the token of the last fenced write, and the lock it came from.

    ``fence_key = "rollup"`` binds all rows to one lock; writes under another are refused. Bound
    classes may drop the column: ``fencing_key = None``.

    A flush that would change either column of a stored row raises CannotFence, as it does for every
    mapped class that has them: an instance that was loaded or pickled earlier must not roll the token
    back. Statements that go past the unit of work
    (``update(Row)``, ``bulk_update_mappings``) are not seen by this guard.
    """

    fence_key: ClassVar[str | None] = None

    if TYPE_CHECKING:
        fencing_token: Mapped[int]
        fencing_key: Mapped[str]
    else:  # without annotations, which SQLModel would read as fields of pydantic's
        fencing_token = mapped_column(
            sa.BigInteger, nullable=False, default=0, server_default=sa.text("0")
        )
        fencing_key = mapped_column(
            _key_type(), nullable=False, default="", server_default=sa.text("''")
        )


def _keep_token(mapper: orm.Mapper[Any], connection: sa.Connection, state: Any) -> None:
    for name in (TOKEN, KEY):
        if name in mapper.column_attrs and state.attrs[name].history.has_changes():
            raise CannotFence(
                f"this flush would set {mapper.class_.__name__}.{name}, which only fenced writes may "
                "do: an old value would let displaced leaders in again. Leave the attribute alone "
                "(after session.merge(), expire it), and write with fenced_save(session, lease, row)"
            )
    if state.session.is_modified(state.obj()):
        _flushed.setdefault(state.session.get_transaction(), set()).add(state.key)


_flushed: weakref.WeakKeyDictionary[orm.SessionTransaction, set[Any]] = weakref.WeakKeyDictionary()


def was_flushed(session: orm.Session, instance: object) -> bool:
    """Whether this transaction has flushed changes of this instance's row, without a fence."""
    transaction = session.get_transaction()
    found = set() if transaction is None else _flushed.get(transaction, set())
    return sa.inspect(instance).key in found


@event.listens_for(orm.Mapper, "mapper_configured")
def _guard(mapper: orm.Mapper[Any], _class: type[Any]) -> None:
    """Keep the token of every class that has a fence, with FencedMixin or with columns of its own."""
    fenced = KEY in mapper.columns or _bound_to(mapper.local_table, mapper)
    if not fenced or TOKEN not in mapper.columns or _keep_token in mapper.dispatch.before_update:
        return
    # raw and retval: SQLAlchemy then keeps the function itself, so that it can be told apart below.
    event.listen(mapper, "before_update", _keep_token, raw=True, retval=True)


def foreign_listeners(mapper: orm.Mapper[Any]) -> list[Any]:
    """What the user wants called by a flush of this mapper's instances."""
    found: list[Any] = []
    for name in ("before_update", "after_update", "before_insert", "after_insert"):
        found += getattr(mapper.dispatch, name)
    return [listener for listener in found if listener is not _keep_token]


def fence_table(
    metadata: sa.MetaData, name: str = FENCE_TABLE, *, schema: str | None = None
) -> sa.Table:
    """The table of fence rows, one per lock key, in this metadata: for ``create_all`` and Alembic.

    Called again with the same name, it returns the same table. It is the table that the migrations
    of ``volcano_locks_django`` make, so both can share it.
    """
    known = metadata.tables.get(f"{schema}.{name}" if schema else name)
    if known is not None:
        return known
    return sa.Table(
        name,
        metadata,
        sa.Column("key", _key_type(), primary_key=True),
        sa.Column(TOKEN, sa.BigInteger, nullable=False),
        sa.Column("advanced_at", sa.DateTime(timezone=True), nullable=False),
        schema=schema,
    )


class Finding(NamedTuple):
    """What keeps a fence from being certain. ``id`` is that of the Django kit's system check."""

    id: str
    message: str
    hint: str


class Target(NamedTuple):
    """A table that can be fenced. ``token`` and ``key`` are in the terms of ``entity``."""

    entity: Any
    table: sa.Table
    mapper: orm.Mapper[Any] | None
    token: Any
    key: Any
    """None if ``bound_to`` alone says which lock it is."""
    bound_to: str | None
    columns: tuple[sa.Column[Any], ...]
    """The columns themselves: the token, and the key if there is one."""

    @property
    def terms(self) -> tuple[Any, ...]:
        """What to select or to set: the token, and the key if there is one."""
        return (self.token,) if self.key is None else (self.token, self.key)

    @property
    def primary_key(self) -> tuple[sa.Column[Any], ...]:
        """The columns by which a session knows a row; the table's own, if no class is mapped."""
        source: Any = self.table if self.mapper is None else self.mapper
        return tuple(source.primary_key)

    @property
    def label(self) -> str:
        return f"row of {self.table.fullname}"


def _mapper(entity: object) -> orm.Mapper[Any] | None:
    found = sa.inspect(entity, raiseerr=False)
    return found if isinstance(found, orm.Mapper) else None


def _fence_column(table: sa.Table, mapper: orm.Mapper[Any] | None, name: str) -> Any:
    if mapper is None:
        return table.c.get(name)
    attribute = mapper.column_attrs.get(name)
    return None if attribute is None else attribute.columns[0]


def _bound_to(table: Any, mapper: orm.Mapper[Any] | None) -> str | None:
    bound = getattr(mapper.class_, "fence_key", None) if mapper else table.info.get("fence_key")
    return bound if isinstance(bound, str) else None


def _bound_of(table: sa.Table, mapper: orm.Mapper[Any]) -> list[str]:
    """The locks that the classes of this table are bound to."""
    classes = [one for one in mapper.registry.mappers if one.local_table is table]
    return sorted({str(_bound_to(table, one)) for one in classes})


def model_findings(entity: object, dialect: Dialect | None = None) -> Iterator[Finding]:
    """What keeps the fence of this mapped class or Table from being certain; looks at no database.

    Without a dialect, an Integer counts as too narrow; SQLite's are 64-bit all the same.
    """
    mapper = _mapper(entity)
    table = mapper.local_table if mapper else entity
    name = mapper.class_.__name__ if mapper else getattr(table, "fullname", repr(entity))
    whole = mapper is None or (len(mapper.tables) == 1 and mapper.selectable is table)
    if not isinstance(table, sa.Table) or not whole:
        yield Finding(
            "volcano_locks.E001",
            f"{name} is not one table: a write would be several statements, and the fence could be "
            "in only one of them",
            "fence a class that has one table (single-table or concrete inheritance), or write "
            "inside fenced_transaction(session, lease)",
        )
        return
    token = _fence_column(table, mapper, TOKEN)
    if token is None:
        yield Finding(
            "volcano_locks.E002",
            f"{name} has no {TOKEN} column",
            "inherit FencedMixin, or add *fencing_columns() to the Table, and migrate",
        )
        return
    if not is_wide(token.type, dialect):
        yield Finding(
            "volcano_locks.E002",
            f"{name}.{TOKEN} is {token.type!r}: real fencing tokens overflow 32 bits, text compares "
            "'10' below '9', and other types may lose digits",
            "declare it as BigInteger (FencedMixin and fencing_columns() do), and migrate",
        )
    if token.nullable:
        yield Finding(
            "volcano_locks.E002",
            f"{name}.{TOKEN} may be NULL, which no comparison matches",
            "declare it nullable=False with server_default '0', and migrate",
        )
    key = _fence_column(table, mapper, KEY)
    if key is None and not _bound_to(table, mapper):
        yield Finding(
            "volcano_locks.E003",
            f"{name} does not say which lock its tokens belong to, and tokens of two locks must not "
            "be compared",
            f"keep the column {KEY}, or bind it: fence_key = 'your-lock' on the class, "
            "info={'fence_key': 'your-lock'} on a Table",
        )
    elif key is None and mapper and len(bound := _bound_of(table, mapper)) > 1:
        yield Finding(
            "volcano_locks.E003",
            f"the classes of {table.fullname} are bound to several locks ({', '.join(bound)}), and "
            "tokens of two locks must not be compared",
            f"bind all to one lock, or keep the column {KEY}",
        )
    elif key is not None and (not isinstance(key.type, sa.String) or key.nullable):
        yield Finding(
            "volcano_locks.E003",
            f"{name}.{KEY} is {key.type!r}{', nullable' if key.nullable else ''}: lock keys would "
            "not be compared byte by byte",
            "take the column from FencedMixin or fencing_columns()",
        )
    elif key is not None:
        yield from _key_findings(f"{name}.{KEY}", key.type, dialect)


def _key_findings(where: str, type_: Any, dialect: Dialect | None) -> Iterator[Finding]:
    if dialect is not None:
        type_ = type_.dialect_impl(dialect)
    if type_.length is not None and type_.length < KEY_LENGTH:
        yield Finding(
            "volcano_locks.E003",
            f"{where} holds {type_.length} characters, and a lock key has up to {KEY_LENGTH}",
            "take the column from FencedMixin or fencing_columns(), and migrate",
        )
    if dialect is not None and not _is_exact(type_, dialect.name):
        yield Finding(
            "volcano_locks.E003",
            f"{where} is {type_!r}, which {dialect.name} compares without case unless its collation "
            "says otherwise: 'Rollup' and 'rollup' are two locks",
            "take the column from FencedMixin or fencing_columns(), and migrate",
        )


def _is_exact(type_: Any, vendor: str) -> bool:
    """Whether text of this type is compared byte by byte."""
    collation = (getattr(type_, "collation", None) or "").lower()
    if vendor in ("mysql", "mariadb"):
        return is_binary(collation) or bool(getattr(type_, "binary", False))
    if vendor == "sqlite":
        return collation in ("", "binary")
    return not isinstance(type_, postgresql.CITEXT)


def is_binary(collation: str) -> bool:
    """Whether MySQL and MariaDB compare byte by byte under this collation."""
    return collation == "binary" or collation.endswith("_bin")


def is_wide(type_: sa.types.TypeEngine[Any], dialect: Dialect | None) -> bool:
    """Whether a column of this type holds and compares every fencing token exactly."""
    if dialect is not None:
        type_ = type_.dialect_impl(dialect)
        if dialect.name == "sqlite":
            return isinstance(type_, sa.Integer)
    return isinstance(type_, sa.BigInteger)


_known: weakref.WeakKeyDictionary[Any, dict[str, Target]] = weakref.WeakKeyDictionary()


def target_of(entity: Any, dialect: Dialect) -> Target:
    """The fence of a mapped class or Table; CannotFence if it has none that is certain."""
    mapper = _mapper(entity)
    targets = _known.setdefault(mapper or entity, {})
    if dialect.name not in targets:
        if mapper is not None:
            _guard(mapper, mapper.class_)  # configured before this module was imported
        if mapper is None and not isinstance(entity, sa.Table):
            raise CannotFence(f"{entity!r} is neither a mapped class nor a Table")
        for finding in model_findings(entity, dialect):
            raise CannotFence(f"{finding.message}. Instead: {finding.hint}")
        table = cast("sa.Table", mapper.local_table if mapper else entity)
        found = {name: _fence_column(table, mapper, name) for name in (TOKEN, KEY)}
        columns = {name: column for name, column in found.items() if column is not None}
        terms = {name: getattr(mapper.class_, name) for name in columns} if mapper else columns
        targets[dialect.name] = Target(
            entity,
            table,
            mapper,
            terms[TOKEN],
            terms.get(KEY),
            _bound_to(table, mapper),
            tuple(columns.values()),
        )
    return targets[dialect.name]
