"""Fenced writes of rows that carry their own fence.

The law of this module: one statement on the usual path. Only if it wrote nothing is the row looked
at, on the same connection and in the same transaction, to tell a newer leader's row from one that is
not there. Where several rows may match, all are written or none. A refused write leaves nothing
behind that a later flush could write.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import (
    InstanceState,
    RelationshipDirection,
    Session,
    make_transient_to_detached,
    undefer,
)
from sqlalchemy.orm.attributes import instance_state, set_committed_value

from volcano_locks.errors import CannotFence, FenceRejected, FenceTargetMissing, OutcomeUnknown
from volcano_locks.fencing import offer

from .model import foreign_listeners, target_of, was_flushed
from .place import Place, place_for
from .statement import check_kind, fenced, unique_sets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from volcano_locks.fencing import Fenced

    from .model import Target
    from .statement import Dml, Write

__all__ = ["save", "upsert", "write", "write_or_insert"]

_state: Any = instance_state
_FEW: Final = 500
"""Rows that one query names: SQLite nests no more than 1,000 terms, drivers bind 32,766 values."""


def write(target: Any, lease: Fenced, statement: Dml) -> int:
    """``fenced_update`` and ``fenced_delete``."""
    offered = offer(lease)
    check_kind(statement)
    place = place_for(target, statement)
    prepared = fenced(statement, offered, place.connection.dialect)
    if place.session is not None:
        _refuse_pending(place.session, prepared)
    place.watch(lease)
    count = perform(place, prepared)
    if place.session is not None:
        _renew(place, prepared)
    return count


def perform(place: Place, write: Write) -> int:
    """Write all rows that match or none; the number of rows."""
    try:
        return _all_or_none(place, write)
    except FenceRejected as refusal:
        session = place.session
        if session and any(was_flushed(session, one) for one in _instances(session, write)):
            refusal.args = (
                f"{refusal} That is, by this write: before it, in this transaction, a flush has written "
                "pending changes of this row without the fence. Roll back; next time, set them inside "
                "session.no_autoflush or after the last query",
            )
        raise


def _all_or_none(place: Place, write: Write) -> int:
    if write.single:
        return place.send(write) or _second_look(place, write)
    with place.savepoint():
        if write.shape.subselects or place.hooked:
            # After the write, such a condition may find other rows: all are locked and seen before it.
            for seen in place.rows(write.look(lock=True, limit=None), write.parameters).all():
                write.judge(seen)
            return place.send(write) or _second_look(place, write)
        count = place.send(write)
        # A locking read: on MySQL a plain one would show the transaction's old snapshot. It comes
        # after the write, so a row that the write passed over is still to be seen.
        refused = place.first(write.look(refused_only=True, lock="share"), write.parameters)
        if refused is not None:
            write.judge(refused)
        return count or _second_look(place, write)


def _second_look(place: Place, write: Write) -> int:
    seen = place.first(write.look(), write.parameters)
    if seen is not None:
        write.judge(seen)
    # Not there, or not refused: then the look may be at an old snapshot, the row may have come in
    # between, or this database counts no row that it left as it was. Locked, it cannot change again.
    seen = place.first(write.look(lock=True), write.parameters)
    if seen is None:
        raise FenceTargetMissing(write.offered.key, target=write.target.label)
    write.judge(seen)
    if count := place.send(write):
        return count
    if place.connection.dialect.name in ("mysql", "mariadb") and seen[0] == write.offered.token:
        return int(place.first(write.tally(), write.parameters)[0])
    raise OutcomeUnknown(
        f"the database finds rows that it should write, and says that it wrote none: a trigger, a rule "
        f"or row-level security of {write.target.table.fullname} keeps updates away, or the driver "
        "does not count. Roll back"
    )


def write_or_insert(place: Place, write: Write, insert: sa.Insert) -> bool:
    """Write the one row that the write is after, or insert it; whether it was new."""
    failure: IntegrityError | None = None
    for _round in range(3):  # each round lost means that a rival inserted, or deleted, in between
        try:
            perform(place, write)
        except FenceTargetMissing:
            pass
        else:
            return False
        try:
            with nullcontext() if place.autocommits else place.savepoint():
                place.connection.execute(insert)
        except IntegrityError as error:
            failure = error
        else:
            return True
    assert failure is not None
    raise failure


def upsert(
    target: Any,
    lease: Fenced,
    entity: Any,
    values: Mapping[str, Any],
    key: Sequence[str] | None,
) -> bool:
    """``fenced_upsert``."""
    offered = offer(lease)
    if not hasattr(values, "keys"):
        raise CannotFence("fenced_upsert() takes the values of one row, as a mapping")
    place = place_for(target, sa.update(entity))
    fence = target_of(entity, place.connection.dialect)
    columns: Any = fence.table.c if fence.mapper is None else fence.mapper.columns
    names = key or [name for name, column in columns.items() if column.primary_key]
    if unknown := sorted({*names, *values} - set(columns.keys())):
        raise CannotFence(f"{fence.table.fullname} has no {', '.join(unknown)}")
    if frozenset(columns[name].key for name in names) not in unique_sets(fence.table):
        raise CannotFence(
            f"no unique constraint says that {', '.join(names)} names one row of "
            f"{fence.table.fullname}: the insert could make a second one. Name a unique key"
        )
    if any(values.get(name) is None for name in names):
        raise CannotFence(f"fenced_upsert() needs a value for each of its key: {', '.join(names)}")
    terms = [columns[name] if fence.mapper is None else getattr(entity, name) for name in names]
    update = sa.update(entity).where(
        *(term == values[name] for term, name in zip(terms, names, strict=True))
    )
    rest = {name: value for name, value in values.items() if name not in names}
    prepared = fenced(update.values(rest), offered, place.connection.dialect)
    if place.session is not None:
        _refuse_pending(place.session, prepared)
    place.watch(lease)
    created = write_or_insert(
        place, prepared, sa.insert(entity).values({**_made(fence), **values, **_stamp(prepared)})
    )
    if place.session is not None:
        _renew(place, prepared)
    return created


def _made(target: Target) -> dict[str, Any]:
    """What a flush would give a new row by itself: the class that it is of, and its first version."""
    mapper: Any = target.mapper
    if mapper is None:
        return {}
    made = [(mapper.polymorphic_on, mapper.polymorphic_identity)]
    if mapper.version_id_generator:
        made.append((mapper.version_id_col, mapper.version_id_generator(None)))
    own = set(target.table.c)
    return {
        mapper.get_property_by_column(column).key: value
        for column, value in made
        if value is not None and column in own
    }


def _stamp(write: Write) -> dict[str, Any]:
    return {
        term.key: value
        for term, value in zip(write.target.terms, write.offered[::-1], strict=False)
    }


def save(target: Any, lease: Fenced, instance: Any) -> None:
    """``fenced_save``."""
    offered = offer(lease)
    if not isinstance(target, Session):
        raise CannotFence("fenced_save() takes a session: a connection knows no instances")
    state: Any = sa.inspect(instance, raiseerr=False)
    if not isinstance(state, InstanceState):
        raise CannotFence(f"a {type(instance).__name__} is not an instance of a mapped class")
    if state.detached or state.deleted or state.session not in (None, target):
        raise CannotFence(
            "fenced_save() takes an instance that is new or was loaded by this session; this one is "
            "detached, deleted or another session's. Load it here, set its attributes, save it"
        )
    if _is_leaving(target, instance):
        raise CannotFence(
            f"the next flush of this session deletes the row of this {type(instance).__name__}, without "
            "the fence and whoever has written it by then. Take the deletion back (session.add(row), or "
            "give an orphan its parent again), and use fenced_delete()"
        )
    mapper = state.mapper
    if any(one is instance for one in _handed_over(target, mapper.local_table)):
        raise CannotFence(
            f"a relationship of another instance has taken this {mapper.class_.__name__}, or let it go: "
            "the next flush sets its foreign key, without the fence. Set the foreign key itself instead, "
            "or flush inside fenced_transaction()"
        )
    new = not state.persistent
    key = mapper.primary_key_from_instance(instance) if new else state.identity
    identity: tuple[Any, ...] = tuple(key or ())
    if new and None in identity:
        raise CannotFence(
            f"a new {mapper.class_.__name__} whose key the database chooses has no row to compare "
            "tokens with, so a displaced leader could insert it unseen. Give it a primary key of its "
            "own, or insert it inside fenced_transaction()"
        )
    changes = _changes(state)
    keys = {mapper.get_property_by_column(column).key for column in mapper.primary_key}
    statement = sa.update(mapper.class_).where(
        *(column == value for column, value in zip(mapper.primary_key, identity, strict=True))
    )
    statement = statement.values({k: v for k, v in changes.items() if not new or k not in keys})
    place = place_for(target, statement)
    prepared = fenced(statement, offered, place.connection.dialect)
    if new:
        _refuse_pending(target, prepared)
        if prepared.stored_key() is None:
            raise CannotFence(
                f"{identity!r} may equal the keys of several rows of {mapper.local_table}. Give the new "
                f"{mapper.class_.__name__} a primary key of its columns' own types"
            )
        touched = _instances(target, prepared)
        known = prepared.identity or (_stored_key(place, prepared) if touched else None)
        if any(_state(one).identity == known for one in touched):
            raise CannotFence(
                f"this session has loaded the row that this new {mapper.class_.__name__} names. Set the "
                "attributes of the loaded one, and save that"
            )
    place.watch(lease)
    if not new:
        prepared = prepared._replace(own_identity=identity)
        try:
            perform(place, prepared)
        except BaseException as error:
            # The next flush would write what was refused here. After an error of the database, its
            # transaction may take no SELECT any more.
            _renew(place, prepared, read=isinstance(error, FenceRejected))
            raise
        _renew(place, prepared)
        return
    if state.pending:
        target.expunge(instance)  # or the next flush would insert it without the fence
    insert = sa.insert(mapper.class_).values({**changes, **_stamp(prepared)})
    write_or_insert(place, prepared, insert)
    stored = prepared.identity or _stored_key(place, prepared) or identity
    for column, value in zip(mapper.primary_key, stored, strict=True):
        set_committed_value(instance, mapper.get_property_by_column(column).key, value)
    make_transient_to_detached(instance)
    target.add(instance)
    _renew(place, prepared._replace(own_identity=stored))


def _changes(state: Any) -> dict[str, Any]:
    mapper, name = state.mapper, state.mapper.class_.__name__
    reason = None
    for relation in mapper.relationships:
        if not relation.viewonly and state.attrs[relation.key].history.has_changes():
            reason = f"the relationship {name}.{relation.key} has changed, and its keys are set by a flush"
    if mapper.version_id_col is not None:
        reason = f"{name} counts versions, which a flush does"
    if foreign_listeners(mapper):
        reason = f"{name} has before_update or after_update listeners, which a flush calls"
    if reason:
        raise CannotFence(
            f"fenced_save() is one statement and no flush, but {reason}. Use fenced_update() for the "
            "columns, or flush inside fenced_transaction()"
        )
    found = {
        attribute.key: state.attrs[attribute.key].history.added
        for attribute in mapper.column_attrs
        if isinstance(attribute.columns[0], sa.Column)
    }
    return {key: added[0] for key, added in found.items() if added}


def _instances(session: Session, write: Write) -> list[Any]:
    """The loaded instances that the write may have changed."""
    identity, found = write.identity, []
    kin: dict[type, bool | None] = {}
    # Not by one look-up: an identity token, or another class of the table, is a key of its own.
    for key in list(session.identity_map.keys()):
        cls = key[0]
        if cls not in kin:
            kin[cls] = _kinship(cls, write.target)
        known = kin[cls]
        if known is None or (known and identity is not None and key[1] != identity):
            continue
        instance = session.identity_map.get(key)
        if instance is not None and write.target.table in _state(instance).mapper.tables:
            found.append(instance)
    return found


def _kinship(cls: type, target: Target) -> bool | None:
    """Whether instances known under this class have the target's primary key; None: not its table."""
    mapper: Any = sa.inspect(cls)
    if not any(target.table in one.tables for one in mapper.self_and_descendants):
        return None
    own, theirs = target.primary_key, mapper.primary_key
    return len(own) == len(theirs) and all(map(operator.is_, own, theirs))


