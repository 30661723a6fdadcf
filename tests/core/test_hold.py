"""The laws of a hold, on every driver: threads, asyncio and trio."""

from __future__ import annotations

import json
import logging
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.core.conftest import Driver
from tests.core.fake import Drop, FakeService, Meanwhile
from volcano_locks import (
    AuthenticationFailed,
    InvalidRequest,
    LeaseLost,
    LockHeld,
    ServiceUnavailable,
    TransportFailed,
    UnexpectedResponse,
)
from volcano_locks._http import httpx
from volcano_locks.contract import Operation, Reply

pytestmark = pytest.mark.anyio

ACQUIRE, RENEW, RELEASE = Operation.ACQUIRE, Operation.RENEW, Operation.RELEASE


async def lose(driver: Driver, service: FakeService) -> None:
    """Take the lock away and let the next renewal find out."""
    service.take_over("job")
    await driver.advance(12)


# -- the plain operations --------------------------------------------------------------------------


async def test_acquire_renew_get_release(driver: Driver, service: FakeService) -> None:
    lease = await driver.call("acquire", "job", 10)
    assert lease.key == "job"
    assert lease.fencing_token == 4503599627370497
    assert (await driver.call("get", "job")).held
    renewed = await driver.call("renew", lease, 20)
    assert renewed.fencing_token == lease.fencing_token
    assert renewed.expires_at > lease.expires_at
    assert renewed.token == lease.token
    await driver.call("release", renewed)
    assert not (await driver.call("get", "job")).held
    assert (await driver.call("acquire", "job")).fencing_token > lease.fencing_token


async def test_contention_is_none(driver: Driver, service: FakeService) -> None:
    service.take_over("job")
    assert await driver.call("acquire", "job") is None


async def test_both_409_codes_are_contention_on_acquire(
    driver: Driver, service: FakeService
) -> None:
    for code in ("lock_held", "lock_ownership_lost"):
        service.next(ACQUIRE, Reply(409, json.dumps({"error": "x", "code": code}).encode()))
        assert await driver.call("acquire", "job") is None


async def test_renew_and_release_of_a_lost_lease_say_so(
    driver: Driver, service: FakeService
) -> None:
    lease = await driver.call("acquire", "job", 10)
    service.take_over("job")
    for method in ("renew", "release"):
        with pytest.raises(LeaseLost) as caught:
            await driver.call(method, lease)
        assert caught.value.status == 409
        assert caught.value.request_id
    assert service.locks["job"].owner == "another"


async def test_release_of_a_free_lock_is_fine(driver: Driver, service: FakeService) -> None:
    lease = await driver.call("acquire", "job", 10)
    await driver.call("release", lease)
    await driver.call("release", lease)


async def test_force_release_drops_any_lease(driver: Driver, service: FakeService) -> None:
    service.take_over("job")
    await driver.call("force_release", "job")
    assert service.free("job")


async def test_the_callers_ids_are_sent(driver: Driver, service: FakeService) -> None:
    token = "11111111-1111-4111-8111-111111111111"
    ids = [f"22222222-2222-4222-8222-{n:012d}" for n in range(5)]
    lease = await driver.call("acquire", "job", 10, token=token, request_id=ids[0])
    await driver.call("renew", lease, request_id=ids[1])
    await driver.call("get", "job", request_id=ids[2])
    await driver.call("release", lease, request_id=ids[3])
    await driver.call("force_release", "job", request_id=ids[4])
    assert [request.request_id for _, request in service.requests] == ids
    assert lease.token.reveal() == token


async def test_ids_of_a_hold_go_to_the_acquisition_only(
    driver: Driver, service: FakeService
) -> None:
    request_id = "22222222-2222-4222-8222-222222222222"
    async with driver.hold(ttl=30, request_id=request_id):
        await driver.advance(11)
    sent = [request.request_id for _, request in service.requests]
    assert sent[0] == request_id
    assert len(sent) == len(set(sent)) == 3


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("bad key",), "lock key"),
        (("-x",), "lock key"),
        (("x" * 129,), "lock key"),
        (("job\n",), "lock key"),
        (("job", 4), "TTL"),
        (("job", 7_776_001), "TTL"),
        (("job", 5.5), "TTL"),
        (("job", True), "TTL"),
    ],
)
async def test_bad_input_is_refused_before_anything_is_sent(
    driver: Driver, service: FakeService, arguments: tuple[Any, ...], word: str
) -> None:
    with pytest.raises(InvalidRequest, match=word):
        await driver.call("acquire", *arguments)
    assert not service.requests


