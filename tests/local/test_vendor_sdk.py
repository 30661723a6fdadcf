"""A client that nobody here wrote: the vendor's Python SDK against the served form."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import volcano_sdk

from tests.contract.served import KEY, PATIENCE, served

POWERLESS = "sk-powerless"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("--faults", "--powerless-key", f"local={POWERLESS}") as server:
        yield server.url


@pytest.fixture
def locks(url: str):
    return volcano_sdk.VolcanoClient(anon_key="ak-any", service_key=KEY, api_url=url).locks


@pytest.fixture
def key() -> str:
    return f"job.{uuid.uuid4()}"


def test_it_acquires_reads_renews_and_releases(locks, key):
    lease = locks.acquire(key, ttl=600)
    state = locks.get(key)
    assert (state.held, state.fencing_token) == (True, lease.fencing_token)
    assert state.expires_at == lease.expires_at
    renewed = locks.renew(key, lease, ttl=900)
    assert renewed.fencing_token == lease.fencing_token
    assert renewed.expires_at > lease.expires_at
    locks.release(key, renewed)
    assert locks.get(key).held is False
    assert locks.acquire(key, ttl=600).fencing_token > lease.fencing_token


def test_it_contends_and_takes_the_same_token_again(locks, key):
    lease = locks.acquire(key, ttl=600)
    with pytest.raises(volcano_sdk.ConflictError):
        locks.acquire(key, ttl=600)
    again = locks.acquire(key, ttl=600, token=lease.token)
    assert again.fencing_token == lease.fencing_token


def test_it_force_releases_and_the_old_lease_is_lost(locks, key):
    lease = locks.acquire(key, ttl=600)
    locks.force_release(key)
    locks.force_release(key)
    with pytest.raises(volcano_sdk.ConflictError):
        locks.renew(key, lease, ttl=600)


def test_its_with_lock_holds_and_gives_back(locks, key):
    with locks.with_lock(key, ttl=600) as guard:
        assert locks.get(key).held
        assert not guard.lost
    assert not locks.get(key).held


def test_its_with_lock_notices_a_force_release(locks, key):
    """It renews at a third of five seconds, so this takes two."""

    def work() -> None:
        with locks.with_lock(key, ttl=5) as guard:
            locks.force_release(key)
            assert guard.wait_lost(timeout=PATIENCE)

    with pytest.raises(volcano_sdk.ConflictError):
        work()


def test_it_retries_an_acquire_whose_answer_was_lost_and_gets_the_same_lease(locks, key, url):
    import httpx

    body = {"fault": "drop-answer", "operation": "acquire", "key": key}
    assert httpx.post(f"{url}/_faults", json=body, timeout=PATIENCE).status_code == 200
    lease = locks.acquire(key, ttl=600)
    assert locks.get(key).fencing_token == lease.fencing_token


def test_it_understands_the_refusals(url, key):
    def by(service_key: str):
        client = volcano_sdk.VolcanoClient(anon_key="ak-any", service_key=service_key, api_url=url)
        return client.locks

    with pytest.raises(volcano_sdk.AuthenticationError):
        by("sk-wrong").acquire(key, ttl=600)
    with pytest.raises(volcano_sdk.PermissionDeniedError):
        by(POWERLESS).acquire(key, ttl=600)
