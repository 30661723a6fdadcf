"""The in-process transport, as a user of httpx meets it."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import uuid
from pathlib import Path

import anyio
import pytest

from volcano_locks import LockClient
from volcano_locks._http import httpx
from volcano_locks.errors import ConfigurationError
from volcano_locks.local import address as address_module
from volcano_locks.local import store as store_module
from volcano_locks.local.address import default_path, store_path
from volcano_locks.local.transport import LocalTransport


def headers(token: str | None = None, key: str | None = None) -> dict[str, str]:
    found = {"X-Volcano-Request-Id": str(uuid.uuid4())}
    if token is not None:
        found["X-Volcano-Lock-Token"] = token
    if key is not None:
        found["Authorization"] = f"Bearer {key}"
    return found


def test_a_lease_is_taken_and_given_back_through_httpx(tmp_path: Path):
    token = str(uuid.uuid4())
    with httpx.Client(transport=LocalTransport(str(tmp_path / "s")), base_url="http://x") as client:
        taken = client.post("/locks/job/lease", json={"ttl_seconds": 10}, headers=headers(token))
        assert taken.status_code == 201
        assert taken.headers["content-type"] == "application/json"
        seen = client.get("/locks/job", headers=headers())
        assert seen.json() == {"held": True, **taken.json()}
        assert client.delete("/locks/job/lease", headers=headers(token)).status_code == 204
        assert client.get("/locks/job", headers=headers()).json() == {"held": False}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("path", ["file", "memory"])
def test_the_async_form_answers_the_same(backend: str, path: str, tmp_path: Path):
    async def main() -> int:
        transport = LocalTransport(str(tmp_path / "s") if path == "file" else None)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            asked = {"json": {"ttl_seconds": 10}, "headers": headers(str(uuid.uuid4()))}
            return (await client.post("/locks/job/lease", **asked)).status_code

    assert anyio.run(main, backend=backend) == 201


def test_a_slow_disk_does_not_block_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The request waits for another's transaction while the loop goes on and then ends the wait."""
    monkeypatch.setattr(store_module, "PATIENCE", 30)
    taken, asked, let_go = threading.Event(), threading.Event(), threading.Event()

    def clock() -> int:
        asked.set()  # the last before the store
        return 1_800_000_000_000

    transport = LocalTransport(str(tmp_path / "s"), clock=clock)
    transport.store.open()

    def keep_the_store_busy() -> None:
        with transport.store._mutex:
            taken.set()
            let_go.wait(60)

    async def main() -> int:
        status = 0

        async def request() -> None:
            nonlocal status
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                answer = await client.get("/locks/job", headers=headers())
                status = answer.status_code

        async with anyio.create_task_group() as group:
            group.start_soon(request)
            while not asked.is_set():  # noqa: ASYNC110 - another thread sets it
                await anyio.sleep(0.01)
            let_go.set()  # not before the request gave up, if the loop were blocked
        return status

    thread = threading.Thread(target=keep_the_store_busy)
    thread.start()
    assert taken.wait(60)
    try:
        assert anyio.run(main) == 200
    finally:
        let_go.set()
        thread.join()


def test_no_key_is_needed_and_any_key_is_the_one_project(tmp_path: Path):
    with httpx.Client(transport=LocalTransport(None), base_url="http://x") as client:
        token = str(uuid.uuid4())
        client.post("/locks/job/lease", json={"ttl_seconds": 10}, headers=headers(token))
        for key in (None, "sk-one", "sk-two"):
            assert client.get("/locks/job", headers=headers(key=key)).json()["held"] is True
        assert client.get("/locks/job", headers=headers(key="ak-anon")).status_code == 403


def test_leases_are_judged_by_the_clock_that_was_passed_in():
    now = 1_800_000_000_000
    with httpx.Client(
        transport=LocalTransport(None, clock=lambda: now), base_url="http://x"
    ) as client:
        asked = {"json": {"ttl_seconds": 10}, "headers": headers(str(uuid.uuid4()))}
        client.post("/locks/job/lease", **asked)
        now += 10_999
        assert client.get("/locks/job", headers=headers()).json()["held"] is True
        now += 1
        assert client.get("/locks/job", headers=headers()).json() == {"held": False}


def test_a_file_that_cannot_serve_is_told_by_its_name_at_the_first_request(tmp_path: Path):
    (tmp_path / "s").write_bytes(b"x" * 5_000)
    transport = LocalTransport(str(tmp_path / "s"))
    with (
        httpx.Client(transport=transport, base_url="http://x") as client,
        pytest.raises(ConfigurationError, match=str(tmp_path / "s")),
    ):
        client.get("/locks/job", headers=headers())


def test_an_unavailable_store_is_503_and_fails_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_module, "PATIENCE", 0.01)
    transport = LocalTransport(str(tmp_path / "s"))
    transport.store.open()
    with (
        httpx.Client(transport=transport, base_url="http://x") as client,
        contextlib.closing(sqlite3.connect(tmp_path / "s", isolation_level=None)) as other,
    ):
        other.execute("BEGIN EXCLUSIVE")
        answer = client.get("/locks/job", headers=headers())
    assert answer.status_code == 503
    assert answer.json()["code"] == "lock_service_unavailable"


def test_local_alone_is_a_file_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(address_module.sys, "platform", "linux")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    expected = tmp_path / "state" / "volcano-locks" / "locks.sqlite3"
    assert default_path() == expected
    assert store_path("local:") == str(expected)
    assert expected.parent.is_dir()
    assert not expected.exists(), "nothing is opened before the first request"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_path().parts[-5:-1] == (Path.home().name, ".local", "state", "volcano-locks")
    monkeypatch.setattr(address_module.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "AppData"))
    assert default_path() == tmp_path / "AppData" / "volcano-locks" / "locks.sqlite3"


def test_a_path_is_relative_to_the_directory_in_which_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert store_path("local:some/locks.db") == str(tmp_path / "some" / "locks.db")
    (tmp_path / "some").mkdir()
    with LockClient(api_url="local:some/locks.db") as client:
        monkeypatch.chdir("/")
        client.get("job")
    assert (tmp_path / "some" / "locks.db").is_file()


def test_a_user_folder_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "state").write_text("a file, not a folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(ConfigurationError, match="cannot be made"):
        store_path("local:")


@pytest.mark.parametrize("url", ["http://x", "local", "local://x/y", ""])
def test_what_is_no_local_url_is_refused(url: str):
    with pytest.raises(ConfigurationError, match="local:PATH"):
        store_path(url)