async def test_bad_ids_are_refused_and_not_repeated(driver: Driver, service: FakeService) -> None:
    for name in ("token", "request_id"):
        with pytest.raises(InvalidRequest) as caught:
            await driver.call("acquire", "job", **{name: "s3cret-but-no-uuid"})
        assert "s3cret" not in str(caught.value)
    assert not service.requests


# -- entering --------------------------------------------------------------------------------------


async def test_a_held_lock_and_an_unknown_outcome_are_different_types(
    driver: Driver, service: FakeService
) -> None:  # law 9
    driver.clock.rush = True
    service.take_over("job")
    with pytest.raises(LockHeld):
        async with driver.hold():
            raise AssertionError("the body ran without a grant")
    service.next(ACQUIRE, 503, 503)
    with pytest.raises(ServiceUnavailable):
        async with driver.hold():
            raise AssertionError("the body ran without a grant")
    service.next(ACQUIRE, 401)
    with pytest.raises(AuthenticationFailed):
        async with driver.hold():
            raise AssertionError("the body ran without a grant")


async def test_an_unknown_acquisition_never_runs_the_body_and_leaves_no_orphan(
    driver: Driver, service: FakeService
) -> None:  # R2
    driver.clock.rush = True
    service.next(ACQUIRE, Drop(arrives=True), Drop(arrives=True))
    with pytest.raises(TransportFailed) as caught:
        async with driver.hold():
            raise AssertionError("the body ran without a grant")
    assert isinstance(caught.value.__cause__, httpx.ReadTimeout)
    assert service.free("job")


async def test_a_lost_answer_is_adopted(driver: Driver, service: FakeService) -> None:  # R2
    driver.clock.rush = True
    service.next(ACQUIRE, Drop(arrives=True))
    async with driver.hold() as hold:
        assert hold.fencing_token == service.locks["job"].fencing_token
    first, second = service.sent(ACQUIRE)
    assert first == second


async def test_a_hold_is_entered_once(driver: Driver, service: FakeService) -> None:  # R12
    hold = driver.client.hold("job")
    enter = hold.__enter__ if driver.name == "thread" else hold.__aenter__
    leave = hold.__exit__ if driver.name == "thread" else hold.__aexit__

    async def run(function: Any, *args: Any) -> Any:
        result = function(*args)
        return await result if driver.name != "thread" else result

    await run(enter)
    try:
        with pytest.raises(InvalidRequest, match="entered before"):
            await run(enter)
    finally:
        await run(leave, None, None, None)
    with pytest.raises(InvalidRequest, match="entered before"):
        await run(enter)
    assert len(service.sent(ACQUIRE)) == 1
    assert service.free("job")


async def test_a_hold_that_was_not_entered_says_so(driver: Driver) -> None:
    hold = driver.client.hold("job")
    with pytest.raises(InvalidRequest, match="not entered"):
        hold.check()
    assert "not entered" in repr(hold)


@pytest.mark.parametrize(
    "options", [{"wait": -1}, {"wait": float("nan")}, {"min_hold": -1}, {"min_hold": 1e9}]
)
async def test_senseless_options_are_refused(
    driver: Driver, service: FakeService, options: dict[str, float]
) -> None:
    with pytest.raises(InvalidRequest):
        driver.client.hold("job", **options)


# -- holding ---------------------------------------------------------------------------------------


async def test_a_live_hold_says_how_long_it_may_act(driver: Driver) -> None:
    async with driver.hold(ttl=30) as hold:
        assert not hold.lost
        assert hold.remaining() == pytest.approx(29)
        hold.check()
        await driver.advance(9)
        assert hold.remaining() == pytest.approx(20)
        await driver.advance(2)
        assert hold.remaining() == pytest.approx(28)


