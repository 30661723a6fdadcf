"""Fenced writes for Django's ORM.

The law of this module: the fence is a certain part of the statement that writes, or nothing is sent.
A row carries the fencing token of its last fenced write and the key of the lock that issued it. A
write under a lease lands only where ``stored token <= offered token`` and where the stored key is
the lease's own or still empty; token and key are written with the values, by the same statement.
Whatever would put the fence elsewhere (a join, a parent table, a sub-select that picks the rows
first) is refused with CannotFence, which says what to do instead.

It trusts the row counts of SQLite, PostgreSQL, MariaDB and MySQL, and no others. It knows leases
only by key, token and ``check()``.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import EmptyResultSet, FieldDoesNotExist, ObjectDoesNotExist
from django.db import DatabaseError, IntegrityError, connections, models, router, transaction
from django.db.models import sql
from django.db.models.deletion import Collector
from django.db.models.expressions import DatabaseDefault, Expression
from django.db.models.signals import post_save, pre_save
from django.db.models.sql.where import ExtraWhere, WhereNode
from django.utils import timezone

from volcano_locks.errors import (
    CannotFence,
    FenceKeyMismatch,
    FenceRejected,
    FenceTargetMissing,
    LeaseLost,
    OutcomeUnknown,
    StaleFence,
)
from volcano_locks.fencing import COMMITS, Fenced, Offer, gave_up, is_closed, offer

from .sketch import asks_other_rows, pins_one_row, sketch_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper
    from typing_extensions import Self

    from .sketch import Sketch

    # Generic for type checkers only.
    _Field = models.Field[Any, Any]
    _BigIntegerField = models.BigIntegerField[int, int]
    _CharField = models.CharField[str, str]
else:
    _Field, _BigIntegerField, _CharField = models.Field, models.BigIntegerField, models.CharField

__all__ = [
    "FenceWarning",
    "FencedManager",
    "FencedModel",
    "FencedQuerySet",
    "FencingTokenField",
    "LockKeyField",
    "fenced_transaction",
]

VENDORS: Final = ("sqlite", "postgresql", "mysql")
"""Databases whose row counts and row locks are tested here; Django calls MariaDB mysql, too."""

TOKEN: Final = "fencing_token"  # noqa: S105 - a column's name
KEY: Final = "fencing_key"
KEY_LENGTH: Final = 128
"""The longest key of a lock, in characters (contract: keys)."""

_NO_SUCH_SAVEPOINT: Final = 1305
_IN_TRANSACTION: Final = 2  # libpq's PQTRANS_INTRANS
_FOUND_ROWS: Final = 2  # MySQL's CLIENT_FOUND_ROWS: count the rows found, not the rows changed

M = TypeVar("M", bound=models.Model)
F = TypeVar("F", bound="Callable[..., Any]")


class FenceWarning(UserWarning):
    """A transaction was committed after the lease that it wrote under had ended."""


def _alters_data(method: F) -> F:
    """Django's mark for methods that no template may call."""
    method.alters_data = True  # type: ignore[attr-defined]
    return method


def _queryset_only(method: F) -> F:
    """Django's mark for methods that managers do not take over: they would hit every row."""
    method.queryset_only = True  # type: ignore[attr-defined]
    return method


# --- the two columns -------------------------------------------------------------------------------


class _FenceField(_Field):
    """A column that only fenced writes, inserts and the reset command set.

    An instance that was loaded earlier carries an older token; if its plain ``save()`` wrote that
    back, displaced leaders would be accepted again. So an update of the row leaves the column as it
    is, whatever the instance says.
    """

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        return super().pre_save(model_instance, add) if add else models.F(self.attname)


class FencingTokenField(_FenceField, _BigIntegerField):
    """The fencing token of the row's last fenced write; 0 if there was none. Signed 64-bit, not null."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("default", 0)
        kwargs.setdefault("db_default", 0)
        kwargs.setdefault("editable", False)
        super().__init__(*args, **kwargs)


class LockKeyField(_FenceField, _CharField):
    """The key of a lock, compared byte by byte also where text is compared without case (MySQL)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("max_length", KEY_LENGTH)
        kwargs.setdefault("editable", False)
        if not kwargs.get("primary_key"):
            kwargs.setdefault("default", "")
            kwargs.setdefault("db_default", "")
        super().__init__(*args, **kwargs)

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        parameters = super().db_parameters(connection)
        if connection.vendor == "mysql":
            parameters["collation"] = "utf8mb4_bin"
        return parameters


# --- what a model's fence is -----------------------------------------------------------------------


class Fault(NamedTuple):
    """Why a model cannot be fenced: the id of its system check, and what to do."""

    id: str
    message: str
    advice: str


class FenceColumns(NamedTuple):
    """Where a model keeps its fence. ``key`` is None if the class is bound to one lock."""

    token: models.Field[Any, Any]
    key: models.Field[Any, Any] | None
    bound_to: str | None
    uniques: tuple[frozenset[str], ...]
    """Sets of columns' attribute names of which each pins at most one row."""


