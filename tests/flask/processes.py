"""Real processes that tests start, listen to and always end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from volcano_locks import LockClient
from volcano_locks.local import store
from volcano_locks.local.service import wall_milliseconds

ROOT = Path(__file__).parents[2]
PATIENCE = 60
"""Seconds after which an event that did not come is a failure. Nothing waits this long to pass."""


class Process:
    """A process whose lines of standard output are events."""

    def __init__(self, arguments: list[str], directory: Path, **environment: str) -> None:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ}
        kept |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment}
        self.popen = subprocess.Popen(
            arguments,
            cwd=directory,
            env=kept,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        self.seen: list[str] = []
        self._readers = [threading.Thread(target=work) for work in (self._out, self._err)]
        for reader in self._readers:
            reader.start()

    def _out(self) -> None:
        for line in self.popen.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _err(self) -> None:
        self._errors.extend(self.popen.stderr)

    def line(self) -> str:
        """The next line of standard output."""
        try:
            line = self._lines.get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError(f"no line came after {self.seen}: {self.errors()}") from None
        assert line is not None, f"it ended after {self.seen}: {self.errors()}"
        self.seen.append(line)
        return line

    def until(self, start: str) -> str:
        while not (line := self.line()).startswith(start):
            pass
        return line

    def errors(self) -> str:
        return "".join(self._errors)

    def tell(self, line: str = "") -> None:
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()

    def end(self, signum: int | None = None) -> int:
        """Send the signal, if any, and wait for the end: the exit code."""
        if signum is not None:
            self.popen.send_signal(signum)
        code = self.popen.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        while (line := self._lines.get(timeout=PATIENCE)) is not None:
            self.seen.append(line)
        self._lines.put(None)
        return code

    @property
    def output(self) -> str:
        return "\n".join(self.seen)

    def clean_up(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # the session, for the workers of a server
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Machines:
    """Starts processes that share one lock service, a ``local:`` file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"local:{directory / 'locks.sqlite3'}"
        self._started: list[Process] = []
        self.client = LockClient(api_url=self.url)

    def start(self, *arguments: str, **environment: str) -> Process:
        environment = {"VOLCANO_API_URL": self.url, **environment}
        process = Process([sys.executable, *arguments], self.directory, **environment)
        self._started.append(process)
        return process

    def flask(self, *arguments: str, app: str = "tests.flask.app", **environment: str) -> Process:
        return self.start("-m", "flask", "--app", app, *arguments, **environment)

    def run(self, *arguments: str, **environment: str) -> Process:
        """A ``flask`` command, run to its end."""
        process = self.flask(*arguments, **environment)
        process.end()
        return process

    def until_refused(self, key: str) -> None:
        """Wait until somebody asked for the lock in vain: by then its process hears signals."""
        service = self.client._local
        assert service is not None
        end = time.monotonic() + PATIENCE
        while not any(row.key == key and row.contended for row in service.store.read().locks):
            assert time.monotonic() < end, f"nobody asked for {key}"
            time.sleep(0.01)

    def close(self) -> None:
        for process in self._started:
            process.clean_up()
        self.client.close()


def run_out(client: LockClient, key: str) -> None:
    """The lease of whoever holds the lock ends now, as if nobody had renewed it for its TTL; a TTL
    so short that a test could wait for it would be lost by a process that the machine keeps waiting."""
    assert client._local is not None
    sql = "UPDATE entry SET expires_at = ? WHERE key = ?"
    client._local.store._run(lambda db: db.execute(sql, (wall_milliseconds(), key)))


@contextlib.contextmanager
def silent_port():
    """A port on which nobody listens, and nobody else can meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def machines(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PATIENCE", PATIENCE)  # the processes have it, too
    machines = Machines(tmp_path)
    yield machines
    machines.close()
