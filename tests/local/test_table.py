"""The lease table against the rules of the contract, and broken tables against the same judge."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.local.model import Model
from volcano_locks.contract import Operation, Request
from volcano_locks.local.quota import spend
from volcano_locks.local.table import (
    Answer,
    Granted,
    Record,
    Refusal,
    Seen,
    decide,
    fingerprint,
)
from volcano_locks.models import MAX_TTL, Secret

if TYPE_CHECKING:
    from collections.abc import Callable

    Decide = Callable[[Record | None, Request, int], tuple[Record | None, Answer]]

START = 1_800_000_000_000
TOKENS = [str(uuid.UUID(int=number)) for number in range(1, 4)]
TTLS = st.sampled_from([5, 6, 10, 30, 3_600, MAX_TTL - 1, MAX_TTL])


def request(operation: Operation, token: str | None = None, ttl: int | None = None) -> Request:
    secret = None if token is None else Secret(token)
    return Request(operation, "job", str(uuid.UUID(int=9)), secret, ttl)


def plain(answer: Answer) -> tuple[object, ...]:
    if isinstance(answer, Granted):
        return "granted", answer.expires_at, answer.fencing_token
    if isinstance(answer, Seen):
        seen = answer.record
        return ("free",) if seen is None else ("held", seen.expires_at, seen.fencing_token)
    return (answer.value,)


class TableMachine(RuleBasedStateMachine):
    """Random operations of three callers on one lock, at instants around every boundary."""

    decide: Decide = staticmethod(decide)

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.record: Record | None = None
        self.now = START

    def ask(self, *what: object) -> tuple[object, ...]:
        self.record, answer = type(self).decide(self.record, request(*what), self.now)  # type: ignore[arg-type]
        return plain(answer)

    @rule(token=st.sampled_from(TOKENS), ttl=TTLS)
    def acquire(self, token: str, ttl: int) -> None:
        answer = self.ask(Operation.ACQUIRE, token, ttl)
        self.model.acquire(token, ttl, self.now, answer)

    @rule(token=st.sampled_from(TOKENS), ttl=TTLS)
    def renew(self, token: str, ttl: int) -> None:
        self.model.renew(token, ttl, self.now, self.ask(Operation.RENEW, token, ttl))

    @precondition(lambda self: self.model.lease is not None)
    @rule(ttl=TTLS)
    def the_owner_renews(self, ttl: int) -> None:
        self.renew(self.model.lease.token, ttl)

    @precondition(lambda self: self.model.lease is not None)
    @rule(ttl=TTLS)
    def the_owner_acquires_again(self, ttl: int) -> None:
        self.acquire(self.model.lease.token, ttl)

    @rule(token=st.sampled_from(TOKENS))
    def release(self, token: str) -> None:
        self.model.release(token, self.now, self.ask(Operation.RELEASE, token))

    @rule()
    def force_release(self) -> None:
        self.model.force_release(self.ask(Operation.FORCE_RELEASE))

    @rule()
    def get(self) -> None:
        self.model.get(self.now, self.ask(Operation.GET))

    @rule(milliseconds=st.integers(0, 12_000))
    def time_passes(self, milliseconds: int) -> None:
        self.now += milliseconds

    @precondition(lambda self: self.model.lease is not None)
    @rule(offset=st.sampled_from([-1_001, -1_000, -999, -1, 0, 1, 999, 1_000, 1_001]))
    def time_passes_to_a_boundary(self, offset: int) -> None:
        self.now = max(self.now, self.model.lease.until + offset)

    @rule(milliseconds=st.integers(1, 5_000))
    def the_clock_is_set_back(self, milliseconds: int) -> None:
        self.now -= milliseconds


def judge(table: Decide, examples: int) -> None:
    class Judged(TableMachine):
        decide = staticmethod(table)

    run_state_machine_as_test(
        Judged,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_table_keeps_every_rule_of_the_contract():
    judge(decide, 200)


# -- broken tables, each of which the judge must catch -------------------------------------------


def without_grace(record, asked, now):
    """Takeover at the expiry itself."""
    if record is not None and record.owner is not None and now >= record.expires_at:
        record = replace(record, owner=None)
    return decide(record, asked, now)


def token_reset_at_release(record, asked, now):
    after, answer = decide(record, asked, now)
    return (None if after is not None and after.owner is None else after), answer


def renewal_adds(record, asked, now):
    after, answer = decide(record, asked, now)
    if asked.operation is Operation.RENEW and isinstance(answer, Granted):
        until = min(record.expires_at + asked.ttl * 1_000, record.deadline)
        return replace(after, expires_at=until), Granted(until, answer.fencing_token)
    return after, answer


def deadline_moves_with_renewals(record, asked, now):
    after, answer = decide(record, asked, now)
    if asked.operation is Operation.RENEW and isinstance(answer, Granted):
        return replace(after, acquired_at=now), answer
    return after, answer


def no_deadline(record, asked, now):
    after, answer = decide(record, asked, now)
    if isinstance(answer, Granted):
        until = now + asked.ttl * 1_000
        return replace(after, expires_at=until), Granted(until, answer.fencing_token)
    return after, answer


def stale_token_releases(record, asked, now):
    if asked.operation is Operation.RELEASE and record is not None:
        asked = replace(asked, operation=Operation.FORCE_RELEASE)
    return decide(record, asked, now)


def reacquire_is_a_new_lease(record, asked, now):
    if asked.operation is Operation.ACQUIRE and record and record.owner == fingerprint(asked):
        record = replace(record, owner=None)
    return decide(record, asked, now)


def reacquire_never_shortens(record, asked, now):
    after, answer = decide(record, asked, now)
    if (
        isinstance(answer, Granted)
        and record is not None
        and after.acquired_at == record.acquired_at
    ):
        until = max(record.expires_at, answer.expires_at)
        return replace(after, expires_at=until), Granted(until, answer.fencing_token)
    return after, answer


def late_renewal_is_taken(record, asked, now):
    if asked.operation is Operation.RENEW and record is not None and now < record.expires_at:
        asked = replace(asked, operation=Operation.ACQUIRE)
    return decide(record, asked, now)


def lapsed_lease_heals(record, asked, now):
    if asked.operation is Operation.ACQUIRE and record and record.owner == fingerprint(asked):
        now = min(now, record.expires_at - 1)
    return decide(record, asked, now)


def anybody_renews(record, asked, now):
    if asked.operation is Operation.RENEW and record is not None and record.owner is not None:
        record = replace(record, owner=fingerprint(asked))
    return decide(record, asked, now)


def free_in_the_second_of_grace(record, asked, now):
    if asked.operation is Operation.GET and record is not None and now >= record.expires_at:
        return record, Seen(None)
    return decide(record, asked, now)


def token_is_the_clock(record, asked, now):
    after, answer = decide(record, asked, now)
    if isinstance(answer, Granted) and (record is None or after.acquired_at != record.acquired_at):
        return replace(after, fencing_token=now), Granted(answer.expires_at, now)
    return after, answer


def small_tokens(record, asked, now):
    after, answer = decide(record, asked, now)
    if isinstance(answer, Granted) and record is None:
        return replace(after, fencing_token=1), Granted(answer.expires_at, 1)
    return after, answer


def release_of_nothing_fails(record, asked, now):
    after, answer = decide(record, asked, now)
    if asked.operation is Operation.RELEASE and (record is None or record.free(now)):
        return record, Refusal.LOST
    return after, answer


def held_answers_lost(record, asked, now):
    after, answer = decide(record, asked, now)
    return after, Refusal.LOST if answer is Refusal.HELD else answer


def force_release_spares_the_living(record, asked, now):
    after, answer = decide(record, asked, now)
    return (record if asked.operation is Operation.FORCE_RELEASE else after), answer


MUTANTS = [
    without_grace,
    token_reset_at_release,
    renewal_adds,
    deadline_moves_with_renewals,
    no_deadline,
    stale_token_releases,
    reacquire_is_a_new_lease,
    reacquire_never_shortens,
    late_renewal_is_taken,
    lapsed_lease_heals,
    anybody_renews,
    free_in_the_second_of_grace,
    token_is_the_clock,
    small_tokens,
    release_of_nothing_fails,
    held_answers_lost,
    force_release_spares_the_living,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_table_is_caught(mutant: Decide):
    with pytest.raises(AssertionError):
        judge(mutant, 600)


# -- plain examples --------------------------------------------------------------------------------


def test_a_refusal_and_a_read_change_nothing():
    record, _ = decide(None, request(Operation.ACQUIRE, TOKENS[0], 10), START)
    for asked in (
        request(Operation.ACQUIRE, TOKENS[1], 10),
        request(Operation.RENEW, TOKENS[1], 10),
        request(Operation.RELEASE, TOKENS[1]),
        request(Operation.GET),
    ):
        assert decide(record, asked, START + 1)[0] is record


def test_tokens_rise_even_if_the_record_is_forgotten():
    _, first = decide(None, request(Operation.ACQUIRE, TOKENS[0], 5), START)
    _, second = decide(None, request(Operation.ACQUIRE, TOKENS[1], 5), START + 1)
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert second.fencing_token > first.fencing_token


def test_the_record_holds_no_ownership_token():
    record, _ = decide(None, request(Operation.ACQUIRE, TOKENS[0], 5), START)
    assert TOKENS[0] not in repr(record)
    assert TOKENS[0].encode() not in (record.owner or b"")


def test_the_quota_counts_a_fixed_minute_and_tells_the_seconds_to_its_end():
    minute = START // 60_000 * 60_000
    usage = None
    for _ in range(600):
        usage, wait = spend(usage, minute + 17_250, 600)
        assert wait is None
    usage, wait = spend(usage, minute + 17_250, 600)
    assert wait == 43
    usage, wait = spend(usage, minute + 59_999, 600)
    assert wait == 1
    assert usage.refused == 2
    usage, wait = spend(usage, minute + 60_000, 600)
    assert (wait, usage.used, usage.refused) == (None, 1, 0)
