"""The operators' door: what the database remembers, and how it is made to forget."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from django.core.management.base import CommandError

from tests.django.app.models import Bound, Row, State
from tests.django.leases import lease
from volcano_locks.errors import StaleFence
from volcano_locks_django import Fence, FenceReset, fenced_transaction
from volcano_locks_django.fence_command import add_arguments, run


def fence(*arguments: str, answer: bool = False) -> tuple[str, list[str]]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    said: list[str] = []
    asked: list[str] = []

    def confirm(question: str) -> bool:
        asked.append(question)
        return answer

    run(vars(parser.parse_args(arguments)), say=said.append, confirm=confirm)
    return "\n".join(said), asked


@pytest.fixture
def copied(alias: str) -> str:
    """A database with the tokens of another environment."""
    State.objects.using(alias).create(name="a", fencing_token=2**60, fencing_key="rollup", n=3)
    State.objects.using(alias).create(name="b", fencing_token=5, fencing_key="other")
    Bound.objects.using(alias).create(id=1, fencing_token=2**60)
    with fenced_transaction(lease(2**60), using=alias):
        pass
    return alias


def test_status_shows_every_token_that_the_database_remembers(copied: str) -> None:
    said, _ = fence("status", "--database", copied)
    assert f"fence row: lock rollup, highest token {2**60}" in said
    assert f"app.State: lock rollup, highest token {2**60}, 1 row(s)" in said
    assert "app.State: lock other, highest token 5" in said
    assert f"app.Bound: lock rollup, highest token {2**60}" in said
    assert "app.Row" not in said


def test_status_of_an_empty_database_says_so(alias: str) -> None:
    assert "has no fenced rows" in fence("status", "--database", alias)[0]


def test_a_copied_database_refuses_until_it_is_reset(copied: str) -> None:
    row = State.objects.using(copied).filter(pk="a")
    with pytest.raises(StaleFence):
        row.fenced_update(lease(9), n=4)
    said, asked = fence("reset", "rollup", "--database", copied, "--reason", "copied", answer=True)
    assert len(asked) == 1
    assert "Stop its workers first" in asked[0]
    assert "recorded in volcano_locks_fencereset" in said
    row.fenced_update(lease(9), n=4)
    Bound.objects.using(copied).filter(pk=1).fenced_update(lease(9), n=4)
    with fenced_transaction(lease(9), using=copied):
        pass
    assert State.objects.using(copied).get(pk="b").fencing_token == 5


def test_a_reset_is_recorded_with_the_token_that_was_forgotten(copied: str) -> None:
    fence("reset", "rollup", "--database", copied, "--reason", "copied", "--yes")
    records = FenceReset.objects.using(copied)
    assert {(r.target, r.key, r.rows, r.highest_token, r.reason) for r in records} == {
        ("fence row", "rollup", 1, 2**60, "copied"),
        ("app.State", "rollup", 1, 2**60, "copied"),
        ("app.Bound", "rollup", 1, 2**60, "copied"),
    }
    assert all(record.reset_by for record in records)
    assert "copied" in fence("status", "--database", copied)[0]


def test_without_a_yes_nothing_is_reset(copied: str) -> None:
    with pytest.raises(CommandError, match="nothing was reset"):
        fence("reset", "rollup", "--database", copied, answer=False)
    assert Fence.objects.using(copied).get().fencing_token == 2**60
    assert State.objects.using(copied).get(pk="a").fencing_token == 2**60
    assert not FenceReset.objects.using(copied).exists()


def test_a_reset_can_be_kept_to_one_model(copied: str) -> None:
    fence("reset", "rollup", "--database", copied, "--model", "app.State", "--yes")
    assert State.objects.using(copied).get(pk="a").fencing_token == 0
    assert Bound.objects.using(copied).get().fencing_token == 2**60
    assert Fence.objects.using(copied).get().fencing_token == 2**60


def test_a_bound_class_that_kept_its_key_column_forgets_the_lock_that_is_named(
    copied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(State, "fence_key", "rollup")
    rows = State.objects.using(copied).order_by("name")
    fence("reset", "other", "--database", copied, "--yes")
    assert list(rows.values_list("fencing_token", "fencing_key")) == [(2**60, "rollup"), (0, "")]
    fence("reset", "rollup", "--database", copied, "--yes")
    assert list(rows.values_list("fencing_token", "fencing_key")) == [(0, ""), (0, "")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reset", "bad key"], "no lock key"),
        (["reset", "rollup", "--model", "app.Plain"], "no fenced model app.Plain"),
        (["status", "--database", "nowhere"], "no database 'nowhere'"),
    ],
)
def test_bad_input_ends_with_64(sqlite: str, arguments: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message) as ended:
        fence(*arguments)
    assert ended.value.returncode == 64


def test_a_lock_that_left_no_token_needs_no_reset(sqlite: str) -> None:
    Row.objects.create(slug="a")
    said, asked = fence("reset", "rollup")
    assert "nothing to reset" in said
    assert not asked


def test_rows_that_are_written_are_not_touched_otherwise(copied: str) -> None:
    before: Any = State.objects.using(copied).values("n", "touched").get(pk="a")
    fence("reset", "rollup", "--database", copied, "--yes")
    assert State.objects.using(copied).values("n", "touched").get(pk="a") == before