def model_faults(model: type[models.Model]) -> Iterator[Fault]:
    """What keeps the fence of this model from being certain. Looks at the class, not the database."""
    meta = model._meta.concrete_model._meta if model._meta.concrete_model else model._meta
    name = meta.label
    if meta.parents:
        parents = ", ".join(parent.__name__ for parent in meta.parents)
        yield Fault(
            "E001",
            f"{name} inherits from another table ({parents}): a write would be several statements, "
            "and the fence could be in only one of them",
            "make the parent abstract, hold it by a OneToOneField and fence each table, or write "
            "inside fenced_transaction(lease)",
        )
        return
    token = _local_field(model, TOKEN)
    if not isinstance(token, FencingTokenField):
        yield Fault(
            "E002",
            f"{name}.{TOKEN} is {_kind(token)}: other types compare as text, overflow at 32 bits, "
            "or let save() roll the token back",
            f"inherit {TOKEN} from FencedModel, or declare it as FencingTokenField()",
        )
    elif token.null:
        yield Fault(
            "E002",
            f"{name}.{TOKEN} may be NULL, which no comparison matches",
            "declare it as FencingTokenField(), which is not null with default 0, and migrate",
        )
    key = _local_field(model, KEY)
    bound_to = getattr(model, "fence_key", None)
    rebound = getattr(meta.concrete_model, "fence_key", None) != bound_to
    if key is None and rebound:
        yield Fault(
            "E003",
            f"{model._meta.label} is bound to lock {bound_to!r} and the table's own class to another, "
            "but tokens of two locks must not be compared",
            f"bind both to one lock, or keep the column {KEY}",
        )
    if key is None and not bound_to:
        yield Fault(
            "E003",
            f"{name} does not say which lock its tokens belong to, and tokens of two locks must not "
            "be compared",
            f"keep the column {KEY} of FencedModel, or bind the class: fence_key = 'your-lock'",
        )
    elif key is not None and (not isinstance(key, LockKeyField) or key.null):
        yield Fault(
            "E003",
            f"{name}.{KEY} is {_kind(key)}{', nullable' if key.null else ''}: lock keys would not be "
            "compared byte by byte",
            f"inherit {KEY} from FencedModel, or declare it as LockKeyField()",
        )
    elif key is not None and (key.max_length or KEY_LENGTH) < KEY_LENGTH:
        yield Fault(
            "E003",
            f"{name}.{KEY} holds {key.max_length} characters, and a lock's key has up to "
            f"{KEY_LENGTH}: a key that was cut off would be another lock's",
            f"leave max_length out: LockKeyField() has {KEY_LENGTH}",
        )


def _local_field(model: type[models.Model], name: str) -> models.Field[Any, Any] | None:
    try:
        return cast("models.Field[Any, Any]", model._meta.get_field(name))
    except FieldDoesNotExist:
        return None


def _kind(field: models.Field[Any, Any] | None) -> str:
    return "missing" if field is None else f"a {type(field).__name__}"


@functools.lru_cache(maxsize=1_000)
def columns(model: type[models.Model]) -> FenceColumns:
    """The model's fence; CannotFence if it has none that is certain."""
    for fault in model_faults(model):
        raise CannotFence(f"{fault.message}. Instead: {fault.advice}")
    meta = (model._meta.concrete_model or model)._meta
    sets = [frozenset([field.attname]) for field in meta.local_concrete_fields if field.unique]
    # A deferred constraint lets two such rows be, until the commit.
    constraints = [unique for unique in meta.total_unique_constraints if not unique.deferrable]
    groups = [*meta.unique_together, *(unique.fields for unique in constraints)]
    for group in groups:
        members = [cast("_Field", meta.get_field(member)) for member in group]
        if not any(member.null for member in members):
            sets.append(frozenset(member.attname for member in members))
    if isinstance(meta.pk, getattr(models, "CompositePrimaryKey", ())):
        sets.append(frozenset(field.attname for field in meta.pk_fields))
    token, key = meta.get_field(TOKEN), _local_field(model, KEY)
    bound_to = getattr(model, "fence_key", None)
    return FenceColumns(cast("Any", token), key, bound_to, tuple(sets))


class FencePredicate(Expression):
    """``token <= offered and key in ('', offered key)``, on the table that is written.

    ``settled``: only rows that this very lock has fenced before, ``key = offered key``; they need no
    new key. That spares PostgreSQL a fifth of its work for such a row, and all rows but new ones are.
    """

    conditional: ClassVar[bool] = True
    output_field: ClassVar[Any] = models.BooleanField()

    def __init__(
        self, fence: FenceColumns, offered: Offer, table: str, settled: bool = False
    ) -> None:
        self.fence, self.offered, self.table, self.settled = fence, offered, table, settled

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        quote = connection.ops.quote_name
        table = quote(self.table)
        text = f"{table}.{quote(self.fence.token.column)} <= %s"
        if self.fence.key is not None:
            key = f"{table}.{quote(self.fence.key.column)}"
            text += f" AND {key} = %s" if self.settled else f" AND {key} IN ('', %s)"
        return text, _asked(self.fence, self.offered)


def _asked(fence: FenceColumns, offered: Offer) -> tuple[Any, ...]:
    """The predicate's parameters."""
    return (offered.token,) if fence.key is None else (offered.token, offered.key)


class _Leftover(FencePredicate):
    """The rows that the fence keeps from being written, those with a NULL in it included."""

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        quote = connection.ops.quote_name
        table = quote(self.table)
        token = f"{table}.{quote(self.fence.token.column)}"
        text = f"{token} > %s OR {token} IS NULL"
        if self.fence.key is not None:
            key = f"{table}.{quote(self.fence.key.column)}"
            text += f" OR {key} NOT IN ('', %s) OR {key} IS NULL"
        return f"({text})", _asked(self.fence, self.offered)


# --- one statement ---------------------------------------------------------------------------------


_texts: Final[dict[object, str]] = {}
"""The texts of sketched updates, by shape and whether they are for settled rows."""
_MOST_TEXTS: Final = 1_000


