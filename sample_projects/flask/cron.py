"""What cron does: starts ``flask nightly-report`` on two machines whose clocks differ.

Two processes with a working directory each stand for the machines. ``--lock-min-hold`` is for the
case that the first is done before the second one's clock strikes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


def start(machine: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    home = folder / machine
    home.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "flask", "--app", "reports", "nightly-report", *arguments],
        cwd=home,
        env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--skew", type=float, default=2.0, help="seconds between the two clocks")
    parser.add_argument("--min-hold", default="30", help="the command's --lock-min-hold")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        machines = {}
        for number, machine in enumerate(("machine-a", "machine-b")):
            time.sleep(options.skew * number)
            machines[machine] = start(machine, Path(folder), "--lock-min-hold", options.min_hold)
        code = 0
        for machine, process in machines.items():
            output, _ = process.communicate()
            for line in output.splitlines():
                print(f"{machine}: {line}")
            code = code or process.returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
