"""The local lock service without a socket: the transport behind ``VOLCANO_API_URL=local:PATH``.

The law of this module: the HTTP message of the client becomes a call, and nothing of the contract is
cut short: the same routes, headers, bodies and codes as over the network.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from volcano_locks._http import httpx

from ..contract import QUOTA_PER_MINUTE
from ..errors import ConfigurationError
from .service import LockService, wall_milliseconds
from .store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..clock import Clock
    from ..contract import Reply

__all__ = [
    "LocalTransport",
    "default_path",
    "name_service",
    "named_service",
    "open_local",
    "respond",
]

_named: dict[str, tuple[Any, Clock]] = {}
"""By URL ``local:@NAME``: transports that tests made for this process, each with its clock."""


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


def open_local(url: str) -> LocalTransport:
    """The transport for ``local:`` (a file of this user) or ``local:PATH`` (relative to here).

    Raises ConfigurationError for another URL.
    """
    scheme, colon, path = url.partition(":")
    if scheme.lower() != "local" or not colon or path.startswith("//"):
        raise ConfigurationError(
            f"{url!r} is no local lock service: write local: or local:PATH, as in local:./locks.db"
        )
    if not path:
        own = default_path()
        try:
            own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"the folder {own.parent} of the local lock store cannot be made "
                f"({error.strerror}): set VOLCANO_API_URL=local:PATH to a file elsewhere"
            ) from error
        path = str(own)
    # Absolute from now on: a process that changes its directory keeps its locks.
    return LocalTransport(os.path.abspath(os.path.expanduser(path)))


def name_service(url: str, transport: Any, clock: Clock) -> Callable[[], None]:
    """Let clients of this process reach a transport by ``local:@NAME``; returns what ends that."""
    _named[url] = (transport, clock)
    return lambda: _forget(url)


def named_service(url: str) -> tuple[Any, Clock]:
    """The transport and the clock behind ``local:@NAME``; ConfigurationError if there is none."""
    try:
        return _named[url]
    except KeyError:
        raise ConfigurationError(
            f"{url} is a service of a test that is over, or of another process; "
            "a file is named without the @: local:PATH"
        ) from None


def default_path() -> Path:
    """The store of ``local:`` alone: one per user, in the place where the system keeps state."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base or Path.home() / "AppData" / "Local") / "volcano-locks" / "locks.sqlite3"
    base = os.environ.get("XDG_STATE_HOME")
    root = Path(base) if base and os.path.isabs(base) else Path.home() / ".local" / "state"
    return root / "volcano-locks" / "locks.sqlite3"


def _forget(url: str) -> None:
    _named.pop(url, None)


def respond(reply: Reply) -> httpx.Response:
    """The reply as httpx has it."""
    headers = {"Content-Type": "application/json"} if reply.body else {}
    if reply.retry_after is not None:
        headers["Retry-After"] = reply.retry_after
    return httpx.Response(reply.status, headers=headers, content=reply.body)
