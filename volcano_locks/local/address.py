"""What a ``local:`` URL names: a store file, or a service that a test made in this process; and the key
that opens the served form unless it is given another.

The law of this module: it reads names and opens nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..clock import Clock

__all__ = ["DEFAULT_KEY", "default_path", "name_service", "named_service", "store_path"]

DEFAULT_KEY: Final = "sk-local-development"
"""For development at one machine: everybody knows it."""

_named: dict[str, tuple[Any, Clock]] = {}
"""By URL ``local:@NAME``: transports that tests made for this process, each with its clock."""


def store_path(url: str) -> str:
    """The store file of ``local:`` (one per user, its folder is made) or ``local:PATH`` (relative to here).

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
    return os.path.abspath(os.path.expanduser(path))


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
