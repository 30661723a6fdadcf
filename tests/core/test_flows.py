"""The flows against a simulated service: every fault schedule, and mutants that must be caught."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.core.simulation import FINE, Counting, Fault, Service, World, acquire_request, make_rules
from volcano_locks._core import flows
from volcano_locks._core.effects import Answer
from volcano_locks._core.policy import Policy
from volcano_locks._core.tenure import Belief, Loss, Tenure
from volcano_locks._core.verdict import problem
from volcano_locks.contract import LOCK_SERVICE_UNAVAILABLE, Operation, Reply, Request
from volcano_locks.errors import (
    AuthenticationFailed,
    LockHeld,
    OutcomeUnknown,
    RateLimited,
    ServiceUnavailable,
    TransportFailed,
    UnexpectedResponse,
)
from volcano_locks.models import Secret

TOKEN = "0a1b2c3d-0000-4000-8000-00000000abcd"
LOST_REQUEST = Fault(lost_request=True)
LOST_ANSWER = Fault(lost_answer=True)
UNAVAILABLE = Fault(status=503)
LIMITED = Fault(status=429, retry_after="2")
GARBAGE = Fault(body=b"<html>captive portal</html>")
STALL = Fault(there=30.0)
ANSWERED_TOO_LATE = [FINE, Fault(pause=3.0)]

delays = st.floats(0.001, 3.0)
faults = st.builds(
    Fault,
    there=delays,
    back=delays,
    lost_request=st.booleans(),
    lost_answer=st.booleans(),
    status=st.sampled_from([None, None, None, None, 503, 502, 429, 500]),
    retry_after=st.sampled_from([None, "0", "2", "60", "nan"]),
    pause=st.sampled_from([0.0, 0.0, 0.0, 0.4, 3.0, 60.0]),
)
schedules = st.lists(st.one_of(st.just(FINE), faults), max_size=40)
ttls = st.sampled_from([5, 6, 10, 30])
chances = st.floats(0, 0.999)


def hold_for(world: World, ttl: int, seconds: float, chance: float = 0.5) -> Belief | None:
    """Acquire and keep for so long; at every event, belief must be inside the service's truth."""
    rules = make_rules(entropy=Counting(chance))
    ask = acquire_request(rules, ttl)
    try:
        tenure = world.run(flows.acquire(ask, rules, sweep=True))
    except OutcomeUnknown:
        return None
    if tenure is None:
        return None
    belief = Belief(tenure)
    assert ask.token is not None
    token = ask.token.reveal()
    was_lost = False

    def believe_no_more_than_the_service() -> None:
        nonlocal was_lost
        lost = belief.look(world.now) is not None
        assert lost or not was_lost, "a lost hold healed"
        was_lost = lost
        if not lost:
            service = world.service
            assert service.owner == token, "believed to lead while another owned the lock"
            # Law 5: told to stop while a second is left, in which nobody else can lead.
            assert world.now <= service.expires_at - 1.0 + 1e-9, (
                "believed past the service's expiry"
            )

    world.each_event = believe_no_more_than_the_service
    believe_no_more_than_the_service()
    world.run(flows.keep(belief, ttl, rules), until=world.now + seconds)
    return belief


@settings(max_examples=300)
@given(schedule=schedules, ttl=ttls, chance=chances)
@example(schedule=[Fault(there=2.0)], ttl=5, chance=0.5)
@example(schedule=ANSWERED_TOO_LATE, ttl=5, chance=0.5)
@example(schedule=[FINE, Fault(lost_answer=True), Fault(pause=3.0)], ttl=5, chance=0.5)
def test_no_fault_schedule_makes_a_holder_believe_past_the_services_expiry(
    schedule: list[Fault], ttl: int, chance: float
) -> None:
    hold_for(World(schedule), ttl, seconds=60, chance=chance)


@settings(max_examples=150)
@given(
    bad=st.sampled_from([LOST_REQUEST, LOST_ANSWER, UNAVAILABLE, LIMITED, GARBAGE, STALL]),
    which=st.integers(0, 5),
    ttl=ttls,
    chance=chances,
)
def test_one_bad_renewal_never_costs_a_lease(
    bad: Fault, which: int, ttl: int, chance: float
) -> None:
    world = World([FINE] * (1 + which) + [bad])
    belief = hold_for(world, ttl, seconds=ttl * 4, chance=chance)
    assert belief is not None
    assert belief.loss is None


