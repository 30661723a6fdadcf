"""What ``volcano-locks serve`` prints can be pasted, and what it refuses names the option that is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.contract.served import KEY, PATIENCE, ROOT
from volcano_locks import LockClient, Policy
from volcano_locks.cli import _to_paste, main
from volcano_locks.models import Secret
from volcano_locks.settings import LockSettings

OWN = Secret("sk-my-own")
NEVER_SERVES = ["serve", "--store", "/nonexistent/store"]
"""Refused at the last, whatever else is given."""


def in_a_shell(lines: list[str]) -> dict[str, str]:
    """What a program that is started after the paste finds in its environment."""
    shown = subprocess.run(
        ["sh", "-euc", "\n".join([*lines, "env"])],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return dict(line.split("=", 1) for line in shown.stdout.splitlines())


@pytest.fixture
def dotenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Read lines as the ``.env`` of the working directory."""
    for name in [name for name in os.environ if name.startswith("VOLCANO_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def read(lines: list[str]) -> LockSettings:
        (tmp_path / ".env").write_text("\n".join(lines))
        return LockSettings.load()

    return read


def test_the_lines_work_in_a_shell_and_in_a_dotenv_file(dotenv):
    _, lines, remark = _to_paste("http://127.0.0.1:8787", Secret(KEY))
    environment, settings = in_a_shell(lines), dotenv(lines)
    assert environment["VOLCANO_API_URL"] == settings.api_url == "http://127.0.0.1:8787"
    assert environment["VOLCANO_SERVICE_KEY"] == KEY
    assert settings.service_key is not None
    assert settings.service_key.get_secret_value() == KEY
    assert remark == ""


def test_a_key_of_ones_own_is_neither_shown_nor_set_to_something_else(dotenv):
    _, lines, _ = _to_paste("http://127.0.0.1:8787", OWN)
    assert "VOLCANO_SERVICE_KEY" in "".join(lines)
    assert OWN.reveal() not in "".join(lines)
    assert "VOLCANO_SERVICE_KEY" not in in_a_shell(lines)
    assert dotenv(lines).service_key is None


@pytest.mark.parametrize(
    "url", ["http://192.0.2.7:8787", "http://Build-Host:8787", "http://[2001:db8::7]:8787"]
)
def test_our_client_takes_the_url_of_an_address_that_is_not_loopback(dotenv, url):
    _, lines, remark = _to_paste(url, OWN)
    LockClient.from_settings(dotenv(lines), service_key=OWN.reveal()).close()
    assert dotenv(lines).api_url == url
    assert remark == ""


def test_every_address_of_ip_version_6_is_reached_by_its_loopback():
    assert _to_paste("http://[::]:8787", OWN)[1][0] == "export VOLCANO_API_URL=http://[::1]:8787"


def test_a_server_on_every_address_is_reached_from_this_machine_and_tells_others_how(dotenv):
    command = [sys.executable, "-m", "volcano_locks", "serve", "--port=0", "--store=memory"]
    server = subprocess.Popen(
        [*command, "--allow-remote", "--host=0.0.0.0"],
        env={**os.environ, "VOLCANO_LOCKS_SERVE_KEY": OWN.reveal()},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        lines = [server.stdout.readline(), server.stdout.readline()]
        settings, patient = dotenv(lines), Policy(timeout=PATIENCE)
        with LockClient.from_settings(
            settings, service_key=OWN.reveal(), ttl=600, policy=patient
        ) as client:
            assert client.acquire("rollup") is not None
    finally:
        server.terminate()
        _, told = server.communicate(timeout=PATIENCE)
    port = lines[0].strip().rpartition(":")[2]
    assert f"VOLCANO_API_URL=http://HOST:{port} VOLCANO_LOCKS_ALLOW_HTTP=HOST" in told


@pytest.mark.parametrize(
    ("options", "code", "option"),
    [
        (["--service-key", ""], 78, "--service-key"),
        (["--service-key", "ak-secret"], 78, "--service-key"),
        (["--service-key", "sk secret"], 78, "--service-key"),
        (["--project", "shop="], 78, "--project"),
        (["--project", "shop=ak-secret"], 78, "--project"),
        (["--project", "sk-secret"], 64, "--project"),
        (["--project", "sh\udcffp=sk-secret"], 64, "--project"),
        (["--powerless-key", "local=sk secret"], 78, "--powerless-key"),
        (["--powerless-key", "sk-secret"], 64, "--powerless-key"),
        (["--powerless-key", "shop=sk-secret"], 64, "--powerless-key"),
        (["--host", ""], 64, "--host"),
        (["--host", "", "--allow-remote", "--service-key", "sk-secret"], 64, "--host"),
        (["--host", "127.example.com"], 64, "--allow-remote"),
        (["--host", "[::1]"], 64, "[::1] is none of localhost, 127.x.x.x and ::1"),
        (
            [
                *("--host", "0.0.0.0", "--allow-remote", "--service-key", "sk-own"),
                *("--project", "shop=sk-local-development"),
            ],
            64,
            "default key",
        ),
        (["--store", "/nonexistent/store"], 78, "--store"),
        (["--store", f"{Path(__file__)}"], 78, "--store"),
    ],
)
def test_a_refusal_names_the_option_in_one_line_and_no_setting_that_serve_does_not_read(
    options, code, option
):
    done = CliRunner().invoke(main, [*NEVER_SERVES, *options])
    refusal = [line for line in done.output.splitlines() if option in line]
    assert done.exit_code == code
    assert len(refusal) == 1
    assert done.output.splitlines()[-1] == refusal[0]
    assert "secret" not in done.output
    assert "VOLCANO_SERVICE_KEY" not in done.output
    assert "VOLCANO_API_URL" not in done.output


def test_a_project_may_be_named_before_or_after_its_key_without_power():
    options = ["--powerless-key", "shop=sk-weak", "--project", "shop=sk-strong"]
    done = CliRunner().invoke(main, [*NEVER_SERVES, *options])
    assert "--store" in done.output
    assert "powerless" not in done.output
