"""The command ``volcano-locks``.

The law of this module: words of the command line become calls, errors become one line and the exit
code that they carry. It decides nothing about leases, and prints no secret.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from .contract import QUOTA_PER_MINUTE, is_loopback
from .errors import ConfigurationError, VolcanoLocksError
from .local.address import DEFAULT_KEY
from .models import Secret, check_service_key

try:
    import click
except ImportError:
    sys.exit("the command volcano-locks needs click: pip install 'volcano-locks[cli]'")

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .local.service import Credential

__all__ = ["main"]

_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - looked up, not listened on
"""By the address that means every one of this machine: the one under which its programs reach it."""


class _Group(click.Group):
    """Ends with the exit code of the error, and with 64 for a wrong command line (sysexits.h)."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _usage_ends_with_64():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _usage_ends_with_64():
                return super().invoke(ctx)
        except VolcanoLocksError as error:
            click.echo(f"volcano-locks: {error}", err=True)
            ctx.exit(error.exit_code)


@contextlib.contextmanager
def _usage_ends_with_64() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        error.exit_code = 64  # type: ignore[misc]
        raise


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="volcano-locks")
def main() -> None:
    """Leader-only work on the Volcano project-lock service."""


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=8787,
    show_default=True,
    type=click.IntRange(0, 65_535),
    help="Port; 0 picks a free one.",
)
@click.option(
    "--store",
    metavar="PATH|memory",
    help="Where leases are kept. By default the file that VOLCANO_API_URL=local: uses.",
)
@click.option(
    "--service-key",
    envvar="VOLCANO_LOCKS_SERVE_KEY",
    default=DEFAULT_KEY,
    help=f"Key of the project `local`; also VOLCANO_LOCKS_SERVE_KEY. Default: {DEFAULT_KEY}.",
)
@click.option(
    "--project",
    "projects",
    multiple=True,
    metavar="NAME=KEY",
    help="A further project and its key. Repeatable; one project may have several keys.",
)
@click.option(
    "--powerless-key",
    "powerless",
    multiple=True,
    metavar="NAME=KEY",
    help="A key of project NAME without the permission locks.manage, to try the 403.",
)
@click.option(
    "--quota",
    default=QUOTA_PER_MINUTE,
    show_default=True,
    type=click.IntRange(1),
    help="Operations per project and minute.",
)
@click.option("--allow-remote", is_flag=True, help="Listen on another address than loopback.")
@click.option("--faults", is_flag=True, help="Open /_faults, which makes things fail on purpose.")
def serve(
    host: str,
    port: int,
    store: str | None,
    service_key: str,
    projects: tuple[str, ...],
    powerless: tuple[str, ...],
    quota: int,
    allow_remote: bool,
    faults: bool,
) -> None:
    """Run the local lock service: the same contract over HTTP, and a page that shows the locks.

    For other languages, and for several services in development. Stops on SIGTERM and Ctrl-C.
    """
    try:
        from .local.server import serve as run
        from .local.service import Credential, LockService
    except ImportError as error:
        raise ConfigurationError(
            f"volcano-locks serve needs {error.name}: pip install 'volcano-locks[cli,server]'"
        ) from error
    from .local.address import store_path
    from .local.faults import Faults
    from .local.service import DEFAULT_PROJECT, wall_milliseconds
    from .local.store import Store

    key = _key(service_key, "--service-key (or VOLCANO_LOCKS_SERVE_KEY)")
    if not host.strip():
        raise click.UsageError(
            "--host is empty: leave it out for this machine alone, or name an address"
        )
    remote = not is_loopback(host)
    if remote and not allow_remote:
        raise click.UsageError(
            f"{host} is none of localhost, 127.x.x.x and ::1: add --allow-remote to let other "
            "machines in"
        )
    credentials = [
        Credential(key, DEFAULT_PROJECT),
        *_credentials(projects, "--project", may_manage=True),
    ]
    known = {credential.project for credential in credentials}
    credentials += _credentials(powerless, "--powerless-key", may_manage=False)
    if any(credential.project not in known for credential in credentials):
        raise click.UsageError(
            f"--powerless-key names a project that nobody made: take {DEFAULT_PROJECT}, or add the "
            "project with --project"
        )
    _check_distinct(credentials)
    if remote and any(credential.key.reveal() == DEFAULT_KEY for credential in credentials):
        raise click.UsageError(
            "the default key is known to everybody: set VOLCANO_LOCKS_SERVE_KEY to a key of your own, and "
            "give none of the projects the default"
        )
    try:
        where = Store(None if store == "memory" else store_path(f"local:{store or ''}"))
        where.open()
    except ConfigurationError as error:
        text = str(error).replace("set VOLCANO_API_URL=local:PATH to", "set --store to")
        raise ConfigurationError(f"--store: {text}") from error
    planned = Faults() if faults else None
    clock = wall_milliseconds if planned is None else planned.shifted(wall_milliseconds)
    service = LockService(where, credentials=credentials, quota=quota, clock=clock)

    def ready(url: str) -> None:
        url, lines, elsewhere = _to_paste(url, key)
        click.echo("\n".join(lines))
        if elsewhere:
            click.echo(elsewhere, err=True)
        kept = "in memory, until this process ends" if where.path is None else f"in {where.path}"
        click.echo(f"# Locks are kept {kept}. See them at {url}/", err=True)
        if planned is not None:
            click.echo(f"# Faults can be planned at {url}/_faults: not for real work", err=True)

    run(service, host, port, faults=planned, ready=ready)


