"""Imports point one way, and importing the package stays light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE_BANS = {"time", "random", "threading", "asyncio", "anyio", "httpx", "secrets", "uuid", "os"}
FRAMEWORKS = {"django", "flask", "starlette", "fastapi", "sqlalchemy", "click", "rich", "uvicorn"}


def imports_of(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, also lazily; not those for typing only."""
    package = path.relative_to(ROOT).with_suffix("").parts
    if package[-1] == "__init__":
        package = (*package[:-1], "")
    found: set[str] = set()
    for node in _runtime_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def _runtime_nodes(tree: ast.AST) -> list[ast.AST]:
    nodes: list[ast.AST] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += [item for part in node.orelse for item in (part, *_runtime_nodes(part))]
            continue
        nodes += [node, *_runtime_nodes(node)]
    return nodes


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)}


@pytest.mark.parametrize("path", modules("volcano_locks/_core"), ids=lambda path: path.name)
def test_the_core_knows_no_time_chance_thread_or_network(path: Path) -> None:
    assert not tops(path) & CORE_BANS
    ours = {name for name in imports_of(path) if name.startswith("volcano_locks.")}
    allowed = (
        "volcano_locks._core",
        "volcano_locks.contract",
        "volcano_locks.errors",
        "volcano_locks.models",
    )
    assert all(name.startswith(allowed) for name in ours)


def test_only_one_module_imports_the_http_library() -> None:
    offenders = {
        str(path.relative_to(ROOT))
        for folder in ("volcano_locks", "volcano_locks_django", "volcano_locks_flask")
        for path in modules(folder)
        if tops(path) & {"httpx", "httpx2", "httpcore"}
    }
    assert offenders <= {"volcano_locks/_http.py"}


@pytest.mark.parametrize("name", ["errors", "models", "contract", "clock"])
def test_the_foundation_stands_on_nothing_of_ours_above_it(name: str) -> None:
    below = {
        "errors": set(),
        "models": {"errors"},
        "clock": set(),
        "contract": {"errors", "models"},
    }
    ours = {
        found.split(".")[1]
        for found in imports_of(ROOT / f"volcano_locks/{name}.py")
        if found.startswith("volcano_locks.")
    }
    assert ours <= below[name]


@pytest.mark.parametrize("path", modules("volcano_locks/local"), ids=lambda path: path.name)
def test_the_local_service_imports_no_client(path: Path) -> None:
    clients = {"client", "async_client", "_client", "_core"}
    ours = {n.split(".")[1] for n in imports_of(path) if n.startswith("volcano_locks.")}
    assert not ours & clients


@pytest.mark.parametrize(
    "path", [ROOT / f"volcano_locks/{n}.py" for n in ("client", "async_client", "_client")]
)
def test_the_clients_import_the_local_service_only_lazily(path: Path) -> None:
    top_level = ast.parse(path.read_text()).body
    eager = {
        ast.unparse(node) for node in top_level if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert not any("local" in line.split() or ".local" in line for line in eager)


@pytest.mark.parametrize("folder", ["volcano_locks_django", "volcano_locks_flask"])
def test_framework_packages_use_no_private_module(folder: str) -> None:
    for path in modules(folder):
        private = {n for n in imports_of(path) if n.startswith("volcano_locks._")}
        assert not private, path


def in_a_new_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return done.stdout


def test_importing_the_package_imports_no_framework_and_no_pydantic() -> None:
    code = (
        "import sys, json, volcano_locks; from volcano_locks import LockClient, AsyncLockClient;"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    loaded = set(json.loads(in_a_new_process(code)))
    assert not loaded & (FRAMEWORKS | {"pydantic", "pydantic_settings", "sqlite3"})


def test_using_a_client_imports_no_framework_and_no_pydantic() -> None:
    code = (
        "import sys, json; from volcano_locks import LockClient\n"
        "with LockClient('sk-x', 'http://127.0.0.1:1') as client:\n"
        "    try: client.get('job')\n"
        "    except Exception as error: assert type(error).__name__ == 'TransportFailed', error\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    bare = "import sys, json, httpx; print(json.dumps([n.split('.')[0] for n in sys.modules]))"
    loaded = set(json.loads(in_a_new_process(code))) - set(json.loads(in_a_new_process(bare)))
    assert not loaded & (FRAMEWORKS | {"pydantic", "pydantic_settings", "sqlite3"})


def test_importing_costs_no_more_modules_than_httpx_and_a_few() -> None:
    count = "import sys; {}; print(len(sys.modules))"
    ours = int(in_a_new_process(count.format("import volcano_locks")))
    theirs = int(in_a_new_process(count.format("import httpx")))
    assert ours < theirs
    with_client = int(
        in_a_new_process(count.format("import httpx; from volcano_locks import LockClient"))
    )
    assert with_client - theirs <= 20


def test_the_public_names_are_all_there_and_sorted() -> None:
    import volcano_locks

    assert volcano_locks.__all__ == sorted(volcano_locks.__all__)
    for name in volcano_locks.__all__:
        assert getattr(volcano_locks, name).__doc__
    with pytest.raises(AttributeError, match="nonsense"):
        _ = volcano_locks.nonsense
    assert set(volcano_locks.__all__) <= set(dir(volcano_locks))
