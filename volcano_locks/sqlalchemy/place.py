"""Where a fenced write runs: one connection, one transaction, and the session around it, if any.

The law of this module: every statement of one fenced write, the look after it included, goes over
the connection that writes, whatever the session routes elsewhere. What is pending in the session is
never flushed by it. A lease that ends before its writes are committed takes the commit with it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session

from volcano_locks.errors import CannotFence, LeaseLost, OutcomeUnknown

from .statement import carries_fence

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection, Engine, NestedTransaction, RootTransaction

    from volcano_locks.fencing import Fenced

    from .statement import Write

__all__ = ["Place", "lasts", "on", "place_for"]


class Place:
    """A connection in a transaction, and the session that it is taken from."""

    def __init__(
        self,
        connection: Connection,
        session: Session | None = None,
        bind: Engine | Connection | None = None,
    ) -> None:
        self.connection = connection
        self.session = session
        self.bind = bind

    @property
    def eager(self) -> bool:
        """Whether no attribute may be left to a later lazy load: there is none under asyncio."""
        assert self.session is not None
        return self.connection.dialect.is_async or not self.session.expire_on_commit

    @property
    def hooked(self) -> bool:
        """Whether ``do_orm_execute`` listeners may add criteria, which then hold for looks as well."""
        return self.session is not None and bool(self.session.dispatch.do_orm_execute)

    def send(self, write: Write) -> int:
        """Execute the write; the number of rows that the database says it wrote."""
        dialect, statement = self.connection.dialect, write.statement
        if write.schemas is not None:
            statement = statement.execution_options(schema_translate_map=write.schemas)
        if dialect.supports_sane_rowcount:
            count = getattr(self._execute(statement, write), "rowcount", -1)
        else:
            returns = (
                dialect.update_returning
                if isinstance(statement, sa.Update)
                else dialect.delete_returning
            )
            if self.hooked or not returns:
                raise CannotFence(
                    f"{dialect.name} with {dialect.driver} does not count the rows that it writes, "
                    "so a refusal could not be told from a success. Use a driver that counts them"
                )
            returned = statement.returning(*write.target.table.primary_key)
            count = len(self.connection.execute(returned, write.parameters).all())
        if count < 0:
            raise OutcomeUnknown(
                f"the driver {dialect.driver} did not count the rows of this write, so whether it "
                "landed is not known. Roll back, and use a driver that counts them"
            )
        return int(count)

    def _execute(self, statement: Any, write: Write) -> Any:
        if not self.hooked:
            # Not over the session: whatever it routes elsewhere, this connection is the one.
            return self.connection.execute(statement, write.parameters)
        assert self.session is not None
        sent = False

        def inspect(_connection: object, clause: Any, *_more: object) -> None:
            nonlocal sent
            fenced = carries_fence(clause, write)
            sent = sent or fenced
            if getattr(clause, "is_dml", False) and not fenced:
                raise CannotFence(
                    "a do_orm_execute listener of this session replaced the fenced statement by one "
                    "without the fence; nothing was sent. Let it pass updates and deletes on, or "
                    "write over session.connection()"
                )

        event.listen(self.connection, "before_execute", inspect)
        try:
            result = self.session.execute(statement, write.parameters)
        finally:
            event.remove(self.connection, "before_execute", inspect)
        answered = getattr(getattr(result, "context", None), "invoked_statement", None)
        if not sent or not carries_fence(answered, write):
            raise OutcomeUnknown(
                "the session did not send the fenced write over the connection that get_bind() names: "
                "a do_orm_execute listener answered it, or get_bind() changed its mind. Roll back; let "
                "both pass updates and deletes on, or write over session.connection()"
            )
        return result

    def first(self, query: sa.Select[Any], parameters: dict[str, Any]) -> Any:
        """The first row of the query, seen on the connection that writes; None if there is none."""
        return self.rows(query, parameters).first()

    def rows(self, query: sa.Select[Any], parameters: dict[str, Any]) -> sa.Result[Any]:
        """The rows of the query, seen on the connection that writes."""
        if not self.hooked:
            return self.connection.execute(query, parameters)
        assert self.session is not None
        if not self.routes_here(query):
            raise CannotFence(
                "this session adds criteria to queries (do_orm_execute) and routes them by its own "
                "get_bind(), so the look after a fenced write could be at a replica. Let get_bind() "
                "honour its argument bind, or write over session.connection()"
            )
        return self.session.execute(query, parameters, bind_arguments={"bind": self.bind})

    def routes_here(self, query: sa.Select[Any]) -> bool:
        """Whether the session sends this query to the connection that writes when it is told to."""
        assert self.session is not None
        try:
            return self.session.get_bind(clause=query, bind=self.bind) is self.bind
        except TypeError:  # an override that knows no bind
            return False

    @property
    def autocommits(self) -> bool:
        """Whether each statement is committed by itself."""
        level = self.connection.get_execution_options().get("isolation_level")
        if level is None:
            level = getattr(self.connection.dialect, "_on_connect_isolation_level", None)
        # The driver is asked as well: connect_args may have told it so behind SQLAlchemy's back.
        return level == "AUTOCOMMIT" or _driver_commits(self.connection)

    def need_transaction(self, what: str) -> None:
        """CannotFence if each statement here is committed by itself."""
        if self.autocommits:
            raise CannotFence(
                f"{what} takes a transaction, and this connection commits each statement by itself "
                "(AUTOCOMMIT). Use a connection with another isolation level"
            )

    def begin(self, what: str) -> None:
        """See to it that the database is in a transaction; CannotFence if it cannot be."""
        self.need_transaction(what)
        if self.connection.dialect.name != "sqlite":
            return
        # Python's sqlite3 opens no transaction before SAVEPOINT, and releasing the outermost
        # savepoint would then commit: the caller's rollback would come too late. With
        # isolation_level=None it opens none at all, and the fence would be let go of at once.
        if not lasts(self.connection):
            self.connection.exec_driver_sql("BEGIN IMMEDIATE")
        elif self.connection.in_nested_transaction() and not self._surely_begun:
            raise CannotFence(
                f"{what} inside a savepoint that may be all there is of the transaction: Python's sqlite3 "
                "begins none before SAVEPOINT, and RELEASE would commit. Begin it yourself: with "
                "isolation_level=None in connect_args and a listener that sends BEGIN, as SQLAlchemy "
                "documents for pysqlite and aiosqlite; or leave the savepoint out"
            )
        if root := self.connection.get_transaction():
            _begun.add(root)

    @property
    def _surely_begun(self) -> bool:
        known = self.connection.get_transaction() in _begun
        return known or bool(
            self.connection.dispatch.begin or self.connection.engine.dispatch.begin
        )

    @property
    def in_transaction(self) -> bool:
        """Whether the session or connection is still in the transaction that it was in."""
        return (self.session or self.connection).in_transaction()

    def savepoint(self) -> NestedTransaction:
        """A savepoint that can be undone without ending the transaction."""
        self.begin("undoing a part of the work")
        # Session.begin_nested() would flush what is pending.
        return self.connection.begin_nested()

    def watch(self, lease: Fenced) -> None:
        """Refuse the commit of this transaction if the lease has ended by then, as far as it knows."""
        if getattr(lease, "check", None) is None:  # a plain Lease does not know
            return
        if self.connection.in_nested_transaction():
            self.begin("a fenced write under a live hold")
        leases = _watched.get(self.connection)
        if leases is None:
            _listen(self.connection.engine)
            leases = _watched[self.connection] = []
        for known in leases:
            if known is lease:
                return
        leases.append(lease)


def lasts(connection: Connection) -> bool:
    """Whether the driver is in a transaction that can be committed; True where it cannot tell."""
    driver = connection.connection.driver_connection
    status = getattr(getattr(driver, "info", None), "transaction_status", _IN_TRANSACTION)
    return bool(getattr(driver, "in_transaction", status == _IN_TRANSACTION))


_IN_TRANSACTION = 2
"""libpq's PQTRANS_INTRANS."""
_begun: weakref.WeakSet[RootTransaction] = weakref.WeakSet()
"""Transactions of SQLite that began with BEGIN, not with a savepoint."""