def _to_paste(url: str, key: Secret) -> tuple[str, list[str], str]:
    """The URL for this machine, lines for a shell or ``.env`` (both know ``export``), a remark for others.

    No line shows a key that somebody chose.
    """
    parts = urlsplit(url)
    host, elsewhere = parts.hostname or "", ""
    if host in _LOOPBACK:
        url = f"http://{_LOOPBACK[host]}:{parts.port}"
        elsewhere = (
            "# From other machines, with the name of this one for HOST, and unencrypted: "
            f"VOLCANO_API_URL=http://HOST:{parts.port} VOLCANO_LOCKS_ALLOW_HTTP=HOST"
        )
    lines = [f"export VOLCANO_API_URL={url}"]
    if key.reveal() == DEFAULT_KEY:
        lines.append(f"export VOLCANO_SERVICE_KEY={DEFAULT_KEY}")
    else:
        lines.append("# VOLCANO_SERVICE_KEY: the key that you gave")
    if not is_loopback(host) and not elsewhere:
        lines.append(f"export VOLCANO_LOCKS_ALLOW_HTTP={host}")
    return url, lines, elsewhere


def _key(text: str, option: str) -> Secret:
    try:
        return check_service_key(text)
    except ConfigurationError as error:
        # The text is not repeated, and the error names a setting that serve does not read.
        raise ConfigurationError(
            f"what {option} gives is no service key: take one word such as sk-mine, of visible "
            "ASCII characters and without quotes, and no anon key (ak-...)"
        ) from error


def _credentials(pairs: Sequence[str], option: str, *, may_manage: bool) -> list[Credential]:
    from .local.service import Credential

    found = []
    for pair in pairs:
        name, equals, key = pair.partition("=")
        if not equals or not name.strip() or not name.isprintable():
            # The text is not repeated: it may be a key. What cannot be printed cannot be stored either.
            raise click.UsageError(f"{option} is given as NAME=KEY, NAME of printable characters")
        found.append(Credential(_key(key, f"{option} NAME=KEY"), name.strip(), may_manage))
    return found


def _check_distinct(credentials: Sequence[Credential]) -> None:
    keys = {credential.key.reveal() for credential in credentials}
    if len(keys) != len(credentials):
        raise click.UsageError(
            "--service-key, --project and --powerless-key give the same key twice: each key opens "
            "exactly one project"
        )