async def test_it_is_renewed_for_as_long_as_it_is_held(
    driver: Driver, service: FakeService
) -> None:
    async with driver.hold(ttl=30) as hold:
        for _ in range(20):
            await driver.advance(10.1)
            hold.check()
    assert len(service.sent(RENEW)) == 20
    assert service.free("job")


async def test_no_single_failure_costs_the_lease(
    driver: Driver, service: FakeService
) -> None:  # R1
    garbage = Reply(200, b"<html>captive portal</html>")
    limited = Reply(429, b"", retry_after="2")
    service.next(
        RENEW, 503, limited, Drop(), Drop(True), garbage, Drop(error=httpx.RemoteProtocolError)
    )
    async with driver.hold(ttl=30) as hold:
        await driver.advance(28)
        hold.check()
        await driver.advance(28)
        hold.check()


async def test_an_error_that_nobody_foresaw_does_not_end_the_renewals(
    driver: Driver, service: FakeService
) -> None:
    service.next(RENEW, Drop(error=RuntimeError))
    async with driver.hold(ttl=30) as hold:
        await driver.advance(28)
        hold.check()


async def test_a_lost_lease_is_told_and_raised(driver: Driver, service: FakeService) -> None:
    with pytest.raises(LeaseLost) as caught:
        async with driver.hold(ttl=30) as hold:
            await lose(driver, service)
            await anyio.lowlevel.checkpoint()
            assert hold.lost
    assert caught.value.key == "job"
    assert caught.value.fencing_token == 4503599627370497
    assert len(service.sent(RENEW)) == 1
    assert not service.sent(RELEASE)
    assert service.locks["job"].owner == "another"


async def test_a_lost_hold_never_heals(driver: Driver, service: FakeService) -> None:  # law 4
    with pytest.raises(LeaseLost):
        async with driver.hold(ttl=30) as hold:
            await driver.advance(29.5, settle=False)
            assert hold.lost
            assert hold.remaining() == 0
            with anyio.CancelScope(shield=True):
                await driver.advance(0)
                assert hold.lost
            with pytest.raises(LeaseLost):
                hold.check()
    assert not service.sent(RENEW)  # R4: no late renewal


async def test_a_suspended_process_sees_its_loss_at_the_first_look(
    driver: Driver, service: FakeService
) -> None:  # R4, R6
    with pytest.raises(LeaseLost):
        async with driver.hold(ttl=5) as hold:
            driver.clock.advance(6, settle=False)
            with pytest.raises(LeaseLost):
                hold.check()


async def test_the_wall_clock_decides_nothing(driver: Driver, service: FakeService) -> None:  # R6
    async with driver.hold(ttl=30) as hold:
        for hours in (5, -10):
            driver.clock.shift_wall(hours * 3_600)
            hold.check()
            assert hold.remaining() == pytest.approx(29)


async def test_an_answer_after_the_instant_to_stop_heals_nothing(
    driver: Driver, service: FakeService
) -> None:
    clock = driver.clock

    def stand_still() -> None:
        clock._now += 25

    service.next(RENEW, Meanwhile(stand_still))
    with pytest.raises(LeaseLost):
        async with driver.hold(ttl=30) as hold:
            await driver.advance(10)
            with anyio.CancelScope(shield=True):
                await driver.advance(0)
            assert hold.lost
    assert len(service.sent(RENEW)) == 1


# -- leaving ---------------------------------------------------------------------------------------


async def test_the_bodys_own_error_wins(driver: Driver, service: FakeService) -> None:  # law 6
    with pytest.raises(ZeroDivisionError):
        async with driver.hold():
            raise ZeroDivisionError
    assert service.free("job")
    with pytest.raises(ZeroDivisionError):
        async with driver.hold(ttl=30):
            driver.clock.advance(29.5, settle=False)
            raise ZeroDivisionError


