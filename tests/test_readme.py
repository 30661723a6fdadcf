"""The README's and docs/client.md's code runs as printed; what they promise exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CLIENT = (ROOT / "docs" / "client.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def run(*command: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "VOLCANO_API_URL": f"local:{cwd}/locks.sqlite3",
        "PYTHONPATH": f"{cwd}{os.pathsep}{ROOT}",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A new Django project with the README's two files in it."""
    model, command = (
        block for block in blocks(README, "python") if "volcano_locks_django" in block
    )
    commands = tmp_path / "orders" / "management" / "commands"
    commands.mkdir(parents=True)
    for folder in (commands, commands.parent, commands.parent.parent):
        (folder / "__init__.py").touch()
    (tmp_path / "orders" / "models.py").write_text(model)
    (commands / "rollup.py").write_text(command)
    (tmp_path / "settings.py").write_text(
        "SECRET_KEY = 'x'\nUSE_TZ = True\nDEFAULT_AUTO_FIELD = 'django.db.models.BigAutoField'\n"
        "INSTALLED_APPS = ['volcano_locks_django', 'orders']\n"
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': 'db.sqlite3'}}\n"
    )
    (tmp_path / "manage.py").write_text(
        "import os, sys\nos.environ['DJANGO_SETTINGS_MODULE'] = 'settings'\n"
        "from django.core.management import execute_from_command_line\n"
        "execute_from_command_line(sys.argv)\n"
    )
    run("manage.py", "makemigrations", "orders", cwd=tmp_path)
    run("manage.py", "migrate", cwd=tmp_path)
    return tmp_path


def test_the_django_quick_start_leads_writes_and_is_fenced(shop: Path) -> None:
    assert run("manage.py", "check", cwd=shop).stdout.startswith(
        "System check identified no issues"
    )
    shell = "from orders.models import Rollup; "
    done = run("manage.py", "rollup", cwd=shop)
    assert done.stdout.startswith("rolled up under fencing token 1")
    show = shell + "row = Rollup.objects.get(); print(row.last_order, row.fencing_token > 0)"
    assert run("manage.py", "shell", "-v0", "-c", show, cwd=shop).stdout == "42 True\n"
    stale = (
        shell + "from volcano_locks.errors import StaleFence\n"
        "from types import SimpleNamespace as Lease\n"
        "try: Rollup.objects.filter(pk=1).fenced_update(\n"
        "    Lease(key='rollup', fencing_token=1), last_order=1)\n"
        "except StaleFence as error: print(error.offered)"
    )
    assert run("manage.py", "shell", "-v0", "-c", stale, cwd=shop).stdout == "1\n"
    assert run("manage.py", "shell", "-v0", "-c", show, cwd=shop).stdout == "42 True\n"


def test_the_quick_start_is_ten_lines() -> None:
    model, command = (
        block for block in blocks(README, "python") if "volcano_locks_django" in block
    )
    own = [line for line in (model + command).splitlines() if line.strip()]
    assert len([line for line in own if not line.startswith(("from", "import"))]) <= 10


def test_the_flask_block_leads(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(README, "python") if "volcano_locks_flask" in block)
    (tmp_path / "app.py").write_text(block)
    done = run("-m", "flask", "--app", "app", "nightly-report", cwd=tmp_path)
    assert done.stdout.startswith("I lead, with fencing token 1")


def test_the_fastapi_block_serves_and_leads(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(README, "python") if "volcano_locks.fastapi" in block)
    (tmp_path / "app.py").write_text(
        block.replace("    while True:", "    open('led', 'w')\n    while True:")
    )
    drive = (
        "import os, time\nfrom starlette.testclient import TestClient\nfrom app import app\n"
        "with TestClient(app) as client:\n"
        "    end = time.monotonic() + 60\n"
        "    while not os.path.exists('led'):\n"
        "        assert time.monotonic() < end\n"
        "        client.get('/docs')\n"
    )
    run("-c", drive, cwd=tmp_path)


def test_the_other_blocks_run(tmp_path: Path) -> None:
    frameworks = ("volcano_locks_", "volcano_locks.fastapi")
    plain = [b for b in blocks(README, "python") if not any(name in b for name in frameworks)]
    (first,) = plain
    began = time.monotonic()
    shown = re.fullmatch(r"\d+ (\d+\.\d+)\n", run("-c", first, cwd=tmp_path).stdout)
    assert shown is not None
    assert 29 - (time.monotonic() - began) < float(shown[1]) <= 29
    outputs = [run("-c", block, cwd=tmp_path).stdout for block in blocks(CLIENT, "python")]
    assert outputs[1].startswith("leading ")
    assert outputs[2].splitlines()[0].startswith("True ")
    assert outputs[2].splitlines()[1].startswith("monday under ")


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    pages = [README, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))]
    targets = {
        name for page in pages for name in re.findall(r"(?m)(?:`|^)make ([a-z][a-z-]*)", page)
    }
    assert {"demo", "test", "check", "docs", "bench"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_file_that_is_linked_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_setting_is_documented() -> None:
    from volcano_locks.settings import LockSettings

    for field in LockSettings.model_fields.values():
        for name in field.validation_alias.choices:  # type: ignore[union-attr]
            assert f"`{name}`" in CLIENT