def test_503_then_429_then_silence_then_200_within_the_ttl_is_not_a_loss() -> None:  # R1
    world = World([FINE, UNAVAILABLE, LIMITED, LOST_REQUEST])
    belief = hold_for(world, ttl=30, seconds=60)
    assert belief is not None
    assert belief.loss is None


def test_409_is_a_loss_at_once_and_nothing_more_is_sent() -> None:  # R1
    world = World()
    rules = make_rules()
    belief = Belief(world.run(flows.acquire(acquire_request(rules, 30), rules, sweep=True)))
    world.service.owner = "another"
    assert world.run(flows.keep(belief, 30, rules)) is Loss.REFUSED
    assert world.now == pytest.approx(1_010, abs=2)
    assert [request.operation for _, request, _ in world.sent].count(Operation.RENEW) == 1


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_refused_credential_or_request_is_a_loss_at_once(status: int) -> None:
    belief = hold_for(World([FINE, Fault(status=status)]), ttl=30, seconds=60)
    assert belief is not None
    assert belief.loss is Loss.DENIED


def test_failures_until_the_deadline_are_a_loss_one_second_before_it() -> None:  # R1
    world = World([FINE] + [UNAVAILABLE] * 100)
    rules = make_rules()
    belief = Belief(world.run(flows.acquire(acquire_request(rules, 30), rules, sweep=True)))
    assert world.run(flows.keep(belief, 30, rules)) is Loss.EXPIRED
    assert world.now == pytest.approx(1_029, abs=0.1)


def test_a_long_retry_after_still_leaves_a_last_try_before_it_is_too_late() -> None:
    limited = Fault(status=429, retry_after="60")
    belief = hold_for(World([FINE, limited]), ttl=30, seconds=50)
    assert belief is not None
    assert belief.loss is None


def test_every_retry_of_one_renewal_is_the_same_request() -> None:
    world = World([FINE, UNAVAILABLE, LOST_ANSWER])
    hold_for(world, ttl=30, seconds=20)
    renewals = [request for _, request, _ in world.sent if request.operation is Operation.RENEW]
    assert len(renewals) == 3
    assert len({request.request_id for request in renewals}) == 1
    assert len({request.request_id for _, request, _ in world.sent}) == 2


def test_each_try_of_a_renewal_ends_well_inside_what_is_left() -> None:
    world = World([FINE] + [STALL] * 20)
    hold_for(world, ttl=5, seconds=10)
    tries = [
        (at, timeout) for at, request, timeout in world.sent if request.operation is Operation.RENEW
    ]
    assert len(tries) >= 2
    assert all(at + timeout <= 1_004.02 + 1e-6 for at, timeout in tries)


def test_renewals_come_at_a_third_of_the_ttl_with_ten_percent_jitter() -> None:
    for chance, expected in ((0.0, 9.0), (0.5, 10.0), (0.999, 11.0)):
        world = World()
        hold_for(world, ttl=30, seconds=11.5, chance=chance)
        assert world.sent[1][0] - 1_000 == pytest.approx(expected, abs=0.05)


def test_at_90_days_a_force_release_is_noticed_within_minutes() -> None:  # R14
    world = World()
    rules = make_rules()
    ask = acquire_request(rules, 7_776_000)
    belief = Belief(world.run(flows.acquire(ask, rules, sweep=True)))
    world.service.owner = None
    assert world.run(flows.keep(belief, 7_776_000, rules)) is Loss.REFUSED
    assert world.now < 1_000 + 180


def test_a_term_ends_at_90_days_whatever_the_renewals() -> None:
    world = World()
    rules = make_rules(Policy(longest_interval=86_400))
    ttl = 2_000_000
    belief = Belief(world.run(flows.acquire(acquire_request(rules, ttl), rules, sweep=True)))
    assert world.run(flows.keep(belief, ttl, rules)) is Loss.TERM_OVER
    assert world.now <= 1_000 + 7_776_000 - 1


# -- acquiring -------------------------------------------------------------------------------------


def acquire(world: World, **options: Any) -> Any:
    rules = make_rules()
    return world.run(flows.acquire(acquire_request(rules, 30), rules, sweep=True, **options))


def test_a_grant_whose_answer_is_lost_is_adopted_by_the_retry() -> None:  # R2
    world = World([LOST_ANSWER])
    tenure = acquire(world)
    first, second = (request for _, request, _ in world.sent)
    assert first == second
    assert tenure.lease.fencing_token == world.service.fencing_token
    assert tenure.valid_until <= world.service.expires_at


