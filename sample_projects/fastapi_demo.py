"""The consumer's job, played through: ``make demo-fastapi``.

The sample application runs under ``uvicorn --workers 3`` while jobs keep coming in. The consuming
worker is killed, and another takes over when its lease has run out; that one is told to stop, and
hands over at once. No account, nothing left behind. Exit code 0 if every job was done exactly once
and all went as it should, 1 if not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from typing import Any

from ._stage import NotAsItShouldBe, Process, Stage, run, should

TTL = 5
HANDOVER = 1.0
"""Seconds: the poll interval of the sample's client."""
SLACK = 2.0
"""Seconds that a busy machine may add."""


def ask(server: Process, path: str, method: str = "GET", again: bool = True) -> dict[str, Any]:
    """One request; once more on a fresh connection if a killed worker had accepted it."""
    url = server.says(r"running on (http://[\d.:]+)")[1]
    request = urllib.request.Request(f"{url}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
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

    def consumer(number: int, seconds: float) -> tuple[int, int]:
        found = server.says(r"worker (\d+) consumes with fencing token (\d+)", number, seconds)
        return int(found[1]), int(found[2])

    def work_off() -> None:
        jobs: dict[str, Any] = {}

        def all_done() -> bool:
            jobs.update(ask(server, "/jobs"))
            should(jobs["twice"] == 0, "a job was done twice")
            return jobs["done"] == jobs["total"]

        stage.until("all jobs are done", all_done, 15)
        say(f"{jobs['done']} of {jobs['total']} jobs done, {jobs['twice']} of them twice")

    say("starting uvicorn --workers 3 over a local lock store and a SQLite queue")
    app = ["sample_projects.fastapi.app:app", "--workers", "3", "--port", "0"]
    server = Process(stage, "uvicorn", "-m", "uvicorn", *app, "--no-access-log")
    server.says("Application startup complete", 3, 38)
    first, token = consumer(1, 10)
    say(f"all three serve; worker {first} consumes, fencing token {token}")
    ask(server, "/jobs?count=40", "POST")
    work_off()

    os.kill(first, signal.SIGKILL)
    killed = time.monotonic()
    say(f"killed worker {first} with SIGKILL; 40 more jobs come in meanwhile")
    ask(server, "/jobs?count=40", "POST")
    second, newer = consumer(2, TTL + 1 + SLACK)
    took = time.monotonic() - killed
    should(newer > token, "the fencing token did not rise")
    should(second != first, "the killed worker consumes")
    say(f"worker {second} took over after {took:.1f} s (at most {TTL + 1} s: the TTL and a second)")
    work_off()

    os.kill(second, signal.SIGTERM)
    told = time.monotonic()
    say(f"told worker {second} to stop with SIGTERM; 40 more jobs")
    ask(server, "/jobs?count=40", "POST")
    third, newest = consumer(3, HANDOVER + SLACK)
    took = time.monotonic() - told
    should(newest > newer, "the fencing token did not rise")
    say(f"worker {third} took over after {took:.1f} s: nobody waited for the TTL")
    work_off()

    server.send(signal.SIGTERM)
    stage.until("the server ended", server.ended)
    should("Task was destroyed" not in server.text, "a worker ended untidily")
    say("as it should be: one consumer at a time, every job done exactly once")


if __name__ == "__main__":
    sys.exit(run(play))