async def test_a_release_that_fails_is_logged_and_the_body_has_succeeded(
    driver: Driver, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    driver.clock.rush = True
    service.next(RELEASE, 503, 503, 503)
    async with driver.hold():
        pass
    assert "could not be released" in caplog.text


async def test_release_from_elsewhere_ends_the_hold(
    driver: Driver, service: FakeService
) -> None:  # R13
    async with driver.hold() as hold:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(driver.release, hold)
        assert service.free("job")
        with pytest.raises(LeaseLost, match="released"):
            hold.check()
        await driver.release(hold)
        await driver.advance(60)
    assert len(service.sent(RELEASE)) == 1
    assert not service.sent(RENEW)


async def test_after_leaving_a_hold_is_worth_nothing(driver: Driver) -> None:
    async with driver.hold() as hold:
        pass
    assert hold.lost
    with pytest.raises(LeaseLost, match="released"):
        hold.check()


async def test_min_hold_keeps_others_away_after_a_short_body(
    driver: Driver, service: FakeService
) -> None:  # R15
    async with driver.hold(ttl=120, min_hold=30):
        pass
    assert not service.sent(RELEASE)
    await driver.advance(2)
    assert await driver.call("acquire", "job") is None
    await driver.advance(29)
    assert await driver.call("acquire", "job") is not None


async def test_min_hold_that_is_over_is_a_release(driver: Driver, service: FakeService) -> None:
    async with driver.hold(ttl=30, min_hold=15):
        await driver.advance(16)
    assert service.free("job")


async def test_min_hold_is_dropped_on_a_cancellation_or_signal(
    driver: Driver, service: FakeService
) -> None:
    with pytest.raises(SystemExit):
        async with driver.hold(ttl=30, min_hold=30):
            raise SystemExit(143)
    assert service.free("job")
    with anyio.CancelScope() as scope:
        async with driver.hold(ttl=30, min_hold=30):
            scope.cancel()
            await anyio.sleep(9)
    assert service.free("job")


# -- with_lock, leader_only, campaign --------------------------------------------------------------


async def test_with_lock_returns_what_the_work_returned(
    driver: Driver, service: FakeService
) -> None:
    result = await driver.call("with_lock", "job", driver.work(42), ttl=30)
    assert (result.acquired, result.value) == (True, 42)
    assert service.free("job")
    service.take_over("job")
    result = await driver.call("with_lock", "job", driver.work(42))
    assert (result.acquired, result.value) == (False, None)
    with pytest.raises(TypeError, match="acquired"):
        bool(result)


async def test_with_lock_does_not_take_the_works_own_lock_held_for_contention(
    driver: Driver, service: FakeService
) -> None:
    if driver.name == "thread":

        def work(hold: Any) -> None:
            raise LockHeld("inner")
    else:

        async def work(hold: Any) -> None:  # type: ignore[misc]
            raise LockHeld("inner")

    with pytest.raises(LockHeld, match="inner"):
        await driver.call("with_lock", "job", work)
    assert service.free("job")


async def test_leader_only_gives_the_live_hold(driver: Driver, service: FakeService) -> None:
    if driver.name == "thread":

        def work(number: int, *, lease: Any) -> Any:
            """Work."""
            return number, lease.fencing_token

        led = driver.client.leader_only("job", ttl=30)(work)  # type: ignore[arg-type]
        result: Any = await anyio.to_thread.run_sync(lambda: led(7))  # type: ignore[call-arg]
    else:

        async def awork(number: int, *, lease: Any) -> Any:
            """Work."""
            return number, lease.fencing_token

        led = driver.client.leader_only("job", ttl=30)(awork)  # type: ignore[arg-type]
        result = await led(7)  # type: ignore[misc, call-arg]
    assert result.value == (7, 4503599627370497)
    assert led.__doc__ == "Work."


async def test_campaign_takes_over_after_a_crash(driver: Driver, service: FakeService) -> None:
    service.take_over("job", ttl=20)
    driver.clock.rush = True
    async with driver.hold(ttl=30, wait=None) as term:
        assert 1_021 <= driver.clock.now() <= 1_021.25
        assert term.fencing_token == 4503599627370498


async def test_terms_follow_each_other(driver: Driver, service: FakeService) -> None:
    tokens = []
    if driver.name == "thread":
        for term in driver.client.campaign("job", ttl=30):  # type: ignore[union-attr]
            with term:
                tokens.append(term.fencing_token)
            if len(tokens) == 2:
                break
        with driver.client.campaign("job") as term:  # type: ignore[union-attr]
            tokens.append(term.fencing_token)
    else:
        async for term in driver.client.campaign("job", ttl=30):  # type: ignore[union-attr]
            async with term:
                tokens.append(term.fencing_token)
            if len(tokens) == 2:
                break
        async with driver.client.campaign("job") as term:  # type: ignore[union-attr]
            tokens.append(term.fencing_token)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 3
    assert service.free("job")


# -- secrets ---------------------------------------------------------------------------------------


async def test_no_secret_is_shown_anywhere(
    driver: Driver, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token = "11111111-1111-4111-8111-111111111111"
    shown: list[object] = [driver.client]
    driver.clock.rush = True
    service.next(ACQUIRE, Drop(), Reply(201, b"nonsense"))
    with pytest.raises(UnexpectedResponse) as caught:
        async with driver.hold(token=token):
            pass
    shown += [caught.value, caught.value.__cause__, caught.value.__dict__]
    async with driver.hold(token=token) as hold:
        shown += [hold, hold.lease, vars(hold), service.requests[0][1]]
        await driver.advance(11)
    with pytest.raises(LeaseLost) as lost:
        hold.check()
    shown += [lost.value, lost.value.__dict__]
    text = "".join(f"{thing!r} {thing}" for thing in shown) + caplog.text
    assert token not in text
    assert "sk-test" not in text
    frames = _locals_of(caught.value) + _locals_of(caught.value.__cause__)
    assert token not in frames.replace(f"token='{token}'", "")  # the test's own arguments
    assert "sk-test" not in frames


def _locals_of(error: BaseException | None) -> str:
    text, traceback = "", error.__traceback__ if error else None
    while traceback is not None:
        code = traceback.tb_frame.f_code.co_filename
        if "volcano_locks" in code and "tests" not in code:
            text += repr(traceback.tb_frame.f_locals)
        traceback = traceback.tb_next
    return text


async def test_redirects_are_not_followed(driver: Driver, service: FakeService) -> None:
    hosts: list[str] = []

    class Redirecting(FakeService):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            hosts.append(request.url.host)
            return httpx.Response(307, headers={"Location": "https://evil.example/steal"})

    driver.client._transport = Redirecting(driver.clock)
    driver.clock.rush = True
    with pytest.raises(UnexpectedResponse, match="307"):
        await driver.call("get", "job")
    with pytest.raises(UnexpectedResponse, match="307"):
        await driver.call("acquire", "job")
    assert set(hosts) == {"locks.example"}


async def test_validity_counts_from_before_the_request(
    driver: Driver, service: FakeService
) -> None:  # law 1, in the drivers themselves
    def slowly() -> None:
        driver.clock._now += 3

    service.next(ACQUIRE, Meanwhile(slowly))
    async with driver.hold(ttl=30) as hold:
        assert hold.remaining() == pytest.approx(26)
        service.next(RENEW, Meanwhile(slowly))
        await driver.advance(11)
        assert hold.remaining() <= 29 - 3
        hold.check()


async def test_a_lease_that_ran_out_by_unheard_renewals_is_given_back(
    driver: Driver, service: FakeService
) -> None:
    service.next(RENEW, *[Drop(arrives=True)] * 50)
    with pytest.raises(LeaseLost):
        async with driver.hold(ttl=30) as hold:
            with anyio.CancelScope(shield=True):
                await driver.advance(29.5)
            assert hold.lost
    assert service.free("job")


async def test_a_transport_that_was_passed_in_is_not_closed(
    driver: Driver, service: FakeService
) -> None:
    await driver.call("get", "job")
    if driver.name == "thread":
        driver.client.close()  # type: ignore[union-attr]
    else:
        await driver.client.aclose()  # type: ignore[union-attr]
    assert service.closed == 0
    await driver.call("get", "job")


async def test_a_page_without_end_is_not_read_to_its_end(
    driver: Driver, service: FakeService
) -> None:
    read = 0

    class Endless(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self) -> Any:
            nonlocal read
            while True:
                read += 10_000
                yield b"x" * 10_000

        async def __aiter__(self) -> Any:
            for chunk in self:
                yield chunk

    class Portal(FakeService):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, stream=Endless(), headers={"Content-Length": "99999999"})

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return self.handle_request(request)

    driver.client._transport = Portal(driver.clock)
    driver.clock.rush = True
    with pytest.raises(UnexpectedResponse):
        await driver.call("get", "job")
    assert read < 200_000
