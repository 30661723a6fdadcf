"""A ``volcano-locks serve`` process for tests: real, on a free port, ended with the test."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEY = "sk-local-development"


@dataclass
class Served:
    url: str
    process: subprocess.Popen[str]

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(15)


@contextlib.contextmanager
def served(*options: str, store: str = "memory") -> Iterator[Served]:
    command = [sys.executable, "-m", "volcano_locks", "serve", "--port", "0", "--store", store]
    process = subprocess.Popen(
        [*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        match = re.fullmatch(r"export VOLCANO_API_URL=(http://\S+)\n", process.stdout.readline())
        assert match, "serve did not start"
        yield Served(match.group(1), process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(15)
        process.stdout.close()
