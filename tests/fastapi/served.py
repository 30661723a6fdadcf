"""An application for real servers. What happens in its processes is appended to one file."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.applications import Starlette

from volcano_locks import AsyncHold, AsyncLockClient, Policy
from volcano_locks.fastapi import leader_lifespan
from volcano_locks.local import store

store.PATIENCE = 60  # no test is about a slow disk
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")


def note(event: str, **details: Any) -> None:
    line = {"event": event, "pid": os.getpid(), "ppid": os.getppid(), "at": time.time(), **details}
    with open(os.environ["JOURNAL"], "ab", buffering=0) as journal:
        journal.write(json.dumps(line).encode() + b"\n")  # one write: lines stay whole


@asynccontextmanager
async def own(app: Starlette) -> AsyncIterator[None]:
    note("serves")
    yield
    note("leaves")


async def singleton(lease: AsyncHold) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    note("leads", token=lease.fencing_token, sigterm=getattr(handler, "__qualname__", None))
    try:
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.1)  # winding down takes a while; nobody else may lead meanwhile
            note("stops", lost=lease.lost)


# At module level: made before a fork, used in several processes.
client = AsyncLockClient.from_settings(policy=Policy(poll_interval=0.5))
# Starlette, because processes start twice as fast without pydantic's schemas; the sample is FastAPI.
app = Starlette(lifespan=leader_lifespan(singleton, key="job", client=client, lifespan=own))
