"""Leaders that are paused and woken at random, on real connections, against real databases.

Who wrote what, and in which order, is told by a trigger of the database itself, which knows nothing
of the fence: each write of a row leaves the leader's token in a log, in the order of the row's lock.
A stale write is a token in the log that is lower than one before it on the same row.

``VOLCANO_TEST_RACE_SECONDS`` (default 6) is the time for each race; CI gives it more. A race goes on
after that until all that it is about has come up.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from django.db import DatabaseError, connections

from tests.django.app.models import Plain, Row
from tests.django.leases import lease
from volcano_locks.errors import StaleFence
from volcano_locks_django import fenced_transaction

SECONDS = float(os.environ.get("VOLCANO_TEST_RACE_SECONDS", "6"))
ROWS = 3
LEADERS = 6

TRIGGERS = {
    "default": [
        "CREATE TABLE race_log (id INTEGER PRIMARY KEY AUTOINCREMENT, row_id BIGINT, token BIGINT)",
        "CREATE TRIGGER race AFTER UPDATE ON app_row BEGIN "
        "INSERT INTO race_log (row_id, token) VALUES (NEW.id, NEW.n); END",
    ],
    "postgresql": [
        "CREATE TABLE race_log (id BIGSERIAL PRIMARY KEY, row_id BIGINT, token BIGINT)",
        "CREATE FUNCTION race() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO race_log (row_id, token) VALUES (NEW.id, NEW.n); RETURN NEW; END $$",
        "CREATE TRIGGER race AFTER UPDATE ON app_row FOR EACH ROW EXECUTE FUNCTION race()",
    ],
    "mariadb": [
        "CREATE TABLE race_log (id BIGINT AUTO_INCREMENT PRIMARY KEY, row_id BIGINT, token BIGINT)",
        "CREATE TRIGGER race AFTER UPDATE ON app_row FOR EACH ROW "
        "INSERT INTO race_log (row_id, token) VALUES (NEW.id, NEW.n)",
    ],
}
UNDO = {
    "default": ["DROP TRIGGER race", "DROP TABLE race_log"],
    "postgresql": ["DROP TRIGGER race ON app_row", "DROP FUNCTION race", "DROP TABLE race_log"],
    "mariadb": ["DROP TRIGGER race", "DROP TABLE race_log"],
}


class Race:
    """Leaders in threads, each with all the leases it ever had: a paused leader is one whose old
    lease is used again after others have led."""

    def __init__(self, alias: str, seed: int) -> None:
        self.alias = alias
        self.seed = seed
        self.tokens = 0
        self.guard = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stop = threading.Event()

    def new_lease(self) -> Any:
        with self.guard:
            self.tokens += 1
            return lease(2**52 + self.tokens)

    def lead(self, number: int, write: Callable[[Any, random.Random], tuple[str, int]]) -> None:
        chance = random.Random(self.seed * 100 + number)
        leases = [self.new_lease()]
        try:
            while not self.stop.is_set():
                if chance.random() < 0.02:
                    leases = [*leases[-5:], self.new_lease()]
                mine = chance.choice(leases) if chance.random() < 0.3 else leases[-1]
                if chance.random() < 0.01:
                    time.sleep(chance.random() * 0.01)  # paused before, and woken for, this write
                if not self.attempt(mine, chance, write) and chance.random() < 0.2:
                    leases = [*leases[-5:], self.new_lease()]
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            connections[self.alias].close()

    def count(self, **more: int) -> None:
        with self.guard:
            self.counts.update(more)

    def attempt(self, mine: Any, chance: random.Random, write: Any) -> bool:
        """Whether the write landed."""
        try:
            kind, written = write(mine, chance)
        except StaleFence as refused:
            self.count(refused=1)
            issued = 2**52 < refused.stored <= 2**52 + self.tokens if refused.stored else False
            if refused.offered != mine.fencing_token or not issued:
                self.wrong.append(f"false refusal: {refused}")
            elif refused.stored <= refused.offered:  # type: ignore[operator]
                self.wrong.append(f"refused by an older token: {refused}")
        except DatabaseError as error:
            if "deadlock" not in str(error).lower():
                raise
            self.count(deadlocks=1)
        else:
            self.count(**{kind: 1, "logged": written})
            return True
        return False

    def run(self, write: Any, *, until: Callable[[], bool], seconds: float = 0) -> None:
        """For so many seconds, and then until that is true, for at most a minute more."""
        threads = [threading.Thread(target=self.lead, args=(n, write)) for n in range(LEADERS)]
        for thread in threads:
            thread.start()
        least = time.monotonic() + seconds
        while (now := time.monotonic()) < least + 60 and not self.wrong:
            if now >= least and until():
                break
            self.stop.wait(0.1)
        self.stop.set()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


def stale_writes(alias: str) -> int:
    """How many writes in the log came after one with a higher token, on the same row."""
    highest: dict[int, int] = {}
    stale = 0
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT row_id, token FROM race_log ORDER BY id")
        for row, token in cursor.fetchall():
            stale += token < highest.get(row, 0)
            highest[row] = max(token, highest.get(row, 0))
    return stale


@pytest.fixture
def raced(alias: str) -> Any:
    for number in range(ROWS):
        Row.objects.using(alias).create(slug=f"{number}")
    with connections[alias].cursor() as cursor:
        for statement in TRIGGERS[alias]:
            cursor.execute(statement)
        yield alias
        for statement in UNDO[alias]:
            cursor.execute(statement)


@pytest.mark.timeout(SECONDS + 240)
def test_no_stale_write_lands_and_no_fresh_one_is_refused(raced: str) -> None:
    rows = Row.objects.using(raced)

    def write(mine: Any, chance: random.Random) -> tuple[str, int]:
        token = mine.fencing_token
        dice = chance.random()
        if dice < 0.85:
            rows.filter(slug=str(chance.randrange(ROWS))).fenced_update(mine, n=token)
            return "row", 1
        if dice < 0.9:
            written = rows.filter(day=0).order_by("pk").fenced_update(mine, n=token)
            assert written == ROWS
            return "many", written
        with fenced_transaction(mine, using=raced):
            Plain.objects.using(raced).create(n=token)
        return "transaction", 0

    race = Race(raced, seed=1)
    kinds = {"row", "many", "transaction", "refused"}
    race.run(
        write,
        until=lambda: race.counts.keys() >= kinds and race.tokens > LEADERS,
        seconds=SECONDS if raced != "default" else SECONDS / 3,
    )
    print(f"\n{raced}: {dict(race.counts)}, {race.tokens} leases")
    assert race.wrong == []
    assert stale_writes(raced) == 0
    # Every write that was said to have landed did, once: the database counted them, too.
    with connections[raced].cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM race_log")
        assert cursor.fetchone()[0] == race.counts["logged"]
    inserted = list(Plain.objects.using(raced).order_by("pk").values_list("n", flat=True))
    assert len(inserted) == race.counts["transaction"]
    assert inserted == sorted(inserted)
    assert race.counts.keys() >= kinds, race.counts
    assert race.tokens > LEADERS


def test_the_same_race_without_the_fence_shows_stale_writes(raced: str) -> None:
    rows = Row.objects.using(raced)

    def write(mine: Any, chance: random.Random) -> tuple[str, int]:
        return "row", rows.filter(slug=str(chance.randrange(ROWS))).update(n=mine.fencing_token)

    race = Race(raced, seed=1)
    race.run(write, until=lambda: stale_writes(raced) > 0)
    assert race.wrong == []
    assert stale_writes(raced) > 0
