"""Fenced rows: what lands, what is refused, and what is in the database afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, models, transaction
from django.db.backends.utils import CursorWrapper
from django.db.models import (
    BooleanField,
    Case,
    Exists,
    F,
    Func,
    IntegerField,
    Q,
    Subquery,
    Value,
    When,
)
from django.db.models.expressions import RawSQL
from django.db.models.functions import Length
from django.db.models.signals import post_delete, post_save, pre_delete, pre_save
from django.db.utils import IntegrityError

from tests.django.app.models import (
    Bound,
    Computed,
    Folded,
    Legacy,
    Loose,
    Note,
    OfState,
    Own,
    Pair,
    Row,
    Stamped,
    State,
    StateProxy,
    Tree,
)
from tests.django.leases import Held, lease
from tests.django.sending import statements
from volcano_locks.errors import (
    CannotFence,
    FenceKeyMismatch,
    FenceRejected,
    FenceTargetMissing,
    InvalidRequest,
    LeaseLost,
    OutcomeUnknown,
    StaleFence,
)
from volcano_locks.fence_testing import assert_fenced
from volcano_locks_django import FenceWarning, fencing

BIG = 4503599627370497


@pytest.fixture
def state(alias: str) -> Any:
    """The queryset of one row, never fenced."""
    State.objects.using(alias).create(name="a")
    return State.objects.using(alias).filter(pk="a")


# -- update ----------------------------------------------------------------------------------------


def test_the_newest_leader_writes_as_often_as_it_likes(state: Any) -> None:
    assert state.fenced_update(lease(7), n=1) == 1
    assert state.fenced_update(lease(8), n=2) == 1
    assert state.values_list("n", "fencing_token", "fencing_key").get() == (2, 8, "rollup")


def test_two_identical_updates_both_succeed(state: Any) -> None:
    assert state.fenced_update(lease(7), n=1) == 1
    assert state.fenced_update(lease(7), n=1) == 1


def test_a_stale_leader_is_refused_and_told_both_tokens(state: Any) -> None:
    state.fenced_update(lease(BIG + 1), n=2)
    with pytest.raises(StaleFence) as refused:
        state.fenced_update(lease(BIG), n=1)
    error = refused.value
    assert (error.key, error.offered, error.stored) == ("rollup", BIG, BIG + 1)
    assert state.get().n == 2


def test_tokens_are_exact_up_to_the_last_bit(state: Any) -> None:
    state.fenced_update(lease(2**63 - 1), n=2)
    assert state.get().fencing_token == 2**63 - 1
    with pytest.raises(StaleFence):
        state.fenced_update(lease(2**63 - 2), n=1)


@pytest.mark.parametrize("token", [0, -1, 2**63, "9", 9.0, True, None])
def test_what_is_no_token_is_refused_before_any_statement(sqlite: str, token: Any) -> None:
    with statements(sqlite) as sent, pytest.raises(InvalidRequest):
        State.objects.filter(pk="a").fenced_update(lease(token), n=1)
    assert sent == []


def test_a_lost_hold_sends_nothing(alias: str) -> None:
    hold = Held(7)
    hold.lose()
    row = State(name="a")
    with statements(alias) as sent:
        for write in (
            lambda: State.objects.using(alias).fenced_update(hold, n=1),
            lambda: State.objects.using(alias).all().fenced_delete(hold),
            lambda: State.objects.using(alias).fenced_upsert(hold, {"n": 1}, name="a"),
            lambda: row.fenced_save(hold, using=alias),
            lambda: row.fenced_delete(hold, using=alias),
        ):
            with pytest.raises(LeaseLost):
                write()
    assert sent == []


def test_a_missing_row_is_another_error(alias: str) -> None:
    rows = State.objects.using(alias)
    for missing in (rows.filter(pk="a"), rows.filter(n__gt=3), rows.none()):
        with pytest.raises(FenceTargetMissing, match=r"row of app\.State"):
            missing.fenced_update(lease(7), n=1)
        with pytest.raises(FenceTargetMissing):
            missing.fenced_delete(lease(7))
    assert not connections[alias].in_atomic_block


def test_expressions_are_computed_once(state: Any) -> None:
    state.fenced_update(lease(7), n=F("n") + 1)
    state.fenced_update(lease(7), n=F("n") + F("fencing_token"))
    state.fenced_update(lease(9), n=F("n") + F("fencing_token"))
    assert state.get().n == 1 + 7 + 7  # the token before the write, on every database


def test_without_values_only_the_token_is_advanced(state: Any) -> None:
    assert state.fenced_update(lease(7)) == 1
    assert state.values_list("n", "fencing_token").get() == (0, 7)


def test_a_queryset_shows_the_new_values_after_its_own_update(state: Any) -> None:
    assert state[0].n == 0
    list(state)
    state.fenced_update(lease(7), n=5)
    assert next(iter(state)).n == 5


def test_of_many_rows_all_are_written_or_none(alias: str) -> None:
    rows = Row.objects.using(alias)
    for number in range(5):
        rows.create(slug=f"{number}")
    assert rows.filter(n=0).fenced_update(lease(7), n=1) == 5
    rows.filter(slug="3").fenced_update(lease(9), n=2)
    with pytest.raises(StaleFence) as refused:
        rows.filter(n__gt=0).fenced_update(lease(8), n=5)
    assert refused.value.stored == 9
    assert list(rows.order_by("slug").values_list("n", flat=True)) == [1, 1, 1, 2, 1]
    with pytest.raises(StaleFence):
        rows.all().fenced_delete(lease(8))
    assert rows.count() == 5


@pytest.mark.parametrize("way", ["exists", "in"])
def test_a_write_that_changes_what_its_own_filter_finds_is_all_or_none(
    alias: str, way: str
) -> None:
    rows = Row.objects.using(alias)
    rows.create(slug="new")
    rows.create(slug="old", n=7, fencing_token=9, fencing_key="rollup")
    rows.create(slug="other", n=7)
    zeros = rows.filter(n=0)
    found = rows.filter(Exists(zeros) if way == "exists" else Q(tenant__in=zeros.values("tenant")))
    with pytest.raises(StaleFence) as refused:
        found.fenced_update(lease(8), n=1)
    assert refused.value.stored == 9
    # MariaDB's own backend of Django rewrites such a delete, which is refused.
    with pytest.raises((StaleFence, CannotFence)):
        found.fenced_delete(lease(8))
    assert list(rows.order_by("slug").values_list("n", flat=True)) == [0, 7, 7]
    assert found.fenced_update(lease(9), n=1) == 3


@pytest.mark.parametrize(
    ("condition", "asks"),
    [
        (Q(n=1) | ~Q(slug__in=["a", "b"], n__gt=F("day")), False),
        (Q(day=Length("slug") + 1), False),
        (Q(pk__in=[1, Subquery(Row.objects.values("pk")[:1])]), True),
        (Q(pk__in=Row.objects.values("pk")) | Q(n=1), True),
        (Q(n=Case(When(Exists(Row.objects.filter(n=0)), then=1), default=0)), True),
        (Q(Func(F("n"), template="%(expressions)s > 0", output_field=BooleanField())), True),
        (Q(n__gt=RawSQL("(SELECT MIN(n) FROM app_row)", ())), True),
    ],
)
def test_what_asks_other_rows_is_looked_at_before_the_write(
    sqlite: str, condition: Any, asks: bool
) -> None:
    Row.objects.create(slug="a")
    with statements(sqlite) as sent, suppress(FenceTargetMissing):
        Row.objects.filter(condition).fenced_update(lease(7))
    first = next(sql for sql in sent if sql.startswith(("SELECT", "UPDATE")))
    assert first.startswith("SELECT" if asks else "UPDATE")


def test_a_row_that_is_next_after_the_write_is_no_part_of_it(alias: str) -> None:
    rows = Row.objects.using(alias)
    rows.create(slug="a")
    rows.create(slug="b", fencing_token=9, fencing_key="rollup")
    queue = rows.filter(pk=rows.filter(n=0).order_by("slug").values("pk")[:1])
    assert queue.fenced_update(lease(8), n=1) == 1
    with pytest.raises(StaleFence):
        queue.fenced_update(lease(8), n=1)
    assert list(rows.order_by("slug").values_list("n", flat=True)) == [1, 0]


def test_a_unique_column_compared_with_a_column_pins_no_row(alias: str) -> None:
    rows = Row.objects.using(alias)
    rows.create(slug="new", fencing_key="rollup")
    rows.create(slug="old", fencing_token=9, fencing_key="rollup")
    with pytest.raises(StaleFence):
        rows.filter(slug=F("slug")).fenced_update(lease(8), n=5)
    assert set(rows.values_list("n", flat=True)) == {0}


def test_a_refused_write_leaves_the_transaction_around_it_usable(alias: str) -> None:
    rows = Row.objects.using(alias)
    rows.create(slug="new")
    rows.create(slug="old", fencing_token=9, fencing_key="rollup")
    with transaction.atomic(using=alias):
        with pytest.raises(StaleFence):
            rows.fenced_update(lease(8), n=5)
        rows.filter(slug="new").fenced_update(lease(8), n=6)
    assert list(rows.order_by("slug").values_list("n", flat=True)) == [6, 0]


def test_a_filter_on_a_column_that_the_update_changes_is_no_trap(alias: str) -> None:
    rows = Row.objects.using(alias)
    for number in range(3):
        rows.create(slug=f"{number}")
    assert rows.filter(n=0).fenced_update(lease(7), n=1) == 3
    with pytest.raises(FenceTargetMissing):
        rows.filter(n=0).fenced_update(lease(7), n=1)


@pytest.mark.needs("mariadb")
def test_mysql_that_counts_changed_rows_gives_the_same_answers(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.django.conftest import use

    alias = use(made, "mariadb")
    connection = connections[alias]
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", {"client_flag": 0})
    connection.close()
    try:
        rows = Row.objects.using(alias)
        for number in range(3):
            rows.create(slug=f"{number}")
        with connection.cursor() as cursor:
            for expected in (3, 0):  # this connection really counts changes
                assert cursor.execute("UPDATE app_row SET n = 1") == expected
        for _ in range(2):
            assert rows.filter(slug="1").fenced_update(lease(7), n=5) == 1
            assert rows.fenced_update(lease(7), n=6) == 3
        rows.filter(slug="1").fenced_update(lease(7), n=F("n") + 1)
        assert rows.get(slug="1").n == 7
        rows.filter(slug="1").fenced_update(lease(9))
        for stale in (rows.filter(slug="1"), rows.all()):
            with pytest.raises(StaleFence):
                stale.fenced_update(lease(8), n=0)
        with pytest.raises(FenceTargetMissing):
            rows.filter(slug="x").fenced_update(lease(9), n=0)
        assert rows.filter(slug="2").fenced_delete(lease(9)) == 1
    finally:
        monkeypatch.undo()
        connection.close()


@pytest.mark.needs("mariadb")
def test_an_old_snapshot_does_not_hide_a_newer_leader(made: Any) -> None:
    """MySQL's REPEATABLE READ shows a transaction its old rows; the fence must look at the new ones."""
    from tests.django.conftest import use

    alias = use(made, "mariadb")
    rows = Row.objects.using(alias)
    rows.create(slug="a")
    rows.create(slug="b")
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    try:
        with transaction.atomic(using=alias):
            assert rows.get(slug="a").fencing_token == 0  # the snapshot is taken
            made["mariadb"].execute(
                "UPDATE app_row SET fencing_token = 9, fencing_key = 'rollup' WHERE slug = 'a'"
            )
            assert rows.get(slug="a").fencing_token == 0
            with pytest.raises(StaleFence):
                rows.filter(slug="a").fenced_update(lease(8), n=1)
            with pytest.raises(StaleFence):
                rows.all().fenced_update(lease(8), n=1)
            with pytest.raises(StaleFence):
                rows.all().fenced_delete(lease(8))
        assert sorted(rows.values_list("slug", "n")) == [("a", 0), ("b", 0)]
    finally:
        connection.close()


