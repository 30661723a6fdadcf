"""The local lock service as an httpx transport: no socket, for tests and tools that speak HTTP.

The law of this module: the HTTP message of the client becomes a call, and nothing of the contract is
cut short: the same routes, headers, bodies and codes as over the network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio.to_thread

from volcano_locks._http import httpx

from ..contract import QUOTA_PER_MINUTE
from .service import LockService, wall_milliseconds
from .store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..contract import Reply

__all__ = ["LocalTransport", "respond"]


class LocalTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """An httpx transport, sync and async, that answers from a store file, or from memory for None.

    ``clock``: milliseconds since 1970. Nothing is opened before the first request, which raises
    ConfigurationError if the file cannot serve. It survives ``close()`` and ``fork``: the next
    request opens the file again.
    """

    def __init__(
        self,
        path: str | None,
        *,
        clock: Callable[[], int] = wall_milliseconds,
        quota: int = QUOTA_PER_MINUTE,
    ) -> None:
        self.store = Store(path)
        self.service = LockService(self.store, clock=clock, quota=quota)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._answer(request, request.read())

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        if self.store.path is None:
            return self._answer(request, body)
        # A file may wait for the disk and for other processes: not on the event loop.
        return await anyio.to_thread.run_sync(self._answer, request, body)

    def close(self) -> None:
        self.store.close()

    async def aclose(self) -> None:
        self.store.close()

    def _answer(self, request: httpx.Request, body: bytes) -> httpx.Response:
        # httpx keeps header names in lower case for its own lookups; so does the service.
        headers = dict(request.headers)
        return respond(self.service.reply(request.method, request.url.path, headers, body))


def respond(reply: Reply) -> httpx.Response:
    """The reply as httpx has it."""
    headers = {"Content-Type": "application/json"} if reply.body else {}
    if reply.retry_after is not None:
        headers["Retry-After"] = reply.retry_after
    return httpx.Response(reply.status, headers=headers, content=reply.body)
