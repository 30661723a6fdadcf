"""A singleton's life: it runs under a grant, is cancelled on loss, restarts, and hands over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi import FastAPI
from trio.testing import MockClock

from tests.core.fake import Drop, FakeService
from tests.fastapi.conftest import PATIENCE, Journal
from volcano_locks import AsyncHold, AsyncLockClient, ConfigurationError, InvalidRequest
from volcano_locks import fastapi as kit
from volcano_locks._http import httpx
from volcano_locks.contract import Operation
from volcano_locks.fastapi import LeaderLifespan, Restart, TermEnd, leader_lifespan
from volcano_locks.testing import ManualClock

pytestmark = pytest.mark.anyio

ACQUIRE, RENEW, RELEASE = Operation.ACQUIRE, Operation.RENEW, Operation.RELEASE
Clients = Callable[[], AsyncLockClient]


def at_once(end: TermEnd) -> float:
    """The shortest pause that there is."""
    return 0.0


def lives(journal: Journal, name: str = "job") -> Callable[[AsyncHold], Any]:
    """A singleton that works until it is cancelled, and says so."""

    async def singleton(lease: AsyncHold) -> None:
        assert not lease.lost
        journal.note(f"{name} starts")
        try:
            await anyio.sleep_forever()
        finally:
            journal.note(f"{name} stops")

    return singleton


def candidate(state: Any, key: str = "job") -> Any:
    return state[f"volcano_locks:{key}"]


# -- leading ---------------------------------------------------------------------------------------


async def test_a_singleton_runs_under_a_grant_and_its_lease_is_released_at_shutdown(
    client: AsyncLockClient, service: FakeService, journal: Journal
) -> None:
    lifespan = leader_lifespan(lives(journal), key="job", client=client)
    async with lifespan(FastAPI()) as state:
        await journal.until("job starts")
        assert candidate(state).lease.fencing_token == service.locks["job"].fencing_token
    assert journal.events == ["job starts", "job stops"]
    assert service.free("job")
    assert len(service.sent(RELEASE)) == 1


async def test_a_standby_serves_but_does_not_run_the_singleton(
    client: AsyncLockClient, service: FakeService, clock: ManualClock, journal: Journal
) -> None:
    service.take_over("job", ttl=1_000)
    async with leader_lifespan(lives(journal), key="job", client=client)(FastAPI()) as state:
        await clock.aadvance(900)
        assert candidate(state).lease is None
    assert journal.events == []


async def test_a_released_lock_is_taken_over_within_a_poll_interval_and_not_a_ttl(
    new_client: Clients, service: FakeService, clock: ManualClock, journal: Journal
) -> None:
    first = leader_lifespan(lives(journal, "first"), key="job", ttl=600, client=new_client())
    second = leader_lifespan(lives(journal, "second"), key="job", ttl=600, client=new_client())
    async with anyio.create_task_group() as replicas:
        leave_first, leave_second = anyio.Event(), anyio.Event()
        replicas.start_soon(serve, first, leave_first)
        await journal.until("first starts")
        replicas.start_soon(serve, second, leave_second)
        await clock.aadvance(30)
        assert journal.events == ["first starts"]
        leave_first.set()
        await journal.until("first stops")
        await clock.aadvance(2 * 1.1 + 0.1)  # a poll interval of this policy, jittered
        await journal.until("second starts")
        leave_second.set()
    assert journal.events == ["first starts", "first stops", "second starts", "second stops"]


async def serve(lifespan: LeaderLifespan, leave: anyio.Event) -> None:
    """One replica: starts, and serves until it is told to leave."""
    async with lifespan(FastAPI()):
        await leave.wait()


async def test_losing_the_lease_cancels_the_singleton_and_it_stands_again(
    client: AsyncLockClient, service: FakeService, clock: ManualClock, journal: Journal
) -> None:
    lifespan = leader_lifespan(lives(journal), key="job", ttl=30, client=client)
    async with lifespan(FastAPI()) as state:
        await journal.until("job starts")
        service.take_over("job", ttl=100)
        await clock.aadvance(12)
        await journal.until("job stops")
        assert candidate(state).lease is None
        assert candidate(state).overdue == 0
        await clock.aadvance(95)
        await journal.until("job starts", times=2)
        assert candidate(state).lease.fencing_token == service.locks["job"].fencing_token


async def test_a_loss_that_the_singleton_finds_by_check_is_no_crash(
    client: AsyncLockClient, service: FakeService, clock: ManualClock, journal: Journal
) -> None:
    ends: list[TermEnd] = []

    async def singleton(lease: AsyncHold) -> None:
        journal.note("starts")
        if journal.events.count("starts") == 1:
            await clock.aadvance(40, settle=False)  # the process was suspended past the TTL
        lease.check()
        await anyio.sleep_forever()

    lifespan = leader_lifespan(singleton, key="job", client=client, restart=ends.append)
    async with lifespan(FastAPI()):
        await journal.until("starts", times=2)
    assert ends == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_singleton_that_swallows_its_cancellation_at_a_loss_has_not_returned(
    client: AsyncLockClient, service: FakeService, clock: ManualClock, journal: Journal
) -> None:
    async def singleton(lease: AsyncHold) -> None:
        journal.note("starts")
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            journal.note("stops")

    lifespan = leader_lifespan(singleton, key="job", client=client, restart=Restart("on_crash"))
    async with lifespan(FastAPI()) as state:
        await journal.until("starts")
        service.take_over("job", ttl=100)
        await clock.aadvance(12)
        await journal.until("stops")
        assert not candidate(state).withdrawn
        await clock.aadvance(95)
        await journal.until("starts", times=2)


# -- ends of its own -------------------------------------------------------------------------------


async def test_a_crash_is_logged_releases_the_lease_and_is_followed_by_a_new_term(
    client: AsyncLockClient,
    service: FakeService,
    journal: Journal,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends: list[TermEnd] = []

    async def singleton(lease: AsyncHold) -> None:
        journal.note("starts")
        if journal.events.count("starts") < 4:
            raise ValueError("bad luck")
        await anyio.sleep_forever()

    def strategy(end: TermEnd) -> float:
        assert service.free("job"), "a standby must be able to lead during the pause"
        ends.append(end)
        return 0.0

    lifespan = leader_lifespan(singleton, key="job", client=client, restart=strategy)
    async with lifespan(FastAPI()):
        await journal.until("starts", times=4)
    assert [end.in_a_row for end in ends] == [1, 2, 3]
    assert {repr(end.error) for end in ends} == {"ValueError('bad luck')"}
    crashes = [record for record in caplog.records if "crashed" in record.message]
    assert len(crashes) == 3
    assert crashes[0].exc_info
    tokens = {str(request.token and request.token.reveal()) for request in service.sent(ACQUIRE)}
    assert len(tokens) == 4, "each term has an ownership token of its own"


async def test_a_singleton_that_returns_is_run_again_by_whoever_leads_next(
    client: AsyncLockClient, service: FakeService, journal: Journal
) -> None:
    async def singleton(lease: AsyncHold) -> None:
        journal.note("runs")

    lifespan = leader_lifespan(singleton, key="job", client=client, restart=at_once)
    async with lifespan(FastAPI()):
        await journal.until("runs", times=3)


@pytest.mark.parametrize(("when", "crashes"), [("on_crash", False), ("never", True)])
async def test_a_process_may_withdraw_when_its_singleton_ends(
    client: AsyncLockClient, service: FakeService, journal: Journal, when: Any, crashes: bool
) -> None:
    async def singleton(lease: AsyncHold) -> None:
        journal.note("runs")
        if crashes:
            raise ValueError

    lifespan = leader_lifespan(singleton, key="job", client=client, restart=Restart(when))
    async with lifespan(FastAPI()) as state:
        with anyio.fail_after(PATIENCE):
            await candidate(state)._ended.wait()
        assert candidate(state).withdrawn
        assert service.free("job")
    assert journal.events == ["runs"]


def test_pauses_double_up_to_the_longest() -> None:
    restart = Restart(first_pause=1, longest_pause=20)
    for in_a_row, longest in [(1, 1), (2, 2), (3, 4), (6, 20), (10_000, 20)]:
        pause = restart(TermEnd(ValueError(), 0.1, in_a_row))
        assert pause is not None
        assert longest / 2 <= pause <= longest


@pytest.mark.parametrize("options", [{"when": "maybe"}, {"first_pause": 0}, {"longest_pause": 0.5}])
def test_a_restart_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Restart(**options)


async def test_a_strategy_that_fails_is_replaced_by_the_default(
    client: AsyncLockClient, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    async def singleton(lease: AsyncHold) -> None:
        journal.note("runs")

    def strategy(end: TermEnd) -> float:
        raise KeyError("oops")

    lifespan = leader_lifespan(singleton, key="job", client=client, restart=strategy)
    async with lifespan(FastAPI()):
        await journal.until("runs", times=2)
    assert "restart strategy" in caplog.text


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancellation_from_inside_the_singleton_is_a_crash_and_not_the_end_of_the_election(
    client: AsyncLockClient, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    async def singleton(lease: AsyncHold) -> None:
        journal.note("runs")
        task = asyncio.ensure_future(asyncio.sleep(3_600))
        task.cancel()
        await task

    lifespan = leader_lifespan(singleton, key="job", client=client, restart=at_once)
    async with lifespan(FastAPI()):
        await journal.until("runs", times=2)
    assert "cancelled from inside" in caplog.text


# -- the lock service is not there, or refuses -----------------------------------------------------


async def test_the_application_starts_while_the_lock_service_is_down(
    client: AsyncLockClient, service: FakeService, clock: ManualClock, journal: Journal
) -> None:
    service.next(ACQUIRE, *[Drop(error=httpx.ConnectError)] * 6)
    with anyio.fail_after(PATIENCE):
        async with leader_lifespan(lives(journal), key="job", client=client)(FastAPI()) as state:
            assert candidate(state).lease is None
            assert journal.events == []
            await clock.aadvance(30)
            await journal.until("job starts")


async def test_a_refused_credential_is_logged_and_the_application_serves(
    client: AsyncLockClient,
    service: FakeService,
    journal: Journal,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.next(ACQUIRE, 401)
    async with leader_lifespan(lives(journal), key="job", client=client)(FastAPI()):
        await journal.until("job starts")  # the key was mended meanwhile
    assert "does not run" in caplog.text
    assert "VOLCANO_SERVICE_KEY" in caplog.text


async def test_a_missing_service_key_stops_the_start_with_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, journal: Journal
) -> None:
    for name in ("VOLCANO_SERVICE_KEY", "SERVICE_ROLE_KEY", "VOLCANO_API_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    lifespan = leader_lifespan(lives(journal), key="job")  # nothing is read before the lifespan
    with pytest.raises(ConfigurationError, match="VOLCANO_SERVICE_KEY"):
        async with lifespan(FastAPI()):
            pytest.fail("must not serve")


async def test_a_prefix_that_makes_the_key_too_long_stops_the_start(
    service: FakeService, journal: Journal
) -> None:
    client = AsyncLockClient("sk-test", transport=service, key_prefix="p" * 60)
    lifespan = leader_lifespan(lives(journal), key="k" * 100, client=client)
    with pytest.raises(InvalidRequest, match="lock key"):
        async with lifespan(FastAPI()):
            pytest.fail("must not serve")


async def test_by_default_the_client_comes_from_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, journal: Journal
) -> None:
    monkeypatch.setenv("VOLCANO_API_URL", f"local:{tmp_path / 'locks.db'}")
    monkeypatch.setenv("VOLCANO_LOCKS_KEY_PREFIX", "staging.")
    async with leader_lifespan(lives(journal), key="job")(FastAPI()) as state:
        await journal.until("job starts")
        assert candidate(state).lease.key == "staging.job"
        assert candidate(state).lease.ttl == 30


# -- what cannot work ------------------------------------------------------------------------------


async def fine(lease: AsyncHold) -> None:
    """A singleton."""


async def without_lease() -> None:
    """No singleton."""


async def wants_more(lease: AsyncHold, database: str) -> None:
    """No singleton either: nobody gives it a database."""


async def undecorated(app: FastAPI) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    ("options", "error", "advice"),
    [
        ({"singleton": lambda lease: None}, ConfigurationError, "async def"),
        ({"singleton": without_lease}, ConfigurationError, "given the lease"),
        ({"singleton": wants_more}, ConfigurationError, "app, state, stopping"),
        ({"key": "no spaces"}, InvalidRequest, "lock key"),
        ({"ttl": 4}, InvalidRequest, "TTL"),
        ({"grace": -1}, ConfigurationError, "grace"),
        ({"lifespan": undecorated}, ConfigurationError, "asynccontextmanager"),
    ],
)
def test_what_cannot_work_is_refused_where_it_is_written(
    options: dict[str, Any], error: type[Exception], advice: str
) -> None:
    with pytest.raises(error, match=advice):
        leader_lifespan(**({"singleton": fine, "key": "job"} | options))


# -- composition -----------------------------------------------------------------------------------


async def test_the_applications_own_lifespan_surrounds_the_singleton_and_keeps_its_state(
    client: AsyncLockClient, journal: Journal
) -> None:
    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        journal.note("own starts")
        yield {"database": "sqlite"}
        journal.note("own stops")

    app = FastAPI()

    async def singleton(lease: AsyncHold, *, app: FastAPI, state: Any) -> None:
        assert app is expected
        journal.note(f"job uses {state['database']}")
        try:
            await anyio.sleep_forever()
        finally:
            journal.note("job stops")

    expected = app
    lifespan = leader_lifespan(singleton, key="job", client=client, lifespan=own)
    async with lifespan(app) as state:
        assert state["database"] == "sqlite"
        await journal.until("job uses sqlite")
    assert journal.events == ["own starts", "job uses sqlite", "job stops", "own stops"]


async def test_several_singletons_share_one_application(
    client: AsyncLockClient, service: FakeService, journal: Journal
) -> None:
    one = leader_lifespan(lives(journal, "one"), key="one", client=client)
    both = leader_lifespan(lives(journal, "two"), key="two", client=client, lifespan=one)
    async with both(FastAPI()) as state:
        await journal.until("one starts")
        await journal.until("two starts")
        assert candidate(state, "one").lease.key == "one"
        assert candidate(state, "two").lease.key == "two"
    assert service.free("one")
    assert service.free("two")


async def test_two_singletons_with_one_key_are_refused_at_start_up(
    client: AsyncLockClient, journal: Journal
) -> None:
    one = leader_lifespan(lives(journal), key="job", client=client)
    with pytest.raises(ConfigurationError, match="share the lock 'job'"):
        async with leader_lifespan(lives(journal), key="job", client=client, lifespan=one)(None):
            pytest.fail("must not serve")


async def test_one_lifespan_serves_an_application_that_starts_twice(
    client: AsyncLockClient, journal: Journal
) -> None:
    lifespan = leader_lifespan(lives(journal), key="job", client=client)
    for time in (1, 2):
        async with lifespan(FastAPI()):
            await journal.until("job starts", times=time)


async def test_errors_of_the_application_come_out_as_they_are(
    client: AsyncLockClient, service: FakeService, journal: Journal
) -> None:
    lifespan = leader_lifespan(lives(journal), key="job", client=client)
    with pytest.raises(ZeroDivisionError):
        async with lifespan(FastAPI()):
            await journal.until("job starts")
            raise ZeroDivisionError
    assert service.free("job")


async def test_a_lifespan_that_is_cancelled_still_releases(
    client: AsyncLockClient, service: FakeService, journal: Journal
) -> None:
    lifespan = leader_lifespan(lives(journal), key="job", client=client)
    with anyio.CancelScope() as server:
        async with lifespan(FastAPI()):
            await journal.until("job starts")
            server.cancel()
            await anyio.sleep_forever()
    assert journal.events == ["job starts", "job stops"]
    assert service.free("job")


async def test_a_mounted_application_is_warned_that_its_singleton_will_never_run(
    client: AsyncLockClient, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI()
    app.mount("/api", FastAPI(lifespan=leader_lifespan(lives(journal), key="lost", client=client)))
    async with leader_lifespan(lives(journal), key="job", client=client)(app):
        assert "'lost' will never run" in caplog.text
        assert "'/api'" in caplog.text


# -- shutdown --------------------------------------------------------------------------------------

GRACE = 0.05


def punctual() -> pytest.MarkDecorator:
    """``late``: as late as the machine is slow, and under a clock of the test's own not at all."""
    return pytest.mark.parametrize(
        ("anyio_backend", "late"),
        [
            pytest.param("asyncio", PATIENCE / 2, id="asyncio"),
            pytest.param(("trio", {"clock": MockClock(autojump_threshold=0)}), 0.02, id="trio"),
        ],
    )


