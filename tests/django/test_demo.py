"""``make demo`` tells the truth and ends in time; it and the other two demos leave nothing behind."""

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
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from sample_projects import demo
from sample_projects._stage import NotAsItShouldBe, Process, Stage, run

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "sample_projects.demo"]


def test_it_shows_the_election_and_the_refused_write(tmp_path: Path) -> None:
    done = subprocess.run(
        COMMAND,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path), "VOLCANO_API_URL": "https://not.used.invalid"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,  # a demo that is late says so itself, before
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert sum("skipped: lock 'rollup' is held" in line for line in lines) == 4
    refusal = next(line for line in lines if "CommandError: stopped: stale write refused" in line)
    offered, stored = map(int, re.findall(r"\d{13,}", refusal))
    assert offered < stored
    assert "What happened" in done.stdout
    assert list(tmp_path.iterdir()) == []


def children(pid: int) -> set[int]:
    with contextlib.suppress(OSError):
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return set()


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def gone(pids: Iterable[int]) -> bool:
    """Whether they are; a killed process may take its time, and none of these ends by itself."""
    end = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, pids))


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
    started: set[int] = set()
    try:
        while process.poll() is None:
            before, started = len(started), started | children(process.pid)
            if before < 5 <= len(started):
                process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        assert process.returncode == 130, b"".join(seen)
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(controller)
    assert gone(started)
    assert b"nothing is left behind" in b"".join(seen)
    assert b"Traceback" not in b"".join(seen)
    assert list(tmp_path.iterdir()) == []


def heard(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A Python process whose temporary files are in the folder, and whose words come in one stream."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("name", ["flask_demo", "fastapi_demo"])
def test_sigterm_ends_the_other_demos_too(name: str, tmp_path: Path) -> None:
    with heard(tmp_path, "-m", f"sample_projects.{name}") as process:
        while not (started := children(process.pid)):
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert said.splitlines()[-1] == "stopped: all processes are ended, nothing is left behind"
    assert gone(started)
    assert list(tmp_path.iterdir()) == []


STAGED = """
import signal, sys
from sample_projects._stage import NotAsItShouldBe, Process, run, should

def play(stage):
    going = Process(stage, "Romeo", "-c", "import time; print('I wait'); time.sleep(600)")
    frozen = Process(stage, "Julia", "-c", "import time; print('I sleep'); time.sleep(600)")
    going.says("I wait")
    frozen.says("I sleep")
    frozen.send(signal.SIGSTOP)
    print(going.pid, frozen.pid)
    {ending}

sys.exit(run(play, limit=60))
"""
WAITS = "stage.until('the end', lambda: False)"
LATE = "stage.until('the sun rises', lambda: False, 0.1)"


@pytest.mark.parametrize(
    ("ending", "signum", "code", "words"),
    [
        ("print('fine')", None, 0, "fine"),
        ("should(False, 'a plague')", None, 1, "NOT as it should be: a plague"),
        (LATE, None, 1, "NOT as it should be: waited too long until the sun rises"),
        ("1 / 0", None, 1, "ZeroDivisionError"),
        (WAITS, signal.SIGINT, 130, "stopped: "),
        (WAITS, signal.SIGTERM, 143, "stopped: "),
        (WAITS, signal.SIGHUP, 129, "stopped: "),
    ],
)
def test_however_a_demo_ends_it_leaves_no_process_and_no_folder(
    ending: str, signum: signal.Signals | None, code: int, words: str, tmp_path: Path
) -> None:
    with heard(tmp_path, "-c", STAGED.format(ending=ending)) as process:
        assert process.stdout is not None
        started = [int(pid) for pid in process.stdout.readline().split()]
        if signum is not None:
            process.send_signal(signum)
        said = process.stdout.read()
    assert process.returncode == code, said
    assert words in said
    assert gone(started)
    assert list(tmp_path.iterdir()) == []
    assert ("Romeo (exit None):\nI wait\n" in said) == (code == 1)


def test_a_terminal_that_is_closed_ends_a_demo_like_any_signal(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", STAGED.format(ending=WAITS)],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        started = [int(pid) for pid in os.read(controller, 100).split()]
        os.close(controller)
        process.send_signal(signal.SIGHUP)  # as the kernel does to whom the terminal belonged
    assert process.returncode == 129
    assert gone(started)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with contextlib.closing(Stage(tmp_path, 60, stopped=[])) as stage:
        yield stage


def test_what_a_process_has_started_ends_with_it(stage: Stage) -> None:
    other = "subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3)"  # -3: DEVNULL
    started = Process(stage, "both", "-c", f"import subprocess; print({other}.pid)").done()
    assert alive(int(started))
    stage.close()
    assert gone([int(started)])


def test_a_process_that_ends_before_it_said_its_line_is_not_waited_for(stage: Stage) -> None:
    with pytest.raises(NotAsItShouldBe, match="silent ended and has not said 'a word'"):
        Process(stage, "silent", "-c", "").says("a word")


def test_nothing_of_the_callers_configuration_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VOLCANO_LOCKS_TTL", "volcano_locks_key_prefix", "SERVICE_ROLE_KEY"):
        monkeypatch.setenv(name, "mine")
    for name in ("DJANGO_SETTINGS_MODULE", "FLASK_APP", "UVICORN_RELOAD", "EDITOR"):
        monkeypatch.setenv(name, "mine")
    seen = "import os; print([name for name in os.environ if os.environ[name] == 'mine'])"
    with contextlib.closing(Stage(tmp_path, 60, stopped=[])) as stage:
        there = Process(stage, "there", "-c", f"{seen}; print(os.getcwd())").done()
        files = Process(
            stage, "files", "-c", "import tempfile; print(tempfile.gettempdir())"
        ).done()
    assert there == f"['EDITOR']\n{tmp_path}"  # no .env is there, either
    assert files == str(tmp_path)


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
    assert run(demo.play, demo.Shop, limit=100) == 1
    assert "5 processes led, and one should have" in capsys.readouterr().err
