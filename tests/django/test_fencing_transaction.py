"""The fence row: a stale transaction is refused, or cannot commit after a newer one."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import (
    DataError,
    IntegrityError,
    InternalError,
    OperationalError,
    connections,
    transaction,
)
from pymysql.constants import SERVER_STATUS

from tests.databases import VENDORS
from tests.django.app.models import Note, OfState, Plain, Row, State
from tests.django.conftest import use
from tests.django.leases import Held, lease
from tests.django.sending import statements
from tests.django.test_fencing_docs import blocks
from volcano_locks.client import LockClient
from volcano_locks.errors import (
    CannotFence,
    FenceKeyMismatch,
    FenceRejected,
    FenceTargetMissing,
    InvalidRequest,
    LeaseLost,
    StaleFence,
)
from volcano_locks.fence_testing import assert_fenced
from volcano_locks_django import Fence, FenceWarning, fenced_transaction

SERVERS = VENDORS[1:]
"""The databases where two transactions write at once; SQLite has one writer."""


def stored(alias: str, key: str = "rollup") -> int:
    return Fence.objects.using(alias).get(key=key).fencing_token


def test_any_table_is_written_under_the_fence_row(alias: str) -> None:
    with fenced_transaction(lease(7), using=alias):
        Plain.objects.using(alias).create(n=1)
    with fenced_transaction(lease(7), using=alias):
        Plain.objects.using(alias).create(n=2)
    with fenced_transaction(lease(8), using=alias):
        Plain.objects.using(alias).filter(n=1).delete()
    with (
        pytest.raises(StaleFence, match="the fence of the lock carries 8") as refused,
        fenced_transaction(lease(7), using=alias),
    ):
        raise AssertionError("the body of a stale transaction ran")
    assert (refused.value.offered, refused.value.stored) == (7, 8)
    assert list(Plain.objects.using(alias).values_list("n", flat=True)) == [2]


def test_inserts_and_deletes_are_replayed_by_assert_fenced(alias: str) -> None:
    def write(lease: Any) -> None:
        with fenced_transaction(lease, using=alias):
            Plain.objects.using(alias).create(n=lease.fencing_token)

    assert_fenced(write, read=lambda: Plain.objects.using(alias).count())


def test_locks_have_fence_rows_of_their_own(alias: str) -> None:
    with fenced_transaction(lease(9, "a"), using=alias):
        pass
    with fenced_transaction(lease(1, "A"), using=alias):
        pass
    assert (stored(alias, "a"), stored(alias, "A")) == (9, 1)


def test_a_body_that_raises_takes_its_token_back(alias: str) -> None:
    with pytest.raises(ZeroDivisionError), fenced_transaction(lease(9), using=alias):
        raise ZeroDivisionError
    assert not Fence.objects.using(alias).exists()
    with fenced_transaction(lease(7), using=alias):
        pass
    assert stored(alias) == 7


def fails_after_writing(alias: str) -> None:
    Plain.objects.using(alias).create(n=3)
    raise ZeroDivisionError


def test_inside_an_outer_transaction_it_is_a_savepoint(alias: str) -> None:
    with transaction.atomic(using=alias):
        Plain.objects.using(alias).create(n=1)
        with fenced_transaction(lease(9), using=alias):
            Plain.objects.using(alias).create(n=2)
        with pytest.raises(StaleFence), fenced_transaction(lease(8), using=alias):
            pass
        with pytest.raises(ZeroDivisionError):
            fenced_transaction(lease(10), using=alias)(fails_after_writing)(alias)
    assert sorted(Plain.objects.using(alias).values_list("n", flat=True)) == [1, 2]
    assert stored(alias) == 9


def test_fences_of_two_locks_nest(alias: str) -> None:
    with fenced_transaction(lease(5, "a"), using=alias), fenced_transaction(lease(3), using=alias):
        State.objects.using(alias).fenced_upsert(lease(3), {"n": 1}, name="a")
    assert (stored(alias, "a"), stored(alias)) == (5, 3)


def test_two_databases_have_two_fences(sqlite: str) -> None:
    with fenced_transaction(lease(9)):  # the router's choice: default
        pass
    assert stored("default") == 9


def test_it_decorates_a_function(alias: str) -> None:
    @fenced_transaction(lease(7), using=alias)
    def write() -> None:
        Plain.objects.using(alias).create(n=1)

    write()
    write()
    assert Plain.objects.using(alias).count() == 2


def test_a_lost_hold_does_not_begin(alias: str) -> None:
    hold = Held(7)
    hold.lose()
    with statements(alias) as sent, pytest.raises(LeaseLost), fenced_transaction(hold, using=alias):
        raise AssertionError("ran")
    assert sent == []


def test_a_hold_that_is_lost_in_the_body_does_not_commit(alias: str) -> None:
    hold = Held(7)

    @fenced_transaction(hold, using=alias)
    def write() -> None:
        Plain.objects.using(alias).create(n=1)
        hold.lose()

    with pytest.raises(LeaseLost):
        write()
    assert not Plain.objects.using(alias).exists()


def test_a_lease_that_ends_before_the_outer_commit_is_warned_about(alias: str) -> None:
    def released_inside_committed_outside() -> None:
        with transaction.atomic(using=alias):
            hold = Held(7)
            with fenced_transaction(hold, using=alias):
                pass
            hold.lose()

    with pytest.warns(FenceWarning, match="another leader may have started"):
        released_inside_committed_outside()


def test_what_is_no_lease_is_refused(sqlite: str) -> None:
    with pytest.raises(InvalidRequest), fenced_transaction("rollup"):  # type: ignore[arg-type]
        pass


def test_a_database_without_row_locks_and_transactions_is_refused(
    sqlite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections["default"].features, "supports_transactions", False)
    with pytest.raises(CannotFence, match="InnoDB"), fenced_transaction(lease(7)):
        pass
    monkeypatch.undo()
    monkeypatch.setattr(connections["default"], "vendor", "oracle")
    with pytest.raises(CannotFence, match="oracle"), fenced_transaction(lease(7)):
        pass


# -- two connections -------------------------------------------------------------------------------


@contextmanager
def another_connection(work: Any) -> Iterator[threading.Thread]:
    """Run ``work`` in a thread, which has connections of its own; what it raised is raised at the end."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    yield thread
    thread.join(60)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def is_mariadb(alias: str) -> bool:
    connection = connections[alias]
    return connection.vendor == "mysql" and connection.mysql_is_mariadb  # type: ignore[attr-defined]


