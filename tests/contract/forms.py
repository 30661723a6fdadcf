"""The forms of the lock service that one suite judges: the table, in process, served, and live.

Each form is asked the same questions and has its own way to let time pass: the first two own their
clock, the served one has a clock that stands until it is told to shift it, and a live one is waited for.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol

from tests.contract.served import PATIENCE
from volcano_locks._http import httpx
from volcano_locks.contract import Operation, Request
from volcano_locks.local.table import Granted, Record, Refusal, Seen, decide
from volcano_locks.local.transport import LocalTransport
from volcano_locks.models import Secret

LIVE_URL = os.environ.get("VOLCANO_TEST_LIVE_URL")
LIVE_KEY = os.environ.get("VOLCANO_TEST_LIVE_KEY")
NAMES = ["table", "in-process", "served", *(["live"] if LIVE_URL else [])]
HTTP_NAMES = NAMES[1:]
START = datetime(2026, 7, 20, 14, 0, tzinfo=timezone.utc)
STANDING_AT = round(START.timestamp() * 1_000)


@dataclass(frozen=True)
class Heard:
    """An answer, as the contract puts it."""

    status: int
    code: str | None = None
    held: bool | None = None
    expires_at: datetime | None = None
    fence: int | None = None

    @property
    def brief(self) -> tuple[int, str | None]:
        return self.status, self.code


class Form(Protocol):
    tolerance: timedelta
    """How far an expiry may be from what is expected: the clocks are not the same one."""
    waits: bool
    """Whether letting time pass takes that time."""

    def ask(
        self, operation: Operation, key: str, token: str | None = None, ttl: int | None = None
    ) -> Heard: ...

    def pass_time(self, seconds: float) -> None: ...

    def now(self) -> datetime: ...


class TableForm:
    tolerance = timedelta(0)
    waits = False

    def __init__(self) -> None:
        self._records: dict[str, Record | None] = {}
        self._now = STANDING_AT

    def ask(
        self, operation: Operation, key: str, token: str | None = None, ttl: int | None = None
    ) -> Heard:
        asked = Request(operation, key, str(uuid.uuid4()), Secret(token) if token else None, ttl)
        record, answer = decide(self._records.get(key), asked, self._now)
        self._records[key] = record
        if isinstance(answer, Granted):
            until = _instant(answer.expires_at)
            return Heard(operation.success, expires_at=until, fence=answer.fencing_token)
        if isinstance(answer, Refusal):
            return Heard(409, answer.value)
        if isinstance(answer, Seen):
            if answer.record is None:
                return Heard(200, held=False)
            until = _instant(answer.record.expires_at)
            return Heard(200, held=True, expires_at=until, fence=answer.record.fencing_token)
        return Heard(204)

    def pass_time(self, seconds: float) -> None:
        self._now += round(seconds * 1_000)

    def now(self) -> datetime:
        return _instant(self._now)


class HttpForm:
    """Any form that is spoken to in HTTP, with httpx and nothing of ours in between."""

    def __init__(self, client: httpx.Client, key: str | None) -> None:
        self.client = client
        self._key = key

    def send(
        self,
        method: str,
        path: str,
        *,
        token: str | None = None,
        body: object = None,
        headers: Mapping[str, str | None] | None = None,
    ) -> httpx.Response:
        """A request as the contract wants it, but for ``headers``: None leaves one out."""
        wanted: dict[str, str | None] = {
            "X-Volcano-Request-Id": str(uuid.uuid4()),
            "X-Volcano-Lock-Token": token,
            "Authorization": f"Bearer {self._key}" if self._key else None,
            **(headers or {}),
        }
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.request(
            method,
            path,
            headers={name: value for name, value in wanted.items() if value is not None},
            content=None if body is None else content,
        )

    def ask(
        self, operation: Operation, key: str, token: str | None = None, ttl: int | None = None
    ) -> Heard:
        path = f"/locks/{key}/lease" if operation.on_lease else f"/locks/{key}"
        body = None if ttl is None else {"ttl_seconds": ttl}
        answer = self.send(operation.method, path, token=token, body=body)
        if answer.status_code == 204:
            assert answer.content == b""
            return Heard(204)
        fields: dict[str, Any] = answer.json()
        if answer.status_code >= 400:
            assert isinstance(fields["error"], str)
            return Heard(answer.status_code, fields.get("code"))
        if "held" in fields and not fields["held"]:
            assert fields == {"held": False}, "free, and nothing else"
            return Heard(200, held=False)
        text = fields["expires_at"]
        until = _parse(text)
        fence = fields.get("fencing_token")
        return Heard(answer.status_code, None, fields.get("held"), until, fence)

    tolerance = timedelta(0)
    waits = False

    def pass_time(self, seconds: float) -> None:
        raise NotImplementedError

    def now(self) -> datetime:
        return datetime.now(timezone.utc)


class InProcessForm(HttpForm):
    def __init__(self) -> None:
        self._now = STANDING_AT
        transport = LocalTransport(None, clock=lambda: self._now)
        super().__init__(httpx.Client(transport=transport, base_url="http://local"), None)

    def pass_time(self, seconds: float) -> None:
        self._now += round(seconds * 1_000)

    def now(self) -> datetime:
        return _instant(self._now)


class ServedForm(HttpForm):
    """A server whose clock stands at ``START``: no request is late because the machine is slow."""

    def __init__(self, url: str, key: str) -> None:
        client = httpx.Client(base_url=url, trust_env=False, verify=False, timeout=PATIENCE)
        super().__init__(client, key)
        self._shift = 0.0

    def pass_time(self, seconds: float) -> None:
        self._shift += seconds
        body = {"fault": "clock-shift", "seconds": self._shift}
        assert self.client.post("/_faults", json=body).status_code == 200

    def now(self) -> datetime:
        return START + timedelta(seconds=self._shift)


class LiveForm(HttpForm):
    tolerance = timedelta(seconds=10)
    waits = True

    def __init__(self, url: str, key: str | None) -> None:
        super().__init__(httpx.Client(base_url=url), key)

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)  # nobody can move a live service's clock


def _parse(text: str) -> datetime:
    """RFC 3339 with 0 to 9 fraction digits, also on Python 3.10."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    instant = datetime.strptime(whole, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
    return instant.replace(microsecond=int(fraction.ljust(6, "0")[:6] or 0))


def _instant(milliseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(milliseconds=milliseconds)
