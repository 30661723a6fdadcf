"""How a lease is won, kept and given back: generators of effects, one per job.

The law of this module: a flow never believes more than an answer proved, never gives up a lease for
one bad answer, and never leaves a lease behind that the service would hold for a whole TTL, as far
as a best-effort release can help (laws 1, 3, 5, 6 and 8). It knows no thread, no event loop and no
HTTP library. ``effects`` says what a driver owes a flow.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from ..contract import GRACE, Operation, Reply, Request, decode_state
from ..errors import (
    ConfigurationError,
    LeaseLost,
    LockHeld,
    OutcomeUnknown,
    RateLimited,
    Refused,
    ServiceUnavailable,
    TransportFailed,
    UnexpectedResponse,
    VolcanoLocksError,
)
from ..models import MAX_TTL, MIN_TTL, Lease, LockState
from .effects import Answer, Entropy, Flow, send, sleep
from .policy import Policy, Quota
from .tenure import Belief, Loss, Tenure
from .verdict import grant, problem

logger = logging.getLogger("volcano_locks")


class Left(Enum):
    """How a lease was given back. A failure to find out is an error, not a member."""

    RELEASED = "released"
    KEPT = "kept for its minimum time"
    NOT_OURS = "was not ours any more"


@dataclass(frozen=True)
class Rules:
    """What all flows of one client share."""

    policy: Policy
    entropy: Entropy
    quota: Quota


def once(request: Request, rules: Rules) -> Flow[Reply]:
    """One request, one answer; a failure is raised as its typed error."""
    answer = yield from send(request, rules.policy.timeout)
    error = problem(request, answer)
    if error is not None:
        raise error
    return _reply(answer)


def acquire(ask: Request, rules: Rules, *, sweep: bool) -> Flow[Tenure | None]:
    """Try to win the lock once: the tenure, or None if another leads.

    Retried once with the same ids after no answer or a 503 (contract, What a client must do). If it
    stays unknown whether the service holds a lease for us, and on every interruption, that orphan is
    released, unless ``sweep`` is False: then the caller owns the token and may repeat the request.
    """
    assert ask.ttl is not None
    policy, began_at, orphan = rules.policy, None, False
    try:
        for retries_left in range(policy.acquire_retries, -1, -1):
            before, orphan = orphan, True  # from here on, until the answer says otherwise
            answer = yield from send(ask, policy.acquire_timeout(ask.ttl))
            began_at = answer.sent_at if began_at is None else began_at
            outcome = _judge_acquire(ask, answer, began_at, policy)
            if isinstance(outcome, Tenure):
                return outcome
            if isinstance(outcome, LockHeld):
                orphan = False  # a same-token acquire would have been granted
                return None
            orphan = before or _may_have_taken_effect(outcome)
            if not retries_left or not _retryable(outcome):
                raise outcome
            pause = policy.backoff(1, rules.entropy.fraction())
            asked = getattr(outcome, "retry_after", None) or 0.0
            yield from sleep(answer.received_at + max(pause, min(asked, policy.longest_backoff)))
    except (GeneratorExit, ConfigurationError):
        raise
    except BaseException:
        if orphan and sweep:
            yield from _sweep(ask, rules)
        raise
    raise AssertionError("the loop returns or raises")


def _judge_acquire(
    ask: Request, answer: Answer, began_at: float, policy: Policy
) -> Tenure | VolcanoLocksError:
    error = problem(ask, answer)
    if error is not None:
        return error
    assert ask.token is not None
    assert ask.ttl is not None
    granted = grant(ask, _reply(answer))
    if isinstance(granted, UnexpectedResponse):
        return granted
    assert granted.fencing_token is not None
    lease = Lease(ask.key, granted.expires_at, granted.fencing_token, answer.sent_wall, ask.token)
    tenure = Tenure.granted(
        lease,
        began_at=began_at,
        sent_at=answer.sent_at,
        ttl=ask.ttl,
        stop_margin=policy.stop_margin,
    )
    if tenure.loss(answer.received_at) is None:
        return tenure
    return TransportFailed(
        f"acquire of lock {ask.key!r} was granted, but the answer came when the lease had run out",
        request_id=ask.request_id,
    )


def _retryable(error: VolcanoLocksError) -> bool:
    return isinstance(error, TransportFailed) or error.status == 503


def _may_have_taken_effect(error: VolcanoLocksError) -> bool:
    if isinstance(error, TransportFailed):
        return error.sent
    return isinstance(error, ServiceUnavailable | UnexpectedResponse)


def _sweep(ask: Request, rules: Rules) -> Flow[None]:
    """Release what an acquire may have left behind; failing is no worse than not trying."""
    assert ask.token is not None
    lease = Request(Operation.RELEASE, ask.key, rules.entropy.uuid(), token=ask.token)
    try:
        yield from release(lease, rules)
    except VolcanoLocksError as error:
        logger.warning(
            "lock %r: a lease of ours may be left behind for up to %d s: %s",
            ask.key,
            ask.ttl,
            error,
        )


def campaign(
    next_ask: Callable[[], Request], rules: Rules, *, wait: float | None, sweep: bool
) -> Flow[Tenure]:
    """Wait for the lock and win it; ``wait`` in seconds, None for ever, 0 for one try.

    After contention one ``get`` tells when takeover becomes possible. The waiter sleeps until then,
    or for a poll interval, whichever is first: it costs at most two requests per poll interval, and
    one in the usual case. Unknown outcomes are waited out too, with backoff. When the wait is over,
    the last outcome is raised: LockHeld, or what kept us from finding out (law 9). Refusals are
    raised at once.
    """
    waiter = object()
    failures = 0
    until = math.inf if wait is None else (yield from _now()) + wait
    try:
        while True:
            ask = next_ask()
            outcome = yield from _attempt(ask, rules, sweep=sweep)
            if isinstance(outcome, Tenure):
                return outcome
            now = yield from _now()
            if now >= until:
                raise outcome
            rules.quota.wait(waiter)
            if isinstance(outcome, LockHeld):
                failures = 0
                yield from _await_opening(ask.key, rules, until)
            else:
                failures += 1
                if failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, ... in a row
                    logger.warning("cannot find out who leads, trying again: %s", outcome)
                yield from sleep(min(_after(outcome, now, failures, rules), until))
    finally:
        rules.quota.leave(waiter)


def _attempt(
    ask: Request, rules: Rules, *, sweep: bool
) -> Flow[Tenure | LockHeld | OutcomeUnknown]:
    try:
        tenure = yield from acquire(ask, rules, sweep=sweep)
    except OutcomeUnknown as error:
        return error
    return tenure or LockHeld(ask.key)


def _await_opening(key: str, rules: Rules, until: float) -> Flow[None]:
    """Return when another try makes sense: takeover is possible, or time is up.

    The expiry is the service's wall clock against ours, so it is a guess: too early, and we look
    again shortly; too late, and the poll interval bounds it.
    """
    policy, premature = rules.policy, 0
    while True:
        chance = rules.entropy.fraction()
        poll = policy.jittered(rules.quota.poll_interval(), chance)
        look = Request(Operation.GET, key, rules.entropy.uuid())
        answer = yield from send(look, policy.timeout)
        now = answer.received_at
        error = problem(look, answer)
        state = None if error else decode_state(_reply(answer))
        if isinstance(error, Refused):
            raise error
        if isinstance(error, OutcomeUnknown):
            yield from sleep(min(max(_after(error, now, 1, rules), now + poll), until))
            return
        if state is not None and not state.held:
            yield from sleep(min(now + chance * _SPREAD, until))
            return
        opens_at = _opens_at(state, answer)
        if opens_at is not None and opens_at <= now:
            premature += 1
            wake = min(now + policy.backoff(premature, chance), now + poll)
        else:
            wake = min(now + poll, math.inf if opens_at is None else opens_at + chance * _SPREAD)
        woke = yield from sleep(min(max(wake, rules.quota.quiet_until), until))
        if woke >= until or (opens_at is not None and now < opens_at <= woke):
            return


_SPREAD = 0.1
"""Seconds over which waiters are spread that wake for the same opening."""


def _opens_at(state: LockState | None, answer: Answer) -> float | None:
    if state is None or state.expires_at is None:
        return None
    left = (state.expires_at - answer.sent_wall).total_seconds()
    return answer.sent_at + left + GRACE


def _after(error: OutcomeUnknown, now: float, failures: int, rules: Rules) -> float:
    """The instant of the next try: backoff, or what the service asked for and a little more."""
    chance = rules.entropy.fraction()
    pause = rules.policy.backoff(failures, chance)
    if error.retry_after is not None:
        asked = min(error.retry_after, _LONGEST_RETRY_AFTER)
        pause = max(pause, asked + chance)
        if isinstance(error, RateLimited):
            rules.quota.quiet_until = max(rules.quota.quiet_until, now + asked)
    return now + pause


_LONGEST_RETRY_AFTER = 120.0
"""Seconds. The service asks for 60 at most (contract rules 10 and 11)."""


def keep(belief: Belief, ttl: int, rules: Rules) -> Flow[Loss]:
    """Renew at a third of the TTL until told to stop (closed), or until the lease is lost: why.

    The belief follows every renewal that gets through, and the loss. A failed renewal is retried as
    the same request until nothing can succeed any more (law 3).
    """
    while True:
        tenure = belief.tenure
        interval = rules.quota.renewal_interval(ttl)
        wake = tenure.confirmed_at + rules.policy.jittered(interval, rules.entropy.fraction())
        now = yield from sleep(min(wake, tenure.stop_at))
        lease = tenure.lease
        request = Request(Operation.RENEW, lease.key, rules.entropy.uuid(), lease.token, ttl)
        loss = yield from _renew_insistently(request, belief, now, rules)
        if loss is not None:
            return loss


def renew_once(request: Request, lease: Lease, rules: Rules) -> Flow[Lease]:
    """One renewal outside a hold: the new lease, or the typed error."""
    reply = yield from once(request, rules)
    outcome = _renewed_lease(request, reply, lease)
    if isinstance(outcome, VolcanoLocksError):
        raise outcome
    return outcome


def _renew_insistently(
    request: Request, belief: Belief, now: float, rules: Rules
) -> Flow[Loss | None]:
    tenure, failures = belief.tenure, 0
    while (loss := belief.look(now)) is None:
        left = tenure.stop_at - now
        answer = yield from send(request, rules.policy.renewal_timeout(left))
        now = answer.received_at
        outcome = judge_renewal(request, answer, tenure)
        if isinstance(outcome, Tenure):
            belief.renew(outcome, now)  # an answer after the instant to stop heals nothing (law 4)
            return belief.loss
        if not isinstance(outcome, OutcomeUnknown):
            belief.lose(Loss.REFUSED if isinstance(outcome, LeaseLost) else Loss.DENIED)
            return belief.loss
        failures += 1
        logger.warning(
            "renewal of lock %r failed, %.1f s left: %s", request.key, tenure.stop_at - now, outcome
        )
        # However long the service asks to wait, one more try is made before it is too late.
        retry = _after(outcome, now, failures, rules)
        last_chance = tenure.stop_at - _LAST_TRY
        now = yield from sleep(min(retry, last_chance if now < last_chance else tenure.stop_at))
    return loss


_LAST_TRY = 0.4
"""Seconds before the instant to stop at which the last try begins."""


def judge_renewal(request: Request, answer: Answer, tenure: Tenure) -> Tenure | VolcanoLocksError:
    error = problem(request, answer)
    if error is not None:
        return error
    assert request.ttl is not None
    lease = _renewed_lease(request, _reply(answer), tenure.lease)
    if isinstance(lease, VolcanoLocksError):
        return lease
    return tenure.renewed(lease, sent_at=answer.sent_at, ttl=request.ttl)


def _renewed_lease(request: Request, reply: Reply, held: Lease) -> Lease | VolcanoLocksError:
    granted = grant(request, reply)
    if isinstance(granted, UnexpectedResponse):
        return granted
    if granted.fencing_token not in {None, held.fencing_token}:
        return LeaseLost(held.key, Loss.REFUSED.value, fencing_token=held.fencing_token)
    return replace(held, expires_at=granted.expires_at)


def release(request: Request, rules: Rules) -> Flow[Left]:
    """Give the lease back, with a few tries inside ``release_budget`` seconds.

    "Not yours" after a try whose outcome is unknown means that that try did it.
    """
    error, unsure = yield from _insist(request, rules)
    if error is None or (unsure and isinstance(error, LeaseLost)):
        return Left.RELEASED
    if isinstance(error, LeaseLost):
        return Left.NOT_OURS
    raise error


def leave(tenure: Tenure, rules: Rules, *, keep_for: float) -> Flow[Left]:
    """End a hold: release, or renew so that nobody else may start for ``keep_for`` more seconds."""
    lease = tenure.lease
    if keep_for <= 0:
        return (
            yield from release(
                Request(Operation.RELEASE, lease.key, rules.entropy.uuid(), lease.token), rules
            )
        )
    ttl = min(max(MIN_TTL, math.ceil(keep_for)), MAX_TTL)
    shorten = Request(Operation.RENEW, lease.key, rules.entropy.uuid(), lease.token, ttl)
    error, _ = yield from _insist(shorten, rules)
    if error is None:
        return Left.KEPT
    if isinstance(error, LeaseLost):
        return Left.NOT_OURS
    raise error


def _insist(request: Request, rules: Rules) -> Flow[tuple[VolcanoLocksError | None, bool]]:
    """The last outcome, and whether an earlier try may have taken effect unseen."""
    policy, unsure, failures = rules.policy, False, 0
    left = policy.release_budget
    while True:
        timeout = min(policy.timeout, left, max(left / 2, _SHORTEST_LAST_TRY))
        answer = yield from send(request, timeout)
        until = answer.sent_at + left
        error = problem(request, answer)
        if not isinstance(error, OutcomeUnknown):
            return error, unsure
        failures += 1
        unsure = unsure or _may_have_taken_effect(error)
        wake = _after(error, answer.received_at, failures, rules)
        if failures >= policy.release_tries or wake >= until:
            return error, unsure
        left = until - (yield from sleep(wake))


_SHORTEST_LAST_TRY = 0.5
"""Seconds that a try of a release gets even at the end of its budget."""


def _now() -> Flow[float]:
    return (yield from sleep(-math.inf))


def _reply(answer: Answer) -> Reply:
    assert isinstance(answer.result, Reply)
    return answer.result