def wait_for_a_waiter(alias: str, made: dict[str, Any]) -> None:
    """Return once a connection of this database waits for a lock."""
    waiting = {
        "postgresql": "SELECT COUNT(*) FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND datname = current_database()",
        # A statement that runs for 0.1 s; the view of InnoDB's own waits is a cached one.
        "mariadb": "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() "
        "AND command = 'Query' AND time_ms > 100 AND id <> CONNECTION_ID()",
    }.get(alias)
    if alias == "mariadb" and not is_mariadb(alias):
        waiting = "SELECT COUNT(*) FROM performance_schema.data_lock_waits"
    if waiting is None:  # SQLite tells nobody who waits; the order is asserted all the same
        threading.Event().wait(0.2)
        return
    # On a connection of its own: inside a transaction these views do not move.
    connection = made[alias].connect()
    cursor = connection.cursor()
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            cursor.execute(waiting)
            if cursor.fetchone()[0]:
                return
            threading.Event().wait(0.01)
    finally:
        connection.close()
    raise AssertionError("nobody waits")


def look_for_deadlocks_after(alias: str, wait: str) -> None:
    """Where the one gives way that looks first, and looks but once: PostgreSQL."""
    if alias == "postgresql":
        with connections[alias].cursor() as cursor:
            cursor.execute(f"SET LOCAL deadlock_timeout = '{wait}'")


@pytest.fixture
def waits_for_the_other(alias: str, made: dict[str, Any]) -> Callable[[], None]:
    return functools.partial(wait_for_a_waiter, alias, made)


