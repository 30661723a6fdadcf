"""The sample shop: it works as its README says, and a stale roll-up leaves no trace."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from volcano_locks import LockSettings
from volcano_locks_django import lease_lost

DOCS = Path(__file__).resolve().parents[2] / "docs" / "django.md"
SAMPLE = Path(__file__).resolve().parents[2] / "sample_projects" / "django"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A copy of the sample, as somebody would take it."""
    return shutil.copytree(
        SAMPLE, tmp_path / "shop", ignore=shutil.ignore_patterns("*.sqlite3", "__pycache__")
    )


def bash(shop: Path, script: str, answers: str = "") -> str:
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(shop.parent),
        "XDG_STATE_HOME": str(shop.parent / "state"),
        "XDG_CACHE_HOME": str(shop.parent / "cache"),
        "XDG_RUNTIME_DIR": str(shop.parent),
        "PYTHONPATH": str(SAMPLE.parents[1]),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=shop,
        env=environment,
        input=answers,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readmes_first_steps_work_as_they_stand(shop: Path) -> None:
    steps = re.search(r"```bash\n(.*?)```", (shop / "README.md").read_text(), re.DOTALL)
    assert steps is not None
    script = "\n".join(line for line in steps[1].splitlines() if not line.startswith("pip"))
    out = bash(shop, f"{script}\npython manage.py makemigrations --check --dry-run")
    assert "1000 orders added" in out
    assert "done: 1000 orders rolled up" in out
    assert "No changes detected" in out


def manage(shop: Path, *lines: str, answers: str = "") -> str:
    """Run ``manage.py`` lines one after another, all in one process."""
    code = (
        "import shlex, sys; from django.core.management import execute_from_command_line as run\n"
        "for line in sys.argv[1:]: run(['manage.py', *shlex.split(line, comments=True)])"
    )
    script = (
        "export VOLCANO_API_URL=local:locks DJANGO_SETTINGS_MODULE=shop.settings; "
        f"python -c {shlex.quote(code)} {shlex.join(lines)}"
    )
    return bash(shop, script, answers)


STALE = """
from django.db.models import Sum
from orders.models import DailyTotal, RollupCursor
from orders.rollup import next_batch, write_batch
from volcano_locks import Lease, Secret, StaleFence
from django.utils import timezone

def lease(token):
    return Lease("rollup", None, token, timezone.now(), Secret("x"))

def totals():
    return DailyTotal.objects.aggregate(n=Sum("orders"), c=Sum("cents"))

stale = next_batch(300)
write_batch(lease(2), *next_batch(1000))
before = totals()
try:
    write_batch(lease(1), *stale)
except StaleFence as refused:
    assert (refused.offered, refused.stored) == (1, 2)
    print("refused")
assert totals() == before == {"n": 1000, "c": sum(100 + n for n in range(1000))}
assert RollupCursor.objects.get().last_order == 1000
"""


def test_a_stale_roll_up_changes_neither_cursor_nor_totals(shop: Path) -> None:
    out = manage(shop, "migrate -v 0", "seed 1000", shlex.join(["shell", "-c", STALE]))
    assert out.endswith("refused\n")


def test_the_code_of_the_documentation_runs() -> None:
    blocks = re.findall(r"```(python|bash)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    for language, block in blocks:
        if language == "python" and "BaseCommand" not in block:
            names: dict[str, Any] = {}
            exec(block, names)
            if "VOLCANO_LOCKS" in names:
                assert LockSettings.load(names["VOLCANO_LOCKS"]).key_prefix == "staging."
            else:
                assert lease_lost.disconnect(names["page_somebody"])


def test_the_command_and_the_operators_lines_of_the_documentation_run(shop: Path) -> None:
    blocks = re.findall(r"```(?:python|bash)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    command = next(block for block in blocks if "BaseCommand" in block)
    operators = next(block for block in blocks if "manage.py" in block and "volcano_locks" in block)
    (shop / "orders/management/commands/rollup.py").write_text(command)
    out = manage(
        shop,
        "migrate -v 0",
        "shell -c 'from orders.models import RollupCursor as R; R().save()'",
        "rollup",
        *(line.removeprefix("python manage.py ") for line in operators.splitlines()),
        answers="y\n",
    )
    assert "rollup: free\nbilling.acme: free\n" in out
    assert "rollup: released" in out
    assert "orders.RollupCursor: lock rollup, highest token 1" in out