def test_a_driver_that_does_not_count_is_not_believed(
    state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CursorWrapper, "rowcount", -1, raising=False)
    with pytest.raises(OutcomeUnknown, match="does not count"):
        state.fenced_update(lease(7), n=1)


def test_many_stale_rows_show_the_newest_token_in_whatever_order(alias: str) -> None:
    rows = Row.objects.using(alias)
    for token in (8, 9):
        rows.create(slug=str(token), fencing_token=token, fencing_key="rollup")
    with pytest.raises(StaleFence) as refused:
        rows.order_by("slug").reverse().fenced_update(lease(7))
    assert refused.value.stored == 9


def test_a_column_that_is_compared_in_its_own_way_pins_no_row(alias: str) -> None:
    rows = Folded.objects.using(alias)
    rows.create(slug="a")
    if connections[alias].vendor != "mysql":  # where the unique column itself folds
        rows.create(slug="A", fencing_token=9, fencing_key="rollup")
        with pytest.raises(StaleFence):
            rows.filter(slug="a").fenced_update(lease(7), n=1)
        assert set(rows.values_list("n", flat=True)) == {0}
    assert rows.filter(slug="a").fenced_update(lease(9), n=1) == rows.count()


def test_a_value_that_is_an_expression_of_ones_own_pins_no_row(alias: str) -> None:
    rows = Row.objects.using(alias)
    rows.create(pk=1, slug="a")
    rows.create(pk=2, slug="b", fencing_token=9, fencing_key="rollup")
    either = Func(Value(7), template="(%(expressions)s) OR (1 = 1)", output_field=IntegerField())
    with pytest.raises(StaleFence):
        rows.filter(pk=1).filter(n=either).fenced_update(lease(7), n=1)
    assert set(rows.values_list("n", flat=True)) == {0}


