"""Configuration: who wins, what is refused, and that it is refused before anything is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from volcano_locks import AsyncLockClient, ConfigurationError, InvalidRequest, LockClient, Policy
from volcano_locks.settings import LockSettings

KEY = "sk-0123456789abcdef"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("VOLCANO_", "SERVICE_ROLE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_explicit_wins_over_the_environment_over_dot_env(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text(
        "VOLCANO_SERVICE_KEY=sk-file\nVOLCANO_LOCKS_TTL=60\nVOLCANO_API_URL=https://file.example\n"
        "DATABASE_URL=postgres://x\nVOLCANO_SOMETHING_ELSE=1\n"  # H5: foreign keys are fine
    )
    monkeypatch.setenv("VOLCANO_LOCKS_TTL", "90")
    monkeypatch.setenv("VOLCANO_API_URL", "https://env.example")
    settings = LockSettings.load({"API_URL": "https://explicit.example", "TTL": None})
    assert settings.api_url == "https://explicit.example"
    assert settings.ttl == 90
    assert settings.service_key is not None
    assert settings.service_key.get_secret_value() == "sk-file"


def test_an_empty_variable_means_unset(monkeypatch: pytest.MonkeyPatch) -> None:  # H5
    monkeypatch.setenv("VOLCANO_LOCKS_TTL", "")
    monkeypatch.setenv("VOLCANO_SERVICE_KEY", "")
    monkeypatch.setenv("SERVICE_ROLE_KEY", KEY)
    settings = LockSettings.load()
    assert settings.ttl == 30
    assert settings.service_key is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VOLCANO_LOCKS_TTL", "4"),
        ("VOLCANO_LOCKS_TTL", "soon"),
        ("VOLCANO_LOCKS_TIMEOUT", "0"),
        ("VOLCANO_LOCKS_TIMEOUT", "nan"),
    ],
)
def test_a_value_that_cannot_work_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=name):
        LockSettings.load()


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="service_key"):
        LockSettings.load({"SERVICEKEY": KEY})


def test_the_key_is_in_no_repr_and_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLCANO_SERVICE_KEY", KEY)
    settings = LockSettings.load()
    client = LockClient.from_settings(settings)
    assert KEY not in f"{settings!r} {client!r} {vars(client)}"
    with pytest.raises(ConfigurationError) as caught:
        LockSettings.load({"service_key": [KEY]})
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("client", [LockClient, AsyncLockClient])
@pytest.mark.parametrize(
    ("key", "words"),
    [
        (None, "local:"),
        ("", "local:"),
        ("   ", "local:"),
        ("ak-0123456789", "anon key"),
        ("sk-with space", "characters"),
        ("sk-line\nbreak", "characters"),
        ("sk-schlüssel", "characters"),
    ],
)
def test_a_key_that_cannot_be_one_is_refused_at_once(
    client: type[Any], key: str | None, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        client(key)
    assert not key or not key.strip() or key not in str(caught.value)


def test_the_missing_key_says_how_to_get_going_locally() -> None:
    with pytest.raises(ConfigurationError, match="VOLCANO_API_URL=local:"):
        LockClient.from_settings()


@pytest.mark.parametrize(
    "url",
    [
        "http://locks.example",
        "http://10.0.0.5:8787",
        "ftp://locks.example",
        "locks.example",
        "",
        "https://",
        "https://user:pw@locks.example",
        "https://locks.example?x=1",
        "http://localhost.evil.example",
        "https://locks.example:port",
        "https://[::1",
    ],
)
def test_an_unsafe_or_senseless_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LockClient(KEY, url)
    assert "pw" not in str(caught.value).replace("pwd", "")


@pytest.mark.parametrize(
    "url",
    [
        "https://locks.example/prefix/",
        "http://localhost:8787",
        "http://127.0.0.1:8787",
        "http://[::1]:8787",
        "local:",
    ],
)
def test_https_loopback_and_local_are_fine(url: str) -> None:
    LockClient(KEY, url)


def test_plain_http_is_allowed_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    LockClient(KEY, "http://locks.internal:80", allow_http=["locks.internal"])
    monkeypatch.setenv("VOLCANO_LOCKS_ALLOW_HTTP", "other, locks.internal")
    monkeypatch.setenv("VOLCANO_API_URL", "http://locks.internal")
    monkeypatch.setenv("VOLCANO_SERVICE_KEY", KEY)
    LockClient.from_settings()


@pytest.mark.parametrize("key", [None, 5, b"job"])
def test_a_key_that_is_no_text_is_refused_and_not_made_one(key: Any) -> None:
    with pytest.raises(InvalidRequest):
        LockClient(KEY).hold(key)
    with pytest.raises(InvalidRequest):
        LockClient(KEY, key_prefix="staging.").hold(key)
    with pytest.raises(InvalidRequest):
        LockClient(KEY, key_prefix=key)


@pytest.mark.parametrize(
    "options", [{"timeout": "5"}, {"timeout": 1e10}, {"timeout": 0}, {"api_url": None}]
)
def test_values_of_the_wrong_kind_are_configuration_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        LockClient(KEY, **options)


def test_one_allowed_host_may_be_given_as_text() -> None:
    LockClient(KEY, "http://locks.internal", allow_http="locks.internal")
    with pytest.raises(ConfigurationError):
        LockClient(KEY, "http://l", allow_http="locks.internal")


def test_a_host_name_that_cannot_be_is_a_configuration_error() -> None:
    url = "https://-ü-.example"
    with LockClient(KEY, url) as client, pytest.raises(ConfigurationError):
        client.get("job")


def test_certificates_that_are_not_there_are_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent.pem")
    with (
        LockClient(KEY, "https://locks.example") as client,
        pytest.raises(ConfigurationError, match="SSL_CERT_FILE"),
    ):
        client.get("job")


def test_a_key_prefix_is_checked_and_put_before_every_key() -> None:
    with pytest.raises(InvalidRequest):
        LockClient(KEY, key_prefix="bad prefix")
    assert LockClient(KEY, key_prefix="staging.").hold("job").key == "staging.job"


def test_nothing_is_validated_at_import(monkeypatch: pytest.MonkeyPatch) -> None:  # H5
    import subprocess
    import sys

    code = "import volcano_locks, volcano_locks.settings, volcano_locks.client"
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=True,
        env={"VOLCANO_LOCKS_TTL": "nonsense", "VOLCANO_API_URL": "::", "PATH": ""},
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("client", [LockClient, AsyncLockClient])
@pytest.mark.parametrize("damage", ["corrupt", "no folder", "a folder"])
def test_a_store_that_cannot_be_used_is_a_configuration_error(
    client: type[Any], damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / ("missing/locks.db" if damage == "no folder" else "locks.db")
    if damage == "corrupt":
        path.write_bytes(b"somebody's precious notes" * 100)
    elif damage == "a folder":
        path.mkdir()
    before = path.read_bytes() if path.is_file() else None
    locks = client(api_url=f"local:{path}")
    with pytest.raises(ConfigurationError, match=str(path)):
        acquired = locks.acquire("job")
        if client is AsyncLockClient:
            anyio.run(lambda: acquired)
    assert (path.read_bytes() if path.is_file() else None) == before
    assert not caplog.records


# -- proxies: H6 -----------------------------------------------------------------------------------


def test_a_socks_proxy_without_its_package_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match=r"httpx\[socks\]"):
        LockClient(KEY, "https://locks.example").get("job")


def test_a_proxy_that_is_no_url_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "gopher://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="VOLCANO_LOCKS_TRUST_ENV"):
        LockClient(KEY, "https://locks.example").get("job")


@pytest.mark.parametrize("bypass", ["locks.example", ".example", "*", "a.example, locks.example"])
def test_no_proxy_keeps_the_service_off_a_proxy(
    monkeypatch: pytest.MonkeyPatch, bypass: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", bypass)
    with LockClient(KEY, "https://locks.example") as client:
        assert client._pool().is_closed is False


def test_loopback_and_trust_env_false_use_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    from volcano_locks import TransportFailed

    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    with (
        LockClient(KEY, "http://127.0.0.1:1") as client,
        pytest.raises(TransportFailed) as caught,
    ):
        client.get("job")
    assert caught.value.sent is False
    with LockClient(KEY, "https://locks.example", trust_env=False) as client:
        assert client._pool().is_closed is False


# -- policy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers",
    [
        {"stop_margin": 0.5},
        {"first_renewal": 0.9},
        {"latest_renewal": 0.9},
        {"jitter": 0.9},
        {"jitter": -0.1},
        {"first_backoff": 0},
        {"first_backoff": 9.0, "longest_backoff": 1.0},
        {"timeout": 0},
        {"release_tries": 0},
        {"poll_interval": 0.01},
        {"quota_per_minute": 0},
        {"holders_share": 1.0},
        {"stop_margin": 3.0},
    ],
)
def test_unsafe_numbers_are_refused_with_advice(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"unsafe policy: .{15,}"):
        Policy(**numbers)
