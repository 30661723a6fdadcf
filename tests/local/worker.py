"""One process of several on one store file: takes, renews, releases and abandons leases at random.

``python -m tests.local.worker FILE LOG SEED SECONDS [no-flock] [deferred]``. Time runs a hundred times
faster than the wall clock, the same in all processes, so that leases expire while one watches. Each
event is a line of the log, written in one piece after the answer arrived; that a release is sent, too,
before it is, since a process that is killed may have released what it never said. It ends early if
LOG.stop appears. It waits for its turn however slow the disk is: the gate is not fair. ``no-flock``: as on a
platform without it. ``deferred``: the mutant whose transactions lock only what they write, and only
then.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import sys
import time
import uuid
from functools import partial
from typing import Any

from volcano_locks.contract import Operation, Request, decode_grant
from volcano_locks.local import store as store_module
from volcano_locks.local.service import LockService
from volcano_locks.local.store import Store
from volcano_locks.models import Secret

SPEED = 100
ORIGIN = 1_800_000_000_000


def fast_clock() -> int:
    return ORIGIN + (time.time_ns() - ORIGIN * 1_000_000) * SPEED // 1_000_000


class Deferred(sqlite3.Connection):
    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        return super().execute("BEGIN" if sql == "BEGIN IMMEDIATE" else sql, *values)


def main(path: str, log: str, seed: str, seconds: str, *ways: str) -> None:
    assert {*ways} <= {"no-flock", "deferred"}
    store_module.PATIENCE = 60
    if "no-flock" in ways:
        store_module._HAS_FLOCK = False
    if "deferred" in ways:
        sqlite3.connect = partial(sqlite3.connect, factory=Deferred)  # type: ignore[assignment]
    chance = random.Random(seed)
    service = LockService(Store(path), clock=fast_clock, quota=10**9)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    end = time.monotonic() + float(seconds)

    def tell(event: dict[str, object]) -> None:
        os.write(out, json.dumps(event).encode() + b"\n")

    def ask(
        operation: Operation, key: str, token: str, ttl: int | None = None
    ) -> dict[str, object]:
        asked = Request(operation, key, str(uuid.uuid4()), Secret(token), ttl)
        event: dict[str, object] = {
            "op": operation.name,
            "key": key,
            "token": token,
            "sent": fast_clock(),
            "status": None,
        }
        if operation is Operation.RELEASE:
            tell(event)
        reply = service.perform(asked)
        event |= {"got": fast_clock(), "status": reply.status, "body": reply.body.decode()}
        if reply.status in (200, 201):
            grant = decode_grant(reply)
            assert grant is not None
            assert grant.expires_at is not None
            event["fence"] = grant.fencing_token
            event["expires"] = round(grant.expires_at.timestamp() * 1_000)
        tell(event)
        return event

    while time.monotonic() < end and not os.path.exists(f"{log}.stop"):
        key, token = chance.choice(["a", "b"]), str(uuid.UUID(int=chance.getrandbits(128)))
        if ask(Operation.ACQUIRE, key, token, 5)["status"] != 201:
            time.sleep(chance.random() / 500)
            continue
        if chance.random() < 0.3:
            ask(Operation.RENEW, key, token, chance.choice([5, 8]))
        if chance.random() < 0.7:
            ask(Operation.RELEASE, key, token)


if __name__ == "__main__":
    main(*sys.argv[1:])
