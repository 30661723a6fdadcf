"""Where the lease table lives: one SQLite file that processes share, or memory.

The law of this module: one request is one short immediate transaction, and what was answered is on
the disk. The table decides, the quota counts in the same transaction, and the store only reads and
writes rows. It never deletes or converts a file that it does not know.

Why a rollback journal and not WAL: people delete the file under running processes. SQLite notices
that on its own in this mode; in WAL mode a ``-shm`` that is left behind corrupts the next file. The
journal stays and is emptied by overwriting its head (PERSIST), the quickest way of the three for a
disk. Why FULL: after a power cut a machine elsewhere may still hold.

One connection per process, under a mutex: SQLite lets one writer in at a time anyway. A child after
``fork`` makes its own and never touches its parent's, not even to close it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

from ..contract import Operation
from ..errors import ConfigurationError
from .quota import Usage, spend
from .table import GRACE_MS, Answer, Record, Refusal, decide

try:
    import fcntl

    _HAS_FLOCK = True
except ImportError:
    _HAS_FLOCK = False

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..contract import Request

__all__ = ["Contents", "Limited", "LockRow", "Store", "StoreUnavailable", "TenureRow"]

APPLICATION_ID: Final = 0x564C434B  # "VLCK"
SCHEMA_VERSION: Final = 2
PATIENCE: Final = 3.0
"""Seconds to wait for other processes' transactions; after that nobody knows (rule 11)."""
_NAP: Final = 0.001
"""Seconds between two tries for a lock: others leave gaps of that length between transactions."""
_KEPT_TENURES: Final = 5_000
_PRUNED_EVERY: Final = 100
_T = TypeVar("_T")
_ATTEMPTS: Final = 8
"""How often a file that vanished under a transaction is opened afresh."""

# What a request reads and writes is in one b-tree, so that a commit journals and writes as few pages
# as it can: the file's first one and this leaf, plus the timeline's last leaf when a term ends.
_SCHEMA: Final = (
    """CREATE TABLE entry (
        project TEXT NOT NULL, key TEXT NOT NULL, owner BLOB, fencing_token INTEGER,
        acquired_at INTEGER, expires_at INTEGER, contended INTEGER, minute INTEGER, used INTEGER,
        refused INTEGER, PRIMARY KEY (project, key)) WITHOUT ROWID""",
    """CREATE TABLE tenure (
        id INTEGER PRIMARY KEY, project TEXT NOT NULL, key TEXT NOT NULL,
        fencing_token INTEGER NOT NULL, started INTEGER NOT NULL, ended INTEGER NOT NULL,
        ending TEXT NOT NULL)""",
)
# The entry of a project's usage has an empty blob for its key: no text equals it, so no lock has it.
_READ: Final = (
    "SELECT usage.minute, usage.used, usage.refused, lock.owner, lock.fencing_token, "
    "lock.acquired_at, lock.expires_at, lock.contended FROM (SELECT 1) "
    "LEFT JOIN entry AS usage ON usage.project = ?1 AND usage.key = x'' "
    "LEFT JOIN entry AS lock ON lock.project = ?1 AND lock.key = ?2"
)
_WRITE_USAGE: Final = (
    "REPLACE INTO entry (project, key, minute, used, refused) VALUES (?, x'', ?, ?, ?)"
)
_WRITE_LOCK: Final = (
    "REPLACE INTO entry (project, key, owner, fencing_token, acquired_at, expires_at, contended) "
    "VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_WRITE_TENURE: Final = (
    "INSERT INTO tenure (project, key, fencing_token, started, ended, ending) "
    "VALUES (?, ?, ?, ?, ?, ?)"
)
_READ_LOCKS: Final = (
    "SELECT project, key, owner, fencing_token, acquired_at, expires_at, contended "
    "FROM entry WHERE key <> x'' ORDER BY project, key"
)
_READ_USAGES: Final = "SELECT project, minute, used, refused FROM entry WHERE key = x''"
_READ_TENURES: Final = (
    "SELECT project, key, fencing_token, started, ended, ending FROM tenure WHERE ended >= ? "
    "UNION ALL SELECT project, key, fencing_token, acquired_at, NULL, NULL FROM entry "
    "WHERE owner IS NOT NULL ORDER BY 4, 3"
)


