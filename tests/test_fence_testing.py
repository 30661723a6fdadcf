"""assert_fenced tells a fenced write from one that only looks so."""

from __future__ import annotations

import asyncio

import pytest

from volcano_locks.errors import StaleFence
from volcano_locks.fence_testing import assert_fenced, assert_fenced_async
from volcano_locks.models import Lease


class Store:
    def __init__(self) -> None:
        self.token = 0
        self.writes: list[int] = []

    def read(self) -> list[int]:
        return list(self.writes)

    def fenced(self, lease: Lease) -> None:
        if self.token > lease.fencing_token:
            raise StaleFence(lease.key, offered=lease.fencing_token, stored=self.token)
        self.unfenced(lease)

    def unfenced(self, lease: Lease) -> None:
        self.token = lease.fencing_token
        self.writes.append(lease.fencing_token)

    def fenced_too_late(self, lease: Lease) -> None:
        token = self.token
        self.writes.append(lease.fencing_token)
        if token > lease.fencing_token:
            raise StaleFence(lease.key, offered=lease.fencing_token, stored=token)
        self.token = lease.fencing_token


def test_a_fenced_write_passes() -> None:
    store = Store()
    assert_fenced(store.fenced, read=store.read, key="rollup")
    assert store.writes == [2**52 + 1, 2**52 + 2]


def test_a_write_that_lands_is_shown_with_the_state_before_and_after() -> None:
    store = Store()
    with pytest.raises(AssertionError, match=r"was not refused(.|\n)*before(.|\n)*after"):
        assert_fenced(store.unfenced, read=store.read)


def test_a_write_that_lands_and_raises_afterwards_is_found_out() -> None:
    store = Store()
    with pytest.raises(AssertionError, match="refused, but its write landed"):
        assert_fenced(store.fenced_too_late, read=store.read)


def test_a_write_that_does_nothing_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="nothing refused it"):
        assert_fenced(lambda lease: None, read=lambda: 0)


def test_another_error_is_not_the_fence() -> None:
    calls: list[int] = []

    def write(lease: Lease) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError

    with pytest.raises(AssertionError, match="ZeroDivisionError, not by the fence"):
        assert_fenced(write, read=lambda: 0)


def test_a_write_that_fails_before_the_replay_is_not_hidden() -> None:
    def write(lease: Lease) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        assert_fenced(write, read=lambda: 0)


def test_tokens_must_rise() -> None:
    with pytest.raises(ValueError, match="rise"):
        assert_fenced(lambda lease: None, read=lambda: 0, tokens=(2, 2))


def test_coroutines_are_replayed_too() -> None:
    store = Store()

    async def write(lease: Lease) -> None:
        store.fenced(lease)

    async def unfenced(lease: Lease) -> None:
        store.unfenced(lease)

    async def read() -> list[int]:
        return store.read()

    asyncio.run(assert_fenced_async(write, read=read))
    with pytest.raises(AssertionError, match="not fenced"):
        asyncio.run(assert_fenced_async(unfenced, read=read, tokens=(2**60, 2**60 + 1)))