class _Write(NamedTuple):
    """One fenced write of one queryset: checked, not sent."""

    rows: FencedQuerySet[Any]
    fence: FenceColumns
    offered: Offer
    lease: Fenced
    connection: BaseDatabaseWrapper
    build: Callable[[bool], Any]
    """Makes the statement: for rows that the lock has fenced before, or (False) for all."""
    sketch: Sketch | None = None

    def run(self) -> int:
        """Write all rows of the queryset or none; the number of rows.

        One statement if the filter pins one row and the database says that it wrote it; a second one
        if the row was never fenced. Otherwise the statement and a look at what it left unwritten, in
        one transaction; if the filter may ask other rows, a lock and a look come before it instead.
        """
        count = self._write()
        _watch(self.lease, self.connection)
        return count

    def _write(self) -> int:
        connection = self.connection
        counts_found = _counts_found_rows(connection)
        pinned = counts_found and (
            self.sketch is not None or pins_one_row(self.rows.query, self.fence.uniques)
        )
        if pinned:
            for settled in (True, False) if self.fence.key else (False,):
                if sent := self._send(*self._statement(settled)):
                    return sent
        statement = self._statement(False)
        with transaction.atomic(using=connection.alias):
            asks = not pinned and asks_other_rows(self.rows.query)
            locked = self._lock_and_count() if asks or not counts_found else 0
            if asks:
                # After the write, the filter may find other rows, or not find those any more.
                self._refuse_leftovers()
            sent = 0
            if not pinned or not connection.features.has_select_for_update:
                # The write comes before the look where only a write locks (SQLite: the whole file).
                sent = self._send(*statement)
            if not asks:
                self._refuse_leftovers()
            if counts_found and not sent and self._lock_and_count():
                # Rows appeared between the two statements; now they are locked.
                sent = self._send(*statement)
                self._refuse_leftovers()
            count = sent if counts_found else locked
            if not count:
                raise FenceTargetMissing(self.offered.key, target=self._target)
            return count

    @property
    def _target(self) -> str:
        return f"row of {self.rows.model._meta.label}"

    def _statement(self, settled: bool) -> tuple[str, Sequence[Any]]:
        """The text, empty where no row can match, and its parameters."""
        fence, offered, sketch = self.fence, self.offered, self.sketch
        if sketch is None:
            return self._made(settled)
        stamp = [fence.token.get_db_prep_save(offered.token, connection=self.connection)]
        if fence.key is not None and not settled:
            stamp.insert(0, offered.key)
        parameters = (*sketch.new, *stamp, *sketch.wanted, *_asked(fence, offered))
        text = _texts.get((sketch.shape, settled))
        if text is None:
            text, made = self._made(settled)
            if len(made) != len(parameters):
                return text, made
            if len(_texts) >= _MOST_TEXTS:
                _texts.clear()
            _texts[sketch.shape, settled] = text
        return text, parameters

    def _made(self, settled: bool) -> tuple[str, Sequence[Any]]:
        compiler = self.build(settled).get_compiler(self.connection.alias, self.connection)
        try:
            text, parameters = compiler.as_sql()
        except EmptyResultSet:
            return "", ()
        _must_be_closed(text)
        return text, parameters

    def _send(self, text: str, parameters: Sequence[Any]) -> int:
        if not text:
            return 0
        alias = self.connection.alias
        with (
            transaction.mark_for_rollback_on_error(using=alias),
            self.connection.cursor() as cursor,
        ):
            cursor.execute(text, parameters)
            sent: int = cursor.rowcount
        if sent < 0:
            raise OutcomeUnknown(
                f"the driver of {alias!r} does not count the rows that it writes, so nobody "
                "knows whether the fenced write landed. Use a driver that counts, or write inside "
                "fenced_transaction(lease)"
            )
        return sent

    def _locked(self) -> models.QuerySet[Any]:
        # A locking read: on MySQL a plain one would show the transaction's old snapshot.
        rows: Any = self.rows.using(self.connection.alias)
        locked: models.QuerySet[Any] = rows.order_by().select_related(None).select_for_update()
        locked.query.standard_ordering = True  # also of a queryset that was reversed
        return locked

    def _lock_and_count(self) -> int:
        return len(self._locked().values_list("pk"))

    def _refuse_leftovers(self) -> None:
        leftovers = self._locked()
        _add(leftovers.query, _Leftover(self.fence, self.offered, _table(leftovers.query)))
        fields = [TOKEN] if self.fence.key is None else [TOKEN, KEY]
        for token, *keys in leftovers.order_by(f"-{TOKEN}").values_list(*fields)[:1]:
            if token is None or None in keys:
                raise FenceRejected(
                    f"fenced write under lock {self.offered.key!r} refused: the {self._target} has "
                    f"NULL as its {TOKEN if token is None else KEY}, and NULL can be compared with "
                    "nothing; nothing was changed. Make the column NOT NULL with its default "
                    "(manage.py check --database ALIAS finds such rows)"
                )
            if keys and keys[0] not in ("", self.offered.key):
                raise FenceKeyMismatch(self.offered.key, stored_key=keys[0], target=self._target)
            raise StaleFence(
                self.offered.key, offered=self.offered.token, stored=token, target=self._target
            )


def _counts_found_rows(connection: BaseDatabaseWrapper) -> bool:
    """Whether an update that changes nothing still counts its rows (MySQL can be set not to)."""
    if connection.vendor != "mysql":
        return True
    flags: int = connection.get_connection_params().get("client_flag", 0)
    return bool(flags & _FOUND_ROWS)


def _has_raw_where(node: WhereNode) -> bool:
    return any(
        _has_raw_where(child) if isinstance(child, WhereNode) else isinstance(child, ExtraWhere)
        for child in node.children
    )


def _table(query: sql.Query) -> str:
    alias: str = query.get_initial_alias()
    return alias


class _Grouped(WhereNode):
    """Conditions in parentheses of their own.

    Django joins conditions with AND as they are; the OR in the SQL of somebody's own lookup or
    function would open a way around what stands beside it.
    """

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        text, parameters = super().as_sql(compiler, connection)
        _must_be_closed(text)
        return f"({text})" if text else text, parameters


