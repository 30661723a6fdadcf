from __future__ import annotations

import pytest
from flask import Flask

from volcano_locks import LockClient
from volcano_locks.local.transport import LocalTransport
from volcano_locks_flask import VolcanoLocks

from .processes import machines

__all__ = ["machines"]


@pytest.fixture
def service():
    """A lock service of this test alone, in memory."""
    transport = LocalTransport(None)
    yield transport
    transport.close()


@pytest.fixture
def client(service):
    with LockClient(api_url="local:", transport=service) as client:
        yield client


@pytest.fixture
def app(service):
    app = Flask("shop")
    VolcanoLocks(
        app, client_factory=lambda settings: LockClient(api_url="local:", transport=service)
    )
    return app


@pytest.fixture
def runner(app):
    return app.test_cli_runner()
