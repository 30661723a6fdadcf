"""Fenced rows: what lands, what is refused, and what is in the database afterwards."""

from __future__ import annotations

import pytest
from django.db import connections

from tests.django.app.models import Row, State
from tests.django.leases import lease
from volcano_locks.errors import FenceTargetMissing, StaleFence


def test_the_newest_leader_writes_as_often_as_it_likes(alias: str) -> None:
    State.objects.using(alias).create(name="a")
    row = State.objects.using(alias).filter(pk="a")
    assert row.fenced_update(lease(7), n=1) == 1
    assert row.fenced_update(lease(7), n=1) == 1
    assert row.fenced_update(lease(8), n=2) == 1
    assert row.values_list("n", "fencing_token", "fencing_key").get() == (2, 8, "rollup")


def test_a_stale_leader_is_refused_and_told_both_tokens(alias: str) -> None:
    State.objects.using(alias).create(name="a")
    row = State.objects.using(alias).filter(pk="a")
    row.fenced_update(lease(2**52 + 2), n=2)
    with pytest.raises(StaleFence) as refused:
        row.fenced_update(lease(2**52 + 1), n=1)
    assert (refused.value.key, refused.value.offered, refused.value.stored) == (
        "rollup",
        2**52 + 1,
        2**52 + 2,
    )
    assert row.get().n == 2


def test_a_missing_row_is_another_error(alias: str) -> None:
    with pytest.raises(FenceTargetMissing, match=r"row of app\.State"):
        State.objects.using(alias).filter(pk="a").fenced_update(lease(7), n=1)
    with pytest.raises(FenceTargetMissing):
        State.objects.using(alias).filter(n__gt=3).fenced_update(lease(7), n=1)
    with pytest.raises(FenceTargetMissing):
        State.objects.using(alias).none().fenced_update(lease(7), n=1)
    assert not connections[alias].in_atomic_block


def test_of_many_rows_all_are_written_or_none(alias: str) -> None:
    for number in range(5):
        Row.objects.using(alias).create(slug=f"{number}")
    rows = Row.objects.using(alias)
    assert rows.filter(n=0).fenced_update(lease(7), n=1) == 5
    rows.filter(slug="3").fenced_update(lease(9), n=2)
    with pytest.raises(StaleFence) as refused:
        rows.filter(n__gt=0).fenced_update(lease(8), n=5)
    assert refused.value.stored == 9
    assert list(rows.order_by("slug").values_list("n", flat=True)) == [1, 1, 1, 2, 1]
