"""Leader-only commands as real processes: exit codes, signals, freezing, database waits."""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, connections

from tests.command.jobs import Job, freeze
from tests.databases import VENDORS, Database, database
from volcano_locks import LockClient
from volcano_locks_django.interrupt import database_waits

TERM = signal.SIGTERM
SQL = {
    "postgresql": "select pg_sleep(600)",
    "mariadb": "select sleep(600)",
    "sqlite": "with recursive n(i) as (select 1 union all select i + 1 from n)"
    " select count(*) from n",
}
SLEEP = {vendor: f"query({sql!r})" for vendor, sql in SQL.items()}
ALIASES = {"default": "sqlite", "postgresql": "postgresql", "mariadb": "mariadb"}


class Machine:
    """One database and one lock service, on which commands are started."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.url = f"local:{folder / 'locks'}"
        self.locks = LockClient(api_url=self.url)
        self._environment = {
            "DJANGO_SETTINGS_MODULE": "tests.django.jobs.settings",
            "JOBS_DATABASE": json.dumps(settings),
            "VOLCANO_API_URL": self.url,
        }

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.locks.close()

    def start(self, do: str = "", *options: str, **environment: str) -> Job:
        command = ["-m", "django", "job", "--do", do, "--skip-checks", *options]
        return Job(command, **(self._environment | environment))

    @property
    def held(self) -> bool:
        return self.locks.get("job").held


@pytest.fixture(autouse=True)
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the jobs: the disk of a test machine may stall."""
    monkeypatch.setattr("volcano_locks.local.store.PATIENCE", 60)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "db")}
    with Machine(tmp_path, sqlite) as started:
        yield started


@pytest.fixture(params=VENDORS)
def with_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Machine, Any]]:
    with database(request.param) as mine, Machine(tmp_path, mine.django()) as started:
        yield started, mine


def test_leader_skip_fail_wait_and_the_stream_of_each_message(machine: Machine) -> None:
    with machine.start("time.sleep(600)") as leader:
        leader.expect("leading")
        with (
            machine.start() as skips,
            machine.start("", "--if-held", "fail") as fails,
            machine.start("", "--lock-wait", "forever") as waits,
        ):
            held = "lock 'job' is held by another process"
            assert skips.end() == (0, f"skipped: {held}", "")
            assert fails.end() == (75, "", f"CommandError: not run: {held}\n")
            leader.send(TERM)
            assert leader.end().code == 143
            end = waits.end()
    assert end.code == 0
    assert end.out.endswith("\ndone")
    assert not machine.held


def test_two_sigterms_while_the_job_prints_and_calls_the_service(machine: Machine) -> None:
    """Scenario P3: one release, the right exit code, no deadlock."""
    do = """
for number in range(10**9):
    self.stdout.write("x" * 500)
    if number < 300:  # however late the signal: the release needs its share of the quota
        self.get_lock_client().get("another")
"""
    with machine.start(do) as job:
        job.expect("xxx")
        job.send(TERM)
        signal.sigtimedwait([], 0.02)
        job.send(TERM)
        end = job.end()
    # The second may strike when all is done and the handlers are restored: it then ends the process
    # by itself, which a shell shows as 143 as well.
    assert end.code in {143, -TERM}
    assert end.err == ""
    assert not machine.held


def test_a_frozen_leader_is_told_at_once_when_it_is_thawed(
    machine: Machine, tmp_path: Path
) -> None:
    """Scenario R6, with another leader in between."""
    with machine.start("time.sleep(600)", "--lock-ttl", "5") as frozen:
        token = int(frozen.expect("leading").split()[1])
        freeze(frozen.process, tmp_path)
        with machine.start("", "--lock-wait", "forever") as next_one:
            assert int(next_one.expect("leading").split()[1]) > token
            assert next_one.end().code == 0
        frozen.send(signal.SIGCONT)
        end = frozen.end()
    assert end.code == 76
    assert end.err.splitlines()[-1].startswith(
        f"CommandError: stopped: lease of 'job' (fencing token {token}) is lost: "
    )
    assert "Traceback" not in end.err


# -- database waits ------------------------------------------------------------------------------


def test_a_lost_lease_breaks_a_database_wait_and_the_body_can_clean_up(
    with_database: tuple[Machine, Database],
) -> None:
    machine, db = with_database
    do = f"""
try:
    with transaction.atomic():
        {SLEEP[db.vendor]}
except LeaseLost:
    connection.close()
    self.stdout.write(f"then {{query('select 5')[0][0]}}")
    raise
"""
    with machine.start(do) as job:
        job.expect("leading")
        machine.locks.force_release("job")
        end = job.end()
    assert end.code == 76, end.err
    assert end.out.endswith("then 5")
    assert end.err.splitlines()[-1].startswith("CommandError: stopped: lease of 'job'")


def test_sigterm_breaks_a_database_wait(with_database: tuple[Machine, Database]) -> None:
    machine, db = with_database
    with machine.start(f"soon(); {SLEEP[db.vendor]}") as job:
        job.expect("waiting")
        job.send(TERM)
        end = job.end()
    assert (end.code, end.err) == (143, "")
    assert not machine.held


def test_sigterm_breaks_the_busy_wait_of_sqlite(machine: Machine, tmp_path: Path) -> None:
    db = Database("sqlite", str(tmp_path / "db"))
    writer = db.connect()
    writer.execute("begin immediate")
    do = "query('pragma busy_timeout = 60000'); soon(); query('begin immediate')"
    with machine.start(do) as job:
        job.expect("waiting")
        job.send(TERM)
        end = job.end(limit=40)  # of the 60
    writer.close()
    assert (end.code, end.err) == (143, "")


def test_each_driver_has_a_breaker_that_works_from_another_thread(alias: str) -> None:
    breakers: queue.Queue[Any] = queue.Queue()
    ended: list[BaseException] = []

    def work() -> None:
        wrapper = connections[alias]  # a thread has connections of its own
        with database_waits() as interrupt, wrapper.cursor() as cursor:
            breakers.put(interrupt)
            try:
                cursor.execute(SQL[ALIASES[alias]])
                cursor.fetchall()
            except DatabaseError as error:
                ended.append(error)
        wrapper.close()

    thread = threading.Thread(target=work)
    thread.start()
    interrupt = breakers.get(timeout=60)
    end = time.monotonic() + 60
    while thread.is_alive():
        assert time.monotonic() < end, "the wait goes on"
        interrupt()
        thread.join(0.2)
    assert len(ended) == 1
