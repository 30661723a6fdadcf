"""The one module that imports the HTTP library; nothing else does.

``VOLCANO_LOCKS_HTTP=httpx2`` (extra ``httpx2``) chooses httpx's API-compatible successor; the whole
suite passes on it. What an exception of the library means to a lease is decided here: whether the
request can have reached the service.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.request import proxy_bypass

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

__all__ = ["httpx", "open_pool", "surely_unsent"]

P = TypeVar("P")

_MAX_CONNECTIONS: Final = 100


class _Borrowed(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A caller's transport, which is the caller's to close."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._transport.handle_request(request)  # type: ignore[no-any-return]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._transport.handle_async_request(request)  # type: ignore[no-any-return]


def open_pool(
    kind: type[P], *, host: str, timeout: float, trust_env: bool, transport: Any, borrowed: bool
) -> P:
    """An ``httpx.Client`` or ``httpx.AsyncClient``: explicit timeouts, and no redirects, so that the
    credential goes to the configured origin only. Raises ConfigurationError for a proxy that cannot
    be used.
    """
    limits = httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=20)
    if borrowed:
        transport = _Borrowed(transport)
    elif transport is None and trust_env and proxy_bypass(host):
        # A pool with a transport of its own asks for no proxy; the library alone would build every
        # proxy first, and fail for one that this host does not use.
        direct = (
            httpx.AsyncHTTPTransport if issubclass(kind, httpx.AsyncClient) else httpx.HTTPTransport
        )
        transport = direct(trust_env=True, limits=limits)
    options: dict[str, Any] = {
        "timeout": httpx.Timeout(timeout),
        "follow_redirects": False,
        "trust_env": trust_env,
        "transport": transport,
        "limits": limits,
    }
    try:
        return kind(**options)
    except OSError as error:
        raise ConfigurationError(
            f"the certificates of SSL_CERT_FILE or SSL_CERT_DIR cannot be read ({error}); mend the "
            "variable, or unset it"
        ) from error
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used ({error}); mend it, "
            "install what it needs (a SOCKS proxy: pip install 'httpx[socks]'), name the service in "
            "NO_PROXY, or ignore proxies with VOLCANO_LOCKS_TRUST_ENV=false"
        ) from error


def surely_unsent(error: Exception) -> bool:
    """Whether the request cannot have reached the service, so that no lease can be left behind."""
    return isinstance(
        error,
        (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol),
    )