@pytest.mark.parametrize("saved", [False, True], ids=["unsaved", "saved since"])
def test_a_save_takes_the_key_of_a_related_row_as_djangos_own_does(alias: str, saved: bool) -> None:
    tree = Tree.objects.using(alias).create()
    tree.parent = Tree()
    if not saved:
        with pytest.raises(ValueError, match="unsaved related object"):
            tree.fenced_save(lease(7), using=alias)
        return
    tree.parent.save(using=alias)
    tree.fenced_save(lease(7), using=alias)
    assert Tree.objects.using(alias).get(pk=tree.pk).parent_id == tree.parent.pk


def test_a_save_under_a_lost_hold_calls_nobody(state: Any, alias: str) -> None:
    heard: list[Any] = []
    hold = Held(7)
    hold.lose()

    def hear(**signal: Any) -> None:
        heard.append(signal)

    row = state.get()
    pre_save.connect(hear, sender=State)
    try:
        with pytest.raises(LeaseLost):
            row.fenced_save(hold)
    finally:
        pre_save.disconnect(hear, sender=State)
    assert heard == []


def test_a_proxy_knows_what_is_unique_in_its_models_table(alias: str) -> None:
    StateProxy(name="a").fenced_save(lease(7), using=alias)
    assert not StateProxy.objects.using(alias).fenced_upsert(lease(8), {"n": 1}, name="a")
    with statements(alias) as sent:
        StateProxy.objects.using(alias).filter(pk="a").fenced_update(lease(8), n=2)
    assert len(sent) == 1


