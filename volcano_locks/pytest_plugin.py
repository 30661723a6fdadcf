"""The pytest plugin: a lock service for tests of code that leads.

The law of this module: it is imported into every test run of everybody who has volcano-locks
installed, so it imports nothing of its own unless a fixture is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .async_client import AsyncLockClient
    from .client import LockClient
    from .testing import LockService

__all__ = ["async_lock_client", "lock_client", "lock_service"]


@pytest.fixture
def lock_service() -> Iterator[LockService]:
    """A lock service in memory, with a clock that only the test moves."""
    from .testing import LockService

    with LockService() as service:
        yield service


@pytest.fixture
def lock_client(lock_service: LockService) -> Iterator[LockClient]:
    """A LockClient of ``lock_service``, on its clock."""
    with lock_service.client() as client:
        yield client


@pytest.fixture
def async_lock_client(lock_service: LockService) -> AsyncLockClient:
    """An AsyncLockClient of ``lock_service``, on its clock. It has no connections to close."""
    return lock_service.async_client()
