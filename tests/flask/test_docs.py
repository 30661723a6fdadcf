"""What docs/flask.md shows runs as it stands."""

from __future__ import annotations

import re

import pytest
from flask import Flask

from volcano_locks.errors import ConfigurationError
from volcano_locks_flask import VolcanoLocks

from .processes import ROOT


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """The names that the page's Python blocks make, one after another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOLCANO_API_URL", f"local:{tmp_path / 'locks.sqlite3'}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    page = (ROOT / "docs" / "flask.md").read_text()
    names = {"__name__": "shown"}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "docs/flask.md", "exec"), names)
    return names


def test_the_pages_commands_run(shown):
    runner = shown["app"].test_cli_runner()
    report = runner.invoke(args=["nightly-report", "--day", "monday"])
    assert report.output.startswith("the report of monday carries fencing token 1")
    assert runner.invoke(args=["bill", "acme"]).output == "bills for acme\n"
    status = runner.invoke(args=["volcano-locks", "status", "nightly-report", "billing.acme"])
    assert status.output == "nightly-report: free\nbilling.acme: free\n"


def test_the_pages_settings_and_factory_make_clients(shown):
    app = shown["create_app"]()
    with app.app_context():
        assert "key_prefix='staging.'" in repr(VolcanoLocks().client)
    with pytest.raises(ConfigurationError, match="has a VolcanoLocks already"):
        VolcanoLocks(app)
    app = Flask("made")
    shown["locks"].init_app(app)
    with app.app_context():
        assert not shown["locks"].client.get("k").held


def test_the_pages_job_and_fenced_write_run(shown):
    app, db = shown["app"], shown["db"]
    app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite:///:memory:"
    db.init_app(app)
    with app.app_context():
        assert shown["clean_up"]().acquired
        assert not shown["clean_up"]().acquired  # for its minimum hold
        db.create_all()
        db.session.add(shown["Report"](id=1))
        db.session.commit()
        assert shown["write_total"](total=7).acquired
        assert db.session.get(shown["Report"], 1).total == 7
        db.session.remove()
        db.engine.dispose()