# -- the key beside the token ----------------------------------------------------------------------


def test_tokens_of_two_locks_are_never_compared(state: Any) -> None:
    state.fenced_update(lease(7, "rollup"), n=1)
    for token in (1, 99):
        with pytest.raises(FenceKeyMismatch, match="fenced by lock 'rollup'") as refused:
            state.fenced_update(lease(token, "cleanup"), n=2)
        assert (refused.value.key, refused.value.stored_key) == ("cleanup", "rollup")
    assert state.get().n == 1


def test_keys_that_differ_in_case_are_two_locks(alias: str) -> None:
    rows = State.objects.using(alias)
    rows.create(name="a", fencing_token=7, fencing_key="Rollup")
    with pytest.raises(FenceKeyMismatch):
        rows.filter(pk="a").fenced_update(lease(9, "rollup"), n=1)


def test_a_class_bound_to_one_lock_refuses_the_others_before_any_statement(alias: str) -> None:
    Bound.objects.using(alias).create(id=1)
    row = Bound.objects.using(alias).filter(pk=1)
    assert row.fenced_update(lease(7, "rollup"), n=1) == 1
    with statements(alias) as sent, pytest.raises(CannotFence, match="bound to lock 'rollup'"):
        row.fenced_update(lease(99, "cleanup"), n=2)
    assert sent == []
    with pytest.raises(StaleFence):
        row.fenced_update(lease(6, "rollup"), n=2)


# -- NULLs -----------------------------------------------------------------------------------------


@contextmanager
def legacy(alias: str, token: str, key: str = "VARCHAR(128) NOT NULL") -> Iterator[Any]:
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"CREATE TABLE legacy (id BIGINT PRIMARY KEY, n BIGINT NOT NULL, "
            f"fencing_token {token}, fencing_key {key})"
        )
        try:
            yield cursor
        finally:
            cursor.execute("DROP TABLE legacy")


def test_a_null_is_named_and_never_counts_as_fresh_or_stale(alias: str) -> None:
    with legacy(alias, "BIGINT NULL", "VARCHAR(128) NULL") as cursor:
        cursor.execute("INSERT INTO legacy VALUES (1, 0, NULL, ''), (2, 0, 0, NULL), (3, 0, 0, '')")
        rows = Legacy.objects.using(alias)
        for broken in (rows.filter(pk=1), rows.filter(pk__in=[1, 3])):
            with pytest.raises(FenceRejected, match="NULL as its fencing_token"):
                broken.fenced_update(lease(7), n=1)
        with pytest.raises(FenceRejected, match="NULL as its fencing_key"):
            rows.filter(pk=2).fenced_delete(lease(7))
        assert sorted(rows.values_list("pk", "n")) == [(1, 0), (2, 0), (3, 0)]


# -- save() and what else could move the token back --------------------------------------------------


def test_a_plain_save_of_an_older_instance_leaves_the_token(state: Any, alias: str) -> None:
    state.fenced_update(lease(5), n=1)
    older = state.get()
    state.fenced_update(lease(50), n=2)
    older.n = 3
    older.save()
    assert state.values_list("n", "fencing_token", "fencing_key").get() == (3, 50, "rollup")
    older.save(update_fields=["fencing_token", "fencing_key"])
    State.objects.using(alias).update_or_create(name="a", defaults={"n": 4, "fencing_token": 1})
    assert state.values_list("n", "fencing_token", "fencing_key").get() == (4, 50, "rollup")
    with pytest.raises(StaleFence):
        state.fenced_update(lease(49), n=5)


def test_bulk_writes_cannot_name_the_columns_of_the_fence(state: Any, alias: str) -> None:
    state.fenced_update(lease(50), n=2)
    row = state.get()
    row.fencing_token = 1
    rows = State.objects.using(alias)
    writes: list[Any] = [
        lambda: rows.update(fencing_token=1),
        lambda: rows.filter(pk="a").update(fencing_key=""),
        lambda: State.objects.update(fencing_token=1),
        lambda: State.objects.bulk_update([row], ["fencing_token"]),
        lambda: rows.bulk_update([row], ["n", "fencing_token"]),
        lambda: rows.bulk_create(
            [row], update_conflicts=True, unique_fields=["name"], update_fields=["fencing_token"]
        ),
        lambda: state.fenced_update(lease(60), fencing_token=1),
        lambda: state.fenced_update(lease(60), fencing_token=F("fencing_token") + 1),
        lambda: rows.fenced_upsert(lease(60), {"fencing_key": "x"}, name="a"),
    ]
    for write in writes:
        with pytest.raises(CannotFence, match=r"leave fencing_(key|token) of app\.State out"):
            write()
    assert state.get().fencing_token == 50


def test_ordinary_bulk_writes_still_work(state: Any, alias: str) -> None:
    rows = State.objects.using(alias)
    assert rows.filter(pk="a").update(n=1) == 1
    row = state.get()
    row.n = 2
    assert rows.bulk_update([row], ["n"]) == 1
    rows.bulk_create([State(name="b", n=3)])
    assert sorted(rows.values_list("name", "n")) == [("a", 2), ("b", 3)]


