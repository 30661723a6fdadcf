"""The extension: an app's configuration becomes one client, when it is first used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from flask import Flask

from volcano_locks import LockClient, LockSettings
from volcano_locks.errors import ConfigurationError
from volcano_locks_flask import VolcanoLocks, leader_only

from .processes import ROOT


def test_an_application_factory_makes_an_app_per_call_each_with_its_own_client(tmp_path):
    locks = VolcanoLocks()

    def create_app(name):
        app = Flask(name)
        app.config["VOLCANO_LOCKS"] = {"API_URL": f"local:{tmp_path / name}"}
        locks.init_app(app)
        return app

    one, two = create_app("one"), create_app("two")
    with one.app_context():
        first = locks.client
        assert locks.client is first
        assert first.acquire("k", 5)
    with two.app_context():
        assert locks.client is not first
        assert locks.client.acquire("k", 5)  # another file


def test_a_second_registration_is_refused_and_the_remedy_is_named():
    app = Flask("shop")
    locks = VolcanoLocks(app)
    with pytest.raises(
        ConfigurationError, match=r"'shop' has a VolcanoLocks already.* make it once"
    ):
        VolcanoLocks(app)
    with pytest.raises(ConfigurationError, match="once for each app"):
        locks.init_app(app)


def test_the_apps_configuration_wins_over_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("VOLCANO_API_URL", f"local:{tmp_path / 'environment'}")
    monkeypatch.setenv("VOLCANO_LOCKS_TTL", "45")
    seen = []

    def factory(settings):
        seen.append(settings)
        return LockClient.from_settings(settings)

    app = Flask("shop")
    app.config["VOLCANO_LOCKS"] = {"api_url": f"local:{tmp_path / 'config'}", "KEY_PREFIX": "dev."}
    locks = VolcanoLocks(app, client_factory=factory)
    with app.app_context():
        assert seen == []  # nothing is made before it is used
        assert "config" in repr(locks.client)
        assert "ttl=45" in repr(locks.client)
        assert "key_prefix='dev.'" in repr(locks.client)
    assert len(seen) == 1
    assert isinstance(seen[0], LockSettings)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("local:", "VOLCANO_LOCKS.* is a str; write a dict"),
        ({"API_ULR": "local:"}, "unknown setting 'api_ulr'"),
        ({"API_URL": "local:", "TTL": 1}, "setting (ttl|VOLCANO_LOCKS_TTL)"),
    ],
)
def test_a_configuration_that_cannot_work_is_told_when_it_is_used(config, words):
    app = Flask("shop")
    app.config["VOLCANO_LOCKS"] = config
    locks = VolcanoLocks(app)
    with app.app_context(), pytest.raises(ConfigurationError, match=words):
        _ = locks.client


def test_an_app_without_the_extension_is_told_to_register_it():
    app = Flask("bare")

    @leader_only("k")
    def job():
        raise AssertionError("it must not run")

    with app.app_context(), pytest.raises(ConfigurationError, match="has no VolcanoLocks"):
        job()
    with app.app_context(), pytest.raises(ConfigurationError, match="has no VolcanoLocks"):
        _ = VolcanoLocks().client


def test_a_process_that_ends_with_an_open_hold_gives_it_back(tmp_path):
    script = """
from flask import Flask
from volcano_locks_flask import VolcanoLocks
app = Flask("shop")
app.config["VOLCANO_LOCKS"] = {"API_URL": "local:locks"}
locks = VolcanoLocks(app)
with app.app_context():
    hold = locks.client.hold("left-open", ttl=30).__enter__()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env=environment)
    with LockClient(api_url=f"local:{tmp_path / 'locks'}") as client:
        assert client.get("left-open").held is False