@pytest.mark.parametrize("first_time", [True, False], ids=["first writers", "later"])
def test_a_newer_leader_waits_for_the_commit_of_the_older(
    alias: str, first_time: bool, waits_for_the_other: Callable[[], None]
) -> None:
    if not first_time:
        with fenced_transaction(lease(1), using=alias):
            pass
    order: list[str] = []

    def newer() -> None:
        with fenced_transaction(lease(8), using=alias):
            order.append("newer in")

    with another_connection(newer) as thread, fenced_transaction(lease(7), using=alias):
        thread.start()
        waits_for_the_other()
        order.append("older out")
    assert order == ["older out", "newer in"]
    assert stored(alias) == 8


@pytest.mark.parametrize("first_time", [True, False], ids=["first writers", "later"])
def test_an_older_leader_that_waited_for_a_newer_one_is_refused(
    alias: str, first_time: bool, waits_for_the_other: Callable[[], None]
) -> None:
    if not first_time:
        with fenced_transaction(lease(1), using=alias):
            pass

    def older() -> None:
        with pytest.raises(StaleFence), fenced_transaction(lease(7), using=alias):
            Plain.objects.using(alias).create(n=7)

    with another_connection(older) as thread, fenced_transaction(lease(8), using=alias):
        thread.start()
        waits_for_the_other()
        Plain.objects.using(alias).create(n=8)
    assert list(Plain.objects.using(alias).values_list("n", flat=True)) == [8]


def test_an_older_leader_goes_on_if_the_newer_one_rolled_back(
    alias: str, waits_for_the_other: Callable[[], None]
) -> None:
    def older() -> None:
        with fenced_transaction(lease(7), using=alias):
            Plain.objects.using(alias).create(n=7)

    @fenced_transaction(lease(8), using=alias)
    def newer() -> None:
        thread.start()
        waits_for_the_other()
        raise ZeroDivisionError

    with another_connection(older) as thread, pytest.raises(ZeroDivisionError):
        newer()
    assert stored(alias) == 7


# -- conflicts of the database's own ----------------------------------------------------------------

PAGE: dict[str, Any] = {}
exec(blocks("retry.py"), PAGE)
retried = PAGE["retried"]
"""The loop that the page shows."""

