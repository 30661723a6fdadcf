"""Files that cannot serve: a typed error that names path and remedy, and the file left as it was."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.local.test_table import START, TableMachine, plain, request
from volcano_locks.contract import Operation, Request
from volcano_locks.errors import ConfigurationError
from volcano_locks.local import store as store_module
from volcano_locks.local.service import LockService
from volcano_locks.local.store import Limited, Store, StoreUnavailable
from volcano_locks.local.table import Granted
from volcano_locks.models import Secret

ROOT = Path(__file__).parents[2]


def acquire(store: Store, key: str = "job", token: str | None = None, now: int = START):
    asked = Request(Operation.ACQUIRE, key, "r", Secret(token or str(uuid.uuid4())), 10)
    return store.transact("p", asked, now, 600)


def refused(path: Path) -> str:
    """The error's words; the store is opened by a request, as users meet it."""
    with pytest.raises(ConfigurationError) as caught:
        acquire(Store(str(path)))
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def file_store(tmp_path: Path):
    with contextlib.closing(Store(str(tmp_path / "store"))) as store:
        yield store


class StoreMachine(TableMachine):
    """The same rules and the same judge, with every request going through SQLite."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(None)

    def ask(self, *what: object) -> tuple[object, ...]:
        answer = self.store.transact("p", request(*what), self.now, 10**9)  # type: ignore[arg-type]
        assert not isinstance(answer, Limited)
        return plain(answer)

    def teardown(self) -> None:
        self.store.close()


def test_the_store_keeps_every_rule_of_the_contract():
    from hypothesis import HealthCheck, settings
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_leases_and_tokens_are_there_after_a_restart(tmp_path: Path):
    path = str(tmp_path / "store")
    with contextlib.closing(Store(path)) as store:
        first = acquire(store, token="mine")
    with contextlib.closing(Store(path)) as store:
        again = acquire(store, token="mine", now=START + 1)
        assert isinstance(first, Granted)
        assert isinstance(again, Granted)
        assert again.fencing_token == first.fencing_token


def test_a_closed_store_is_all_in_its_file_and_opens_again(file_store: Store, tmp_path: Path):
    first = acquire(file_store, token="mine")
    file_store.close()
    assert not any(Path(f"{file_store.path}-journal").read_bytes()[:28])  # nothing to play back
    copied = shutil.copy(file_store.path or "", tmp_path / "copy")
    with contextlib.closing(Store(copied)) as copy:
        assert acquire(copy, token="mine") == first
    acquire(file_store, "other")


def test_the_file_holds_no_ownership_token(file_store: Store):
    token = str(uuid.uuid4())
    acquire(file_store, token=token)
    for name in (file_store.path, f"{file_store.path}-journal"):
        assert token.encode() not in Path(name or "").read_bytes()


def test_a_file_of_garbage_is_refused_and_stays_as_it_is(tmp_path: Path):
    path = tmp_path / "store"
    path.write_bytes(garbage := b"these are my notes, not a database\n" * 200)
    assert "move the file away" in refused(path)
    assert path.read_bytes() == garbage


def test_a_damaged_store_is_refused_and_stays_as_it_is(tmp_path: Path):
    path = tmp_path / "store"
    with contextlib.closing(Store(str(path))) as store:
        for number in range(50):
            acquire(store, f"job-{number}")
    data = bytearray(path.read_bytes())
    for start in range(4_096, len(data), 4_096):
        data[start : start + 200] = b"\xff" * 200
    path.write_bytes(data)
    assert "damaged" in refused(path)
    assert path.read_bytes() == data


def test_a_truncated_store_is_refused(tmp_path: Path):
    path = tmp_path / "store"
    with contextlib.closing(Store(str(path))) as store:
        acquire(store)
    path.write_bytes(path.read_bytes()[:5_000])
    assert "damaged" in refused(path)


def test_a_database_of_something_else_is_refused_and_not_converted(tmp_path: Path):
    path = tmp_path / "store"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE orders (id INTEGER)")
    before = path.read_bytes()
    assert "something else" in refused(path)
    assert path.read_bytes() == before


def test_a_store_of_a_newer_version_is_refused(tmp_path: Path):
    path = tmp_path / "store"
    with contextlib.closing(Store(str(path))) as store:
        acquire(store)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 9")
    before = path.read_bytes()
    assert "upgrade volcano-locks" in refused(path)
    assert path.read_bytes() == before


def test_a_folder_that_is_missing_is_named(tmp_path: Path):
    assert f"make {tmp_path / 'missing'}" in refused(tmp_path / "missing" / "store")
    assert not (tmp_path / "missing").exists()


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path):
    assert "cannot be written" in refused(tmp_path)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_this_user_may_not_write_is_refused(what: str, tmp_path: Path):
    """Root may write everything, so as root the attempt is made as nobody."""
    path = tmp_path / "store"
    if what == "file":
        with contextlib.closing(Store(str(path))) as store:
            acquire(store)
        path.chmod(0o444)
    tmp_path.chmod(0o555)
    script = """
        import os, sys
        from volcano_locks.contract import Operation, Request
        from volcano_locks.errors import ConfigurationError
        from volcano_locks.local.service import LockService
        from volcano_locks.local.store import Store
        from volcano_locks.models import Secret

        os.chdir(sys.argv[1])
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            LockService(Store("store")).perform(
                Request(Operation.ACQUIRE, "job", "r", Secret("t"), 10)
            )
        except ConfigurationError as error:
            sys.exit(str(error))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    tmp_path.chmod(0o755)
    assert done.returncode == 1, done.stderr
    assert "write permission on the file and on its folder" in done.stderr


