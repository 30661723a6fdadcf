"""The store file under several real processes: never two holders, tokens that only rise."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GRACE = 1_000
TAKEN = b'"status": 201'
DISTURBED = "another process keeps the local lock store"


@dataclass
class Term:
    """What one holder was told: its exclusive time lies between ``got`` and ``end``."""

    key: str
    fence: int
    sent: int
    got: int
    end: int


def terms(log: Path) -> list[Term]:
    """The terms in the log by key and fencing token; ``end``: when the next may start, at the soonest."""
    found: dict[str, Term] = {}
    for line in log.read_text().splitlines():
        event = json.loads(line)
        # "keeps vanishing" is right if the file was deleted again and again during one request.
        assert event["status"] != 503 or "keeps vanishing" in event["body"], event["body"]
        if event["op"] == "ACQUIRE" and event["status"] == 201:
            found[event["token"]] = Term(
                event["key"], event["fence"], event["sent"], event["got"], event["expires"] + GRACE
            )
        elif event["op"] == "RENEW" and event["status"] == 200:
            found[event["token"]].end = event["expires"] + GRACE
        elif event["op"] == "RELEASE" and event["status"] in (None, 204):
            found[event["token"]].end = min(found[event["token"]].end, event["sent"])
    return sorted(found.values(), key=lambda term: (term.key, term.fence))


def assert_one_holder_at_a_time(found: list[Term]) -> None:
    for one, following in itertools.pairwise(found):
        if one.key == following.key:
            assert one.fence < following.fence, "two holders were given one token"
            assert following.got >= one.end, f"{following} began while {one} held"


def assert_tokens_rise(found: list[Term]) -> None:
    highest: dict[str, Term] = {}
    for term in sorted(found, key=lambda term: term.got):
        last = highest.get(term.key)
        if last is not None and last.got < term.sent:
            assert term.fence > last.fence, f"{term} came after {last}"
        if last is None or term.fence > last.fence:
            highest[term.key] = term


@contextlib.contextmanager
def workers(
    count: int, store: Path, log: Path, seconds: float, seed: str = "x", ways: Sequence[str] = ()
):
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.local.worker",
                store,
                log,
                f"{seed}{number}",
                f"{seconds}",
                *ways,
            ],
            cwd=ROOT,
        )
        for number in range(count)
    ]
    try:
        yield running
        for process in running:
            process.wait(60)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def count(log: Path, what: bytes) -> int:
    return log.read_bytes().count(what) if log.exists() else 0


def until(log: Path, times: int, what: bytes = TAKEN) -> None:
    """Refusals come in any number, as the scheduler has it: what a test is about has to be awaited."""
    end = time.monotonic() + 60
    while count(log, what) < times:
        assert time.monotonic() < end, f"the workers do not come to {what!r}"
        time.sleep(0.01)


def test_four_processes_never_lead_at_once(tmp_path: Path):
    log = tmp_path / "log"
    with workers(4, tmp_path / "store", log, seconds=60) as running:
        until(log, 40)
        Path(f"{log}.stop").touch()
    assert [process.returncode for process in running] == [0] * 4
    found = terms(log)
    assert_one_holder_at_a_time(found)
    assert_tokens_rise(found)


def run_without_flock(
    tmp_path: Path, *mutant: str, times: int = 40, what: bytes = TAKEN
) -> list[Term]:
    log = tmp_path / "log"
    ways = ["no-flock", *mutant]
    with workers(2, tmp_path / "store", log, seconds=60, ways=ways) as running:
        until(log, times, what)
        Path(f"{log}.stop").touch()
    assert [process.returncode for process in running] == [0] * 2
    return terms(log)


def test_where_there_is_no_flock_the_transaction_alone_keeps_processes_apart(tmp_path: Path):
    found = run_without_flock(tmp_path)
    assert_one_holder_at_a_time(found)
    assert_tokens_rise(found)


def test_a_transaction_that_locks_only_what_it_writes_is_seen_there(tmp_path: Path):
    """It reads what another changes before it writes; SQLite then refuses the write."""
    with pytest.raises(AssertionError, match=DISTURBED):
        run_without_flock(tmp_path, "deferred", times=1, what=DISTURBED.encode())


def test_the_judge_of_these_tests_sees_two_holders():
    first, second = Term("a", 1, 0, 10, 9_000), Term("a", 2, 20, 30, 9_100)
    with pytest.raises(AssertionError, match="began while"):
        assert_one_holder_at_a_time([first, second])
    with pytest.raises(AssertionError, match="came after"):
        assert_tokens_rise([Term("a", 2, 0, 10, 20), Term("a", 1, 30, 40, 50)])


def test_a_file_deleted_under_running_processes_makes_no_token_go_back(tmp_path: Path):
    store, log = tmp_path / "store", tmp_path / "log"
    with workers(3, store, log, seconds=60) as running:
        for cut in range(1, 7):
            until(log, cut * 10)
            if cut < 6:
                store.unlink(missing_ok=True)
        Path(f"{log}.stop").touch()
    assert [process.returncode for process in running] == [0] * 3
    found = terms(log)
    assert_tokens_rise(found)
    with contextlib.closing(sqlite3.connect(store)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_processes_killed_in_the_middle_lose_nothing_that_was_answered(tmp_path: Path):
    store, log, chance = tmp_path / "store", tmp_path / "log", random.Random(7)
    for life in range(4):
        before = count(log, TAKEN)
        with workers(2, store, log, seconds=60, seed=f"{life}-") as running:
            until(log, before + 5 + chance.randrange(10))
            for process in running:
                process.send_signal(signal.SIGKILL)
    before = count(log, TAKEN)
    with workers(1, store, log, seconds=60, seed="last") as running:
        until(log, before + 5)
        Path(f"{log}.stop").touch()
    assert running[0].returncode == 0
    found = terms(log)
    assert_one_holder_at_a_time(found)
    assert_tokens_rise(found)
    with contextlib.closing(sqlite3.connect(store)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_forked_child_works_on_a_connection_of_its_own(tmp_path: Path):
    """Under load in other threads, and without harm to the parent's open connection."""
    script = """
        import os, sys, threading, time, uuid, warnings
        from volcano_locks.contract import Operation, Request
        from volcano_locks.local import store as store_module
        from volcano_locks.local.service import LockService
        from volcano_locks.local.store import Store
        from volcano_locks.models import Secret

        store_module.PATIENCE = 60  # however slow the disk is
        warnings.simplefilter("ignore")  # from 3.12 on, fork with threads warns
        service = LockService(Store(sys.argv[1]), quota=10**9)
        memory = LockService(Store(None))

        def pair(key, by=service):
            token = Secret(str(uuid.uuid4()))
            taken = by.perform(Request(Operation.ACQUIRE, key, "r", token, 30)).status
            return taken, by.perform(Request(Operation.RELEASE, key, "r", token)).status

        assert pair("m", memory) == (201, 204)
        stop = threading.Event()

        def load(key):
            while not stop.is_set():
                assert pair(key) == (201, 204)
                time.sleep(0.002)  # SQLite's lock is not fair: an endless load would starve others

        threads = [threading.Thread(target=load, args=(f"t{n}",)) for n in range(3)]
        for thread in threads:
            thread.start()
        for n in range(5):
            child = os.fork()
            if child == 0:
                pairs = {pair(f"c{n}") for _ in range(3)}
                alone = pair("m", memory)[0] == 503
                if pairs == {(201, 204)} and alone:
                    os._exit(0)
                print(pairs, alone, file=sys.stderr, flush=True)
                os._exit(1)
            status = os.waitpid(child, 0)[1]
            if status:
                os._exit(status)
            assert pair(f"p{n}") == (201, 204)
        stop.set()
        for thread in threads:
            thread.join()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "store"],
        cwd=ROOT,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "store")) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