# The default in MariaDB 11.8; a comment to MySQL, which has none.
SNAPSHOT_ISOLATION = "SET /*M! SESSION innodb_snapshot_isolation = ON, */ @nothing = 0"
REPEATABLE, SERIALIZABLE = "repeatable read", "serializable"
OLD_SNAPSHOTS = {
    "postgresql, repeatable read": (2, {"isolation_level": 3}),
    "postgresql, serializable": (2, {"isolation_level": 4}),
    "mariadb, repeatable read": (1, {"isolation_level": REPEATABLE}),
    "mariadb, snapshot isolation": (
        2,
        {"isolation_level": REPEATABLE, "init_command": SNAPSHOT_ISOLATION},
    ),
    "mariadb, serializable": (1, {"isolation_level": SERIALIZABLE}),
}
"""How often a write has to be tried that meets a newer commit, and the OPTIONS of the database."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=vendor.marks)
        for vendor in SERVERS
        for name in OLD_SNAPSHOTS
        if name.startswith(str(vendor.values[0]))
    ]
)
def isolated(
    request: pytest.FixtureRequest, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, int]]:
    tries, options = OLD_SNAPSHOTS[request.param]
    alias = use(made, request.param.split(",")[0])
    State.objects.using(alias).create(name="a")
    monkeypatch.setitem(connections.settings[alias], "OPTIONS", options)
    connections[alias].close()
    if not is_mariadb(alias) and "snapshot" in request.param:
        tries = 1
    yield alias, tries
    connections[alias].close()


def update(lease: Any, alias: str) -> None:
    State.objects.using(alias).filter(name="a").fenced_update(lease, n=lease.fencing_token)


def upsert(lease: Any, alias: str) -> None:
    State.objects.using(alias).fenced_upsert(lease, {"n": lease.fencing_token}, name="new")


def insert(lease: Any, alias: str) -> None:
    with fenced_transaction(lease, using=alias):
        Plain.objects.using(alias).create(n=lease.fencing_token)


FENCED = [update, upsert, insert]
"""Writes of a token, each under a fence of its own."""


def numbers(alias: str) -> list[int]:
    """All numbers that FENCED wrote, those in a table in the order of their inserts."""
    inserted = Plain.objects.using(alias).order_by("pk").values_list("n", flat=True)
    return [*State.objects.using(alias).filter(n__gt=0).values_list("n", flat=True), *inserted]


@pytest.mark.parametrize("write", FENCED)
def test_a_write_that_meets_a_newer_commit_than_its_snapshot_lands_in_a_retry_or_is_stale(
    isolated: tuple[str, int], write: Any
) -> None:
    alias, needed = isolated

    def meet(*, first: int, second: int) -> int:
        """``first`` commits between the snapshot and the write of ``second``; the tries of that."""
        tried: list[int] = []
        snapshot, go = threading.Event(), threading.Event()

        def work() -> None:
            tried.append(second)
            Note.objects.using(alias).count()
            if len(tried) == 1:
                snapshot.set()
                assert go.wait(60)
            write(lease(second), alias)

        def at_last() -> None:
            with pytest.raises(StaleFence) if second < first else contextlib.nullcontext():
                retried(work, using=alias)

        with another_connection(at_last) as thread:
            thread.start()
            assert snapshot.wait(60)
            retried(lambda: write(lease(first), alias), using=alias)
            go.set()
        return len(tried)

    assert meet(first=7, second=8) == needed
    assert 8 in numbers(alias)
    assert meet(first=18, second=17) == needed
    assert 18 in numbers(alias)
    assert 17 not in numbers(alias)


def test_what_is_read_after_the_fence_has_all_that_the_last_leader_committed(
    isolated: tuple[str, int], made: dict[str, Any]
) -> None:
    alias, _ = isolated
    row = State.objects.using(alias).filter(name="a")
    read: list[int] = []

    @fenced_transaction(lease(8), using=alias)
    def newer() -> None:
        read.append(row.get().n)

    waits = another_connection(lambda: retried(newer, using=alias))
    with waits as thread, fenced_transaction(lease(7), using=alias):
        thread.start()
        wait_for_a_waiter(alias, made)
        row.update(n=7)
    assert read == [7]


def test_two_leaders_in_a_hurry_never_mix(isolated: tuple[str, int]) -> None:
    alias, _ = isolated
    together = threading.Barrier(2)

    def lead(token: int) -> None:
        def work() -> None:
            Note.objects.using(alias).count()
            insert(lease(token), alias)

        together.wait(60)
        for _ in range(10):
            retried(work, using=alias, tries=100)

    def older() -> None:
        with contextlib.suppress(StaleFence):
            lead(7)

    with another_connection(older) as thread:
        thread.start()
        lead(8)
    assert numbers(alias) == sorted(numbers(alias))
    assert numbers(alias).count(8) == 10


@pytest.mark.parametrize("alias", SERVERS, indirect=True)
@pytest.mark.parametrize("victim", [7, 8], ids=["the older gives way", "the newer gives way"])
def test_the_victim_of_a_deadlock_lands_in_a_retry_or_is_stale(
    alias: str, victim: int, waits_for_the_other: Callable[[], None]
) -> None:
    rows = State.objects.using(alias)
    rows.bulk_create([State(name="a"), State(name="b")])
    survivor = 15 - victim
    has_a, has_b = threading.Event(), threading.Event()
    tried: list[int] = []

    def write(name: str, token: int) -> None:
        rows.filter(name=name).fenced_update(lease(token), n=token)

    def a_then_b() -> None:
        tried.append(survivor)
        Plain.objects.using(alias).bulk_create(
            Plain() for _ in range(9)
        )  # MariaDB spares the bigger
        write("a", survivor)
        look_for_deadlocks_after(alias, "10min")
        has_a.set()
        assert has_b.wait(60)
        write("b", survivor)

    def b_then_a() -> None:
        tried.append(victim)
        assert has_a.wait(60)
        if has_b.is_set():
            thread.join(60)  # or the same deadlock could come again
        write("b", victim)
        if not has_b.is_set():
            has_b.set()
            waits_for_the_other()
        look_for_deadlocks_after(alias, "1ms")
        write("a", victim)

    with another_connection(lambda: retried(a_then_b, using=alias)) as thread:
        thread.start()
        with pytest.raises(StaleFence) if victim == 7 else contextlib.nullcontext():
            retried(b_then_a, using=alias)
    assert sorted(tried) == sorted([survivor, victim, victim])
    assert set(rows.values_list("n", "fencing_token")) == {(8, 8)}


@pytest.mark.parametrize("vendor", SERVERS)
@pytest.mark.parametrize("outermost", [True, False], ids=["outermost", "inside another"])
def test_a_body_that_swallows_a_deadlock_commits_nothing(
    made: dict[str, Any], vendor: str, outermost: bool
) -> None:
    alias = use(made, vendor)
    rows, plain = State.objects.using(alias), Plain.objects.using(alias)
    rows.bulk_create([State(name="a"), State(name="b")])
    has_a, has_b = threading.Event(), threading.Event()

    def bystander() -> None:
        with transaction.atomic(using=alias):
            plain.bulk_create(Plain() for _ in range(9))  # MariaDB spares the bigger
            rows.filter(pk="a").update(n=1)
            look_for_deadlocks_after(alias, "10min")
            has_a.set()
            assert has_b.wait(60)
            rows.filter(pk="b").update(n=1)

    def stale(thread: threading.Thread) -> None:
        thread.start()
        assert has_a.wait(60)
        list(rows.filter(pk="b").select_for_update())
        has_b.set()
        wait_for_a_waiter(alias, made)
        look_for_deadlocks_after(alias, "1ms")
        with pytest.raises(OperationalError, match="eadlock"):
            list(rows.filter(pk="a").select_for_update())
        thread.join()
        if vendor == "mariadb":  # where the fence is free by now; elsewhere it would wait for us
            with another_connection(lambda: write_newer(alias)) as second:
                second.start()
        plain.create(n=7)

    outer = contextlib.nullcontext() if outermost else transaction.atomic(using=alias)
    error = FenceRejected if vendor == "mariadb" else InternalError
    words = "lost its fence.* swallowed the error" if vendor == "mariadb" else "aborted"
    with (
        pytest.raises(error, match=words),
        another_connection(bystander) as thread,
        outer,
        fenced_transaction(lease(7), using=alias),
    ):
        stale(thread)
    assert not plain.filter(n=7).exists()
    assert not connections[alias].in_atomic_block


@pytest.mark.parametrize("ends", ["with another write", "with a savepoint", "at once"])
@pytest.mark.parametrize("outermost", [True, False], ids=["outermost", "inside another"])
def test_a_body_that_goes_on_where_sqlite_gave_up_writes_nothing(
    sqlite: str, ends: str, outermost: bool
) -> None:
    """As after an interrupted statement or on a full disk: each statement is by itself from then on."""
    plain = Plain.objects.using(sqlite)
    plain.create(pk=1)
    outer = contextlib.nullcontext() if outermost else transaction.atomic(using=sqlite)
    with (
        pytest.raises(FenceRejected, match="the body has swallowed the error"),
        outer,
        fenced_transaction(lease(7), using=sqlite),
        connections[sqlite].cursor() as cursor,
    ):
        plain.create(pk=2)
        with pytest.raises(IntegrityError):
            cursor.execute("INSERT OR ROLLBACK INTO app_plain (id, n) VALUES (1, 7)")
        if ends == "with a savepoint":
            transaction.savepoint(using=sqlite)
        if ends != "at once":
            plain.create(pk=3)
    assert list(plain.values_list("pk", flat=True)) == [1]
    assert not Fence.objects.using(sqlite).exists()


@pytest.mark.parametrize("vendor", SERVERS[1:])
def test_a_statement_that_commits_the_transaction_ends_its_fence(
    made: dict[str, Any], vendor: str
) -> None:
    alias = use(made, vendor)
    with (
        pytest.raises(FenceRejected, match="a statement that commits, such as TRUNCATE"),
        fenced_transaction(lease(7), using=alias),
        connections[alias].cursor() as cursor,
    ):
        cursor.execute("TRUNCATE TABLE app_note")
        with another_connection(lambda: write_newer(alias)) as thread:
            thread.start()
        Plain.objects.using(alias).create(n=7)
    assert list(Plain.objects.using(alias).values_list("n", flat=True)) == [8]


def write_newer(alias: str) -> None:
    with fenced_transaction(lease(8), using=alias):
        Plain.objects.using(alias).create(n=8)


@pytest.mark.needs("postgres")
@pytest.mark.parametrize("end", ["SELECT 1/0", "ROLLBACK"])
def test_a_body_that_goes_on_where_postgresql_would_roll_back_is_told(
    made: dict[str, Any], end: str
) -> None:
    alias = use(made, "postgresql")
    with (
        pytest.raises(FenceRejected, match="What came after that is not committed"),
        fenced_transaction(lease(7), using=alias),
        connections[alias].cursor() as cursor,
    ):
        Plain.objects.using(alias).create()
        with contextlib.suppress(DataError):
            cursor.execute(end)
    assert not Plain.objects.using(alias).exists()
    assert not Fence.objects.using(alias).exists()


@pytest.mark.needs("mariadb")
def test_djangos_names_of_savepoints_may_come_again(made: dict[str, Any]) -> None:
    alias = use(made, "mariadb")
    with fenced_transaction(lease(7), using=alias):
        transaction.clean_savepoints(using=alias)
        with transaction.atomic(using=alias):
            Plain.objects.using(alias).create()
    assert stored(alias) == 7


@pytest.mark.parametrize("way", ["a swallowed error", "set_rollback", "close"])
def test_what_django_takes_back_takes_the_fence_back(alias: str, way: str) -> None:
    plain = Plain.objects.using(alias)
    plain.create(pk=1)
    with fenced_transaction(lease(7), using=alias):
        plain.create(pk=2)
        if way == "set_rollback":
            transaction.set_rollback(True, using=alias)
        elif way == "close":
            connections[alias].close()
        else:
            with contextlib.suppress(IntegrityError):
                plain.create(pk=1)
    assert list(plain.values_list("pk", flat=True)) == [1]
    assert not Fence.objects.using(alias).exists()


# -- what a refusal leaves behind -----------------------------------------------------------------------


def lost(token: int) -> Held:
    hold = Held(token)
    hold.lose()
    return hold


def lost_in_the_body(alias: str) -> None:
    hold = Held(9)
    with fenced_transaction(hold, using=alias):
        Plain.objects.using(alias).create()
        hold.lose()


def states(alias: str) -> Any:
    return State.objects.using(alias)


REFUSALS: dict[str, tuple[type[Exception], Callable[[str], Any]]] = {
    "a stale update": (StaleFence, lambda on: states(on).filter(pk="a").fenced_update(lease(8))),
    "a stale update of many": (StaleFence, lambda on: states(on).fenced_update(lease(8))),
    "a stale delete": (StaleFence, lambda on: Row.objects.using(on).all().fenced_delete(lease(8))),
    "a stale cascade": (StaleFence, lambda on: states(on).get(pk="a").fenced_delete(lease(8))),
    "a stale upsert": (StaleFence, lambda on: states(on).fenced_upsert(lease(8), name="a")),
    "a stale save": (StaleFence, lambda on: states(on).get(pk="a").fenced_save(lease(8))),
    "a stale save of a new instance": (
        StaleFence,
        lambda on: State(name="a").fenced_save(lease(8), using=on),
    ),
    "a stale transaction": (StaleFence, lambda on: insert(lease(8), on)),
    "no such row": (
        FenceTargetMissing,
        lambda on: states(on).filter(pk="z").fenced_update(lease(9)),
    ),
    "no such rows": (
        FenceTargetMissing,
        lambda on: states(on).filter(n=9).fenced_update(lease(9)),
    ),
    "no such row to delete": (
        FenceTargetMissing,
        lambda on: Row.objects.using(on).filter(slug="z").fenced_delete(lease(9)),
    ),
    "another lock's row": (
        FenceKeyMismatch,
        lambda on: states(on).filter(pk="a").fenced_update(lease(9, "other")),
    ),
    "another lock's rows": (
        FenceKeyMismatch,
        lambda on: states(on).fenced_update(lease(9, "other")),
    ),
    "a lost hold": (LeaseLost, lambda on: states(on).filter(pk="a").fenced_update(lost(9))),
    "a transaction of a lost hold": (LeaseLost, lambda on: insert(lost(9), on)),
    "a hold that is lost in the body": (LeaseLost, lost_in_the_body),
    "a join": (
        CannotFence,
        lambda on: OfState.objects.using(on).filter(state__n=0).fenced_update(lease(9)),
    ),
    "a cascade over another fence": (
        CannotFence,
        lambda on: states(on).filter(pk="a").fenced_delete(lease(9)),
    ),
    "a new row of no fence": (CannotFence, lambda on: Row().fenced_save(lease(9), using=on)),
    "what is no lease": (InvalidRequest, lambda on: insert("rollup", on)),
}


def in_transaction(alias: str, made: dict[str, Any]) -> bool:
    """What the server says of this thread's connection."""
    connection = connections[alias]
    if alias == "postgresql":
        with contextlib.closing(made[alias].connect()) as other:
            pid = connection.connection.info.backend_pid
            found = other.execute("SELECT state FROM pg_stat_activity WHERE pid = %s", [pid])
            return bool(found.fetchone()[0] != "idle")
    if alias == "mariadb":
        with connection.cursor() as cursor:
            cursor.execute("DO 0")  # the answer carries the flag
        return bool(connection.connection.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS)
    return bool(connection.connection.in_transaction)


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refusal_leaves_no_transaction_open_and_none_to_roll_back(
    alias: str, made: dict[str, Any], what: str
) -> None:
    error, refused = REFUSALS[what]
    connection = connections[alias]
    states(alias).create(name="a", fencing_token=9, fencing_key="rollup")
    Row.objects.using(alias).create(slug="r", fencing_token=9, fencing_key="rollup")
    OfState.objects.using(alias).create(state_id="a")
    insert(lease(9), alias)
    with pytest.raises(error):
        refused(alias)
    assert connection.get_autocommit()
    assert not connection.in_atomic_block
    assert not connection.needs_rollback
    assert connection.savepoint_ids == []
    assert connection.run_on_commit == []
    assert not in_transaction(alias, made)
    with transaction.atomic(using=alias):
        Plain.objects.using(alias).create(n=1)
        with pytest.raises(error):
            refused(alias)
        assert not connection.needs_rollback
        assert in_transaction(alias, made)  # the caller's, which goes on
    assert not in_transaction(alias, made)
    assert numbers(alias) == [9, 1]