def test_damage_while_running_is_unavailable_not_a_crash(file_store: Store):
    acquire(file_store)
    Path(file_store.path or "").write_bytes(b"\xff" * 20_000)
    with pytest.raises(StoreUnavailable, match="damaged"):
        acquire(file_store)
    answer = LockService(file_store).perform(Request(Operation.GET, "job", "r"))
    assert answer.status == 503
    assert b"lock_service_unavailable" in answer.body


def test_a_store_that_another_process_keeps_locked_is_unavailable(
    file_store: Store, monkeypatch: pytest.MonkeyPatch
):
    waits: list[float] = []
    connect = sqlite3.connect

    def patiently(*where: Any, timeout: float, **options: Any) -> sqlite3.Connection:
        waits.append(timeout)
        return connect(*where, timeout=timeout, **options)

    monkeypatch.setattr(store_module, "PATIENCE", 0.05)
    acquire(file_store)
    file_store.close()
    with contextlib.closing(sqlite3.connect(file_store.path or "", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(sqlite3, "connect", patiently)
        with pytest.raises(StoreUnavailable, match="another process"):
            acquire(file_store)
    assert waits == [0.05], "its patience, once"
    assert isinstance(acquire(file_store, "other"), Granted)


def test_a_deleted_file_is_noticed_by_the_next_request(file_store: Store):
    first = acquire(file_store)
    Path(file_store.path or "").unlink()
    second = acquire(file_store, now=START + 5)
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert second.fencing_token > first.fencing_token
    assert Path(file_store.path or "").exists()


def test_the_timeline_tells_how_each_term_ended(file_store: Store):
    def ask(operation: Operation, token: str | None, now: int) -> None:
        secret = Secret(token) if token else None
        ttl = 10 if operation is Operation.ACQUIRE else None
        file_store.transact("p", Request(operation, "job", "r", secret, ttl), now, 600)

    ask(Operation.ACQUIRE, "a", START)
    ask(Operation.ACQUIRE, "b", START + 1)
    ask(Operation.RELEASE, "a", START + 2_000)
    ask(Operation.ACQUIRE, "b", START + 3_000)
    ask(Operation.ACQUIRE, "c", START + 20_000)
    ask(Operation.FORCE_RELEASE, None, START + 21_000)
    ask(Operation.ACQUIRE, "d", START + 22_000)
    ends = [(term.started - START, term.ended, term.ending) for term in file_store.read().tenures]
    assert ends == [
        (0, START + 2_000, "released"),
        (3_000, START + 13_000, "expired"),
        (20_000, START + 21_000, "forced"),
        (22_000, None, None),
    ]
    assert [(row.key, row.contended) for row in file_store.read().locks] == [("job", 1)]
    assert file_store.read().usages["p"].used == 7


class FailingWrites(sqlite3.Connection):
    """The write that is the ``due``-th from now fails, as on a full disk."""

    due = 0

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql.startswith(("REPLACE", "INSERT", "UPDATE")):
            type(self).due -= 1
            if self.due == 0:
                raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, *values)


@pytest.mark.parametrize("write", [1, 2, 3])
def test_a_request_is_kept_as_a_whole_or_not_at_all(
    file_store: Store, monkeypatch: pytest.MonkeyPatch, write: int
):
    """Its usage, the lock and the term that it ended, whichever of the three writes fails."""
    monkeypatch.setattr(FailingWrites, "due", 0)
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=FailingWrites))
    reader = Store(file_store.path)

    def kept() -> tuple[object, ...]:
        return tuple(reader.read())

    with contextlib.closing(reader):
        acquire(file_store)
        before = kept()
        FailingWrites.due = write
        with pytest.raises(StoreUnavailable, match="full"):
            acquire(file_store, now=START + 20_000)
        assert kept() == before
        acquire(file_store, now=START + 20_000)
        assert all(now != then for now, then in zip(kept(), before, strict=True))


