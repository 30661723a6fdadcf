"""One lock client per Flask application.

The law of this module: an app's configuration becomes its client when the client is first used, once
per app, and nowhere else; nothing is read or sent when an app is made. Work outside of an application
context belongs to the process's only app, and to none if there are several: a guess could take the
lock of another project.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from flask import Flask, current_app, has_app_context

from volcano_locks.client import LockClient
from volcano_locks.errors import ConfigurationError
from volcano_locks.settings import LockSettings

from .cli import locks_group

__all__ = ["VolcanoLocks", "application", "lock_client"]

NAME: Final = "volcano_locks"
"""The key in ``app.extensions``."""
CONFIG: Final = "VOLCANO_LOCKS"
"""The key in ``app.config``: a mapping of settings, such as ``{"API_URL": "local:", "TTL": 60}``."""

ClientFactory: TypeAlias = Callable[[LockSettings], LockClient]

_apps: weakref.WeakSet[Flask] = weakref.WeakSet()


class VolcanoLocks:
    """The extension: ``VolcanoLocks(app)``, or ``init_app(app)`` in an application factory.

    Configuration: ``app.config["VOLCANO_LOCKS"]`` over the environment over ``.env``, read when a lock
    is first asked for. ``client_factory`` makes the client from these settings, once per app; without
    it, that is ``LockClient.from_settings``. Adds the commands of ``flask volcano-locks``.
    """

    def __init__(
        self, app: Flask | None = None, *, client_factory: ClientFactory | None = None
    ) -> None:
        self._factory = client_factory
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Register this extension on the app. Raises ConfigurationError if one is registered."""
        if NAME in app.extensions:
            raise ConfigurationError(
                f"app {app.name!r} has a VolcanoLocks already, with a client of its own. Use that one "
                "everywhere: make it once, in a module of its own, and call its init_app(app) once "
                "for each app"
            )
        app.extensions[NAME] = _AppLocks(self._factory)
        app.cli.add_command(locks_group)
        _apps.add(app)

    @property
    def client(self) -> LockClient:
        """The client of the current app, shared by all its threads; the app closes it, not you.

        Raises ConfigurationError for settings that cannot work, RuntimeError outside of an
        application context.
        """
        return lock_client(current_app._get_current_object())  # type: ignore[attr-defined]


class _AppLocks:
    """What this extension keeps for one app."""

    def __init__(self, factory: ClientFactory | None) -> None:
        self._factory: ClientFactory = factory or LockClient.from_settings
        self._made: dict[str, LockClient] = {}

    def client(self, app: Flask) -> LockClient:
        # setdefault is atomic: a lock could be found taken by a forked worker.
        client = self._made.get(NAME)
        if client is None:
            mine = self._factory(app_settings(app))
            client = self._made.setdefault(NAME, mine)
            if client is mine:
                weakref.finalize(app, mine.close)
            else:
                mine.close()
        return client


def app_settings(app: Flask) -> LockSettings:
    """The settings of this app as they are now. Raises ConfigurationError, which names the setting."""
    explicit = app.config.get(CONFIG)
    if explicit is not None and not isinstance(explicit, Mapping):
        raise ConfigurationError(
            f"app.config[{CONFIG!r}] is a {type(explicit).__name__}; write a dict such as "
            '{"API_URL": "local:", "TTL": 60}'
        )
    return LockSettings.load(explicit)


def lock_client(app: Flask) -> LockClient:
    """The client of this app. Raises ConfigurationError."""
    state = app.extensions.get(NAME)
    if state is None:
        raise ConfigurationError(
            f"app {app.name!r} has no VolcanoLocks: call VolcanoLocks(app), or init_app(app) of yours "
            "where the app is made"
        )
    client: LockClient = state.client(app)
    return client


def application() -> Flask:
    """The current app, or the process's only one. Raises ConfigurationError if that is not certain."""
    if has_app_context():
        return current_app._get_current_object()  # type: ignore[attr-defined, no-any-return]
    apps = list(_apps)
    if len(apps) == 1:
        return apps[0]
    have = "no app with a VolcanoLocks" if not apps else f"{len(apps)} apps with a VolcanoLocks"
    raise ConfigurationError(
        f"there is no application context, and {have} in this process, so it is not certain whose "
        "lock this is: call it inside `with app.app_context():`"
    )
