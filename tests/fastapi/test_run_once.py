"""Start-up work: one replica does it; the others wait or skip; a failed run does not count."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.core.fake import Drop, FakeService
from tests.fastapi.conftest import Journal
from tests.fastapi.test_lifespan import Clients
from volcano_locks import (
    AsyncHold,
    AsyncLockClient,
    AuthenticationFailed,
    ConfigurationError,
    InvalidRequest,
    LeaseLost,
    TransportFailed,
)
from volcano_locks._http import httpx
from volcano_locks.contract import Operation
from volcano_locks.fastapi import Once, run_once
from volcano_locks.testing import ManualClock

pytestmark = pytest.mark.anyio


def work(journal: Journal) -> Any:
    async def migrate(lease: AsyncHold) -> None:
        lease.check()
        journal.note("runs")

    return migrate


async def test_the_first_replica_runs_it_and_the_next_finds_it_done(
    new_client: Clients, service: FakeService, journal: Journal
) -> None:
    assert await run_once(work(journal), key="migrate", client=new_client()) is Once.RAN
    assert await run_once(work(journal), key="migrate", client=new_client()) is Once.DONE
    assert journal.events == ["runs"]
    assert service.free("migrate")
    assert Once.RAN.is_done
    assert Once.DONE.is_done


async def test_after_remember_seconds_it_is_run_again(
    client: AsyncLockClient, clock: ManualClock, journal: Journal
) -> None:
    await run_once(work(journal), key="migrate", remember=600, client=client)
    await clock.aadvance(602)
    assert await run_once(work(journal), key="migrate", client=client) is Once.RAN


async def test_others_wait_while_one_works_and_none_repeats_it(
    new_client: Clients, clock: ManualClock, journal: Journal
) -> None:
    outcomes: list[Once] = []

    async def migrate(lease: AsyncHold) -> None:
        journal.note("runs")
        await clock.sleep(60)

    async def replica() -> None:
        outcomes.append(await run_once(migrate, key="migrate", client=new_client()))

    async with anyio.create_task_group() as replicas:
        for _ in range(5):
            replicas.start_soon(replica)
        await journal.until("runs")
        await clock.aadvance(50)
        assert outcomes == []
        await clock.aadvance(20)
    assert outcomes == [Once.RAN] + [Once.DONE] * 4
    assert journal.events == ["runs"]


@pytest.mark.parametrize("wait", [0, 30])
async def test_a_replica_may_skip_or_wait_for_a_limited_time(
    client: AsyncLockClient, service: FakeService, clock: ManualClock, journal: Journal, wait: float
) -> None:
    service.take_over("migrate")
    outcomes: list[Once] = []

    async def replica() -> None:
        outcomes.append(await run_once(work(journal), key="migrate", wait=wait, client=client))

    async with anyio.create_task_group() as replicas:
        replicas.start_soon(replica)
        await clock.aadvance(wait + 1)
    assert outcomes == [Once.ELSEWHERE]
    assert not Once.ELSEWHERE.is_done
    assert journal.events == []


async def test_a_failed_run_does_not_count(
    client: AsyncLockClient, service: FakeService, journal: Journal
) -> None:
    async def broken(lease: AsyncHold) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_once(broken, key="migrate", client=client)
    assert service.free("migrate")
    assert await run_once(work(journal), key="migrate", client=client) is Once.RAN


async def test_a_run_that_loses_its_lease_does_not_count(
    client: AsyncLockClient, service: FakeService, clock: ManualClock, journal: Journal
) -> None:
    async def slow(lease: AsyncHold) -> None:
        journal.note("begins")
        service.take_over("migrate", ttl=20)
        await clock.aadvance(12)
        await anyio.sleep_forever()

    with pytest.raises(LeaseLost):
        await run_once(slow, key="migrate", client=client)
    await clock.aadvance(20)
    assert await run_once(work(journal), key="migrate", client=client) is Once.RAN


async def test_the_place_that_knows_whether_it_is_done_may_be_asked_instead(
    new_client: Clients, service: FakeService, journal: Journal
) -> None:
    done = False

    async def migrate(lease: AsyncHold) -> None:
        nonlocal done
        journal.note("runs")
        done = True

    async def look() -> bool:
        return done

    def look_plainly() -> bool:
        return done

    for already_done in (look, look_plainly):
        options: dict[str, Any] = {"already_done": already_done, "client": new_client()}
        done = False
        assert await run_once(migrate, key="migrate", **options) is Once.RAN
        sent = len(service.requests)
        assert await run_once(migrate, key="migrate", **options) is Once.DONE
        assert len(service.requests) == sent, "no lock is needed to see that it is done"
    assert "migrate.done" not in service.locks


async def test_it_is_asked_again_under_the_lock(client: AsyncLockClient, journal: Journal) -> None:
    answers = iter([False, True])
    outcome = await run_once(
        work(journal), key="migrate", already_done=lambda: next(answers), client=client
    )
    assert outcome is Once.DONE
    assert journal.events == []


async def test_while_the_lock_service_is_down_nothing_runs_and_the_application_decides(
    client: AsyncLockClient,
    service: FakeService,
    journal: Journal,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.next(Operation.GET, Drop(error=httpx.ConnectError))
    outcome = await run_once(work(journal), key="migrate", client=client)
    assert outcome is Once.UNKNOWN
    assert not outcome.is_done
    assert journal.events == []
    assert "was not run" in caplog.text


async def test_a_marker_that_could_not_be_set_is_logged(
    client: AsyncLockClient,
    service: FakeService,
    journal: Journal,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def migrate(lease: AsyncHold) -> None:
        service.next(Operation.ACQUIRE, 429)

    assert await run_once(migrate, key="migrate", client=client) is Once.RAN
    assert "may be repeated" in caplog.text


async def test_the_work_s_own_trouble_is_not_taken_for_the_lock_service_s(
    client: AsyncLockClient,
) -> None:
    async def migrate(lease: AsyncHold) -> None:
        raise TransportFailed("another service of the work's own")

    with pytest.raises(TransportFailed):
        await run_once(migrate, key="migrate", client=client)


async def test_a_refused_credential_is_an_error(
    client: AsyncLockClient, service: FakeService, journal: Journal
) -> None:
    service.next(Operation.GET, 401)
    with pytest.raises(AuthenticationFailed):
        await run_once(work(journal), key="migrate", client=client)


async def test_what_cannot_work_is_refused(client: AsyncLockClient, journal: Journal) -> None:
    for options in ({"remember": 1}, {"wait": -1}, {"key": "x" * 128}):
        with pytest.raises(InvalidRequest):
            await run_once(work(journal), **({"key": "k", "client": client} | options))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="async def"):
        await run_once(lambda lease: None, key="k", client=client)  # type: ignore[arg-type,return-value]