async def test_a_singleton_that_takes_stopping_is_given_its_grace_to_finish(
    client: AsyncLockClient, service: FakeService, journal: Journal
) -> None:
    async def singleton(lease: AsyncHold, stopping: anyio.Event) -> None:
        journal.note("starts")
        await stopping.wait()
        await anyio.lowlevel.checkpoint()
        lease.check()
        journal.note("finishes its batch")

    async with leader_lifespan(singleton, key="job", client=client)(FastAPI()):
        await journal.until("starts")
    assert journal.events == ["starts", "finishes its batch"]
    assert service.free("job")


@punctual()
async def test_the_grace_has_an_end(
    client: AsyncLockClient, service: FakeService, journal: Journal, late: float
) -> None:
    async def singleton(lease: AsyncHold, stopping: anyio.Event) -> None:
        journal.note("starts")
        await anyio.sleep_forever()

    with anyio.fail_after(PATIENCE):
        async with leader_lifespan(singleton, key="job", client=client, grace=GRACE)(FastAPI()):
            await journal.until("starts")
            leaves_at = anyio.current_time()
    assert GRACE - 0.001 < anyio.current_time() - leaves_at < GRACE + late
    assert service.free("job")


async def winds_down_for_longer_than_a_ttl(
    client: AsyncLockClient, service: FakeService, clock: ManualClock, journal: Journal
) -> None:
    """The property: the lease is kept, and kept alive, until the singleton has ended."""

    async def singleton(lease: AsyncHold) -> None:
        journal.note("starts")
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                journal.note("winds down")
                await clock.sleep(100)
                journal.note(f"is done, lost={lease.lost}, free={service.free('job')}")

    lifespan = leader_lifespan(singleton, key="job", ttl=30, client=client)
    async with anyio.create_task_group() as server:
        leave = anyio.Event()
        server.start_soon(serve, lifespan, leave)
        await journal.until("starts")
        leave.set()
        await journal.until("winds down")
        await clock.aadvance(101)
    assert journal.events[2] == "is done, lost=False, free=False"
    assert service.free("job")


