"""Races on real servers: no stale write, no false refusal; without the fence, stale writes show.

``VOLCANO_TEST_RACE_SECONDS`` makes them longer: 60 seconds are tens of thousands of writes. A race goes
on after that until it had enough of them to tell.
"""

from __future__ import annotations

import os

import pytest

from tests.databases import database

from . import races

SECONDS = float(os.environ.get("VOLCANO_TEST_RACE_SECONDS", "5"))
SERVERS = [
    pytest.param("postgresql", marks=pytest.mark.needs("postgres")),
    pytest.param("mariadb", marks=pytest.mark.needs("mariadb")),
]


@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.parametrize("vendor", SERVERS)
def test_leaders_paused_at_random_never_write_stale_and_are_never_refused_for_nothing(
    vendor: str,
) -> None:
    with database(vendor) as db:
        outcome = races.race(
            db.url(),
            [races.single, races.several, races.whole],
            lambda so_far: so_far.writes > 100 and so_far.refusals > 5,
            seconds=SECONDS,
        )
    assert outcome.stale == []
    assert outcome.false == []
    assert outcome.other == []
    assert outcome.writes > 100
    assert outcome.refusals > 5
    print(
        f"{vendor}: {outcome.writes} writes, {outcome.refusals} refusals, {outcome.deadlocks} deadlocks"
    )


@pytest.mark.parametrize("vendor", SERVERS)
def test_without_the_fence_the_same_harness_shows_stale_writes(vendor: str) -> None:
    with database(vendor) as db:
        outcome = races.race(
            db.url(), [races.unfenced], lambda so_far: bool(so_far.stale), leaders=3
        )
    assert outcome.stale, "the harness could not fail"