class StoreUnavailable(Exception):
    """Ownership cannot be decided right now; the message says why."""


class Limited(NamedTuple):
    """The quota is used up for so many whole seconds; the request had no effect (rule 10)."""

    seconds: int


Outcome: TypeAlias = Answer | Limited


class LockRow(NamedTuple):
    """One lock, for the operators' view. ``contended``: acquires refused so far."""

    project: str
    key: str
    record: Record
    contended: int


class TenureRow(NamedTuple):
    """One term of one holder, for the timeline. ``ended`` is None while nobody has followed;
    ``ending`` is then None too, else "released", "forced" or "expired". Milliseconds."""

    project: str
    key: str
    fencing_token: int
    started: int
    ended: int | None
    ending: str | None


class Contents(NamedTuple):
    """What a store holds, at one instant."""

    locks: list[LockRow]
    """All that ever were, by project and key."""
    tenures: list[TenureRow]
    """Oldest first."""
    usages: dict[str, Usage]
    """By project, the operations of the last minute in which there were any."""


class Store:
    """The table's rows. ``path`` None: memory, gone with this process and not shared with children.

    Nothing is opened before the first request or ``open()``. ConfigurationError, naming the path
    and the remedy, if that first opening fails; StoreUnavailable for whatever fails later.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        # Re-entrant: an error that a signal handler raises in the wrong instant must not leave the
        # main thread waiting for itself.
        self._mutex = threading.RLock()
        self._gate = _Gate(path)
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._opened = False
        self._orphaned = False
        _stores.add(self)

    def open(self) -> None:
        """Open the file now; ConfigurationError if it cannot serve."""
        self._take_turn()
        try:
            self._connected()
        finally:
            self._mutex.release()

    def close(self) -> None:
        """Close what this process opened; a later request opens it again. Memory is gone then."""
        with self._mutex:
            self._drop()

    def __del__(self) -> None:
        # A forgotten store gives its file back without a warning; a child forgot it at the fork.
        if hasattr(self, "_connection"):
            self._drop()

    def transact(self, project: str, request: Request, now: int, quota: int) -> Outcome:
        """Count the request, decide it and keep the result: all of it, or nothing.

        ``now``: milliseconds. StoreUnavailable if it cannot be told what the outcome is.
        """
        return self._run(lambda db: _transact(db, project, request, now, quota))

    def read(self, since: int = 0) -> Contents:
        """All that there is, at one instant; of the terms those that had not ended before ``since``
        (milliseconds). StoreUnavailable as in ``transact``."""
        return self._run(lambda db: _read(db, since))

    def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        self._take_turn()
        try:
            for _ in range(_ATTEMPTS):
                db = self._connected()
                try:
                    with self._gate:
                        # Looked at inside the gate: nobody makes a new file until this is over.
                        if not self._vanished():
                            result = _in_transaction(db, work)
                            if not self._vanished():
                                return result
                except (sqlite3.Error, OSError) as error:
                    if not self._vanished():
                        raise StoreUnavailable(_explain(error, self.path)) from error
                # Not there, or answered from a file that nobody will find again: once more.
                self._drop()
        finally:
            self._mutex.release()
        raise StoreUnavailable(f"the store file {self.path} keeps vanishing")

    def _take_turn(self) -> None:
        if not self._mutex.acquire(timeout=PATIENCE):
            raise StoreUnavailable("the local store is busy in this process")

    def _connected(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        if self.path is None and self._orphaned:
            raise StoreUnavailable("a store in memory lives in one process; share a file instead")
        for _ in range(_ATTEMPTS):
            before = _identify(self.path)
            try:
                with self._gate:
                    self._connection = _connect(self.path)
            except (sqlite3.Error, OSError, ConfigurationError) as error:
                if before != _identify(self.path):
                    continue  # made or deleted by another meanwhile: that may be all that was wrong
                raise self._complaint(error) from error
            self._identity = _identify(self.path)
            # What was not there before is opened again: only then it is certain which file this is.
            if self.path is None or (before is not None and before == self._identity):
                self._opened = True
                return self._connection
            self._drop()
        raise StoreUnavailable(f"the store file {self.path} keeps vanishing")

    def _complaint(self, error: Exception) -> Exception:
        """A file that never served is a matter of configuration; one that did, of availability."""
        text = str(error) if isinstance(error, ConfigurationError) else _explain(error, self.path)
        passing = self._opened or _busy(error) or _out_of_files()
        return StoreUnavailable(text) if passing else ConfigurationError(text)

    def _vanished(self) -> bool:
        return self.path is not None and _identify(self.path) != self._identity

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        # The folder may have been deleted and made anew with the file: it is opened again, too.
        self._gate.close()

    def _forget(self) -> None:
        """After a fork: keep the parent's connection alive, and never touch it again."""
        self._orphaned = self._orphaned or self._connection is not None
        if self._connection is not None:
            _inherited.append(self._connection)
            self._connection = None
        self._gate.close()