def _refuse_pending(session: Session, write: Write) -> None:
    touched = _instances(session, write)
    if not touched:
        return
    pending = {id(instance) for instance in session.dirty if session.is_modified(instance)}
    pending |= {id(instance) for instance in _handed_over(session, write.target.table)}
    for instance in touched:
        if id(instance) in pending or _is_leaving(session, instance):
            raise CannotFence(
                f"this session holds unflushed changes of a {type(instance).__name__}, or its deletion, "
                "that the fenced write may touch; a later flush would write them without the fence. Use "
                "fenced_save(session, lease, row), or session.expire(row) to drop changes and "
                "session.add(row) to drop a deletion"
            )


def _handed_over(session: Session, table: Any) -> Iterator[Any]:
    """The instances whose foreign key the next flush sets, for what a parent has taken or let go of."""
    for parent in (*session.dirty, *session.new, *session.deleted):
        state: Any = _state(parent)
        for relation in state.mapper.relationships:
            if relation.direction is not RelationshipDirection.ONETOMANY or relation.viewonly:
                continue
            if table in relation.mapper.tables:
                added, unchanged, deleted = state.attrs[relation.key].history
                kept = unchanged if parent in session.deleted else ()
                yield from (*added, *kept, *deleted)


def _is_leaving(session: Session, instance: Any) -> bool:
    """Whether the next flush deletes the row of this instance."""
    state: Any = _state(instance)
    # What a parent with delete-orphan let go of is in no list of the session's: the flush finds it.
    return instance in session.deleted or (state.persistent and state.mapper._is_orphan(state))


