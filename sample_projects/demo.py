"""The main job, played through: ``make demo``.

Five ``manage.py rollup`` processes start at once on the sample shop; one leads, four skip. Then a
leader is frozen past its lease, another takes over and writes, the first is thawed, insists, and is
refused by the database. No account, no server, nothing left behind. Exit code 0 if all of it was as
it should be, 1 if not.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sqlite3
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ._stage import ROOT, Process, Stage, run, should

if TYPE_CHECKING:
    from collections.abc import Iterator

MANAGE = ROOT / "sample_projects" / "django" / "manage.py"


class Worker(Process):
    """One ``manage.py rollup`` process."""

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


class Shop(Stage):
    """The temporary shop, the processes on it, and the picture of them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.console = Console()
        self.database = self.folder / "shop.sqlite3"
        self.environment["SHOP_DATABASE"] = str(self.database)
        self.title = ""
        self.workers: list[Worker] = []
        self._live: Live | None = None

    def manage(self, *arguments: str) -> None:
        Process(self, f"manage.py {arguments[0]}", str(MANAGE), *arguments).done()

    def rollup(self, name: str, *arguments: str) -> Worker:
        self.workers.append(Worker(self, name, str(MANAGE), "rollup", *arguments))
        return self.workers[-1]

    def heard(self, process: Process, line: str) -> None:
        if isinstance(process, Worker) and not self.console.is_terminal:
            self.console.print(
                f"  {process.name}  pid {process.pid}  {line}", markup=False, soft_wrap=True
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
            table.add_row(worker.name, str(worker.pid), Text(state, style), Text(said))
        return Group(Text(f"\n{self.title}", "bold"), table)

    def read(self, query: str) -> tuple:
        with contextlib.closing(sqlite3.connect(self.database, timeout=60)) as connection:
            return connection.execute(query).fetchone()


def check_totals(stage: Shop, orders: int) -> None:
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


def election(stage: Shop) -> Worker:
    with stage.part("1. Five processes start the same roll-up at once"):
        workers = [
            # The minimum hold: whoever starts later skips as well, even if the leader is done by then.
            stage.rollup(f"#{n}", "--pause", "0.5", "--lock-min-hold", "300")
            for n in range(1, 6)
        ]
        stage.until("all five ended", lambda: all(worker.ended() for worker in workers))
    leaders = [worker for worker in workers if worker.token]
    should(len(leaders) == 1, f"{len(leaders)} processes led, and one should have")
    should(all(worker.code == 0 for worker in workers), "a process failed")
    should(
        sum(worker.skipped for worker in workers) == 4,
        "not all of the other four said they skipped",
    )
    check_totals(stage, 2000)
    return leaders[0]


def takeover(stage: Shop) -> tuple[Worker, Worker]:
    # For its minimum hold nobody else may start: an operator frees the lock for us.
    stage.manage("volcano_locks", "force-release", "rollup", "--yes")
    stage.manage("seed", "500")
    with stage.part("2. A leader is frozen past its lease, and comes back"):
        first = stage.rollup("#6", "--lock-ttl", "5", "--pause", "600", "--insist")
        first.says("read 500 orders")
        first.send(signal.SIGSTOP)
        second = stage.rollup("#7", "--lock-wait", "60")
        second.done()
        first.send(signal.SIGCONT)
        first.done(76)
    should(second.token is not None, "the second leader did not lead")
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


def play(stage: Shop) -> None:
    stage.console.print("A shop with 2000 orders, in a temporary folder ...")
    stage.manage("migrate", "--verbosity", "0")
    stage.manage("seed", "2000")
    leader = election(stage)
    first, second = takeover(stage)
    stage.console.print(summary(leader, first, second, time.monotonic() - stage.began))


if __name__ == "__main__":
    sys.exit(run(play, Shop))