# -- fenced_save -----------------------------------------------------------------------------------


def test_fenced_save_writes_the_instance_and_shows_its_new_token(state: Any, alias: str) -> None:
    state.fenced_update(lease(6))
    row = state.get()
    row.n = 9
    with statements(alias) as sent:
        row.fenced_save(lease(7))
    assert len(sent) == 1
    assert (row.fencing_token, row.fencing_key) == (7, "rollup")
    assert state.values_list("n", "fencing_token", "fencing_key").get() == (9, 7, "rollup")


def test_a_stale_fenced_save_is_refused_and_the_instance_keeps_its_old_token(state: Any) -> None:
    older = state.get()
    state.fenced_update(lease(8), n=2)
    older.n = 1
    with pytest.raises(StaleFence):
        older.fenced_save(lease(7))
    assert older.fencing_token == 0
    assert state.get().n == 2


def test_fenced_save_of_a_row_that_is_gone_does_not_bring_it_back(state: Any) -> None:
    row = state.get()
    models.QuerySet.delete(state)
    with pytest.raises(FenceTargetMissing):
        row.fenced_save(lease(7))
    assert not state.exists()


def test_fenced_save_of_a_new_instance_with_its_own_key_inserts_or_updates(alias: str) -> None:
    new = State(name="a", n=1)
    new.fenced_save(lease(7), using=alias)
    assert (new._state.adding, new._state.db, new.fencing_token) == (False, alias, 7)
    State(name="a", n=2).fenced_save(lease(8), using=alias)
    with pytest.raises(StaleFence):
        State(name="a", n=3).fenced_save(lease(7), using=alias)
    assert State.objects.using(alias).get().n == 2
    Pair(left=1, right=2, n=3).fenced_save(lease(7), using=alias)
    pair = Pair.objects.using(alias).get(pk=(1, 2))
    pair.n = 4
    pair.fenced_save(lease(8))
    assert Pair.objects.using(alias).values_list("n", "fencing_token").get() == (4, 8)
    assert Pair.objects.using(alias).filter(pk=(1, 2)).fenced_delete(lease(8)) == 1


def test_a_new_row_without_a_key_of_its_own_is_refused(alias: str) -> None:
    for new in (Row(slug="a"), Row(id=7, slug="a"), Stamped(n=1), Bound()):
        with (
            statements(alias) as sent,
            pytest.raises(CannotFence, match="inside fenced_transaction"),
        ):
            new.fenced_save(lease(7), using=alias)
        assert sent == []


def test_fenced_save_with_update_fields_and_deferred_fields(state: Any) -> None:
    row = state.get()
    row.n = 5
    row.fenced_save(lease(7), update_fields=["touched"])
    assert state.get().n == 0
    partial = state.only("name").get()
    partial.fenced_save(lease(7))
    assert "n" in partial.get_deferred_fields()
    with pytest.raises(ValueError, match="fencing_token, name, nothing"):
        row.fenced_save(lease(7), update_fields=["n", "nothing", "fencing_token", "name"])


def test_fenced_save_reads_back_what_the_database_computed(state: Any) -> None:
    row = state.get()
    row.n = F("n") + 5
    row.fenced_save(lease(7))
    assert row.n == 5
    row.fenced_save(lease(7))
    assert state.get().n == 5


def test_a_new_instance_shows_what_the_database_chose_and_can_be_saved_again(alias: str) -> None:
    new = Computed(name="a", n=3)
    new.fenced_save(lease(5), using=alias)
    row = Computed.objects.using(alias).get()
    shown = ("n", "chosen", "double", "made", "seen", "touched", "fencing_token", "fencing_key")
    assert [new.__dict__[name] for name in shown] == [getattr(row, name) for name in shown]
    assert (new.chosen, new.double) == (9, 6)
    assert new.made is not None
    models.QuerySet.update(Computed.objects.using(alias), chosen=77)
    new.refresh_from_db(fields=["chosen"])
    new.n = 4
    new.fenced_save(lease(6))
    after = Computed.objects.using(alias).get()
    assert [new.__dict__[name] for name in shown] == [getattr(after, name) for name in shown]
    assert (after.chosen, after.double, after.made, after.seen) == (77, 8, row.made, row.seen)


def test_a_new_instance_over_an_old_row_leaves_what_only_an_insert_sets(alias: str) -> None:
    Computed(name="a", n=3, chosen=55).fenced_save(lease(5), using=alias)
    old = Computed.objects.using(alias).get()
    new = Computed(name="a", n=F("n") + 1)
    new.fenced_save(lease(6), using=alias)
    row = Computed.objects.using(alias).get()
    assert (row.n, row.chosen, row.double, row.made, row.seen) == (4, 55, 8, old.made, old.seen)
    assert row.touched > old.touched
    shown = ("n", "chosen", "double", "made", "seen", "touched")
    assert [new.__dict__[name] for name in shown] == [getattr(row, name) for name in shown]


