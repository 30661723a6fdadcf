"""What the three demos have in common.

The law of this module: what a demo starts ends with the demo, in whatever way that ends, and nothing
of it is left; nothing of the caller's configuration gets in. It knows no framework and tells no story.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
PRIVATE = ("VOLCANO_", "SERVICE_ROLE_KEY", "DJANGO_", "FLASK_", "UVICORN_")
T = TypeVar("T")


class NotAsItShouldBe(Exception):
    pass


class Stopped(Exception):
    """Ctrl-C or another ending signal, noticed where no process is half started."""


def should(fact: bool, text: str) -> None:
    if not fact:
        raise NotAsItShouldBe(text)


class Process:
    """A Python process on the stage, in a session of its own, and what it has said so far."""

    def __init__(self, stage: Stage, name: str, *arguments: str) -> None:
        stage.look()
        self.name = name
        self.lines: list[str] = []
        self.frozen = False
        self._stage = stage
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=stage.folder,  # no .env of the caller's is there
            env=stage.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the demo, which then ends them all
        )
        stage.processes.append(self)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self.lines.append(line.rstrip())
                self._stage.heard(self, self.lines[-1])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.poll()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def send(self, signum: signal.Signals) -> None:
        self.frozen = signum == signal.SIGSTOP
        self._process.send_signal(signum)

    def ended(self) -> bool:
        """Whether it has ended, and all that it said is in ``lines``."""
        if self.code is None:
            return False
        self._reader.join(5)
        return True

    def done(self, code: int = 0) -> str:
        """All that it said, once it has ended with this exit code."""
        self._stage.until(f"{self.name} ended", self.ended)
        should(self.code == code, f"{self.name} ended with {self.code}, not with {code}")
        return self.text

    def says(self, pattern: str, times: int = 1) -> re.Match[str]:
        """The match of what it says, once it has said it so often."""

        def said() -> list[re.Match[str]]:
            ended = self.ended()
            found = list(re.finditer(pattern, self.text))[times - 1 :]
            should(bool(found) or not ended, f"{self.name} ended and has not said {pattern!r}")
            return found

        return self._stage.until(f"{self.name} says {pattern!r}", said)[0]

    def kill(self) -> bool:
        """Kill it and all that it started, frozen or not; whether there was anything to kill."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: a Mac's zombie
            os.killpg(self.pid, signal.SIGKILL)
            self._process.poll()
            return True
        return False

    def bury(self) -> None:
        """After ``kill``: wait until it has ended, which one that waits for the disk does not at once."""
        self._process.wait(60)
        self.ended()


class Stage:
    """A temporary folder with a lock store, and the processes that use them, for so many seconds."""

    def __init__(self, folder: Path, limit: float, stopped: list[int]) -> None:
        self.folder = folder
        self.began = time.monotonic()
        self.processes: list[Process] = []
        self._end = self.began + limit
        self._stopped = stopped
        # The settings' names are read in any case of their letters.
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.upper().startswith(PRIVATE)
        } | {
            "VOLCANO_API_URL": f"local:{folder / 'locks.sqlite3'}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(folder),  # what a killed process leaves is gone with it
        }

    def heard(self, process: Process, line: str) -> None:
        """For a demo that shows lines as they come. Called in a thread of the process's own."""

    def draw(self) -> None:
        """For a demo that shows a picture of its processes."""

    def look(self) -> None:
        if self._stopped:
            raise Stopped

    def until(self, what: str, done: Callable[[], T], seconds: float = 60) -> T:
        """What ``done()`` returns, once that is true."""
        end = min(self._end, time.monotonic() + seconds)
        while not (found := done()):
            self.look()
            should(time.monotonic() < end, f"waited too long until {what}")
            self.draw()
            time.sleep(0.05)
        self.draw()
        return found

    def close(self) -> None:
        """Kill every process. Their locks and data are in the folder: none has to wind down."""
        end = time.monotonic() + 0.5  # a zombie stays where nobody adopts orphans
        while [process for process in self.processes if process.kill()] and time.monotonic() < end:
            time.sleep(0.01)
        for process in self.processes:
            process.bury()


def run(play: Callable[[Any], None], kind: type[Stage] = Stage, limit: float = 85) -> int:
    """Play it; the demo's exit code: 0 if all was as it should be, 1 if not, 128 + n by a signal."""
    stopped: list[int] = []
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda signum, _: stopped.append(signum))
    sys.stdout.reconfigure(line_buffering=True)
    wrong: Exception | None = None
    with tempfile.TemporaryDirectory(prefix="volcano-demo-") as folder:
        stage = kind(Path(folder), limit, stopped)
        try:
            play(stage)
        except Exception as error:
            wrong, codes = error, [process.code for process in stage.processes]
        finally:
            stage.close()
    if stopped:
        try:
            print("stopped: all processes are ended, nothing is left behind")
        except OSError:  # the terminal is gone, which must not decide the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + stopped[0]
    if wrong is None:
        return 0
    for process, code in zip(stage.processes, codes, strict=True):
        print(f"{process.name} (exit {code}):\n{process.text}\n", file=sys.stderr)
    if not isinstance(wrong, NotAsItShouldBe):
        raise wrong
    print(f"NOT as it should be: {wrong}", file=sys.stderr)
    return 1
