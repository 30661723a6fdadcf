"""The Flask sample, played through: ``make demo-flask``.

A cron-like script starts ``flask nightly-report`` on two machines whose clocks differ; it runs once.
Then a leader is frozen past its lease, another takes over and writes, the first is thawed, insists,
and is refused by the database. No account, no server, nothing left behind. Exit code 0 if all of it
was as it should be, 1 if not.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "sample_projects" / "flask"
PATIENCE = 60.0


class NotAsItShouldBe(Exception):
    pass


class Stage:
    """A temporary database and lock store, and the processes that use them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[str]] = []
        # Nothing of the caller's configuration may lead the demo to a real project.
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VOLCANO_", "FLASK_")) and name != "SERVICE_ROLE_KEY"
        } | {
            "VOLCANO_API_URL": f"local:{folder / 'locks.sqlite3'}",
            "REPORTS_DATABASE": f"sqlite:///{folder / 'reports.sqlite3'}",
            "PYTHONPATH": f"{SAMPLE}{os.pathsep}{ROOT}",
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        return process

    def flask(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start("-m", "flask", "--app", "reports", *arguments)

    def done(self, process: subprocess.Popen[str], code: int = 0) -> str:
        output, _ = process.communicate(timeout=PATIENCE)
        if process.returncode != code:
            raise NotAsItShouldBe(f"ended with {process.returncode}, not {code}: {output}")
        return output

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


def expect(fine: bool, what: str) -> None:
    if not fine:
        raise NotAsItShouldBe(what)


def shown(who: str, output: str) -> None:
    for line in output.splitlines():
        print(f"  {who}{line}")


def play(stage: Stage) -> None:
    stage.done(stage.flask("init-db"))
    stage.done(stage.flask("sell", "1000"))

    print("cron starts the report on two machines, 2 s apart:")
    output = stage.done(stage.start(str(SAMPLE / "cron.py"), "--min-hold", "300"))
    shown("", output)
    expect(output.count("leading with") == 1, "it should have run once")
    expect(output.count("skipped: ") == 1, "the other machine should have skipped it")
    expect("1000 orders" in output, "the report should have all orders")

    print("for its minimum hold nobody else may start; an operator frees the lock for us:")
    shown("", stage.done(stage.flask("volcano-locks", "status", "nightly-report")))
    shown("", stage.done(stage.flask("volcano-locks", "force-release", "nightly-report", "--yes")))

    print("a leader is frozen, for longer than its lease lives:")
    stage.done(stage.flask("sell", "200"))
    frozen = stage.flask("nightly-report", "--pause", "60", "--insist")
    assert frozen.stdout is not None
    first = frozen.stdout.readline() + frozen.stdout.readline()
    shown("frozen:  ", first)
    frozen.send_signal(signal.SIGSTOP)

    standby = stage.done(stage.flask("nightly-report", "--lock-wait", "60"))
    shown("standby: ", standby)
    expect("1200 orders" in standby, "the standby should have taken over")

    print("it thaws, and insists on its write:")
    frozen.send_signal(signal.SIGCONT)
    refused = stage.done(frozen, 76)
    shown("frozen:  ", refused)
    expect("stale write refused" in refused, "the database should have refused it")
    tokens = [
        int(token) for token in re.findall(r"leading with fencing token (\d+)", first + standby)
    ]
    expect(tokens == sorted(set(tokens)) and len(tokens) == 2, "fencing tokens should rise")

    report = stage.done(stage.flask("nightly-report"))
    expect("1200 orders" in report, "nothing should have been counted twice")
    print("every order was counted once.")


@contextlib.contextmanager
def staged() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="volcano-flask-demo-") as folder:
        stage = Stage(Path(folder))
        try:
            yield stage
        finally:
            stage.close()


def main() -> int:
    with staged() as stage:
        try:
            play(stage)
        except (NotAsItShouldBe, subprocess.TimeoutExpired) as error:
            print(f"not as it should be: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