def _driver_commits(connection: Connection) -> bool:
    wire = connection.connection
    driver = wire.driver_connection
    # An adapter of SQLAlchemy's, the driver itself, or the sqlite3 connection below aiosqlite.
    for one in (wire.dbapi_connection, driver, getattr(driver, "_conn", None)):
        setting = getattr(one, "autocommit", None)  # sqlite3 from Python 3.12 on: -1 if not set
        if isinstance(setting, bool):
            return setting
        ask = getattr(one, "get_autocommit", None)  # MySQL's drivers
        if callable(ask):
            return bool(ask())
    return False


_watched: weakref.WeakKeyDictionary[Connection, list[Fenced]] = weakref.WeakKeyDictionary()
_listening: weakref.WeakSet[Engine] = weakref.WeakSet()


def _listen(engine: Engine) -> None:
    # Once for an engine: a session takes a new Connection for each transaction, and four listeners
    # on each would cost as much as the write.
    if engine in _listening:
        return
    event.listen(engine, "commit", _still_led)
    event.listen(engine, "prepare_twophase", _still_led)
    event.listen(engine, "rollback", _forget)
    event.listen(engine, "rollback_twophase", _forget)
    _listening.add(engine)


def _still_led(connection: Connection, *_xid: object) -> None:
    watched = _watched.get(connection)
    if not watched:
        return
    try:
        for lease in watched:
            lease.check()  # type: ignore[attr-defined]  # watch() has seen that it can
    except LeaseLost as lost:
        _undo(connection)
        raise LeaseLost(
            lost.key,
            f"{lost.reason}; what it wrote was not committed yet and is rolled back. Commit while the "
            "lease is held: the transaction belongs inside the hold",
            fencing_token=lost.fencing_token,
        ) from lost
    watched.clear()