def test_a_default_that_only_the_database_knows_is_not_written_into_a_row(alias: str) -> None:
    Computed.objects.using(alias).create(name="a", chosen=55)
    row = Computed.objects.using(alias).get()
    row.chosen = Computed(name="b").chosen
    row.fenced_save(lease(6))
    assert row.chosen == 55
    assert Computed.objects.using(alias).get().chosen == 55


def test_fenced_save_sends_signals_and_sets_auto_now_and_fenced_update_does_not(state: Any) -> None:
    heard: list[Any] = []

    def hear(sender: Any, signal: Any, **kwargs: Any) -> None:
        name = {id(pre_save): "pre_save", id(post_save): "post_save"}[id(signal)]
        heard.append((name, sender.__name__, kwargs.get("created"), kwargs["update_fields"]))

    before = state.get().touched
    pre_save.connect(hear)
    post_save.connect(hear)
    try:
        state.fenced_update(lease(7), n=1)
        assert heard == []
        assert state.get().touched == before
        row = state.get()
        row.fenced_save(lease(7), update_fields=["n", "touched"])
        both = frozenset({"n", "touched"})
        assert heard == [("pre_save", "State", None, both), ("post_save", "State", False, both)]
        assert state.get().touched > before
        heard.clear()
        state.fenced_update(lease(9))
        with pytest.raises(StaleFence):
            row.fenced_save(lease(7))
        assert heard == [("pre_save", "State", None, None)]
        heard.clear()
        State(name="b").fenced_save(lease(7), using=state.db)
        assert heard[-1] == ("post_save", "State", True, None)
    finally:
        pre_save.disconnect(hear)
        post_save.disconnect(hear)


def test_a_proxy_is_fenced_like_its_model(state: Any, alias: str) -> None:
    row = StateProxy.objects.using(alias).get(pk="a")
    row.n = 4
    row.fenced_save(lease(7))
    with pytest.raises(StaleFence):
        StateProxy.objects.using(alias).filter(pk="a").fenced_update(lease(6), n=1)
    assert state.get().n == 4


def test_a_queryset_class_of_ones_own_is_fenced(alias: str) -> None:
    Own.objects.using(alias).create(id=1, n=11)
    Own.objects.using(alias).create(id=2, n=1)
    assert Own.objects.using(alias).big().fenced_update(lease(7), n=12) == 1
    assert Own.objects.db_manager(alias).fenced_update(lease(7)) == 2
    for manager in (Own.objects, Row.objects):
        assert not hasattr(manager, "fenced_delete")  # as with delete(): not by a slip of the pen
        assert not hasattr(manager, "afenced_delete")


def test_rows_of_a_related_manager_are_fenced(state: Any, alias: str) -> None:
    parts = state.get().parts
    parts.create()
    parts.create()
    assert parts.fenced_update(lease(7), n=1) == 2
    with pytest.raises(StaleFence):
        parts.filter(n=1).fenced_update(lease(6), n=2)
    assert OfState.objects.using(alias).filter(state_id="a", n=1).count() == 2


# -- delete ----------------------------------------------------------------------------------------


def test_a_stale_delete_is_refused(alias: str) -> None:
    rows = Row.objects.using(alias)
    rows.create(slug="a", fencing_token=9, fencing_key="rollup")
    with pytest.raises(StaleFence):
        rows.filter(slug="a").fenced_delete(lease(8))
    assert rows.count() == 1
    assert rows.filter(slug="a").fenced_delete(lease(9)) == 1
    assert rows.count() == 0


def test_an_instance_is_deleted_under_the_fence(alias: str) -> None:
    row = Row.objects.using(alias).create(slug="a", fencing_token=9, fencing_key="rollup")
    with pytest.raises(StaleFence):
        row.fenced_delete(lease(8))
    row.fenced_delete(lease(9))
    assert row.pk is None
    assert not Row.objects.using(alias).exists()
    with pytest.raises(FenceTargetMissing):
        row.fenced_delete(lease(9))


def test_a_fenced_delete_cascades_or_leaves_everything(state: Any, alias: str) -> None:
    note = Note.objects.using(alias).create(state_id="a")
    state.fenced_update(lease(9))
    with pytest.raises(StaleFence):
        state.fenced_delete(lease(8))
    assert Note.objects.using(alias).filter(pk=note.pk).exists()
    assert state.fenced_delete(lease(9)) == 1
    assert not Note.objects.using(alias).exists()
    assert not state.exists()


@pytest.mark.parametrize("child", [OfState, Loose])
@pytest.mark.parametrize("fence", [(50, "rollup"), (1, "other"), (0, "")])
def test_a_cascade_does_not_step_over_another_rows_fence(
    state: Any, alias: str, child: Any, fence: tuple[int, str]
) -> None:
    token, key = fence
    children = child.objects.using(alias)
    children.create(state_id="a", fencing_token=token, fencing_key=key)
    Note.objects.using(alias).create(state_id="a")
    for write in (
        lambda: state.fenced_delete(lease(5)),
        lambda: state.get().fenced_delete(lease(5)),
    ):
        with pytest.raises(CannotFence, match=rf"rows of app\.{child.__name__} as well") as refused:
            write()
        assert "fenced_delete() or fenced_update() those rows first" in str(refused.value)
    assert children.values_list("state_id", "fencing_token").get() == ("a", token)
    assert Note.objects.using(alias).exists()
    assert state.get().fencing_token == 0
    if key != "other":
        children.all().fenced_delete(lease(60))
        assert state.fenced_delete(lease(60)) == 1