def _must_be_closed(text: str) -> None:
    if not is_closed(text):
        raise CannotFence(
            "no fenced write with SQL of your own that has a comment or leaves a parenthesis or a quote "
            f"open ({text:.200}): the fence would stand outside. Instead: close it, or write inside "
            "fenced_transaction(lease)"
        )


def _stamp(fence: FenceColumns, offered: Offer) -> dict[str, Any]:
    """What a fenced write leaves in the fence's columns."""
    return {TOKEN: offered.token} | ({KEY: offered.key} if fence.key else {})


def _add(query: sql.Query, condition: Any) -> None:
    """Put the condition beside all that the query asks for, under no OR and no NOT."""
    query.where = WhereNode([_Grouped([query.where]), condition], connector="AND")


def _refuse(rows: FencedQuerySet[Any], what: str, advice: str) -> None:
    raise CannotFence(
        f"no fenced write of {rows.model._meta.label} through {what}: the fence would not be a part "
        f"of the statement that writes. Instead: {advice}, or write inside fenced_transaction(lease)"
    )


def _prepare(
    rows: FencedQuerySet[Any], lease: Fenced
) -> tuple[FenceColumns, Offer, BaseDatabaseWrapper]:
    """Everything that can be refused without looking at the statement."""
    offered = offer(lease)
    model: type[models.Model] = rows.model
    fence = columns(model)
    if fence.bound_to and fence.bound_to != offered.key:
        raise CannotFence(
            f"{rows.model._meta.label} is bound to lock {fence.bound_to!r}, and this is a lease of "
            f"{offered.key!r}: tokens of two locks cannot be compared. Instead: write it under its "
            "own lock"
        )
    query = rows.query
    if query.combinator:
        _refuse(rows, "union(), intersection() or difference()", "filter with Q objects")
    if query.is_sliced:
        _refuse(rows, "a slice", "filter(pk__in=[...]) with the keys that you picked")
    if query.distinct or query.distinct_fields:
        _refuse(rows, "distinct()", "filter without it")
    if query.group_by is not None or query.where.contains_over_clause:
        _refuse(rows, "an aggregate or window function", "filter(pk__in=[...]) with its result")
    if query.extra or query.extra_tables or _has_raw_where(query.where):
        _refuse(rows, "extra()", "filter with lookups and expressions")
    internals: Any = rows
    if internals._fields is not None:
        _refuse(rows, "values() or values_list()", "filter without it")
    internals._for_write = True
    using = rows.db
    connection = connections[using]
    if connection.vendor not in VENDORS:
        raise CannotFence(
            f"fenced writes on {connection.vendor} are not tested, so they are not built. Use "
            "SQLite, PostgreSQL, MariaDB or MySQL"
        )
    if connection.settings_dict["TEST"].get("MIRROR"):
        _refuse(rows, f"the replica {using!r}", "leave out using(), the router knows the primary")
    return fence, offered, connection


def _seal(rows: FencedQuerySet[Any], query: Any, predicate: FencePredicate) -> Any:
    """The statement with the fence in it; CannotFence if more than one table is."""
    if query.count_active_tables() != 1 or getattr(query, "related_updates", None):
        _refuse(
            rows,
            "a relation to another table",
            "filter(pk__in=Subquery(...)) or filter(Exists(...)), which stay inside one statement",
        )
    query.clear_ordering(force=True)
    query.select_for_update = False
    query.select_related = False
    _add(query, predicate)
    return query


def _refuse_other_fences(collector: Any, targets: models.QuerySet[Any]) -> None:
    """CannotFence if the collected cascade deletes or changes a fenced row beside the targets.

    What was looked at is not asked for again: a child that a rival adds meanwhile meets the foreign
    key, not an unfenced delete.
    """
    fenced = {(_fence_owner(targets.model), row.pk) for row in targets}
    touched = [*collector.data.values(), *collector.fast_deletes]
    for rows in collector.field_updates.values():
        touched += rows
    for rows in touched:
        model = rows.model if isinstance(rows, models.QuerySet) else type(next(iter(rows)))
        owner = _fence_owner(model)
        # Each queryset of fenced rows is read here, and Django takes from then on what was read.
        if owner and any((owner, row.pk) not in fenced for row in rows):
            raise CannotFence(
                f"no fenced delete of {targets.model._meta.label}: it would delete or change rows of "
                f"{model._meta.label} as well, which carry tokens of their own, and a cascade does not "
                "compare them. Instead: fenced_delete() or fenced_update() those rows first, or "
                "delete inside fenced_transaction(lease)"
            )
    collector.fast_deletes = [
        rows for rows in collector.fast_deletes if not _fence_owner(rows.model)
    ]


def _fence_owner(model: type[models.Model]) -> Any:
    """The model whose table has the fence of this model's rows; None if there is no fence."""
    field = _local_field(model, TOKEN)
    return field.model._meta.concrete_model if isinstance(field, FencingTokenField) else None


@dataclass(frozen=True)
class _AfterCommit:
    """Looks again after the commit of the caller's transaction, which may have outlived the lease."""

    lease: Any

    def __call__(self) -> None:
        try:
            self.lease.check()
        except LeaseLost as lost:
            warnings.warn(
                "a transaction that wrote under a lease was committed after the lease had ended "
                f"({lost}): another leader may have started from the state before it. Take the lock "
                "outside the transaction: with client.hold(...) as hold: with transaction.atomic(): ...",
                FenceWarning,
                stacklevel=2,
            )


