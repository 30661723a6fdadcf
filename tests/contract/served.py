"""A ``volcano-locks serve`` process for tests: real, on a free port, ended with the test."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEY = "sk-local-development"
PATIENCE = 60
"""Seconds after which what did not come is a failure. Nothing waits this long to pass."""


@dataclass
class Served:
    url: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)


@contextlib.contextmanager
def served(
    *options: str, store: str = "memory", standing_at: int | None = None
) -> Iterator[Served]:
    """``standing_at``: milliseconds since 1970 at which its clock stands, but for planned shifts."""
    command = [sys.executable, "-m", "tests.contract.serve", "--port", "0", "--store", store]
    clock = {} if standing_at is None else {"STANDING_AT": str(standing_at)}
    process = subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env={**os.environ, **clock},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        match = re.fullmatch(r"export VOLCANO_API_URL=(http://\S+)\n", process.stdout.readline())
        assert match, "serve did not start"
        yield Served(match.group(1), process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE)
        process.stdout.close()
