"""The text of an update is made once for all updates that differ in values alone, and for no others."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.db.models import F, Q

from tests.django.app.models import (
    Bound,
    Computed,
    Loose,
    OfState,
    Pair,
    Row,
    Stamped,
    State,
    StateProxy,
)
from tests.django.leases import lease
from volcano_locks.errors import CannotFence, FenceRejected
from volcano_locks_django import fencing

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.timezone.utc)
Update = tuple[Any, dict[str, Any]]


def updates(number: int) -> list[Update]:
    """Which rows, and the new values; each with values that depend on the number."""
    row, state = Row.objects.filter(pk=number), State.objects.filter(pk=f"row {number}")
    uuid = f"00000000-0000-0000-0000-{number:012}"
    return [
        (row, {}),
        (row, {"n": number}),
        (row, {"n": number, "day": number}),
        (row, {"day": number, "n": number}),
        (row, {"n": F("n") + number}),
        (row, {"n": F("day") + number}),
        (row, {"n": F("day")}),
        (row, {"slug": "100 %s"}),
        (row.filter(n=number), {"n": 1}),
        (row.filter(n=2), {"n": number}),
        (row.filter(n__exact=number), {"n": 1}),
        (row.filter(n__gt=number), {"n": 1}),
        (row.filter(n__lt=number), {"n": 1}),
        (row.filter(n=F("day")), {"n": number}),
        (row.exclude(n=number), {"n": 1}),
        (row.exclude(n=number, day=1), {"n": 1}),
        (row.filter(Q(n=number) | Q(day=1)), {"n": 1}),
        (row.filter(~Q(n=number)), {"n": 1}),
        (row.filter(slug__iexact="a"), {"n": number}),
        (row.order_by("-n"), {"n": number}),
        (row.select_related(), {"n": number}),
        (row.annotate(m=F("n")).filter(m=number), {"n": 1}),
        (row.none(), {"n": number}),
        (row.filter(n=2**70 + number), {"n": 1}),
        (Row.objects.filter(n=number), {"n": 1}),
        (Row.objects.filter(n=number, pk=1), {"n": 1}),
        (Row.objects.filter(slug=f"row {number}"), {"n": 1}),
        (Row.objects.filter(tenant=1, day=number, slug="a"), {"n": 1}),
        (Row.objects.filter(pk__in=[number]), {"n": 1}),
        (Row.objects.filter(pk__in=[number, 7]), {"n": 1}),
        (Row.objects.filter(pk=str(number)), {"n": str(number)}),
        (state, {"n": number}),
        (state, {"touched": NOON}),
        (StateProxy.objects.filter(pk=f"row {number}"), {"n": number}),
        (Bound.objects.filter(pk=number), {"n": 1}),
        (Pair.objects.filter(left=number, right=2), {"n": 1}),
        (Pair.objects.filter(right=number).filter(left=2), {"n": 1}),
        (Pair.objects.filter(pk=(number, 2)), {"n": 1}),
        (Stamped.objects.filter(pk=uuid), {"n": number}),
        (Computed.objects.filter(pk="a"), {"seen": None}),
        (Computed.objects.filter(pk="a"), {"seen": NOON}),
        (Computed.objects.filter(pk="a"), {"shout": "oh"}),
        (Computed.objects.filter(pk="a", seen=None), {"n": number}),
        (Computed.objects.filter(pk="a", seen=NOON), {"n": number}),
        (Computed.objects.filter(pk="a"), {"n": number, "double": 1}),
        (Computed.objects.filter(pk="a"), {"done": number == 1}),
        (Computed.objects.filter(pk="a", done=number == 1), {"n": 1}),
        (Loose.objects.filter(pk=number), {"state": None}),
        (Loose.objects.filter(pk=number), {"state": "a"}),
        (Loose.objects.filter(pk=number), {"state_id": "a"}),
        (Loose.objects.filter(pk=number), {"state": State(name="a")}),
        (OfState.objects.filter(pk=number, state="a"), {"n": number}),
        (OfState.objects.filter(pk=number, state=State(name="a")), {"n": number}),
        (OfState.objects.filter(pk=number, state_id="a"), {"n": number}),
        (OfState.objects.filter(pk=number).filter(n=number), {"n": number}),
        (OfState.objects.filter(pk=number).filter(state__n=number), {"n": number}),
    ]


def sent(alias: str, update: Update, token: int) -> list[tuple[str, Any]]:
    """The first writing statement with its parameters, twice if the first is for settled rows."""
    found: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, parameters: Any, *rest: Any) -> Any:
        if sql.startswith("UPDATE"):
            found.append((sql, list(parameters)))
        return execute(sql, parameters, *rest)

    rows, values = update
    with connections[alias].execute_wrapper(note), pytest.raises((FenceRejected, CannotFence)):
        rows.using(alias).fenced_update(lease(token), **values)
    return found


def without_memory(patch: pytest.MonkeyPatch, do: Callable[[], Any]) -> Any:
    with patch.context() as forgetful:
        forgetful.setattr(fencing, "sketch_of", lambda *_: None)
        return do()


def test_a_remembered_text_is_the_one_that_django_makes(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "_texts", {})
    for update in updates(1):
        sent(alias, update, 1)
    remembered = dict(fencing._texts)
    assert len(remembered) > 20
    for ours, theirs in zip(updates(3), updates(3), strict=True):
        made = without_memory(monkeypatch, lambda it=theirs: sent(alias, it, 2**62))  # type: ignore[misc]
        assert sent(alias, ours, 2**62) == made
    assert remembered == fencing._texts  # other values, and nothing was made anew


def test_memory_is_bounded(sqlite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "_texts", {})
    monkeypatch.setattr(fencing, "_MOST_TEXTS", 8)
    for update in updates(1):
        sent(sqlite, update, 1)
        assert len(fencing._texts) <= 8