class Interrupted(sqlite3.Connection):
    """A signal's handler raises right after the statement that is named."""

    after = ""

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        done = super().execute(sql, *values)
        if sql == self.after:
            type(self).after = ""
            raise KeyboardInterrupt
        return done


@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "COMMIT"])
def test_a_signal_in_the_middle_leaves_no_transaction_open(
    file_store: Store, monkeypatch: pytest.MonkeyPatch, statement: str
):
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Interrupted))
    acquire(file_store)
    Interrupted.after = statement
    with pytest.raises(KeyboardInterrupt):
        acquire(file_store, "other")
    with contextlib.closing(Store(file_store.path)) as elsewhere:
        assert isinstance(acquire(elsewhere, "third"), Granted)
    assert isinstance(acquire(file_store, "fourth"), Granted)


@pytest.mark.parametrize("open_before", [True, False])
def test_a_process_out_of_files_is_told_so(file_store: Store, open_before: bool):
    if open_before:
        acquire(file_store)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        with contextlib.suppress(OSError):
            while True:
                files.enter_context(open(os.devnull))
        with pytest.raises(StoreUnavailable, match="too many files open"):
            acquire(file_store, "other")
    assert isinstance(acquire(file_store, "other"), Granted)


def test_projects_share_no_names_and_no_quota(file_store: Store):
    assert isinstance(acquire(file_store), Granted)
    other = Request(Operation.ACQUIRE, "job", "r", Secret("t"), 10)
    assert isinstance(file_store.transact("q", other, START, 1), Granted)
    assert isinstance(file_store.transact("q", other, START, 1), Limited)
    assert isinstance(acquire(file_store, "more"), Granted)


def test_the_timeline_keeps_the_newest_terms_only(
    file_store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_module, "_KEPT_TENURES", 6)
    monkeypatch.setattr(store_module, "_PRUNED_EVERY", 4)
    for number in range(13):
        acquire(file_store, now=START + number * 20_000)
    kept = [(term.started - START) // 20_000 for term in file_store.read().tenures]
    assert kept == list(range(6, 13)), "six that ended, and the one that goes on"


def test_no_lock_is_taken_for_the_usage_of_its_project(file_store: Store):
    """The client refuses an empty key, but the store must not rely on that."""
    assert isinstance(acquire(file_store, ""), Granted)
    assert isinstance(acquire(file_store, "job"), Granted)
    assert [row.key for row in file_store.read().locks] == ["", "job"]
    assert file_store.read().usages["p"].used == 2
