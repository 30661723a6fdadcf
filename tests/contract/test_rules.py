"""The rules of the service, one by one, on every form of it. Written against contract.md alone."""

from __future__ import annotations

from datetime import timedelta

from tests.contract.forms import Form
from volcano_locks.contract import Operation

ACQUIRE, RENEW, RELEASE = Operation.ACQUIRE, Operation.RENEW, Operation.RELEASE
GET, FORCE = Operation.GET, Operation.FORCE_RELEASE
HELD = (409, "lock_held")
LOST = (409, "lock_ownership_lost")


def near(form: Form, instant: object, seconds: float) -> bool:
    return abs(form.now() + timedelta(seconds=seconds) - instant) <= form.tolerance  # type: ignore[operator]


def test_rule_1_a_free_lock_is_granted_with_an_expiry_and_a_fencing_token(form, key, token):
    granted = form.ask(ACQUIRE, key, token, 10)
    assert granted.status == 201
    assert near(form, granted.expires_at, 10)
    assert 0 < granted.fence < 2**63
    form.ask(RELEASE, key, token)


def test_rule_1_every_hand_over_raises_the_fencing_token(form, key, token, other):
    fences = []
    for owner, leave in ((token, RELEASE), (other, FORCE), (token, RELEASE)):
        fences.append(form.ask(ACQUIRE, key, owner, 10).fence)
        form.ask(leave, key, owner if leave is RELEASE else None)
    assert fences == sorted(set(fences))


def test_rule_2_the_same_token_resets_the_expiry_and_keeps_the_fence(form, key, token):
    first = form.ask(ACQUIRE, key, token, 60)
    again = form.ask(ACQUIRE, key, token, 10)
    assert again.status == 201
    assert again.fence == first.fence
    assert near(form, again.expires_at, 10)
    form.ask(RELEASE, key, token)


def test_rule_3_a_live_lease_keeps_others_out(form, key, token, other):
    form.ask(ACQUIRE, key, token, 10)
    assert form.ask(ACQUIRE, key, other, 10).brief == HELD
    form.ask(RELEASE, key, token)


def test_rules_4_and_5_in_the_second_of_grace_nobody_leads(form, key, token, other):
    first = form.ask(ACQUIRE, key, token, 5)
    form.pass_time(5.3)
    assert form.ask(GET, key).held is True
    assert form.ask(ACQUIRE, key, other, 5).brief == HELD
    assert form.ask(ACQUIRE, key, token, 5).brief == LOST
    assert form.ask(RENEW, key, token, 5).brief == LOST
    form.pass_time(1.2)
    assert form.ask(GET, key).held is False
    taken = form.ask(ACQUIRE, key, other, 5)
    assert taken.status == 201
    assert taken.fence > first.fence
    form.ask(RELEASE, key, other)


def test_rule_5_get_tells_a_held_lock_with_expiry_and_fence(form, key, token):
    assert form.ask(GET, key).held is False
    granted = form.ask(ACQUIRE, key, token, 10)
    seen = form.ask(GET, key)
    assert (seen.held, seen.expires_at, seen.fence) == (True, granted.expires_at, granted.fence)
    form.ask(RELEASE, key, token)
    assert form.ask(GET, key).held is False


def test_rule_6_a_renewal_sets_the_expiry_and_keeps_the_fence(form, key, token):
    first = form.ask(ACQUIRE, key, token, 30)
    renewed = form.ask(RENEW, key, token, 10)
    assert renewed.status == 200
    assert renewed.fence in (None, first.fence)
    assert near(form, renewed.expires_at, 10)
    form.ask(RELEASE, key, token)


def test_rule_6_a_renewal_in_the_last_second_is_too_late(form, key, token):
    form.ask(ACQUIRE, key, token, 5)
    form.pass_time(4.4)
    assert form.ask(RENEW, key, token, 5).brief == LOST
    form.ask(RELEASE, key, token)


def test_rule_6_a_renewal_before_the_last_second_is_in_time(form, key, token):
    form.ask(ACQUIRE, key, token, 5)
    form.pass_time(3)
    assert form.ask(RENEW, key, token, 5).status == 200
    form.ask(RELEASE, key, token)


def test_rule_6_what_one_does_not_own_is_not_renewed(form, key, token, other):
    assert form.ask(RENEW, key, token, 5).brief == LOST
    form.ask(ACQUIRE, key, token, 10)
    assert form.ask(RENEW, key, other, 5).brief == LOST
    form.ask(RELEASE, key, token)
    assert form.ask(RENEW, key, token, 5).brief == LOST


def test_rule_7_release_is_idempotent(form, key, token):
    assert form.ask(RELEASE, key, token).status == 204
    form.ask(ACQUIRE, key, token, 10)
    assert form.ask(RELEASE, key, token).status == 204
    assert form.ask(RELEASE, key, token).status == 204


def test_rule_7_a_stale_token_never_releases_a_newer_lease(form, key, token, other):
    form.ask(ACQUIRE, key, token, 5)
    form.ask(FORCE, key)
    newer = form.ask(ACQUIRE, key, other, 10)
    assert form.ask(RELEASE, key, token).brief == LOST
    assert form.ask(GET, key).fence == newer.fence
    form.ask(RELEASE, key, other)


def test_rule_8_force_release_drops_any_lease_and_none(form, key, token):
    assert form.ask(FORCE, key).status == 204
    form.ask(ACQUIRE, key, token, 10)
    assert form.ask(FORCE, key).status == 204
    assert form.ask(GET, key).held is False
    assert form.ask(RENEW, key, token, 10).brief == LOST


def test_rule_9_ninety_days_after_the_acquisition_a_lease_ends(own_time_form, key, token):
    form = own_time_form
    ninety = 90 * 24 * 3_600
    first = form.ask(ACQUIRE, key, token, ninety)
    form.pass_time(ninety - 100)
    renewed = form.ask(RENEW, key, token, 1_000)
    assert renewed.expires_at == first.expires_at
    assert form.ask(ACQUIRE, key, token, 1_000).expires_at == first.expires_at
    form.pass_time(101.5)
    taken = form.ask(ACQUIRE, key, token, 5)
    assert taken.fence > first.fence
    form.ask(RELEASE, key, token)


def test_keys_are_independent(form, key, token, other):
    form.ask(ACQUIRE, key, token, 10)
    assert form.ask(ACQUIRE, f"{key[:60]}-2", other, 10).status == 201
    form.ask(RELEASE, key, token)
    form.ask(RELEASE, f"{key[:60]}-2", other)
