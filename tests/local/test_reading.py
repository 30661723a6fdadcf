"""How the served form reads a request, whatever is installed beside it and whatever a lock is named."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from tests.contract.served import KEY, PATIENCE, served


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server beside whose packages uvicorn finds the two that it prefers, if one lets it."""
    folder: Path = tmp_path_factory.mktemp("beside")
    for name in ("httptools", "uvloop"):
        (folder / f"{name}.py").write_text(
            "raise RuntimeError('not what the server was tested with')"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with served() as server:
            yield server.url


def say(url: str, start: str, *headers: str, body: str = "") -> bytes:
    parts = urlsplit(url)
    lines = [
        f"{start} HTTP/1.1",
        f"Host: {parts.netloc}",
        f"Authorization: Bearer {KEY}",
        f"X-Volcano-Request-Id: {uuid4()}",
        f"X-Volcano-Lock-Token: {uuid4()}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
        "",
        body,
    ]
    with socket.create_connection((parts.hostname, parts.port or 80), PATIENCE) as connection:
        connection.sendall("\r\n".join(lines).encode())
        return connection.makefile("rb").read()


def test_a_request_that_offers_an_upgrade_keeps_its_body(url: str):
    offer = (
        "Connection: Upgrade, HTTP2-Settings, close",
        "Upgrade: h2c",
        "HTTP2-Settings: AAEAAEAA",
    )
    answer = say(url, "POST /locks/a/lease", *offer, body='{"ttl_seconds": 30}')
    assert answer.startswith(b"HTTP/1.1 201 ")


def test_a_head_without_end_is_not_read_on(url: str):
    try:
        answer = say(url, "GET /locks/a", f"X-Long: {'a' * 5_000_000}")
    except ConnectionError:  # it closed while there was more to send
        return
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/locks/lease", b"DELETE, GET"), ("/locks/lease/lease", b"DELETE, PATCH, POST")],
)
def test_a_lock_named_lease_allows_what_any_lock_does(url: str, path: str, allowed: bytes):
    answer = say(url, f"PUT {path}").lower()
    assert answer.startswith(b"http/1.1 405 ")
    assert b"allow: " + allowed.lower() + b"\r\n" in answer
