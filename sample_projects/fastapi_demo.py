"""The consumer's job, played through: ``make demo-fastapi``.

The sample application runs under ``uvicorn --workers 3`` while jobs keep coming in. The consuming
worker is killed, and another takes over when its lease has run out; that one is told to stop, and
hands over at once. No account, nothing left behind. Exit code 0 if every job was done exactly once
and all went as it should, 1 if not.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 55.0
"""Seconds for the whole demo."""
TTL = 5
HANDOVER = 1.0
"""Seconds: the poll interval of the sample's client."""
SLACK = 2.0
"""Seconds that a busy machine may add."""


class NotAsItShouldBe(Exception):
    pass


class Server:
    """``uvicorn --workers 3``, what it has said, and when each consumer began."""

    def __init__(self, folder: str) -> None:
        self.began = time.monotonic()
        self.said: list[str] = []
        self.consumers: list[tuple[float, int, int]] = []
        environment = os.environ | {
            "DATABASE_URL": f"sqlite+aiosqlite:///{folder}/queue.sqlite3?timeout=30",
            "VOLCANO_API_URL": f"local:{folder}/locks.sqlite3",
            "VOLCANO_LOCKS_TTL": str(TTL),
            "VOLCANO_LOCKS_KEY_PREFIX": "demo.",
        }
        app = ["sample_projects.fastapi.app:app", "--workers", "3", "--port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", *app, "--no-access-log"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            found = re.search(r"worker (\d+) consumes with fencing token (\d+)", line)
            if found:
                self.consumers.append((time.monotonic(), int(found[1]), int(found[2])))

    def url(self) -> str | None:
        running = (re.search(r"running on (http://[\d.:]+)", line) for line in self.said)
        return next((found[1] for found in running if found), None)

    def ask(self, path: str, method: str = "GET") -> dict[str, Any]:
        """One request; once more on a fresh connection if a killed worker had accepted it."""
        request = urllib.request.Request(f"{self.url()}{path}", method=method)
        try:
            answer = urllib.request.urlopen(request, timeout=10)
        except OSError:
            answer = urllib.request.urlopen(request, timeout=10)
        with answer:
            return json.load(answer)

    def until(self, what: str, condition: Callable[[], Any], seconds: float) -> Any:
        end = min(time.monotonic() + seconds, self.began + LIMIT)
        while not (found := condition()):
            if self.process.poll() is not None:
                raise NotAsItShouldBe(f"the server ended with code {self.process.returncode}")
            if time.monotonic() > end:
                raise NotAsItShouldBe(f"not within {seconds:.0f} s: {what}")
            time.sleep(0.02)
        return found

    def consumer(self, number: int, seconds: float) -> tuple[float, int, int]:
        self.until(f"consumer {number}", lambda: len(self.consumers) >= number, seconds)
        return self.consumers[number - 1]

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(max(5.0, self.began + LIMIT - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise NotAsItShouldBe("the server did not end") from None
        finally:
            self._reader.join(2)


def say(server: Server, text: str) -> None:
    print(f"{time.monotonic() - server.began:5.1f} s  {text}", flush=True)


def play(server: Server) -> None:
    say(server, "starting uvicorn --workers 3 over a local lock store and a SQLite queue")
    server.until("three workers serve", lambda: started(server) == 3, 38)
    _, first, token = server.consumer(1, 10)
    say(server, f"all three serve; worker {first} consumes, fencing token {token}")
    work_off(server, 40)

    os.kill(first, signal.SIGKILL)
    killed = time.monotonic()
    say(server, f"killed worker {first} with SIGKILL; 40 more jobs come in meanwhile")
    server.ask("/jobs?count=40", "POST")
    at, second, newer = server.consumer(2, TTL + 1 + SLACK)
    check(newer > token, "the fencing token rises")
    check(second != first, "another worker consumes")
    say(
        server,
        f"worker {second} took over after {at - killed:.1f} s (at most {TTL + 1} s: the TTL and a second)",
    )
    work_off(server, 0)

    os.kill(second, signal.SIGTERM)
    told = time.monotonic()
    say(server, f"told worker {second} to stop with SIGTERM; 40 more jobs")
    server.ask("/jobs?count=40", "POST")
    at, third, newest = server.consumer(3, HANDOVER + SLACK)
    check(newest > newer, "the fencing token rises")
    say(server, f"worker {third} took over after {at - told:.1f} s: nobody waited for the TTL")
    work_off(server, 0)


def started(server: Server) -> int:
    return sum("Application startup complete" in line for line in server.said)


def work_off(server: Server, more: int) -> None:
    if more:
        server.ask(f"/jobs?count={more}", "POST")

    def all_done() -> bool:
        jobs = server.ask("/jobs")
        check(jobs["twice"] == 0, "no job is done twice")
        return bool(jobs["done"] == jobs["total"])

    server.until("all jobs are done", all_done, 15)
    jobs = server.ask("/jobs")
    say(server, f"{jobs['done']} of {jobs['total']} jobs done, {jobs['twice']} of them twice")


def check(fine: bool, what: str) -> None:
    if not fine:
        raise NotAsItShouldBe(f"not so: {what}")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="volcano-locks-demo-") as folder:
        server = Server(folder)
        try:
            try:
                play(server)
            finally:
                server.end()
            untidy = [line for line in server.said if "Task was destroyed" in line]
            check(not untidy, "the workers end tidily")
        except (NotAsItShouldBe, OSError) as error:
            print(*server.said, sep="\n", file=sys.stderr)
            print(f"NOT as it should be: {error}", file=sys.stderr)
            return 1
    say(server, "as it should be: one consumer at a time, every job done exactly once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
