"""``make bench``: every number that the docs state, measured as a ratio in one run.

``python -m benchmarks [NAME ...]`` runs some of the parts only. Ends with 1 if a bound is exceeded.
"""

from __future__ import annotations

import importlib
import sys

from rich.console import Console
from rich.table import Table

from benchmarks._measure import Result

PARTS = ("client", "local", "fence_django", "fence_sqlalchemy")


def main(names: list[str]) -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("what", "ours", "theirs", "ratio", "at most", title="Medians of one run")
    failed = False
    for name in names or PARTS:
        with console.status(f"measuring {name}"):
            results: list[Result] = importlib.import_module(f"benchmarks.{name}").run()
        for result in results:
            failed = failed or not result.fine
            table.add_row(
                result.name + (f"\n  {result.note}" if result.note else ""),
                f"{result.ours_us:,.0f} us",
                f"{result.theirs_us:,.0f} us",
                f"{result.ratio:.2f}",
                "" if result.bound is None else f"{result.bound:.2f}",
                style=None if result.fine else "bold red",
            )
    console.print(table)
    if not names or "client" in names:
        from benchmarks.client import report

        line, fine = report()
        console.print(line, style=None if fine else "bold red")
        failed = failed or not fine
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