def test_an_acquire_that_stays_unknown_is_released_and_says_so() -> None:  # R2
    world = World([LOST_ANSWER, LOST_ANSWER])
    with pytest.raises(TransportFailed) as caught:
        acquire(world)
    assert caught.value.sent
    assert world.service.owner is None
    assert world.sent[-1][1].operation is Operation.RELEASE


def test_the_callers_own_token_is_kept_for_a_repetition() -> None:
    world = World([LOST_ANSWER, LOST_ANSWER])
    rules = make_rules()
    ask = acquire_request(rules, 30)
    with pytest.raises(TransportFailed):
        world.run(flows.acquire(ask, rules, sweep=False))
    assert world.service.owner == ask.token.reveal()  # type: ignore[union-attr]
    assert world.run(flows.acquire(ask, rules, sweep=False)).lease.token == ask.token


@pytest.mark.parametrize(
    ("fault", "error", "tries"),
    [
        (Fault(status=503), ServiceUnavailable, 2),
        (Fault(status=502), ServiceUnavailable, 1),
        (Fault(status=429, retry_after="7"), RateLimited, 1),
        (Fault(status=401), AuthenticationFailed, 1),
        (Fault(status=302), UnexpectedResponse, 1),
        (Fault(lost_request=True), TransportFailed, 2),
    ],
)
def test_only_silence_and_503_are_retried_once(
    fault: Fault, error: type[Exception], tries: int
) -> None:
    world = World([fault, fault])
    with pytest.raises(error):
        acquire(world)
    asked = [request for _, request, _ in world.sent if request.operation is Operation.ACQUIRE]
    assert len(asked) == tries


def test_a_garbage_grant_leaves_no_orphan() -> None:
    world = World([GARBAGE])
    with pytest.raises(UnexpectedResponse):
        acquire(world)
    assert world.service.owner is None


def test_a_grant_that_arrives_when_it_has_run_out_is_no_grant() -> None:
    world = World([Fault(pause=60.0)], Service())
    assert acquire(world) is not None  # the retry finds the lock free again: rule 5
    assert len(world.sent) == 2
    world = World([Fault(pause=30.0)])
    assert acquire(world) is None  # rule 4: our own lapsed lease counts as held


def test_contention_is_no_error_and_leaves_nothing_to_release() -> None:
    world = World(service=Service(owner="another", expires_at=2_000))
    assert acquire(world) is None
    assert len(world.sent) == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("granted", [True, False])
def test_an_interrupted_acquire_releases_what_it_may_have_won(  # law 8
    interruption: type[BaseException], granted: bool
) -> None:
    world, rules = World(), make_rules()
    flow = flows.acquire(acquire_request(rules, 30), rules, sweep=True)
    effect = next(flow)
    if granted:
        world.service.handle(effect.request, world.now)  # type: ignore[union-attr]
    effect = flow.throw(interruption())

    with pytest.raises(interruption):
        world.go_on(flow, effect)
    assert world.service.owner is None


# -- releasing -------------------------------------------------------------------------------------


def release(world: World, *, keep_for: float = 0.0) -> Any:
    rules = make_rules()
    tenure = world.run(flows.acquire(acquire_request(rules, 30), rules, sweep=True))
    return world.run(flows.leave(tenure, rules, keep_for=keep_for))


def test_a_release_that_meets_503_is_sent_again_with_the_same_token() -> None:  # R3
    world = World([FINE, UNAVAILABLE])
    assert release(world) is flows.Left.RELEASED
    first, second = (r for _, r, _ in world.sent if r.operation is Operation.RELEASE)
    assert first == second
    assert world.service.owner is None


def test_a_release_whose_answer_is_lost_counts_as_released() -> None:  # R3
    world = World([FINE, LOST_ANSWER])
    assert release(world) is flows.Left.RELEASED


def test_a_release_whose_answer_is_lost_and_whose_retry_says_409_counts_as_released() -> None:
    world = World([FINE, LOST_ANSWER])
    rules = make_rules()
    tenure = world.run(flows.acquire(acquire_request(rules, 30), rules, sweep=True))

    def another_takes_over() -> None:
        if world.service.owner is None:
            world.service.owner, world.service.expires_at = "another", 1e6

    world.each_event = another_takes_over
    assert world.run(flows.leave(tenure, rules, keep_for=0)) is flows.Left.RELEASED
    assert world.service.owner == "another"


