"""Real servers: one singleton over all workers and instances, whatever happens to their processes.

Nothing here sleeps to be right: a test waits until the journal that all processes write shows what
it waits for, or fails at a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flask.processes import run_out
from volcano_locks import LockClient
from volcano_locks.local import store

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60
"""Seconds after which what did not come is a failure. Nothing waits this long to pass."""
UVICORN = [
    sys.executable,
    "-m",
    "uvicorn",
    "--port",
    "0",
    "--timeout-worker-healthcheck",
    # A worker that starts more slowly is killed; one that ends while it is asked is waited for so long.
    "15",
]
GUNICORN = [
    sys.executable,
    "-m",
    "gunicorn",
    "-k",
    "uvicorn_worker.UvicornWorker",
    "-b",
    "127.0.0.1:0",
    "--timeout",
    "120",
]
SERVED = "tests.fastapi.served:app"

Event = dict[str, Any]


class Stage:
    """Servers over one lock store and one journal, all ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.journal.touch()
        self.url = f"local:{folder / 'locks.db'}"
        self.env = os.environ | {
            "JOURNAL": str(self.journal),
            "VOLCANO_API_URL": self.url,
            "VOLCANO_LOCKS_TTL": "600",  # longer than any test: no lease runs out by itself
            "PYTHONPATH": str(ROOT),
            "PYTHONASYNCIODEBUG": "0",
        }
        self.killed: dict[int, float] = {}
        self.servers: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, workers: int = 0) -> subprocess.Popen[bytes]:
        """Start a server and wait until its workers serve."""
        before = len(self.seen("serves"))
        with (self.folder / f"output.{len(self.servers)}").open("wb") as output:
            server = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.servers.append(server)
        self.until(lambda: len(self.seen("serves")) >= before + (workers or 1))
        return server

    def output(self) -> str:
        return "\n".join(
            (self.folder / f"output.{number}").read_text() for number in range(len(self.servers))
        )

    def events(self) -> list[Event]:
        return [json.loads(line) for line in self.journal.read_text().splitlines()]

    def seen(self, event: str) -> list[Event]:
        return [each for each in self.events() if each["event"] == event]

    def leader(self, number: int) -> Event:
        """The ``number``-th leader of this stage, as soon as there is one."""
        self.until(lambda: len(self.seen("leads")) >= number)
        return self.seen("leads")[number - 1]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"it does not come\n{self.events()}\n{self.output()}")
            time.sleep(0.02)

    def kill(self, pid: int) -> float:
        """Kill a leader, and let its lease run out."""
        os.kill(pid, signal.SIGKILL)
        self.killed[pid] = time.time()
        with LockClient(api_url=self.url) as client:
            run_out(client, "job")
        return self.killed[pid]

    def terminate(self, server: subprocess.Popen[bytes]) -> int:
        server.terminate()
        return server.wait(PATIENCE)

    def check(self) -> None:
        """One leader at a time, in the order of their tokens; and nothing untidy was said."""
        free_at, token = 0.0, 0
        leader: int | None = None
        for event in self.events():
            if event["event"] == "leads":
                if leader is not None:
                    assert leader in self.killed, f"two lead: {self.events()}"
                    free_at = self.killed[leader]
                assert event["at"] >= free_at
                assert event["token"] > token
                leader, token = event["pid"], event["token"]
            elif event["event"] == "stops":
                assert event["pid"] == leader
                assert event["lost"] is False, "it held the lease until it had wound down"
                leader = None
        output = self.output()
        for untidy in (
            *("Task was destroyed", "Traceback", "never awaited", "never retrieved"),
            "still runs",  # what is said of a singleton that used up its grace
        ):
            assert untidy not in output, output

    def end(self) -> None:
        for server in self.servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if server.poll() is None:
                    self.terminate(server)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # what is left of this server, if anything


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(store, "PATIENCE", PATIENCE)  # the servers have it, too
    stage = Stage(tmp_path)
    try:
        yield stage
    finally:
        stage.end()


SERVERS = pytest.mark.parametrize(
    "server",
    [[*UVICORN, SERVED, "--workers", "2"], [*GUNICORN, SERVED, "-w", "2"]],
    ids=["uvicorn", "gunicorn"],
)


def test_one_singleton_over_two_instances_and_it_is_handed_over_on_sigterm(stage: Stage) -> None:
    """Two servers of two workers. A worker that is told to stop hands over at once, and so does a
    whole instance: with a TTL of ten minutes, nobody can have waited for it to run out."""
    uvicorn = stage.start(*UVICORN, SERVED, "--workers", "2", workers=2)
    gunicorn = stage.start(*GUNICORN, SERVED, "-w", "2", workers=2)
    instances = {uvicorn.pid: uvicorn, gunicorn.pid: gunicorn}
    first = stage.leader(1)

    os.kill(first["pid"], signal.SIGTERM)
    second = stage.leader(2)
    assert second["pid"] != first["pid"]

    leading = instances[second["ppid"]]
    (other,) = (server for server in instances.values() if server is not leading)
    stage.terminate(leading)
    # Its second worker may have led for an instant, before it stopped as well.
    stage.until(lambda: stage.seen("leads")[-1]["ppid"] == other.pid)
    stage.terminate(other)
    assert len(stage.seen("stops")) == len(stage.seen("leads")) >= 3
    stage.check()
    with LockClient(api_url=stage.url) as client:
        assert not client.get("job").held


@SERVERS
def test_a_leader_that_is_killed_is_replaced_after_its_lease_has_run_out(
    stage: Stage, server: list[str]
) -> None:
    stage.start(*server, workers=2)
    first = stage.leader(1)
    killed_at = stage.kill(first["pid"])
    second = stage.leader(2)
    assert second["pid"] != first["pid"]
    assert second["at"] - killed_at > 1, "never before the second of grace"
    stage.terminate(stage.servers[0])
    stage.check()


def test_a_reload_is_not_locked_out_by_its_own_old_lease(stage: Stage) -> None:
    source = stage.folder / "src"
    source.mkdir()
    probe = source / "reload_probe.py"
    probe.write_text("from tests.fastapi.served import app\n")
    server = stage.start(
        *UVICORN, "reload_probe:app", "--app-dir", str(source), "--reload",
        "--reload-dir", str(source), "--reload-delay", "0.1",
    )  # fmt: skip
    first = stage.leader(1)
    probe.write_text("from tests.fastapi.served import app  # edited\n")
    second = stage.leader(2)
    assert second["pid"] != first["pid"]
    stage.terminate(server)
    stage.check()


def test_sigterm_ends_uvicorn_tidily_and_its_own_handler_is_left_alone(stage: Stage) -> None:
    server = stage.start(*UVICORN, SERVED)
    leader = stage.leader(1)
    assert leader["sigterm"] == "Server.handle_exit"
    assert stage.terminate(server) in (0, -signal.SIGTERM)
    assert [event["event"] for event in stage.events()] == ["serves", "leads", "stops", "leaves"]
    stage.check()
    with LockClient(api_url=stage.url) as client:
        assert not client.get("job").held
