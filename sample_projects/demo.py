"""The main job, played through: ``make demo``.

Five ``manage.py rollup`` processes start at once on the sample shop; one leads, four skip. Then a
leader is frozen past its lease, another takes over and writes, the first is thawed, insists, and is
refused by the database. No account, no server, nothing left behind. Exit code 0 if all of it was as
it should be, 1 if not.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
MANAGE = ROOT / "sample_projects" / "django" / "manage.py"
LIMIT = 55.0
"""Seconds for the whole demo; what takes longer is not as it should be."""


class NotAsItShouldBe(Exception):
    pass


class Stopped(Exception):
    """Ctrl-C or another ending signal, noticed where no process is half started."""


class Worker:
    """One ``manage.py rollup`` process, and what it has said so far."""

    def __init__(self, name: str, stage: Stage, *arguments: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self.frozen = False
        self._stage = stage
        self.process = stage.start("rollup", *arguments)
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        stage.readers.extend(self._readers)
        for reader in self._readers:
            reader.start()

    def _read(self, stream) -> None:
        with stream:
            for line in stream:
                line = line.strip()
                self.lines.append(line)
                self._stage.heard(self, line)

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def token(self) -> int | None:
        found = re.search(r"leading with fencing token (\d+)", self.text)
        return int(found[1]) if found else None

    @property
    def skipped(self) -> bool:
        return any(line.startswith("skipped: ") for line in self.lines)

    @property
    def state(self) -> tuple[str, str]:
        if self.frozen:
            return "frozen", "cyan"
        if self.code is None:
            return ("leads", "bold green") if self.token else ("waiting", "dim")
        if self.code == 0:
            return ("skipped", "yellow") if self.skipped else ("led, done", "green")
        return f"exit {self.code}", "bold red"

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        self.process.send_signal(signal.SIGCONT)

    def join(self) -> None:
        """Read what an ended process has left in its pipes."""
        for reader in self._readers:
            reader.join(5)


class Stage:
    """The temporary shop, the processes on it, and the picture of them."""

    def __init__(self, console: Console, folder: Path) -> None:
        self.console = console
        self.folder = folder
        self.database = folder / "shop.sqlite3"
        self.workers: list[Worker] = []
        self.readers: list[threading.Thread] = []
        self.title = ""
        self._processes: list[subprocess.Popen[str]] = []
        self._end = time.monotonic() + LIMIT
        self._live: Live | None = None
        self.stopped_by: int | None = None
        # Nothing of the caller's configuration may lead the demo to a real project.
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VOLCANO_", "DJANGO_")) and name != "SERVICE_ROLE_KEY"
        } | {
            "VOLCANO_API_URL": f"local:{folder / 'locks.sqlite3'}",
            "SHOP_DATABASE": str(self.database),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
        }

    def look(self) -> None:
        if self.stopped_by is not None:
            raise Stopped

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        self.look()
        process = subprocess.Popen(
            [sys.executable, str(MANAGE), *arguments],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the demo, which then ends them in order
        )
        self._processes.append(process)
        return process

    def manage(self, *arguments: str) -> None:
        process = self.start(*arguments)
        while True:
            self.look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, errors = process.communicate(timeout=0.1)
                break
            self.in_time(f"manage.py {arguments[0]} ended")
        if process.returncode:
            raise NotAsItShouldBe(f"manage.py {arguments[0]} failed: {output}{errors}".strip())

    def in_time(self, what: str) -> None:
        if time.monotonic() > self._end:
            raise NotAsItShouldBe(f"waited too long until {what}")

    def rollup(self, name: str, *arguments: str) -> Worker:
        worker = Worker(name, self, *arguments)
        self.workers.append(worker)
        return worker

    def until(self, what: str, done: Callable[[], bool]) -> None:
        while not done():
            self.look()
            self.in_time(what)
            time.sleep(0.05)
            self.draw()
        self.draw()

    def end_of(self, *workers: Worker) -> None:
        names = ", ".join(worker.name for worker in workers)
        self.until(f"{names} ended", lambda: all(worker.code is not None for worker in workers))
        for worker in workers:
            worker.join()
        self.draw()

    def heard(self, worker: Worker, line: str) -> None:
        if not self.console.is_terminal:
            self.console.print(
                f"  {worker.name}  pid {worker.process.pid}  {line}", markup=False, soft_wrap=True
            )

    @contextlib.contextmanager
    def part(self, title: str) -> Iterator[None]:
        self.title, self.workers = title, []
        if not self.console.is_terminal:
            self.console.print(f"\n{title}", markup=False, soft_wrap=True)
            yield
            return
        with Live(self.picture(), console=self.console, refresh_per_second=10) as self._live:
            try:
                yield
            finally:
                self.draw()
                self._live = None

    def draw(self) -> None:
        if self._live is not None:
            self._live.update(self.picture())

    def picture(self) -> Group:
        table = Table(box=None, pad_edge=False, expand=True)
        for column, options in (
            ("process", {"no_wrap": True}),
            ("pid", {"no_wrap": True}),
            ("state", {"no_wrap": True, "min_width": 10}),
            ("says", {"ratio": 1}),
        ):
            table.add_column(column, **options)
        for worker in self.workers:
            state, style = worker.state
            said = worker.lines[-1] if worker.lines else ""
            table.add_row(worker.name, str(worker.process.pid), Text(state, style), Text(said))
        return Group(Text(f"\n{self.title}", "bold"), table)

    def read(self, query: str) -> tuple:
        with contextlib.closing(sqlite3.connect(self.database, timeout=10)) as connection:
            return connection.execute(query).fetchone()

    def close(self) -> None:
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGCONT)  # a frozen one hears nothing else
            process.terminate()
        end = time.monotonic() + 4
        for process in running:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:  # noqa: PERF203
                process.kill()
                process.wait()
        for reader in self.readers:
            reader.join(5)
        for process in self._processes:
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def should(fact: bool, text: str) -> None:
    if not fact:
        raise NotAsItShouldBe(text)


def check_totals(stage: Stage, orders: int) -> None:
    counted, last = stage.read(
        "select (select sum(orders) from orders_dailytotal),"
        " (select last_order from orders_rollupcursor)"
    )
    cents, all_cents = stage.read(
        "select (select sum(cents) from orders_dailytotal), (select sum(cents) from orders_order)"
    )
    should(counted == orders, f"{orders} orders exist, but {counted} were counted")
    should(cents == all_cents, f"the totals are {cents} cents, the orders {all_cents}")
    should(last == orders, f"the cursor is at {last}, the last order is {orders}")


def election(stage: Stage) -> Worker:
    with stage.part("1. Five processes start the same roll-up at once"):
        workers = [
            # The minimum hold: whoever starts within 12 s skips, even if the leader is done by then.
            stage.rollup(f"#{n}", "--pause", "0.5", "--lock-min-hold", "12")
            for n in range(1, 6)
        ]
        stage.end_of(*workers)
    leaders = [worker for worker in workers if worker.token]
    should(len(leaders) == 1, f"{len(leaders)} processes led, and one should have")
    should(all(worker.code == 0 for worker in workers), "a process failed")
    should(
        sum(worker.skipped for worker in workers) == 4,
        "not all of the other four said they skipped",
    )
    check_totals(stage, 2000)
    return leaders[0]


def takeover(stage: Stage) -> tuple[Worker, Worker]:
    stage.manage("seed", "500")
    with stage.part("2. A leader is frozen past its lease, and comes back"):
        first = stage.rollup(
            "#6", "--lock-ttl", "5", "--lock-wait", "30", "--pause", "60", "--insist"
        )
        stage.until("#6 leads and has read its orders", lambda: "read 500 orders" in first.text)
        first.freeze()
        second = stage.rollup("#7", "--lock-wait", "30")
        stage.end_of(second)
        first.thaw()
        stage.end_of(first)
    should(second.code == 0 and second.token is not None, "the second leader failed")
    should(first.code == 76, f"the thawed leader ended with {first.code}, not with 76")
    should("told to stop" in first.text, "the thawed leader was not told that its lease is lost")
    should(
        f"offered fencing token {first.token}" in first.text
        and f"carries {second.token}" in first.text,
        "the thawed leader's write was not refused with both tokens",
    )
    check_totals(stage, 2500)
    (stored,) = stage.read("select fencing_token from orders_rollupcursor")
    should(stored == second.token, f"the row carries {stored}, not the second leader's token")
    return first, second


def summary(leader: Worker, first: Worker, second: Worker, seconds: float) -> Panel:
    refusal = next(line for line in first.lines if "stale write refused" in line)
    text = Text()
    for line in (
        f"{leader.name} led with fencing token {leader.token} and rolled up 2000 orders; "
        "the other four saw the lock held and ended with exit code 0.",
        f"{first.name} led next, with token {first.token}, and was frozen for longer than its lease. "
        f"{second.name} waited, took over with the higher token {second.token}, and wrote.",
        f"Thawed, {first.name} was told at once that its lease is lost. It insisted on its write, as "
        "a process does that was frozen one step later, and the database refused it:",
    ):
        text.append(f"{line}\n\n")
    text.append(f"{refusal.removeprefix('CommandError: ')}\n\n", "bold red")
    text.append(
        f"All 2500 orders are in the daily totals, each of them once ({seconds:.0f} s).",
        "bold green",
    )
    return Panel(text, title="What happened", padding=(1, 2))


def main() -> int:
    console = Console()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="volcano-demo-") as folder:
        stage = Stage(console, Path(folder))

        def stop(signum: int, _: object) -> None:
            stage.stopped_by = signum

        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, stop)
        try:
            console.print("A shop with 2000 orders, in a temporary folder ...")
            stage.manage("migrate", "--verbosity", "0")
            stage.manage("seed", "2000")
            leader = election(stage)
            first, second = takeover(stage)
        except NotAsItShouldBe as wrong:
            console.print(Panel(Text(str(wrong)), title="Not as it should be", style="red"))
            for worker in stage.workers:
                console.print(
                    f"{worker.name} (exit {worker.code}):\n{worker.text}",
                    markup=False,
                    soft_wrap=True,
                )
            return 1
        except Stopped:
            stage.close()
            console.print("stopped: all processes are ended, nothing is left behind")
            return 128 + (stage.stopped_by or 0)
        finally:
            stage.close()
        console.print(summary(leader, first, second, time.monotonic() - started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