async def test_the_lease_is_kept_while_a_singleton_winds_down_however_long_it_takes(
    client: AsyncLockClient, service: FakeService, clock: ManualClock, journal: Journal
) -> None:
    await winds_down_for_longer_than_a_ttl(client, service, clock, journal)


async def test_mutant_that_cancels_the_hold_with_its_singleton_is_caught(
    client: AsyncLockClient,
    service: FakeService,
    clock: ManualClock,
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = kit._Candidate._stop

    async def mutant(self: Any) -> None:
        self._group.cancel_scope.cancel()
        await stop(self)

    monkeypatch.setattr(kit._Candidate, "_stop", mutant)
    with pytest.raises(AssertionError, match="lost=True"):
        await winds_down_for_longer_than_a_ttl(client, service, clock, journal)


@punctual()
async def test_a_singleton_that_does_not_end_is_waited_for_and_named_in_the_log(
    client: AsyncLockClient,
    service: FakeService,
    journal: Journal,
    caplog: pytest.LogCaptureFixture,
    late: float,
) -> None:
    let_go = anyio.Event()

    async def singleton(lease: AsyncHold) -> None:
        journal.note("starts")
        with anyio.CancelScope(shield=True):
            await let_go.wait()

    lifespan = leader_lifespan(singleton, key="job", client=client, grace=GRACE)
    async with anyio.create_task_group() as server:
        leave = anyio.Event()
        server.start_soon(serve, lifespan, leave)
        await journal.until("starts")
        leave.set()
        leaves_at = anyio.current_time()
        with anyio.move_on_after(PATIENCE):
            while "still runs" not in caplog.text:  # noqa: ASYNC110 - a log has no event
                await anyio.sleep(0.01)
        waited, given_back = anyio.current_time() - leaves_at, service.free("job")
        let_go.set()
    assert GRACE - 0.001 < waited < GRACE + late
    assert not given_back
    assert service.free("job")