def test_a_table_that_refers_to_itself_is_deleted_with_all_that_hangs_on_it(alias: str) -> None:
    rows = Tree.objects.using(alias)
    root = rows.create()
    branch = rows.create(parent=root)
    leaf = rows.create(parent=branch, fencing_token=50, fencing_key="rollup")
    with pytest.raises(CannotFence, match=r"rows of app\.Tree as well"):
        rows.filter(pk=root.pk).fenced_delete(lease(60))
    with pytest.raises(CannotFence, match=r"rows of app\.Tree as well"):
        rows.exclude(pk=leaf.pk).fenced_delete(lease(60))
    with pytest.raises(StaleFence):
        rows.all().fenced_delete(lease(49))
    assert set(rows.values_list("pk", "fencing_token")) == {
        (root.pk, 0),
        (branch.pk, 0),
        (leaf.pk, 50),
    }
    assert rows.filter(pk=leaf.pk).fenced_delete(lease(60)) == 1
    assert rows.all().fenced_delete(lease(60)) == 2
    assert not rows.exists()


def test_a_proxys_cascade_is_fenced_like_its_models(state: Any, alias: str) -> None:
    Note.objects.using(alias).create(state_id="a")
    assert StateProxy.objects.using(alias).filter(pk="a").fenced_delete(lease(7)) == 1
    assert not state.exists()


