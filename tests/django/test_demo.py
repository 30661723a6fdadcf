"""``make demo``: it tells the truth, ends in time, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from sample_projects import demo
from tests.command.jobs import Stopwatch

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "sample_projects.demo"]


def test_it_shows_the_election_and_the_refused_write(tmp_path: Path) -> None:
    watch = Stopwatch()
    done = subprocess.run(
        COMMAND,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path), "VOLCANO_API_URL": "https://not.used.invalid"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert watch.seconds < 60
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert sum("skipped: lock 'rollup' is held" in line for line in lines) == 4
    refusal = next(line for line in lines if "CommandError: stopped: stale write refused" in line)
    offered, stored = map(int, re.findall(r"\d{13,}", refusal))
    assert offered < stored
    assert "What happened" in done.stdout
    assert list(tmp_path.iterdir()) == []


def children(pid: int) -> set[int]:
    with contextlib.suppress(FileNotFoundError):
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return set()


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def test_ctrl_c_on_a_terminal_ends_every_process(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    seen: list[bytes] = []

    def watch() -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(controller, 65536):
                seen.append(chunk)

    reader = threading.Thread(target=watch)
    reader.start()
    process = subprocess.Popen(
        COMMAND,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path), "TERM": "xterm", "COLUMNS": "120"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        end = time.monotonic() + 60
        while len(started := children(process.pid)) < 5:
            assert process.poll() is None, b"".join(seen)
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130, b"".join(seen)
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(controller)
    assert not any(map(alive, started))
    assert b"nothing is left behind" in b"".join(seen)
    assert b"Traceback" not in b"".join(seen)
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_process_is_ended_too(tmp_path: Path) -> None:
    stage = demo.Stage(Console(quiet=True), tmp_path)
    process = stage.start("help")
    process.send_signal(signal.SIGSTOP)
    stage.close()
    assert process.returncode is not None


UNLOCKED = """
import sys
from volcano_locks import Lease, Secret
from volcano_locks_django import mixin
from datetime import datetime, timezone
import os

class Everybody:
    key, fencing_token, lost, released = "rollup", os.getpid(), False, False
    def check(self): pass

mixin.run_leader_only = lambda client, key, options, work, **_: (key(), work(Everybody()))[1]
sys.path.insert(0, {sample!r})
sys.argv[0] = {manage!r}
exec(compile(open({manage!r}).read(), {manage!r}, "exec"))
"""


def test_it_fails_if_the_lock_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manage = tmp_path / "manage.py"
    manage.write_text(UNLOCKED.format(sample=str(demo.MANAGE.parent), manage=str(demo.MANAGE)))
    monkeypatch.setattr(demo, "MANAGE", manage)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the demo's are for its own process
    assert demo.main() == 1
    assert "5 processes led, and one should have" in capsys.readouterr().out
