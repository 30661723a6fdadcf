"""Leader-only runs in processes of their own, and the hand that signals them.

``Job(code)`` starts Python on ``code``, after ``from tests.command.stage import *``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60.0
"""Seconds for a slow machine. A body that has to be ended early waits for longer than that by itself."""


class End(NamedTuple):
    code: int
    out: str
    err: str


class Job:
    """A process, killed at the end of the ``with`` body if it is still there."""

    def __init__(
        self, code: str | list[str], *, cwd: Path | None = None, **environment: str
    ) -> None:
        arguments = (
            ["-c", f"from tests.command.stage import *\n{textwrap.dedent(code)}"]
            if isinstance(code, str)
            else code
        )
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VOLCANO_", "SERVICE_ROLE"))
        }
        self.process = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            cwd=cwd or ROOT,
            env=clean | {"PYTHONPATH": str(ROOT)} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._errors: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_err, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def expect(self, text: str) -> str:
        """The next line of standard output that holds ``text``."""
        while True:
            line = self._queue.get(timeout=LIMIT)
            if line is None:
                raise AssertionError(f"{text!r} was not said: {self.lines} {self._errors}")
            self.lines.append(line)
            if text in line:
                return line

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def tell(self) -> None:
        """End what waits in ``told()``: it has all signals by then that were sent before."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self.process.stdin.fileno(), b"!")

    def end(self, limit: float = LIMIT) -> End:
        code = self.process.wait(limit)
        for reader in self._readers:
            reader.join()
        while (line := self._queue.get()) is not None:
            self.lines.append(line)
        return End(code, "\n".join(self.lines), "".join(self._errors))


def freeze(process: subprocess.Popen[str], stores: Path) -> None:
    """Stop it, but not in a transaction of a store in that folder: it would keep everybody out."""
    folder = os.open(stores, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # as each transaction does
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    finally:
        os.close(folder)


def run(code: str, **environment: str) -> End:
    with Job(code, **environment) as job:
        return job.end()
