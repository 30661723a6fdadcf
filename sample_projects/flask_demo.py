"""The Flask sample, played through: ``make demo-flask``.

A cron-like script starts ``flask nightly-report`` on two machines whose clocks differ; it runs once.
Then a leader is frozen past its lease, another takes over and writes, the first is thawed, insists,
and is refused by the database. No account, no server, nothing left behind. Exit code 0 if all of it
was as it should be, 1 if not.
"""

from __future__ import annotations

import os
import re
import signal
import sys

from ._stage import ROOT, Process, Stage, run, should

SAMPLE = ROOT / "sample_projects" / "flask"


def shown(who: str, output: str) -> None:
    for line in output.splitlines():
        print(f"  {who}{line}")


def play(stage: Stage) -> None:
    stage.environment |= {
        "REPORTS_DATABASE": f"sqlite:///{stage.folder / 'reports.sqlite3'}",
        "PYTHONPATH": f"{SAMPLE}{os.pathsep}{ROOT}",
        "FLASK_SKIP_DOTENV": "1",  # it would look in all folders above, too
    }

    def flask(*arguments: str) -> Process:
        name = f"flask {arguments[0]}"
        return Process(stage, name, "-m", "flask", "--app", "reports", *arguments)

    flask("init-db").done()
    flask("sell", "1000").done()

    print("cron starts the report on two machines, 2 s apart:")
    output = Process(stage, "cron", str(SAMPLE / "cron.py"), "--min-hold", "300").done()
    shown("", output)
    should(output.count("leading with") == 1, "it should have run once")
    should(output.count("skipped: ") == 1, "the other machine should have skipped it")
    should("1000 orders" in output, "the report should have all orders")

    print("for its minimum hold nobody else may start; an operator frees the lock for us:")
    shown("", flask("volcano-locks", "status", "nightly-report").done())
    shown("", flask("volcano-locks", "force-release", "nightly-report", "--yes").done())

    print("a leader is frozen, for longer than its lease lives:")
    flask("sell", "200").done()
    frozen = flask("nightly-report", "--pause", "600", "--insist")
    frozen.says("about to write")
    frozen.send(signal.SIGSTOP)
    first = frozen.text
    shown("frozen:  ", first)

    standby = flask("nightly-report", "--lock-wait", "60").done()
    shown("standby: ", standby)
    should("1200 orders" in standby, "the standby should have taken over")

    print("it thaws, and insists on its write:")
    frozen.send(signal.SIGCONT)
    refused = frozen.done(76).removeprefix(f"{first}\n")
    shown("frozen:  ", refused)
    should("stale write refused" in refused, "the database should have refused it")
    tokens = [
        int(token) for token in re.findall(r"leading with fencing token (\d+)", first + standby)
    ]
    should(tokens == sorted(set(tokens)) and len(tokens) == 2, "fencing tokens should rise")

    report = flask("nightly-report").done()
    should("1200 orders" in report, "nothing should have been counted twice")
    print("every order was counted once.")


if __name__ == "__main__":
    sys.exit(run(play))
