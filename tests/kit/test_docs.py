"""The examples of docs/local-service.md, run as the tests that they are; its options, all there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from volcano_locks.cli import main
from volcano_locks.local.faults import Fault

PAGE = (Path(__file__).parents[2] / "docs" / "local-service.md").read_text()


def test_its_examples_pass(tmp_path: Path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "test_page.py").write_text("\n\n".join(blocks))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "-p", "no:schemathesis", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


def test_it_names_every_option_and_every_fault():
    shown = CliRunner().invoke(main, ["serve", "--help"]).output
    for option in set(re.findall(r"--[a-z-]+", shown)) - {"--help"}:
        assert option in PAGE
    for fault in Fault:
        assert f"`{fault.value}`" in PAGE