def _undo(connection: Connection) -> None:
    # Not left to the caller: closed after a commit that failed, SQLAlchemy would hand the connection
    # back to the pool with the transaction open, and whoever gets it next would commit these writes.
    try:
        connection.connection.rollback()
    except (
        Exception
    ):  # in two phases, or broken: then the server rolls back what loses its connection
        connection.invalidate()


def _forget(connection: Connection, *_xid: object) -> None:
    if leases := _watched.get(connection):
        leases.clear()


def place_for(target: Any, statement: Any, *, bind: Any = None) -> Place:
    """Where this session or connection would execute the statement."""
    if isinstance(target, sa.Connection):
        return Place(target)
    if not isinstance(target, Session):
        raise CannotFence(
            f"a fenced write takes a Session, a scoped_session, a Connection or their async twins, "
            f"not a {type(target).__name__}"
        )
    if hasattr(target, "shard_chooser"):
        raise CannotFence(
            "a ShardedSession may send one statement to several databases; write to one shard over "
            "its own connection: session.connection(bind_arguments={'shard_id': ...})"
        )
    if bind is None:
        subject = statement._propagate_attrs.get("plugin_subject")
        mapper = {} if subject is None else {"mapper": subject.mapper}
        try:
            bind = target.get_bind(clause=statement, **mapper)
        except UnboundExecutionError as error:
            raise CannotFence(
                f"this session has several databases and does not say which one has {statement.table}. "
                "Say it: fenced_transaction(session, lease, bind=engine), or Session(binds={...})"
            ) from error
    connection = target.connection(bind_arguments={"bind": bind})
    return Place(connection, target, bind)


def on(target: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(target, *args)`` on the plain session or connection below target.

    An awaitable of its result if the target is async. What a function does there is the same code
    for both.
    """
    if hasattr(target, "registry") and callable(target):  # scoped_session, async_scoped_session
        target = target()
    run_sync = getattr(target, "run_sync", None)
    if run_sync is None:
        return function(target, *args)
    return run_sync(function, *args)