class _Gate:
    """Passed by one process at a time: with a transaction, or to open or make the file.

    A transaction in a file that was just deleted writes a journal by the name that the next file's
    journal has, and SQLite would play it back into that one. So no file is made while a transaction
    runs. The lock is on the folder, which nobody deletes with the file. Where there is no flock
    (Windows), an open file cannot be deleted either.
    """

    def __init__(self, path: str | None) -> None:
        self._folder = None if path is None else os.path.dirname(path) or os.curdir
        self._file: int | None = None

    def __enter__(self) -> None:
        if self._folder is None or not _HAS_FLOCK:
            return
        if self._file is None:
            if not os.path.isdir(self._folder):
                return
            self._file = os.open(self._folder, os.O_RDONLY)
        end = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # noqa: PERF203 - each try is a wait
                if time.monotonic() >= end:
                    raise StoreUnavailable(
                        f"another process keeps the folder {self._folder} of the local lock store"
                    ) from None
                time.sleep(_NAP)
            else:
                return

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _transact(
    db: sqlite3.Connection, project: str, request: Request, now: int, quota: int
) -> Outcome:
    where = (project, request.key)
    row = db.execute(_READ, where).fetchone()
    usage, retry_after = spend(None if row[0] is None else Usage(*row[:3]), now, quota)
    db.execute(_WRITE_USAGE, (project, usage.window, usage.used, usage.refused))
    if retry_after is not None:
        return Limited(retry_after)
    before = None if row[4] is None else Record(*row[3:7])
    after, answer = decide(before, request, now)
    refused = answer is Refusal.HELD
    if after is None or (after == before and not refused):
        return answer
    db.execute(
        _WRITE_LOCK,
        (
            *where,
            after.owner,
            after.fencing_token,
            after.acquired_at,
            after.expires_at,
            (row[7] or 0) + refused,
        ),
    )
    if before is not None and before.owner is not None and _ends(before, after):
        _keep_tenure(db, *where, before, *_ending(before, request, now))
    return answer


def _read(db: sqlite3.Connection, since: int) -> Contents:
    return Contents(
        [LockRow(row[0], row[1], Record(*row[2:6]), row[6]) for row in db.execute(_READ_LOCKS)],
        [TenureRow(*row) for row in db.execute(_READ_TENURES, (since,))],
        {row[0]: Usage(*row[1:]) for row in db.execute(_READ_USAGES)},
    )


def _keep_tenure(
    db: sqlite3.Connection, project: str, key: str, term: Record, ended: int, ending: str
) -> None:
    values = (project, key, term.fencing_token, term.acquired_at, ended, ending)
    number = db.execute(_WRITE_TENURE, values).lastrowid or 0
    if number % _PRUNED_EVERY == 0:
        db.execute("DELETE FROM tenure WHERE id <= ?", (number - _KEPT_TENURES,))


def _ends(before: Record, after: Record) -> bool:
    return after.owner is None or after.fencing_token != before.fencing_token


def _ending(before: Record, request: Request, now: int) -> tuple[int, str]:
    if now >= before.expires_at + GRACE_MS or request.operation is Operation.ACQUIRE:
        return before.expires_at, "expired"
    forced = request.operation is Operation.FORCE_RELEASE
    return min(now, before.expires_at), "forced" if forced else "released"


def _in_transaction(
    db: sqlite3.Connection,
    work: Callable[[sqlite3.Connection], _T],
    begin: str = "BEGIN IMMEDIATE",
) -> _T:
    try:
        # A signal's handler may raise as soon as it has begun.
        _patiently(db, begin)
        result = work(db)
        _patiently(db, "COMMIT")
    except BaseException:
        if db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        raise
    return result


