"""Fences in Django's own request handler, where ATOMIC_REQUESTS makes each request a transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import path

from tests.django.app.models import Plain, State
from tests.django.leases import lease
from tests.django.test_fencing_docs import blocks
from tests.django.test_fencing_transaction import (
    FENCED,
    SERVERS,
    another_connection,
    wait_for_a_waiter,
)
from volcano_locks.client import LockClient
from volcano_locks.errors import StaleFence
from volcano_locks_django import FenceWarning

View = Callable[[HttpRequest], HttpResponse]


@pytest.fixture
def serve(alias: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[View], Client]]:
    """Puts one view behind the handler; each request is a transaction of the database ``alias``."""
    State.objects.using(alias).create(name="a")
    monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)
    with contextlib.ExitStack() as stack:

        def serve(view: View) -> Client:
            urls = (path("", view),)
            stack.enter_context(override_settings(ROOT_URLCONF=urls, MIDDLEWARE=[]))
            return Client()

        yield serve


def numbers(alias: str) -> list[int]:
    return sorted(Plain.objects.using(alias).values_list("n", flat=True))


@pytest.mark.parametrize("write", FENCED)
def test_a_refusal_that_leaves_the_view_takes_the_whole_request_back(
    alias: str, serve: Any, write: Any
) -> None:
    def view(request: HttpRequest) -> HttpResponse:
        token = int(request.GET["token"])
        Plain.objects.using(alias).create(n=-token)
        write(lease(token), alias)
        return HttpResponse()

    client = serve(view)
    assert client.get("/", {"token": 8}).status_code == 200
    before = numbers(alias)
    with pytest.raises(StaleFence):
        client.get("/", {"token": 7})
    assert numbers(alias) == before
    assert -8 in before


@pytest.mark.parametrize("write", FENCED)
def test_a_view_that_goes_on_after_a_refusal_commits_all_that_was_not_refused(
    alias: str, serve: Any, write: Any
) -> None:
    """Nothing but the refused write is undone; set_rollback() undoes the request."""
    write(lease(8), alias)
    before = numbers(alias)

    def view(request: HttpRequest) -> HttpResponse:
        Plain.objects.using(alias).create(n=-1)
        with pytest.raises(StaleFence):
            write(lease(7), alias)
        Plain.objects.using(alias).create(n=-2)
        if "undo" in request.GET:
            transaction.set_rollback(True, using=alias)
        return HttpResponse(status=409)

    client = serve(view)
    assert client.get("/", {"undo": 1}).status_code == 409
    assert numbers(alias) == before
    assert client.get("/").status_code == 409
    assert numbers(alias) == [-2, -1, *before]


@pytest.mark.parametrize("write", FENCED)
def test_a_hold_that_ends_in_the_view_is_warned_about_at_the_commit(
    alias: str, serve: Any, write: Any, tmp_path: Path
) -> None:
    with LockClient(api_url=f"local:{tmp_path}/locks") as locks:

        def view(request: HttpRequest) -> HttpResponse:
            with locks.hold("rollup") as hold:
                write(hold, alias)
            return HttpResponse()

        with pytest.warns(FenceWarning, match="another leader may have started"):
            serve(view).get("/")
        exempt = transaction.non_atomic_requests(using=alias)(view)
        serve(exempt).get("/")  # no warning: it was committed under the lock


@pytest.mark.parametrize("alias", SERVERS, indirect=True)
@pytest.mark.parametrize("write", FENCED)
@pytest.mark.parametrize("first", [7, 8], ids=["the older first", "the newer first"])
def test_of_two_requests_at_once_the_second_waits_for_the_commit_of_the_first(
    alias: str,
    serve: Any,
    made: Any,
    write: Any,
    first: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    status: dict[int, int] = {}

    def view(request: HttpRequest) -> HttpResponse:
        token = int(request.GET["token"])
        Plain.objects.using(alias).create(n=-token)
        write(lease(token), alias)
        if token == first:
            thread.start()
            wait_for_a_waiter(alias, made)  # the write is done, the request is not
        return HttpResponse()

    def ask(token: int) -> None:
        # A Client would hear of the other thread's exceptions, too.
        request = RequestFactory().get("/", {"token": token})
        status[token] = WSGIHandler().get_response(request).status_code

    serve(view)
    with another_connection(lambda: ask(15 - first)) as thread:
        ask(first)
    refused = [record.exc_info[0] for record in caplog.records if record.exc_info]
    landed = {n for n in numbers(alias) if n < 0}
    if first == 7:
        assert (status, refused, landed) == ({7: 200, 8: 200}, [], {-7, -8})
    else:
        assert (status, refused, landed) == ({8: 200, 7: 500}, [StaleFence], {-8})
    with pytest.raises(StaleFence):
        write(lease(7), alias)


def test_the_view_of_the_page_retries_outside_of_any_transaction(
    sqlite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be refused inside of one: a part of a transaction cannot be run again."""
    State.objects.create(name="orders")
    names: dict[str, Any] = {"__name__": "page", "RollupState": State, "lease": lease(8)}
    exec(blocks("retry.py") + blocks("views.py").replace("cursor=", "n="), names)
    urls = (path("", names["close_day"]),)
    monkeypatch.setitem(connections.settings[sqlite], "ATOMIC_REQUESTS", True)
    with override_settings(ROOT_URLCONF=urls, MIDDLEWARE=[]):
        assert Client().get("/").status_code == 200
        names["lease"] = lease(7)
        assert Client().get("/").status_code == 409
    assert State.objects.get().fencing_token == 8
