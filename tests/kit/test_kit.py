"""The test kit as a user of volcano-locks meets it: fixtures, and no sleeping."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import anyio
import pytest
from starlette.applications import Starlette

from volcano_locks import (
    AsyncHold,
    AsyncLockClient,
    ConfigurationError,
    LeaseLost,
    LockClient,
    LockHeld,
    Policy,
    RateLimited,
    ServiceUnavailable,
    TransportFailed,
)
from volcano_locks.contract import Operation
from volcano_locks.fastapi import leader_lifespan
from volcano_locks.testing import LockService, ManualClock

ROOT = Path(__file__).parents[2]


def test_a_lock_is_taken_and_given_back(lock_service: LockService, lock_client: LockClient):
    with lock_client.hold("rollup", ttl=30) as hold:
        assert lock_client.get("rollup").fencing_token == hold.fencing_token
    assert not lock_client.get("rollup").held
    operations = [exchange.operation for exchange in lock_service.requests]
    assert operations == [Operation.ACQUIRE, Operation.GET, Operation.RELEASE, Operation.GET]
    assert lock_service.requests[0].ttl == 30
    assert lock_service.requests[0].token == lock_service.requests[2].token


def test_somebody_elsewhere_holds(lock_service: LockService, lock_client: LockClient):
    elsewhere = lock_service.hold_elsewhere("rollup")
    with pytest.raises(LockHeld), lock_client.hold("rollup"):
        pass
    lock_service.clock.advance(86_400)
    assert lock_client.acquire("rollup") is None
    elsewhere.release()
    lease = lock_client.acquire("rollup")
    assert lease is not None
    assert lease.fencing_token > elsewhere.fencing_token


def test_a_holder_renews_as_time_passes_and_nobody_sleeps(
    lock_service: LockService, lock_client: LockClient
):
    started = time.monotonic()
    with lock_client.hold("rollup", ttl=30) as hold:
        lock_service.clock.advance(600)
        assert not hold.lost
        renewals = [e for e in lock_service.requests if e.operation is Operation.RENEW]
        assert len(renewals) >= 50
    assert time.monotonic() - started < 60


def test_a_holder_loses_the_lock_to_another(lock_service: LockService, lock_client: LockClient):
    def body() -> None:
        with lock_client.hold("rollup", ttl=30) as hold:
            newer = lock_service.lose("rollup")
            assert hold.lost
            assert newer.fencing_token > hold.fencing_token

    with pytest.raises(LeaseLost):
        body()


def test_a_lease_runs_out(lock_service: LockService, lock_client: LockClient):
    def body() -> None:
        with lock_client.hold("rollup", ttl=30) as hold:
            lock_service.expire("rollup")
            assert hold.lost
            assert lock_client.acquire("rollup") is not None, "it is free for others then"

    with pytest.raises(LeaseLost):
        body()


def test_waiting_for_the_lock_takes_no_time(lock_service: LockService, lock_client: LockClient):
    started = time.monotonic()
    elsewhere = lock_service.hold_elsewhere("rollup", ttl=300)
    with lock_client.hold("rollup", wait=600) as hold:
        assert hold.fencing_token > elsewhere.fencing_token
    lock_service.hold_elsewhere("rollup")
    with pytest.raises(LockHeld), lock_client.hold("rollup", wait=600):
        pass
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_async_body_is_cancelled_when_the_lease_is_lost(
    backend: str, lock_service: LockService, async_lock_client
):
    reached: list[str] = []

    async def main() -> None:
        async with async_lock_client.hold("rollup", ttl=30):
            await lock_service.alose("rollup")
            await anyio.sleep(60)
            reached.append("the end of the body")

    with pytest.raises(LeaseLost):
        anyio.run(main, backend=backend)
    assert reached == []


def test_an_async_lease_runs_out(lock_service: LockService, async_lock_client):
    async def main() -> None:
        async with async_lock_client.hold("rollup", ttl=30) as hold:
            lock_service.expire("rollup")
            assert hold.lost
            await anyio.sleep(60)

    with pytest.raises(LeaseLost):
        anyio.run(main)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("503", ServiceUnavailable),
        ("paused", ServiceUnavailable),
        ("html-502", ServiceUnavailable),
        ("429", RateLimited),
        ("drop-request", TransportFailed),
        ("drop-answer", TransportFailed),
        ("freeze", TransportFailed),
    ],
)
def test_the_next_requests_fail(
    fault: str, error: type[Exception], lock_service: LockService, lock_client: LockClient
):
    lock_service.fail_next(fault, times=5, operation="get", seconds=3)
    with pytest.raises(error):
        lock_client.get("rollup")
    lock_service.faults.clear()
    assert not lock_client.get("rollup").held


def test_waiting_for_a_loss_lets_time_pass_and_the_lease_be_renewed(lock_client: LockClient):
    with lock_client.hold("rollup", ttl=30) as hold:
        assert not hold.wait_lost(60)
        waits = threading.Thread(target=hold.wait_lost)
        waits.start()
        assert not hold.wait_lost(60)
    waits.join(60)
    assert not waits.is_alive()


def test_waiting_for_a_loss_lets_time_pass_in_tasks_too(async_lock_client: AsyncLockClient):
    async def work() -> None:
        async with async_lock_client.hold("rollup", ttl=30) as hold:
            assert not await hold.wait_lost(60)
            assert not hold.lost

    anyio.run(work)


def test_a_singleton_of_an_app_is_tested_without_sleeps(
    lock_service: LockService, async_lock_client: AsyncLockClient
):
    seen: list[object] = []

    async def consume(hold: AsyncHold) -> None:
        seen.append(hold.fencing_token)
        try:
            await anyio.sleep_forever()
        finally:
            seen.append("stopped")

    async def work() -> None:
        lifespan = leader_lifespan(consume, key="consumer", client=async_lock_client)
        async with lifespan(Starlette()):
            before = lock_service.clock.now()
            await anyio.wait_all_tasks_blocked()
            assert lock_service.clock.now() == before
            (first,) = seen
            await lock_service.clock.aadvance(60)
            assert seen == [first]
            assert lock_service.clock.now() == before + 60
            await lock_service.alose("consumer")
            await anyio.wait_all_tasks_blocked()
            assert seen[:2] == [first, "stopped"]

    anyio.run(work)


def test_one_bad_renewal_costs_nothing(lock_service: LockService, lock_client: LockClient):
    with lock_client.hold("rollup", ttl=30) as hold:
        lock_service.fail_next("503", operation="renew")
        lock_service.clock.advance(29)
        assert not hold.lost
    statuses = [e.status for e in lock_service.requests if e.operation is Operation.RENEW]
    assert 503 in statuses
    assert 200 in statuses


def test_a_delay_moves_the_clock_and_not_the_test(lock_service: LockService):
    before, started = lock_service.clock.now(), time.monotonic()
    lock_service.fail_next("delay-answer", seconds=600, operation="acquire")
    with lock_service.client(policy=Policy(timeout=1_000)) as client:
        assert client.acquire("rollup", ttl=10_000) is not None
    assert lock_service.clock.now() - before == pytest.approx(600)
    assert time.monotonic() - started < 60


def test_what_was_lost_on_the_way_is_told_apart(lock_service: LockService, lock_client: LockClient):
    lock_service.fail_next("drop-answer", operation="acquire")
    assert lock_client.acquire("rollup") is not None
    first, second = lock_service.requests
    assert (first.status, second.status) == (None, 201)
    assert (first.token, first.request_id) == (second.token, second.request_id)


def test_mistakes_in_a_test_are_told(lock_service: LockService, lock_client: LockClient):
    with pytest.raises(AssertionError, match="nobody holds"):
        lock_service.lose("rollup")
    with pytest.raises(AssertionError, match="nobody holds"):
        lock_service.expire("rollup")
    lock_service.hold_elsewhere("rollup")
    with pytest.raises(AssertionError, match=r"lose\('rollup'\)"):
        lock_service.hold_elsewhere("rollup")
    with pytest.raises(ValueError, match="there are: delay"):
        lock_service.fail_next("explode")
    with pytest.raises(ValueError, match="no operation is named"):
        lock_service.fail_next("503", operation="steal")


def test_no_token_shows_in_what_a_failing_test_prints(
    lock_service: LockService, lock_client: LockClient
):
    lease = lock_client.acquire("rollup")
    assert lease is not None
    elsewhere = lock_service.hold_elsewhere("other")
    printed = repr(lock_service.requests) + repr(elsewhere)
    assert lease.token.reveal() not in printed
    assert elsewhere._token.reveal() not in printed


def test_a_service_that_is_over_is_told_by_its_name():
    with LockService(ManualClock()) as service:
        url = service.url
    with pytest.raises(ConfigurationError, match="a test that is over"):
        LockClient(api_url=url)


def test_two_services_share_nothing(lock_service: LockService):
    with LockService() as other:
        lock_service.hold_elsewhere("rollup")
        assert not other.client().get("rollup").held


def test_django_points_here_in_one_line(lock_service: LockService):
    script = """
        import django
        from django.conf import settings
        from django.core.management import call_command
        from django.core.management.base import BaseCommand, CommandError
        from django.test import override_settings

        settings.configure(
            INSTALLED_APPS=["django.contrib.contenttypes", "volcano_locks_django"],
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        )
        django.setup()

        from volcano_locks.testing import LockService
        from volcano_locks_django import LeaderOnlyMixin

        ran = []

        class Command(LeaderOnlyMixin, BaseCommand):
            lock_key = "rollup"

            def handle(self, *args, lease, **options):
                ran.append(lease.fencing_token)
                if options.get("lock_ttl") == 60:
                    service.lose("rollup")
                    lease.check()

        with LockService() as service, override_settings(VOLCANO_LOCKS=service.settings):
            call_command(Command())
            elsewhere = service.hold_elsewhere("rollup")
            call_command(Command())
            assert len(ran) == 1, "the second run was skipped"
            elsewhere.release()
            try:
                call_command(Command(), lock_ttl=60)
            except CommandError as error:
                assert error.returncode == 76, error
            else:
                raise SystemExit("the loss was not told")
            assert len(ran) == 2
    """
    run(script)


def test_flask_points_here_in_one_line():
    script = """
        from flask import Flask
        from volcano_locks.testing import LockService
        from volcano_locks_flask import VolcanoLocks

        with LockService() as service:
            app = Flask("shop")
            app.config["VOLCANO_LOCKS"] = service.settings
            locks = VolcanoLocks(app)
            with app.app_context():
                assert locks.client.with_lock("rollup", lambda hold: 7).value == 7
                service.hold_elsewhere("rollup")
                assert not locks.client.with_lock("rollup", lambda hold: 7).acquired
            assert len(service.requests) == 3
    """
    run(script)


def test_the_plugin_costs_a_test_run_nothing_unless_it_is_used(tmp_path: Path):
    (tmp_path / "test_theirs.py").write_text(
        textwrap.dedent(
            """
            import sys

            def test_theirs():
                ours = {name for name in sys.modules if name.startswith("volcano_locks")}
                assert ours == {"volcano_locks", "volcano_locks.pytest_plugin"}
                assert not {"httpx", "anyio", "pydantic", "sqlite3"} & sys.modules.keys()

            def test_ours(lock_client):
                assert "volcano_locks.testing" in sys.modules
            """
        )
    )
    plugins = [
        "-p",
        "no:schemathesis",
        "-p",
        "no:anyio",
        "-p",
        "no:hypothesispytest",
        "-p",
        "no:xdist",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *plugins,
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