def test_a_release_of_a_lease_that_was_taken_over_says_so() -> None:
    world = World()
    rules = make_rules()
    tenure = world.run(flows.acquire(acquire_request(rules, 30), rules, sweep=True))
    world.service.owner, world.service.expires_at = "another", 1e6
    assert world.run(flows.leave(tenure, rules, keep_for=0)) is flows.Left.NOT_OURS


@pytest.mark.parametrize("fault", [UNAVAILABLE, LOST_REQUEST, STALL])
def test_a_release_gives_up_within_its_budget(fault: Fault) -> None:
    world = World([FINE] + [fault] * 10)
    with pytest.raises(OutcomeUnknown):
        release(world)
    assert world.now < 1_000 + 3.6


def test_min_hold_renews_down_so_that_nobody_starts_before() -> None:
    world = World()
    assert release(world, keep_for=25.2) is flows.Left.KEPT
    assert world.service.owner is not None
    assert world.service.expires_at - world.now == pytest.approx(26, abs=0.1)


# -- waiting ---------------------------------------------------------------------------------------


def wait(world: World, seconds: float | None, chance: float = 0.5) -> Any:
    rules = make_rules(entropy=Counting(chance))
    return world.run(
        flows.campaign(lambda: acquire_request(rules, 30), rules, wait=seconds, sweep=True)
    )


def test_a_crashed_leader_is_replaced_within_250_ms_of_the_first_legal_instant() -> None:
    for chance in (0.0, 0.5, 0.999):
        world = World(service=Service(owner="another", expires_at=1_003))
        assert wait(world, None, chance=chance) is not None
        granted = world.service.log[-1][0]
        assert 1_004 <= granted <= 1_004.25


def test_a_crashed_leader_with_a_long_lease_is_replaced_as_promptly() -> None:
    world = World(service=Service(owner="another", expires_at=1_047))
    assert wait(world, None) is not None
    assert 1_048 <= world.service.log[-1][0] <= 1_048.25


def test_a_released_lock_is_won_within_a_poll_interval() -> None:
    world = World(service=Service(owner="another", expires_at=9_000))

    def release_later() -> None:
        if world.now > 1_033.3 and world.service.owner == "another":
            world.service.owner = None

    world.each_event = release_later
    assert wait(world, None) is not None
    assert world.now <= 1_033.3 + 5.5 + 0.2


def test_a_waiter_costs_at_most_two_requests_per_poll_interval() -> None:
    world = World(service=Service(owner="another", expires_at=99_000))
    with pytest.raises(LockHeld):
        wait(world, 600)
    assert len(world.sent) / 10 <= 14  # one `get` every 5 s, and the first and last attempt
    renewing = World(service=Service(owner="another", expires_at=1_005))

    def renewed_at_a_third() -> None:
        if renewing.now > renewing.service.expires_at - 3.3:
            renewing.service.expires_at = renewing.now + 5

    renewing.each_event = renewed_at_a_third
    with pytest.raises(LockHeld):
        wait(renewing, 600)
    assert len(renewing.sent) / 10 <= 25


def test_a_wait_that_runs_out_is_held_and_not_unknown() -> None:
    world = World(service=Service(owner="another", expires_at=9_000))
    with pytest.raises(LockHeld):
        wait(world, 7)
    assert world.now == pytest.approx(1_007, abs=0.3)


def test_a_wait_through_an_outage_ends_with_what_kept_us_from_finding_out() -> None:
    with pytest.raises(ServiceUnavailable):
        wait(World([UNAVAILABLE] * 100), 7)


def test_an_outage_is_waited_out() -> None:
    world = World([UNAVAILABLE] * 9)
    assert wait(world, None) is not None


def test_retry_after_is_heard_by_a_waiter() -> None:
    world = World([Fault(status=429, retry_after="37")])
    assert wait(world, None) is not None
    assert 1_037 <= world.now <= 1_038.2


def test_a_refusal_ends_the_wait_at_once() -> None:
    with pytest.raises(AuthenticationFailed):
        wait(World([Fault(status=401)]), None)