def test_a_child_that_a_rival_adds_meanwhile_is_not_deleted_unfenced(
    state: Any, alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = fencing._refuse_other_fences
    children = OfState.objects.using(alias)

    def look_then_be_late(*args: Any) -> None:
        look(*args)
        children.create(state_id="a", fencing_token=50, fencing_key="rollup")

    monkeypatch.setattr(fencing, "_refuse_other_fences", look_then_be_late)
    with pytest.raises(IntegrityError):
        state.fenced_delete(lease(7))
    assert state.get().fencing_token == 0


def test_rows_that_were_to_be_locked_are_deleted_with_what_hangs_on_them(state: Any) -> None:
    assert state.select_for_update(of=("self",)).fenced_delete(lease(7)) == 1


def test_a_fenced_delete_sends_the_signals_that_someone_hears(alias: str) -> None:
    heard: list[Any] = []

    def hear(sender: Any, instance: Any, **kwargs: Any) -> None:
        heard.append(instance.slug)

    rows = Row.objects.using(alias)
    rows.create(slug="a")
    rows.create(slug="b", fencing_token=9, fencing_key="rollup")
    pre_delete.connect(hear, sender=Row)
    post_delete.connect(hear, sender=Row)
    try:
        with pytest.raises(StaleFence):
            rows.all().fenced_delete(lease(8))
        assert heard == []
        assert rows.filter(slug="a").fenced_delete(lease(8)) == 1
        assert heard == ["a", "a"]
    finally:
        pre_delete.disconnect(hear, sender=Row)
        post_delete.disconnect(hear, sender=Row)


def test_a_row_that_a_rival_adds_meanwhile_is_not_deleted_with_the_advanced_ones(
    state: Any, alias: str
) -> None:
    def adds_one(execute: Any, sql: str, *args: Any) -> Any:
        result = execute(sql, *args)
        if sql.startswith("UPDATE") and not State.objects.using(alias).filter(name="b").exists():
            State.objects.using(alias).create(name="b")
        return result

    with connections[alias].execute_wrapper(adds_one):
        assert State.objects.using(alias).filter(n=0).fenced_delete(lease(9)) == 1
    assert list(State.objects.using(alias).values_list("name", flat=True)) == ["b"]


def test_a_cascading_delete_by_a_filter_on_the_token_is_refused(state: Any) -> None:
    with pytest.raises(CannotFence, match="one on fencing_token"):
        state.filter(fencing_token=0).fenced_delete(lease(7))
    assert state.get().fencing_token == 0


# -- upsert ----------------------------------------------------------------------------------------


def test_an_upsert_inserts_then_updates_and_refuses_a_stale_leader(alias: str) -> None:
    rows = Row.objects.db_manager(alias)
    assert rows.fenced_upsert(lease(7), {"n": 1}, slug="a") is True
    assert rows.fenced_upsert(lease(8), {"n": 2}, slug="a") is False
    with pytest.raises(StaleFence):
        rows.fenced_upsert(lease(7), {"n": 3}, slug="a")
    assert rows.values_list("n", "fencing_token", "fencing_key").get() == (2, 8, "rollup")


def test_an_upsert_names_a_unique_row(alias: str) -> None:
    rows = Row.objects.db_manager(alias)
    assert rows.fenced_upsert(lease(7), {"n": 1}, tenant=1, day=2, slug="a")
    for write in (
        lambda: rows.fenced_upsert(lease(7), {"n": 1}, tenant=1, day=2),
        lambda: rows.fenced_upsert(lease(7), {"n": 1}),
        lambda: rows.filter(tenant=1).fenced_upsert(lease(7), {"n": 1}, slug="a"),
        lambda: rows.fenced_upsert(lease(7), {"n": 1}, slug__iexact="a"),
    ):
        with pytest.raises(CannotFence):
            write()
    assert rows.count() == 1


def test_an_upsert_that_cannot_be_inserted_says_why(alias: str) -> None:
    with pytest.raises(IntegrityError):
        OfState.objects.db_manager(alias).fenced_upsert(lease(7), {"state_id": None}, id=1)


def test_an_upsert_that_lost_the_race_to_insert_is_fenced_against_the_winner(
    alias: str, monkeypatch: pytest.MonkeyPatch, made: Any
) -> None:
    vendor = "sqlite" if alias == "default" else alias
    insert = models.QuerySet.bulk_create

    def lose_against(rival: int) -> None:
        def late(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(models.QuerySet, "bulk_create", insert)
            if alias == "default":  # SQLite has one writer: let go of the file first
                connections[alias].connection.rollback()
            made[vendor].execute(
                "INSERT INTO app_row (slug, tenant, day, n, fencing_token, fencing_key) "
                f"VALUES ('a', 0, 0, 0, {rival}, 'rollup')"
            )
            raise IntegrityError("another connection was faster")

        monkeypatch.setattr(models.QuerySet, "bulk_create", late)

    rows = Row.objects.db_manager(alias)
    lose_against(6)
    assert rows.fenced_upsert(lease(7), {"n": 1}, slug="a") is False
    assert rows.values_list("n", "fencing_token").get() == (1, 7)
    rows.all().delete()
    lose_against(9)
    with pytest.raises(StaleFence):
        rows.fenced_upsert(lease(7), {"n": 1}, slug="a")
    assert rows.values_list("n", "fencing_token").get() == (0, 9)


# -- async, commits, users' tests --------------------------------------------------------------------


def test_the_async_twins_do_the_same(alias: str) -> None:
    async def work() -> None:
        rows = Row.objects.db_manager(alias)
        assert await rows.afenced_upsert(lease(7), {"n": 1}, slug="a")
        assert await rows.filter(slug="a").afenced_update(lease(8), n=2) == 1
        assert await rows.afenced_update(lease(8), n=3) == 1
        row = await rows.aget(slug="a")
        row.n = 4
        await row.afenced_save(lease(9))
        for stale in (
            rows.filter(slug="a").afenced_update(lease(8), n=5),
            rows.afenced_update(lease(8), n=5),
            rows.all().afenced_upsert(lease(8), {"n": 5}, slug="a"),
            row.afenced_save(lease(8)),
            row.afenced_delete(lease(8)),
            rows.all().afenced_delete(lease(8)),
        ):
            with pytest.raises(StaleFence):
                await stale
        assert (await rows.aget(slug="a")).n == 4
        assert await rows.all().afenced_delete(lease(9)) == 1

    async_to_sync(work)()


def test_a_lease_that_ends_before_the_commit_is_warned_about(state: Any, alias: str) -> None:
    def released_inside_committed_outside() -> None:
        with transaction.atomic(using=alias):
            hold = Held(7)
            state.fenced_update(hold, n=1)
            hold.lose()

    with pytest.warns(FenceWarning, match="Take the lock outside the transaction"):
        released_inside_committed_outside()
    assert state.get().n == 1


def test_many_writes_of_one_transaction_are_looked_at_once_in_each_savepoint(
    state: Any, alias: str
) -> None:
    hold = Held(7)
    with transaction.atomic(using=alias):
        for _ in range(3):
            state.fenced_update(hold, n=1)
        with transaction.atomic(using=alias):
            state.fenced_update(hold, n=2)
            state.fenced_update(hold, n=3)
        assert len(connections[alias].run_on_commit) == 2


def test_a_refused_write_has_nothing_to_be_warned_about(state: Any, alias: str) -> None:
    state.fenced_update(lease(9), n=1)
    hold = Held(8)
    with transaction.atomic(using=alias):
        with pytest.raises(StaleFence):
            state.fenced_update(hold, n=2)
        hold.lose()


def test_a_lease_around_the_transaction_is_not_warned_about(state: Any, alias: str) -> None:
    hold = Held(7)
    with transaction.atomic(using=alias):
        state.fenced_update(hold, n=1)
    hold.lose()


def test_assert_fenced_replays_the_stale_writer_on_every_database(state: Any) -> None:
    def write(lease: Any) -> None:
        state.fenced_update(lease, n=F("n") + 1)

    def unfenced(lease: Any) -> None:
        state.update(n=F("n") + 1)

    def read() -> list[Any]:
        return list(State.objects.using(state.db).values_list("name", "n"))

    assert_fenced(write, read=read, key="rollup")
    with pytest.raises(AssertionError, match="not fenced"):
        assert_fenced(unfenced, read=read, key="rollup")
