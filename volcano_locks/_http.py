"""The one module that imports the HTTP library; nothing else does.

``VOLCANO_LOCKS_HTTP=httpx2`` (extra ``httpx2``) chooses httpx's API-compatible successor; the whole
suite passes on it. What an exception of the library means to a lease is decided here: whether the
request can have reached the service.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Final

from .errors import ConfigurationError

if TYPE_CHECKING:
    import httpx
else:
    _library = os.environ.get("VOLCANO_LOCKS_HTTP") or "httpx"
    if _library not in {"httpx", "httpx2"}:
        raise ConfigurationError(
            f"VOLCANO_LOCKS_HTTP={_library!r}: httpx (the default) and httpx2 are possible"
        )
    httpx = importlib.import_module(_library)

__all__ = ["client_options", "httpx", "surely_unsent"]

_MAX_CONNECTIONS: Final = 100


def client_options(*, timeout: float, trust_env: bool, transport: Any) -> dict[str, Any]:
    """What both kinds of pooled client are built with: explicit timeouts, and no redirects, so that
    the credential goes to the configured origin only."""
    return {
        "timeout": httpx.Timeout(timeout),
        "follow_redirects": False,
        "trust_env": trust_env,
        "transport": transport,
        "limits": httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=20),
    }


def surely_unsent(error: Exception) -> bool:
    """Whether the request cannot have reached the service, so that no lease can be left behind."""
    return isinstance(
        error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
    )
