"""The fence row: a stale transaction is refused, or cannot commit after a newer one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import DatabaseError, connections, transaction

from tests.django.app.models import Plain, State
from tests.django.leases import Held, lease
from tests.django.sending import statements
from volcano_locks.client import LockClient
from volcano_locks.errors import CannotFence, InvalidRequest, LeaseLost, StaleFence
from volcano_locks.fence_testing import assert_fenced
from volcano_locks_django import Fence, FenceWarning, fenced_transaction


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
    thread.join(30)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


@pytest.fixture
def waits_for_the_other(alias: str, made: dict[str, Any]) -> Callable[[], None]:
    """A function that returns once a connection of this database waits for a lock."""
    waiting = {
        "postgresql": "SELECT COUNT(*) FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND datname = current_database()",
        # A statement that runs for 0.1 s; the view of InnoDB's own waits is a cached one.
        "mariadb": "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() "
        "AND command = 'Query' AND time_ms > 100 AND id <> CONNECTION_ID()",
    }.get(alias)

    def wait() -> None:
        if waiting is None:  # SQLite tells nobody who waits; the order is asserted all the same
            threading.Event().wait(0.2)
            return
        # On a connection of its own: inside a transaction these views do not move.
        connection = made[alias].connect()
        cursor = connection.cursor()
        try:
            for _ in range(1000):
                cursor.execute(waiting)
                if cursor.fetchone()[0]:
                    return
                threading.Event().wait(0.01)
        finally:
            connection.close()
        raise AssertionError("nobody waits")

    return wait


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


@pytest.mark.needs("postgres")
def test_serializable_transactions_that_collide_fail_and_can_be_retried(made: Any) -> None:
    from tests.django.conftest import use

    alias = use(made, "postgresql")
    with fenced_transaction(lease(1), using=alias):
        pass
    failed: list[str] = []

    def newer() -> None:
        connection = connections[alias]
        with connection.cursor() as cursor:
            cursor.execute(
                "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE"
            )
        for _ in range(2):
            try:
                with transaction.atomic(using=alias):
                    Plain.objects.using(alias).count()  # the snapshot is taken
                    if not failed:
                        ready.set()
                        go.wait(10)
                    with fenced_transaction(lease(8), using=alias):
                        Plain.objects.using(alias).create(n=8)
            except DatabaseError as error:  # noqa: PERF203
                failed.append(error.__cause__.sqlstate)  # type: ignore[union-attr]

    ready, go = threading.Event(), threading.Event()
    with another_connection(newer) as thread:
        thread.start()
        assert ready.wait(10)
        with fenced_transaction(lease(7), using=alias):
            Plain.objects.using(alias).create(n=7)
        go.set()
    assert failed == ["40001"]
    assert sorted(Plain.objects.using(alias).values_list("n", flat=True)) == [7, 8]


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
