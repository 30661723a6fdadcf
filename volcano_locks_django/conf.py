"""Django's settings become a client: ``settings.VOLCANO_LOCKS`` over the environment over ``.env``.

The law of this module: one client per process and settings value, made on first use, never at
import; a changed setting (tests) makes a new one.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.signals import setting_changed

from volcano_locks import ConfigurationError

if TYPE_CHECKING:
    from volcano_locks import LockClient, LockSettings

__all__ = ["lock_client", "lock_settings"]

_guard = threading.Lock()
_client: LockClient | None = None


def lock_settings() -> LockSettings:
    """The settings as they are now. Raises ConfigurationError, which names the setting."""
    explicit = getattr(settings, "VOLCANO_LOCKS", None)
    if explicit is not None and not isinstance(explicit, Mapping):
        raise ConfigurationError(
            f"settings.VOLCANO_LOCKS is a {type(explicit).__name__}; write a dict such as "
            '{"API_URL": "local:", "TTL": 60}'
        )
    from volcano_locks import LockSettings  # pydantic: not for manage.py help

    return LockSettings.load(explicit)


def lock_client() -> LockClient:
    """The client of this process, shared by all threads. Raises ConfigurationError."""
    global _client
    with _guard:
        if _client is None:
            from volcano_locks import LockClient

            _client = LockClient.from_settings(lock_settings())
        return _client


def _close() -> None:
    global _client
    with _guard:
        client, _client = _client, None
    if client is not None:
        client.close()


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "VOLCANO_LOCKS":
        _close()


setting_changed.connect(_forget, dispatch_uid="volcano_locks_django.conf")
atexit.register(_close)