def _patiently(db: sqlite3.Connection, statement: str) -> None:
    """Try until PATIENCE is over. SQLite alone would sleep ever longer, and busy others starve it."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            db.execute(statement)
        except sqlite3.OperationalError as error:  # noqa: PERF203 - each try is a wait
            if not _busy(error) or time.monotonic() >= end:
                raise
            time.sleep(_NAP)
        else:
            return


def _connect(path: str | None) -> sqlite3.Connection:
    if path is not None and not os.path.isdir(folder := os.path.dirname(path) or os.curdir):
        raise ConfigurationError(
            f"the folder of the local lock store {path} does not exist: make {folder}, "
            "or set VOLCANO_API_URL=local:PATH to a file elsewhere"
        )
    db = sqlite3.connect(
        ":memory:" if path is None else path,
        timeout=PATIENCE,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        # Looked at, in one view, before anything is written: it may be somebody else's file.
        if not _in_transaction(db, lambda db: _ours(db, path), "BEGIN"):
            _in_transaction(db, lambda db: _ours(db, path) or _create(db))
        db.execute("PRAGMA journal_mode = PERSIST")
        db.execute("PRAGMA synchronous = FULL")
        if (state := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(f"malformed: {state}")
        db.execute("PRAGMA busy_timeout = 0")
    except BaseException:
        db.close()
        raise
    return db


def _ours(db: sqlite3.Connection, path: str | None) -> bool:
    """True if it is a lock store, False if it is empty; ConfigurationError for anything else."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if application == APPLICATION_ID and version == SCHEMA_VERSION:
        return True
    if application == APPLICATION_ID:
        raise ConfigurationError(
            f"the local lock store {path} has the format {version}, this volcano-locks knows "
            f"{SCHEMA_VERSION}: upgrade volcano-locks in every environment that shares the file, "
            "or set VOLCANO_API_URL=local:PATH to another file. Nothing was changed"
        )
    if application or version or db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        raise ConfigurationError(
            f"{path} is a SQLite database of something else, not a lock store: "
            "set VOLCANO_API_URL=local:PATH to a file of its own. Nothing was changed"
        )
    return False


def _create(db: sqlite3.Connection) -> bool:
    for statement in _SCHEMA:
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    return True


def _identify(path: str | None) -> tuple[int, int] | None:
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _busy(error: Exception) -> bool:
    return "locked" in str(error) or "busy" in str(error)


def _explain(error: Exception, path: str | None) -> str:
    """What SQLite's words mean for the reader, and what to do."""
    text = str(error)
    if _busy(error):
        return f"another process keeps the local lock store {path} locked"
    if "not a database" in text or "malformed" in text:
        return (
            f"the local lock store {path} is damaged or is no lock store ({text}). Nothing was "
            "changed. Stop what uses it, move the file away and start again: leases are forgotten "
            "then, and fencing tokens go on from the clock, higher than before"
        )
    if _out_of_files():
        return (
            f"the local lock store {path} cannot be opened: this process has too many files open. "
            "Raise its limit (ulimit -n), or close connections that nobody uses"
        )
    if "readonly" in text or "unable to open" in text or isinstance(error, OSError):
        return (
            f"the local lock store {path} cannot be written ({text}): give this user write "
            "permission on the file and on its folder, or set VOLCANO_API_URL=local:PATH to a "
            "file elsewhere"
        )
    if "full" in text:
        return f"the disk of the local lock store {path} is full: make room"
    return f"the local lock store {path} failed: {text}"


def _out_of_files() -> bool:
    """SQLite does not tell it from a lack of permission."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_inherited: Final[list[sqlite3.Connection]] = []
_at_fork: list[Store] = []


def _before_fork() -> None:
    # No transaction of ours may be open in the copy: its connection would have half of one.
    _at_fork[:] = list(_stores)
    for store in _at_fork:
        store._mutex.acquire()


def _after_fork_in_parent() -> None:
    for store in _at_fork:
        store._mutex.release()
    _at_fork.clear()


def _after_fork_in_child() -> None:
    for store in _at_fork:
        store._forget()
        store._mutex.release()
    _at_fork.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