# -- the table ---------------------------------------------------------------------------------------


def test_the_migrations_are_the_models(sqlite: str, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("makemigrations", "volcano_locks", check=True, dry_run=True, verbosity=1)
    assert "No changes" in capsys.readouterr().out


def test_the_migration_can_be_taken_back(alias: str) -> None:
    call_command("migrate", "volcano_locks", "zero", database=alias, verbosity=0)
    assert Fence._meta.db_table not in connections[alias].introspection.table_names()
    call_command("migrate", "volcano_locks", database=alias, verbosity=0)
    with fenced_transaction(lease(2**63 - 1), using=alias):
        pass
    assert stored(alias) == 2**63 - 1


# -- with real holds -----------------------------------------------------------------------------------


def test_a_real_hold_fences_and_is_missed_when_it_is_released_too_early(
    alias: str, tmp_path: Path
) -> None:
    with LockClient(api_url=f"local:{tmp_path}/locks", key_prefix="staging.") as client:
        with client.hold("rollup") as older:
            State.objects.db_manager(alias).fenced_upsert(older, {"n": 1}, name="a")
            with fenced_transaction(older, using=alias):
                Plain.objects.using(alias).create(n=1)
        row = State.objects.using(alias).filter(name="a")
        assert row.get().fencing_key == "staging.rollup"
        with pytest.raises(LeaseLost):
            row.fenced_update(older, n=2)

        def the_wrong_way_round() -> None:
            with transaction.atomic(using=alias), client.hold("rollup") as newer:
                row.fenced_update(newer, n=3)

        with pytest.warns(FenceWarning, match="Take the lock outside"):
            the_wrong_way_round()
        with pytest.raises(StaleFence):
            row.fenced_update(older.lease, n=4)
        with pytest.raises(StaleFence), client.hold("other") as unrelated:
            with fenced_transaction(unrelated, using=alias):
                row.fenced_update(older.lease, n=4)
    assert row.get().n == 3