def _renew(place: Place, write: Write, *, read: bool = True) -> None:
    """Let the session's instances show what the database has now."""
    session = place.session
    assert session is not None
    touched = _instances(session, write)
    if not touched:
        return
    classes = {_state(one).key[0] for one in touched}
    near = {cls for cls in classes if _kinship(cls, write.target)}
    kin = [one for one in touched if _state(one).key[0] in near]
    others = [one for one in touched if _state(one).key[0] not in near]
    if isinstance(write.statement, sa.Delete):
        left = set() if write.identity is not None else _still_there(place, write, kin)
        gone = [_state(one) for one in kin if tuple(_state(one).identity) not in left]
        # As a flush does it, so that a rollback brings them back.
        session._remove_newly_deleted(state for state in gone if state.session is session)
        touched = others
    elif write.identity is None and len(kin) > 1:
        stored = _stored_key(place, write)
        touched = [one for one in kin if _state(one).identity == stored] or kin
        touched += others
    _expire(place, write, touched, read=read)


def _expire(place: Place, write: Write, touched: list[Any], *, read: bool) -> None:
    session = place.session
    assert session is not None
    groups: dict[Any, list[Any]] = {}
    loaded: dict[Any, set[str]] = {}
    for instance in touched:
        state = _state(instance)
        keys = {attribute.key for attribute in state.mapper.column_attrs} - {
            state.mapper.get_property_by_column(column).key for column in state.mapper.primary_key
        }
        stale = [key for key in keys if key in state.dict]
        session.expire(instance, stale)
        groups.setdefault(state.mapper, []).append(instance)
        loaded.setdefault(state.mapper, set()).update(stale)
    # Or the rollback of a savepoint would leave them as they were inside it.
    session._register_altered([_state(instance) for instance in touched])
    if not place.eager or not read:
        return
    for mapper, instances in groups.items():
        deferred = [
            one for one in mapper.column_attrs if one.deferred and one.key in loaded[mapper]
        ]
        options = [undefer(getattr(mapper.class_, attribute.key)) for attribute in deferred]
        for condition in _any_of(mapper.primary_key, instances):
            query = write.placed(sa.select(mapper.class_).where(condition).options(*options))
            if place.routes_here(query):
                # unique(): a relationship that is loaded by a join repeats the rows.
                session.execute(query, bind_arguments={"bind": place.bind}).unique().all()


def _stored_key(place: Place, write: Write) -> tuple[Any, ...] | None:
    """The primary key, as it is stored, of the one row that the condition names; None if not known."""
    query = write.stored_key()
    row = None if query is None else place.first(query, write.parameters)
    return None if row is None else tuple(row)


def _still_there(place: Place, write: Write, touched: list[Any]) -> set[tuple[Any, ...]]:
    key = write.target.primary_key
    queries = [write.placed(sa.select(*key).where(part)) for part in _any_of(key, touched)]
    return {tuple(row) for query in queries for row in place.connection.execute(query)}


def _any_of(key: Sequence[Any], instances: list[Any]) -> Iterator[sa.ColumnElement[bool]]:
    """Conditions that name the rows of the instances, each few enough for any database."""
    identities = [_state(one).identity for one in instances]
    for at in range(0, len(identities), _FEW):
        part = identities[at : at + _FEW]
        if len(key) == 1:
            yield key[0].in_([identity[0] for identity in part])
        else:
            yield sa.or_(
                *(
                    sa.and_(*(column == value for column, value in zip(key, identity, strict=True)))
                    for identity in part
                )
            )
