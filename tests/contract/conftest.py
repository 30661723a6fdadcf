from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.contract import forms
from tests.contract.served import KEY, served

TINY = "sk-tiny"
POWERLESS = "sk-powerless"


@pytest.fixture(scope="package")
def server_url() -> Iterator[str]:
    options = ("--faults", "--project", f"tiny={TINY}", "--powerless-key", f"tiny={POWERLESS}")
    with served(*options, "--quota", "100000", standing_at=forms.STANDING_AT) as server:
        yield server.url


def _make(name: str, request: pytest.FixtureRequest) -> forms.Form:
    if name == "table":
        return forms.TableForm()
    if name == "in-process":
        return forms.InProcessForm()
    if name == "served":
        return forms.ServedForm(request.getfixturevalue("server_url"), KEY)
    assert forms.LIVE_URL
    return forms.LiveForm(forms.LIVE_URL, forms.LIVE_KEY)


def _closing(form: forms.Form) -> Iterator[forms.Form]:
    yield form
    if isinstance(form, forms.ServedForm):
        form.client.delete("/_faults")
    if isinstance(form, forms.HttpForm):
        form.client.close()


@pytest.fixture(params=forms.NAMES)
def form(request: pytest.FixtureRequest) -> Iterator[forms.Form]:
    """Every form of the service."""
    yield from _closing(_make(request.param, request))


@pytest.fixture(params=[name for name in forms.NAMES if name != "live"])
def own_time_form(request: pytest.FixtureRequest) -> Iterator[forms.Form]:
    """Every form in which ninety days can pass."""
    yield from _closing(_make(request.param, request))


@pytest.fixture(params=forms.HTTP_NAMES)
def http_form(request: pytest.FixtureRequest) -> Iterator[forms.Form]:
    """Every form that speaks HTTP."""
    yield from _closing(_make(request.param, request))


@pytest.fixture
def key() -> str:
    """A lock that no other test knows, also in a live project."""
    return f"volcano-locks-test.{uuid.uuid4()}"


@pytest.fixture
def token() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def other() -> str:
    return str(uuid.uuid4())
