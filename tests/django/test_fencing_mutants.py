"""Each promise of the fence is broken once, on purpose, and the test that keeps it must notice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from django.db import models
from django.db.models.sql.where import WhereNode

from tests.django.app.models import Plain, Row, State
from tests.django.leases import lease
from volcano_locks.errors import CannotFence, FenceKeyMismatch, FenceRejected, StaleFence
from volcano_locks.fence_testing import assert_fenced
from volcano_locks_django import Fence, fenced_transaction, fencing

Patch = Callable[[pytest.MonkeyPatch], None]


# -- what is promised --------------------------------------------------------------------------------


def a_row_refuses_a_stale_leader(alias: str) -> None:
    State.objects.using(alias).create(name="a")
    rows = State.objects.using(alias)
    assert_fenced(
        lambda lease: rows.filter(pk="a").fenced_update(lease, n=models.F("n") + 1),
        read=lambda: list(rows.values_list("n")),
    )


def many_rows_are_written_or_none(alias: str) -> None:
    rows = Row.objects.using(alias)
    rows.create(slug="new")
    rows.create(slug="old", fencing_token=9, fencing_key="rollup")
    with pytest.raises(StaleFence):
        rows.fenced_update(lease(8), n=1)
    assert set(rows.values_list("n", flat=True)) == {0}


def a_save_leaves_the_token(alias: str) -> None:
    rows = State.objects.using(alias)
    older = rows.create(name="a")
    rows.filter(pk="a").fenced_update(lease(9), n=1)
    older.save()
    assert rows.get().fencing_token == 9


def tokens_of_two_locks_are_not_compared(alias: str) -> None:
    rows = State.objects.using(alias)
    rows.create(name="a", fencing_token=1, fencing_key="other")
    with pytest.raises(FenceKeyMismatch):
        rows.filter(pk="a").fenced_update(lease(9), n=1)


def a_join_is_refused(alias: str) -> None:
    State.objects.using(alias).create(name="a")
    with pytest.raises(CannotFence):
        State.objects.using(alias).filter(notes__isnull=True).fenced_update(lease(9), n=1)


def an_or_does_not_reach_the_fence(alias: str) -> None:
    rows = Row.objects.using(alias)
    rows.create(slug="a", fencing_token=9, fencing_key="rollup")
    with pytest.raises(FenceRejected):
        (rows.filter(slug="x") | rows.filter(n=0)).fenced_update(lease(8), n=1)
    assert rows.get().n == 0


def an_or_of_ones_own_does_not_reach_the_fence(alias: str) -> None:
    rows = Row.objects.using(alias)
    rows.create(slug="a", fencing_token=9, fencing_key="rollup")
    either: Any = models.Func(
        models.Q(n=0),
        models.Q(day=1),
        template="%(expressions)s",
        arg_joiner=" OR ",
        output_field=models.BooleanField(),
    )
    with pytest.raises(FenceRejected):
        rows.filter(either).fenced_update(lease(8), n=1)
    assert rows.get().n == 0
    try:
        rows.filter(either).fenced_update(lease(9), n=1)
    except FenceRejected:
        pytest.fail("a fresh leader was refused")


def a_stale_transaction_is_refused(alias: str) -> None:
    def write(lease: Any) -> None:
        with fenced_transaction(lease, using=alias):
            Plain.objects.using(alias).create()

    assert_fenced(write, read=lambda: Plain.objects.using(alias).count())


def a_stale_transaction_does_not_move_the_fence_back(alias: str) -> None:
    with fenced_transaction(lease(9), using=alias):
        pass
    with contextlib.suppress(StaleFence), fenced_transaction(lease(8), using=alias):
        pass
    assert Fence.objects.using(alias).get().fencing_token == 9


# -- and how it is broken ------------------------------------------------------------------------------


def no_predicate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fencing.FencePredicate, "as_sql", lambda *_: ("1 = 1", ()))


def token_alone(patch: pytest.MonkeyPatch) -> None:
    def as_sql(self: Any, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        return "fencing_token <= %s", (self.offered.token,)

    patch.setattr(fencing.FencePredicate, "as_sql", as_sql)


def predicate_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fencing, "_add", lambda query, condition: query.where.children.append(condition))


def no_parentheses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fencing._Grouped, "as_sql", WhereNode.as_sql)


def no_look_at_the_rest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fencing._Write, "_refuse_leftovers", lambda self: None)


def save_writes_what_the_instance_says(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fencing._FenceField, "pre_save", models.Field.pre_save)


def joins_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fencing, "_refuse", lambda *_: None)


def fence_row_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    advance = fencing._advance

    def always(connection: Any, offered: Any) -> int:
        advance(connection, offered)
        return int(offered.token)

    patch.setattr(fencing, "_advance", always)


def fence_row_is_overwritten(patch: pytest.MonkeyPatch) -> None:
    def overwrite(connection: Any, offered: Any) -> int:
        from django.utils import timezone

        Fence.objects.using(connection.alias).update_or_create(
            key=offered.key,
            defaults={"fencing_token": offered.token, "advanced_at": timezone.now()},
        )
        return int(offered.token)

    patch.setattr(fencing, "_advance", overwrite)


MUTANTS: list[tuple[Patch, Callable[[str], None]]] = [
    (no_predicate, a_row_refuses_a_stale_leader),
    (no_predicate, many_rows_are_written_or_none),
    (token_alone, tokens_of_two_locks_are_not_compared),
    (predicate_anywhere, an_or_does_not_reach_the_fence),
    (no_parentheses, an_or_of_ones_own_does_not_reach_the_fence),
    (no_look_at_the_rest, many_rows_are_written_or_none),
    (save_writes_what_the_instance_says, a_save_leaves_the_token),
    (joins_pass, a_join_is_refused),
    (fence_row_is_not_compared, a_stale_transaction_is_refused),
    (fence_row_is_overwritten, a_stale_transaction_does_not_move_the_fence_back),
]


@pytest.mark.parametrize(
    ("mutant", "promise"), MUTANTS, ids=[f"{m.__name__}-{p.__name__}" for m, p in MUTANTS]
)
def test_a_broken_fence_is_noticed(
    sqlite: str, mutant: Patch, promise: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "_texts", {})  # what was made before would hide the mutant
    mutant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        promise(sqlite)


@pytest.mark.parametrize("promise", dict.fromkeys(p for _, p in MUTANTS), ids=lambda p: p.__name__)
def test_an_unbroken_fence_keeps_the_promise(sqlite: str, promise: Callable[[str], None]) -> None:
    promise(sqlite)
