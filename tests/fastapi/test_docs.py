"""What docs/fastapi.md shows runs as it stands, and the sample application does what it says."""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.testclient import TestClient

from volcano_locks.fastapi import Once

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VOLCANO_API_URL", f"local:{tmp_path / 'locks.db'}")


def until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_page_s_code_runs_from_top_to_bottom() -> None:
    page = (ROOT / "docs" / "fastapi.md").read_text()
    names: dict[str, Any] = {"__name__": "docs"}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    with TestClient(names["app"]) as client:
        until(lambda: client.get("/status").json() == {"leads": True})
        assert client.post("/flush").json()["fencing_token"] > 0
        assert client.get("/healthz").json()["status"] == "ok"
    run_once = names["run_once"]
    assert anyio.run(lambda: run_once(names["load_fixtures"], key="fixtures.v7")) is Once.RAN


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv("DATABASE_URL", f"sqlite+aiosqlite:///{tmp_path / 'queue.sqlite3'}")
    yield importlib.import_module("sample_projects.fastapi.app")
    del sys.modules["sample_projects.fastapi.app"]


def test_the_sample_consumes_its_queue_once(sample: Any) -> None:
    with TestClient(sample.app) as client:
        assert client.post("/jobs?count=12").json() == {"enqueued": 12}
        until(lambda: client.get("/jobs").json() == {"total": 12, "done": 12, "twice": 0})
        assert client.get("/leader").json()["is_leader"] is True
        assert client.get("/leader/remaining").json()["seconds"] > 0
        assert client.get("/healthz").json()["locks"] == {"queue-consumer": "leading"}