@pytest.mark.parametrize("skew", [-40.0, -0.7, 0.7, 40.0])
def test_a_wall_clock_that_differs_costs_promptness_and_not_the_takeover(skew: float) -> None:
    world = World(service=Service(owner="another", expires_at=1_020))

    def skewed(answer: Any) -> Any:
        moved = answer.sent_wall + timedelta(seconds=skew)
        return answer._replace(sent_wall=moved)

    world.tamper = skewed
    assert wait(world, None) is not None
    assert world.now <= 1_021 + 5.6
    assert len(world.sent) < 30


# -- mutants: each is a bug that somebody shipped once ----------------------------------------------


def caught(schedule_strategy: Any = schedules, seconds: float = 60) -> None:
    @settings(
        max_examples=2_000,
        phases=[Phase.explicit, Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schedule=schedule_strategy, ttl=ttls, chance=chances)
    @example(schedule=ANSWERED_TOO_LATE, ttl=5, chance=0.5)
    def search(schedule: list[Fault], ttl: int, chance: float) -> None:
        hold_for(World(schedule), ttl, seconds, chance)

    with pytest.raises(AssertionError):
        search()


def test_mutant_clock_from_the_answer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    send = World._send

    def from_the_answer(self: World, effect: Any) -> Any:
        answer = send(self, effect)
        return answer._replace(sent_at=answer.received_at)

    monkeypatch.setattr(World, "_send", from_the_answer)
    caught()


def test_mutant_no_margin_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tenure, "stop_at", property(lambda self: self.valid_until))
    caught()


def test_mutant_healing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def renew(self: Belief, tenure: Tenure, now: float) -> None:
        self._tenure, self._loss = tenure, None

    monkeypatch.setattr(Belief, "renew", renew)
    caught()


def test_mutant_lost_by_the_keepers_word_only_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Belief, "look", lambda self, now: self._loss)
    caught()


def test_mutant_retry_with_a_new_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real, entropy = flows.send, Counting()

    def new_token(request: Any, timeout: float) -> Any:
        if request.operation is Operation.ACQUIRE:
            request = dataclasses.replace(request, token=Secret(entropy.uuid()))
        return real(request, timeout)

    monkeypatch.setattr(flows, "send", new_token)
    with pytest.raises(AssertionError):
        test_a_grant_whose_answer_is_lost_is_adopted_by_the_retry()


def test_mutant_one_failure_is_a_loss_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = flows.judge_renewal

    def strict(request: Any, answer: Any, tenure: Any) -> Any:
        outcome = real(request, answer, tenure)
        return outcome if isinstance(outcome, Tenure) else AuthenticationFailed("strict")

    monkeypatch.setattr(flows, "judge_renewal", strict)
    with pytest.raises(AssertionError):
        test_503_then_429_then_silence_then_200_within_the_ttl_is_not_a_loss()


def test_mutant_no_sweep_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "_sweep", lambda ask, rules: iter(()))
    with pytest.raises(AssertionError):
        test_an_acquire_that_stays_unknown_is_released_and_says_so()


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"code": LOCK_SERVICE_UNAVAILABLE, "error": "the disk is full:\n make  room"}, True),
        (
            {"code": LOCK_SERVICE_UNAVAILABLE, "error": f"the disk is full: make room{'!' * 400}"},
            True,
        ),
        (
            {"code": LOCK_SERVICE_UNAVAILABLE, "error": f"the disk is full: make room {TOKEN}"},
            False,
        ),
        (
            {
                "code": LOCK_SERVICE_UNAVAILABLE,
                "error": f"the disk is full: make room{'!' * 260} {TOKEN}",
            },
            False,
        ),
        ({"code": LOCK_SERVICE_UNAVAILABLE, "error": "the disk is full: make room \x1b[2J"}, False),
        ({"code": LOCK_SERVICE_UNAVAILABLE, "error": ["the disk is full: make room"]}, False),
        ({"code": "proxy", "error": "the disk is full: make room"}, False),
        ({"error": "the disk is full: make room"}, False),
    ],
)
def test_what_an_unavailable_service_says_is_passed_on_and_no_token(
    body: dict[str, object], shown: bool
) -> None:
    request = Request(Operation.RELEASE, "job", TOKEN, Secret(TOKEN))
    reply = Reply(503, json.dumps(body).encode())
    error = problem(request, Answer(0.0, 0.0, datetime.now(timezone.utc), reply))
    assert isinstance(error, ServiceUnavailable)
    assert ("the disk is full: make room" in str(error)) is shown
    assert TOKEN[:8] not in str(error).partition("says")[2]
    assert len(str(error)) < 500