def _watch(lease: Any, connection: BaseDatabaseWrapper) -> None:
    if not connection.in_atomic_block or not hasattr(lease, "check"):
        return
    # Thousands of writes in one transaction need one look, in each savepoint.
    look = _AfterCommit(lease)
    last = connection.run_on_commit[-1:]
    if not last or last[0][:2] != (set(connection.savepoint_ids), look):
        transaction.on_commit(look, using=connection.alias)


# --- querysets -------------------------------------------------------------------------------------


class FencedQuerySet(models.QuerySet[M]):
    """A queryset whose ``fenced_...`` methods write under a lease.

    They raise LeaseLost before any statement if the hold knows that it is lost, CannotFence if the
    fence could not be certain, StaleFence if a newer leader has written, FenceKeyMismatch if another
    lock's holder has, and FenceTargetMissing if no row matches. Many rows: all or none.

    Like Django's own ``update()``, they send no signals, set no ``auto_now`` field and do not touch
    instances loaded earlier; ``fenced_save()`` of an instance does all three.
    """

    @_alters_data
    def fenced_update(self, lease: Fenced, /, **values: Any) -> int:
        """Write values and token to every row of this queryset; the number of rows, at least 1.

        Without values it only advances the token. Expressions such as ``F("total") + 1`` may be used.
        """
        fence, offered, connection = _prepare(self, lease)
        _refuse_fence_columns(self.model, values, "fenced_update() writes them itself")

        def build(settled: bool) -> Any:
            query: Any = self.query.chain(sql.UpdateQuery)
            query.add_update_values(values)
            if fence.key is not None and not settled:
                query.values.append((fence.key, None, offered.key))
            # Last: MySQL assigns from left to right, and a value may be computed from the old token.
            query.values.append((fence.token, None, offered.token))
            query.clear_select_clause()
            return _seal(self, query, FencePredicate(fence, offered, _table(query), settled))

        sketch = sketch_of(self.query, values, connection, fence.uniques)
        count = _Write(self, fence, offered, lease, connection, build, sketch).run()
        self._result_cache = None
        return count

    @_queryset_only
    @_alters_data
    def fenced_delete(self, lease: Fenced, /) -> int:
        """Delete every row of this queryset; the number of its rows, at least 1.

        One statement where Django itself would need only one. Where related rows or signals are
        concerned, the fence is advanced first, which locks the rows, and Django's own ``delete()``
        follows in the same transaction. A cascade that reaches other rows with a fence (a child's,
        or this table's own) is refused with CannotFence: each has a token and a lock of its own. The
        token goes with the row: if a displaced leader could create the row again, write inside
        ``fenced_transaction(lease)``.
        """
        fence, offered, connection = _prepare(self, lease)

        def build(settled: bool) -> Any:
            query = self.query.chain(sql.DeleteQuery)
            _seal(self, query, FencePredicate(fence, offered, _table(query), settled))
            can = connection.features.delete_can_self_reference_subquery
            if not can and query.get_compiler(connection.alias).contains_self_reference_subquery:
                _refuse(
                    self, "a sub-select from the same table", "filter(pk__in=[...]) with its result"
                )
            return query

        build(False)
        if not Collector(using=connection.alias, origin=self).can_fast_delete(self):
            return self._advance_and_delete(lease, connection.alias)
        count = _Write(self, fence, offered, lease, connection, build).run()
        self._result_cache = None
        return count

    def _advance_and_delete(self, lease: Fenced, using: str) -> int:
        with transaction.atomic(using=using):
            count = self.fenced_update(lease)
            # Only what was advanced: a rival may have added a row that the filter finds, too.
            targets: Any = self.using(using).filter(**_stamp(columns(self.model), offer(lease)))
            targets = targets.order_by().select_related(None)
            targets.query.select_for_update = False  # they are locked
            targets._for_write = True
            collector: Any = Collector(using=using, origin=self)
            collector.collect(targets)
            if len(targets) != count:
                _refuse(
                    self,
                    f"a filter that finds other rows once their fence is advanced (one on {TOKEN} or "
                    f"{KEY}, or on rows that another transaction changes at this moment)",
                    "filter on other columns, or try again",
                )
            _refuse_other_fences(collector, targets)
            collector.delete()
        self._result_cache = None
        return count

    @_alters_data
    def fenced_upsert(
        self, lease: Fenced, /, defaults: dict[str, Any] | None = None, **unique: Any
    ) -> bool:
        """Write ``defaults`` to the one row that ``unique`` names, or insert it; whether it was new.

        ``unique``: plain field names that the primary key or a unique constraint covers. An existing
        row takes one statement. A row that does not exist carries no token yet: if a newer leader
        could have deleted it, write inside ``fenced_transaction(lease)``.
        """
        return self._upsert(lease, unique, defaults or {}) is not None

    def _upsert(
        self,
        lease: Fenced,
        unique: dict[str, Any],
        defaults: dict[str, Any],
        kept: Iterable[str] = (),
    ) -> M | None:
        """The instance that was inserted; None if the row was there. ``kept``: only for a new row."""
        if self.query.where:
            _refuse(self, "a filter", "name every column in fenced_upsert() itself")
        _refuse_fence_columns(
            self.model, {**unique, **defaults}, "fenced_upsert() writes them itself"
        )
        row = self.filter(**unique)
        fence, offered, connection = _prepare(row, lease)
        if not pins_one_row(row.query, fence.uniques):
            _refuse(
                self,
                f"fenced_upsert({', '.join(unique)})",
                "name columns that are unique together, or add a UniqueConstraint for them",
            )
        changes = {name: value for name, value in defaults.items() if name not in set(kept)}
        stamp = _stamp(fence, offered)
        refusal: IntegrityError | None = None
        for _ in range(3):  # each round lost means that a rival inserted, or deleted, in between
            try:
                row.fenced_update(lease, **changes)
            except FenceTargetMissing:
                pass
            else:
                return None
            try:
                with transaction.atomic(using=connection.alias):
                    new: M = self.model(**unique, **defaults, **stamp)
                    rows: Any = models.QuerySet(self.model, using=connection.alias)
                    rows.bulk_create([new])
            except IntegrityError as error:
                refusal = error
            else:
                self._result_cache = None
                _watch(lease, connection)
                return new
        assert refusal is not None
        raise refusal

    @_alters_data
    async def afenced_update(self, lease: Fenced, /, **values: Any) -> int:
        """``fenced_update`` for coroutines."""
        return await sync_to_async(self.fenced_update)(lease, **values)

    @_queryset_only
    @_alters_data
    async def afenced_delete(self, lease: Fenced, /) -> int:
        """``fenced_delete`` for coroutines."""
        return await sync_to_async(self.fenced_delete)(lease)

    @_alters_data
    async def afenced_upsert(
        self, lease: Fenced, /, defaults: dict[str, Any] | None = None, **unique: Any
    ) -> bool:
        """``fenced_upsert`` for coroutines."""
        return await sync_to_async(self.fenced_upsert)(lease, defaults, **unique)

    # What else could move a token back.

    @_alters_data
    def update(self, **kwargs: Any) -> int:
        """Django's ``update()``, not fenced; it refuses to set the fence's own columns."""
        _refuse_fence_columns(self.model, kwargs, _RESET)
        return super().update(**kwargs)

    @_alters_data
    def bulk_update(
        self, objs: Iterable[M], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        """Django's ``bulk_update()``, not fenced; it refuses to set the fence's own columns."""
        fields = list(fields)
        _refuse_fence_columns(self.model, fields, _RESET)
        return super().bulk_update(objs, fields, batch_size)

    @_alters_data
    def bulk_create(
        self,
        objs: Iterable[M],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Any = None,
        unique_fields: Any = None,
    ) -> list[M]:
        """Django's ``bulk_create()``, not fenced; existing rows keep the fence's own columns."""
        if update_fields is not None:
            update_fields = list(update_fields)
            _refuse_fence_columns(self.model, update_fields, _RESET)
        return super().bulk_create(
            objs, batch_size, ignore_conflicts, update_conflicts, update_fields, unique_fields
        )


_RESET: Final = "only fenced writes move them; after a copy of the database use manage.py volcano_locks fence reset"


def _refuse_fence_columns(model: type[models.Model], names: Iterable[str], why: str) -> None:
    if touched := sorted({TOKEN, KEY} & set(names)):
        raise CannotFence(f"leave {' and '.join(touched)} of {model._meta.label} out: {why}")


class FencedManager(models.Manager[M]):
    """The manager of a fenced model: its querysets are FencedQuerySets.

    For a queryset class of your own, inherit FencedQuerySet and use ``YourQuerySet.as_manager()``.
    """

    def get_queryset(self) -> FencedQuerySet[M]:
        internals: Any = self
        return FencedQuerySet(model=self.model, using=self._db, hints=internals._hints)

    @_alters_data
    def fenced_update(self, lease: Fenced, /, **values: Any) -> int:
        """``FencedQuerySet.fenced_update`` of every row."""
        return self.get_queryset().fenced_update(lease, **values)

    @_alters_data
    def fenced_upsert(
        self, lease: Fenced, /, defaults: dict[str, Any] | None = None, **unique: Any
    ) -> bool:
        """See ``FencedQuerySet.fenced_upsert``."""
        return self.get_queryset().fenced_upsert(lease, defaults, **unique)

    @_alters_data
    async def afenced_update(self, lease: Fenced, /, **values: Any) -> int:
        """``FencedQuerySet.fenced_update`` of every row, for coroutines."""
        return await self.get_queryset().afenced_update(lease, **values)

    @_alters_data
    async def afenced_upsert(
        self, lease: Fenced, /, defaults: dict[str, Any] | None = None, **unique: Any
    ) -> bool:
        """See ``FencedQuerySet.fenced_upsert``; for coroutines."""
        return await self.get_queryset().afenced_upsert(lease, defaults, **unique)

    def update(self, **kwargs: Any) -> int:
        """See ``FencedQuerySet.update``."""
        return self.get_queryset().update(**kwargs)

    def bulk_update(
        self, objs: Iterable[M], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        """See ``FencedQuerySet.bulk_update``."""
        return self.get_queryset().bulk_update(objs, fields, batch_size)

    def bulk_create(self, objs: Iterable[M], *args: Any, **kwargs: Any) -> list[M]:
        """See ``FencedQuerySet.bulk_create``."""
        return self.get_queryset().bulk_create(objs, *args, **kwargs)


# --- models ---------------------------------------------------------------------------------------


class FencedModel(models.Model):
    """Base of models whose rows only the current leader may write.

    ``fencing_token`` and ``fencing_key`` are set by fenced writes: the token of the last one, and the
    key of the lock that issued it, so that tokens of two locks are never compared. A class that only
    ever belongs to one lock can do without the second column::

        class RollupState(FencedModel):
            fencing_key = None
            fence_key = "rollup"  # with the prefix, if your settings have one
            cursor = models.BigIntegerField(default=0)

    A plain ``save()`` is not fenced; it leaves both columns as the database has them.
    """

    fence_key: ClassVar[str | None] = None
    """The one lock whose leases may write this class; None if the rows say it themselves."""

    fencing_token = FencingTokenField()
    fencing_key = LockKeyField()

    objects: ClassVar[FencedManager[Self]] = FencedManager()

    class Meta:
        abstract = True

    @_alters_data
    def fenced_save(
        self,
        lease: Fenced,
        /,
        *,
        using: str | None = None,
        update_fields: Iterable[str] | None = None,
    ) -> None:
        """Save this instance under a lease, in one statement; signals and ``auto_now`` as in ``save()``.

        An instance that was loaded updates its row: StaleFence if a newer leader has written,
        FenceTargetMissing if the row is gone. A new instance with a primary key that you chose updates
        that row or inserts it. A new instance whose key the database or a default chooses is refused
        (CannotFence): there is no row to compare with, so insert it in ``fenced_transaction(lease)``.
        """
        offer(lease)
        self._prepare_related_fields_for_save(operation_name="save")  # type: ignore[attr-defined]
        meta = self._meta
        adding = self._state.adding
        chosen = not any(isinstance(part, DatabaseDefault) for part in self._pk_values().values())
        if self.pk is None or (adding and (meta.pk.has_default() or meta.auto_field or not chosen)):
            raise CannotFence(
                f"a new {meta.label} has no row to compare tokens with, so a displaced leader could "
                "insert it unseen. Instead: insert it inside fenced_transaction(lease), or name its "
                "row by what is unique in it: fenced_upsert(lease, {...}, name=...)"
            )
        model = type(self)
        using = using or router.db_for_write(model, instance=self)
        names = self._fields_to_save(update_fields)
        signal: dict[str, Any] = {
            "instance": self,
            "raw": False,
            "using": using,
            "update_fields": None if update_fields is None else frozenset(names),
        }
        origin = meta.concrete_model if meta.proxy else model
        pre_save.send(sender=origin, **signal)
        fields = [cast("_Field", meta.get_field(name)) for name in names]
        values = {field.attname: field.pre_save(self, add=False) for field in fields}
        unset = {name for name, value in values.items() if isinstance(value, DatabaseDefault)}
        values = {name: value for name, value in values.items() if name not in unset}
        computed = {name for name, value in values.items() if hasattr(value, "resolve_expression")}
        generated = {field.attname for field in meta.concrete_fields if field.generated}
        rows: FencedQuerySet[Self] = FencedQuerySet(model=model, using=using)
        created = False
        if adding:
            made = {field.attname for field in fields if getattr(field, "auto_now_add", False)}
            new = rows._upsert(lease, self._pk_values(), values, kept=made)
            created = new is not None
            stale = unset | computed | generated | (made if new is None else set())
            if new is not None:
                shown = new.__dict__
                for name in {field.attname for field in fields} | generated:
                    if name in shown and not hasattr(shown[name], "resolve_expression"):
                        setattr(self, name, shown[name])
                        stale.discard(name)
            self._read_back(stale, using)
        elif stale := unset | computed | (generated & self.__dict__.keys()):
            with transaction.atomic(using=using):
                rows.filter(pk=self.pk).fenced_update(lease, **values)
                self.refresh_from_db(using=using, fields=stale)
        else:
            rows.filter(pk=self.pk).fenced_update(lease, **values)
        self._stamp(lease, using)
        post_save.send(sender=origin, created=created, **signal)

    @_alters_data
    def fenced_delete(self, lease: Fenced, /, *, using: str | None = None) -> None:
        """Delete this instance's row under a lease. See ``FencedQuerySet.fenced_delete``."""
        if self.pk is None:
            raise FenceTargetMissing(lease.key, target=f"row of {self._meta.label}")
        using = using or router.db_for_write(type(self), instance=self)
        FencedQuerySet(model=type(self), using=using).filter(pk=self.pk).fenced_delete(lease)
        self.pk = None

    @_alters_data
    async def afenced_save(
        self,
        lease: Fenced,
        /,
        *,
        using: str | None = None,
        update_fields: Iterable[str] | None = None,
    ) -> None:
        """``fenced_save`` for coroutines."""
        await sync_to_async(self.fenced_save)(lease, using=using, update_fields=update_fields)

    @_alters_data
    async def afenced_delete(self, lease: Fenced, /, *, using: str | None = None) -> None:
        """``fenced_delete`` for coroutines."""
        await sync_to_async(self.fenced_delete)(lease, using=using)

    def _fields_to_save(self, update_fields: Iterable[str] | None) -> list[str]:
        deferred = self.get_deferred_fields()
        own = {
            field.name: field
            for field in self._meta.concrete_fields
            if not field.primary_key
            and not field.generated
            and field.name not in (TOKEN, KEY)
            and field not in getattr(self._meta, "pk_fields", ())
        }
        if update_fields is None:
            return [name for name, field in own.items() if field.attname not in deferred]
        by_attname = {field.attname: name for name, field in own.items()}
        wanted = [by_attname.get(name, name) for name in update_fields]
        if strange := sorted(set(wanted) - set(own)):
            raise ValueError(
                f"update_fields has names that fenced_save() cannot write: {', '.join(strange)}"
            )
        return wanted

    def _pk_values(self) -> dict[str, Any]:
        fields = getattr(self._meta, "pk_fields", None) or [self._meta.pk]
        return {field.attname: getattr(self, field.attname) for field in fields}

    def _read_back(self, names: set[str], using: str) -> None:
        """Show what the database chose; if the row is gone by now, the attributes are deferred.

        Not in one transaction with the write: on MySQL the look for a row that is missing would keep
        a gap locked, and two leaders that insert would deadlock.
        """
        for name in names:
            self.__dict__.pop(name, None)
        if names:
            with suppress(ObjectDoesNotExist):
                self.refresh_from_db(using=using, fields=names)

    def _stamp(self, lease: Fenced, using: str) -> None:
        self.fencing_token = lease.fencing_token
        if any(field.name == KEY for field in self._meta.concrete_fields):
            self.fencing_key = lease.key
        self._state.adding = False
        self._state.db = using


# --- the fence row ---------------------------------------------------------------------------------


@contextmanager
def fenced_transaction(lease: Fenced, using: str | None = None) -> Iterator[None]:
    """A transaction that may write any table, and cannot commit after a newer leader's.

    Its first statement advances the row of the lock's key in the table of fences and locks that row
    until the commit: a newer leader's transaction waits for this one, and an older leader's is
    refused here, before its body runs. ``using``: the alias of the database that the body writes; by
    default the one that the router gives the table of fences. Inside another ``atomic()`` block it is
    a savepoint, and the row stays locked until the outer block ends.

    Raises StaleFence if a newer leader has been here. Raises LeaseLost, before the body and again
    before the commit, if a hold is known to be lost, and FenceRejected if the database gave up the
    transaction in the middle and the body swallowed that; the transaction is rolled back then.
    """
    from .models import Fence

    using = using or router.db_for_write(Fence)
    offered = offer(lease)
    connection = connections[using]
    if connection.vendor not in VENDORS or not connection.features.supports_transactions:
        raise CannotFence(
            f"a fence row needs row locks and transactions, and {using!r} ({connection.vendor}) is "
            "not known to have them. Use SQLite, PostgreSQL, MariaDB or MySQL (InnoDB)"
        )
    with transaction.atomic(using=using):
        stored = _advance(connection, offered)
        if stored > offered.token:
            raise StaleFence(
                offered.key, offered=offered.token, stored=stored, target="fence of the lock"
            )
        with _kept(connection, offered):
            yield
            offer(lease)
        _watch(lease, connection)


@contextmanager
def _kept(connection: BaseDatabaseWrapper, offered: Offer) -> Iterator[None]:
    """FenceRejected if the transaction does not last as long as the body: the fence goes with it.

    A database may give up a transaction in the middle, and a body that swallows the error goes on.
    PostgreSQL takes nothing more then, and turns the commit into a rollback without a word. MySQL, for the victim of a deadlock, goes on in a new transaction, and at the end a savepoint is
    not there any more. SQLite, for a statement that was interrupted or met a full disk, goes on
    without any, so it is asked before each statement.
    """

    if connection.vendor == "sqlite":

        def ask(execute: Any, text: str, *args: Any) -> Any:
            # Not before these: their own error marks the transaction as broken.
            if not text.startswith(("RELEASE", "ROLLBACK")) and not _lasts(connection):
                raise gave_up(offered)
            return execute(text, *args)

        with connection.execute_wrapper(ask):
            yield
        if not _lasts(connection):
            raise gave_up(offered)
    elif connection.vendor == "mysql":
        name = f"volcano_fence_{next(_numbers)}"  # not Django's: its names come again
        _execute(connection, connection.ops.savepoint_create_sql(name))
        yield
        if connection.needs_rollback:
            return
        try:
            _execute(connection, connection.ops.savepoint_commit_sql(name))
        except DatabaseError as error:
            if error.args[:1] != (_NO_SUCH_SAVEPOINT,):
                raise
            raise gave_up(offered, COMMITS) from error
    else:
        yield
        if not connection.needs_rollback and not _in_transaction(connection):
            raise gave_up(offered, ", or has ended it itself")


_numbers: Final = itertools.count()


def _execute(connection: BaseDatabaseWrapper, text: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(text)


def _in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether PostgreSQL's driver is in a transaction that can be committed."""
    return bool(connection.connection.info.transaction_status == _IN_TRANSACTION)


def _lasts(connection: BaseDatabaseWrapper) -> bool:
    """Whether SQLite is still in the transaction, or Django will roll back anyway."""
    return connection.needs_rollback or connection.connection.in_transaction


def _advance(connection: BaseDatabaseWrapper, offered: Offer) -> int:
    """Advance and lock the lock's row, making it if there is none; the token that it holds now.

    One statement in each dialect, so that two first writers need no special case: one waits for the
    other. Of a row that is ahead, nothing is changed.
    """
    from .models import Fence

    quote = connection.ops.quote_name
    fields = [cast("Any", Fence._meta.get_field(n)) for n in ("key", TOKEN, "advanced_at")]
    key, token, at = (quote(field.column) for field in fields)
    table = quote(Fence._meta.db_table)
    now = connection.ops.adapt_datetimefield_value(timezone.now())
    statement = f"INSERT INTO {table} ({key}, {token}, {at}) VALUES (%s, %s, %s) "  # noqa: S608 - names only
    parameters: list[Any] = [offered.key, offered.token, now]
    if connection.vendor == "mysql":
        # Assigned from left to right: the time is decided on the old token.
        statement += (
            f"ON DUPLICATE KEY UPDATE {at} = IF({token} <= %s, %s, {at}), "
            f"{token} = GREATEST({token}, %s)"
        )
        parameters += [offered.token, now, offered.token]
        written = 2  # MySQL's count of a changed row; 1 can be a new one or one left alone
    else:
        statement += (
            f"ON CONFLICT ({key}) DO UPDATE SET {token} = excluded.{token}, {at} = excluded.{at} "
            f"WHERE {table}.{token} <= excluded.{token}"
        )
        written = 1
    with (
        transaction.mark_for_rollback_on_error(using=connection.alias),
        connection.cursor() as cursor,
    ):
        cursor.execute(statement, parameters)
        if cursor.rowcount == written:
            return offered.token
        lock = " FOR UPDATE" if connection.features.has_select_for_update else ""
        cursor.execute(f"SELECT {token} FROM {table} WHERE {key} = %s{lock}", [offered.key])  # noqa: S608 - names only
        return int(cursor.fetchone()[0])
