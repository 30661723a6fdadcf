"""The consumer's job, played through: ``make demo-fastapi``.

The sample application runs under ``uvicorn --workers 3`` while jobs keep coming in. The consuming
worker is killed, and another takes over when its lease has run out; that one is told to stop, and
hands over at once. No account, nothing left behind. Exit code 0 if every job was done exactly once
and all went as it should, 1 if not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.request
from typing import Any

from volcano_locks.local.store import Store, StoreUnavailable

from ._stage import NotAsItShouldBe, Process, Stage, run, should

TTL = 5


def ask(server: Process, path: str, method: str = "GET", again: bool = True) -> dict[str, Any]:
    """One request; once more on a fresh connection if a killed worker had accepted it."""
    url = server.says(r"running on (http://[\d.:]+)")[1]
    request = urllib.request.Request(f"{url}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except OSError as error:
        if again:
            return ask(server, path, method, again=False)
        raise NotAsItShouldBe(f"{method} {path}: {error}") from error


def play(stage: Stage) -> None:
    stage.environment |= {
        "DATABASE_URL": f"sqlite+aiosqlite:///{stage.folder}/queue.sqlite3?timeout=30",
        "VOLCANO_LOCKS_TTL": str(TTL),
        "VOLCANO_LOCKS_KEY_PREFIX": "demo.",
    }

    def say(text: str) -> None:
        print(f"{time.monotonic() - stage.began:5.1f} s  {text}")

    def consumer(after: int = 0) -> tuple[int, int]:
        """The newest one, once there is one with a higher token than that: its process and its token."""

        def newest() -> tuple[int, int] | None:
            found = re.findall(r"worker (\d+) consumes with fencing token (\d+)", server.text)
            return (int(found[-1][0]), int(found[-1][1])) if found else None

        return stage.until(
            f"somebody consumes after token {after}",
            lambda: found if (found := newest()) and found[1] > after else None,
        )

    def ending(token: int) -> str | None:
        """How the term ended that had this token, as the lock store tells it."""

        def told() -> str | None:
            with (
                contextlib.suppress(StoreUnavailable),  # busy
                contextlib.closing(Store(str(stage.folder / "locks.sqlite3"))) as store,
            ):
                terms = store.read().tenures
                return next(term.ending for term in terms if term.fencing_token == token)
            return None

        return stage.until(f"the term of token {token} ended", told)

    def work_off() -> None:
        jobs: dict[str, Any] = {}

        def all_done() -> bool:
            jobs.update(ask(server, "/jobs"))
            should(jobs["twice"] == 0, "a job was done twice")
            return jobs["done"] == jobs["total"]

        stage.until("all jobs are done", all_done)
        say(f"{jobs['done']} of {jobs['total']} jobs done, {jobs['twice']} of them twice")

    say("starting uvicorn --workers 3 over a local lock store and a SQLite queue")
    app = ["sample_projects.fastapi.app:app", "--workers", "3", "--port", "0"]
    # A worker that starts more slowly than that would be killed.
    app += ["--timeout-worker-healthcheck", "15"]
    server = Process(stage, "uvicorn", "-m", "uvicorn", *app, "--no-access-log")
    server.says("Application startup complete", 3)
    first, token = consumer()
    say(f"all three serve; worker {first} consumes, fencing token {token}")
    ask(server, "/jobs?count=40", "POST")
    work_off()

    first, token = consumer()
    os.kill(first, signal.SIGKILL)
    killed = time.monotonic()
    say(f"killed worker {first} with SIGKILL; 40 more jobs come in meanwhile")
    ask(server, "/jobs?count=40", "POST")
    second, newer = consumer(after=token)
    took = time.monotonic() - killed
    should(ending(token) == "expired", f"the killed worker's lease was {ending(token)}")
    should(second != first, "the killed worker consumes")
    say(f"worker {second} took over after {took:.1f} s, when the lease of {TTL} s had run out")
    work_off()

    second, newer = consumer()
    os.kill(second, signal.SIGTERM)
    told = time.monotonic()
    say(f"told worker {second} to stop with SIGTERM; 40 more jobs")
    ask(server, "/jobs?count=40", "POST")
    third, _ = consumer(after=newer)
    took = time.monotonic() - told
    should(ending(newer) == "released", f"the lease of who was told to stop was {ending(newer)}")
    say(f"worker {third} took over after {took:.1f} s: nobody waited for the TTL")
    work_off()

    server.send(signal.SIGTERM)
    stage.until("the server ended", server.ended)
    should("Task was destroyed" not in server.text, "a worker ended untidily")
    say("as it should be: one consumer at a time, every job done exactly once")


if __name__ == "__main__":
    sys.exit(run(play))
