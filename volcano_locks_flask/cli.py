"""The clothes of click on ``volcano_locks.command``, and ``flask volcano-locks``.

The law of this module: it decides nothing about locks. It turns options, messages and exit codes into
click's, on the stream where they belong: what happened as planned on standard output, everything
else on standard error.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import click
from flask import current_app
from flask.cli import AppGroup

from volcano_locks.command import OPTIONS, CommandEnded, force_release, status
from volcano_locks.errors import InvalidRequest

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from volcano_locks.client import LockClient
    from volcano_locks.command import CommandOption, LeaderOptions, Terminated

__all__ = ["ended", "lock_options", "locks_group", "terminated", "usage"]


class _Ended(click.ClickException):
    """A command's end with words and an exit code of its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click says that it may be set


class _Usage(click.UsageError):
    """click's usage error, with the exit code of sysexits.h."""

    exit_code = InvalidRequest.exit_code


class _BadParameter(click.BadParameter):
    exit_code = InvalidRequest.exit_code


def ended(end: CommandEnded, *, usage_error: bool = False) -> click.ClickException:
    """click's error for this end; with the command's usage line if the person typed it wrong."""
    if usage_error:
        return usage(str(end))
    return _Ended(str(end), end.exit_code)


def usage(message: str) -> click.UsageError:
    return _Usage(message, click.get_current_context(silent=True))


def terminated(end: Terminated) -> None:
    """Say on standard error which signal ended the command."""
    click.echo(f"stopped by {signal.Signals(end.signum).name}", err=True)


# -- options -------------------------------------------------------------------------------------


class _OptionType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    def __init__(self, option: CommandOption) -> None:
        self.name = option.dest
        self._option = option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._option.parse(value)
        except InvalidRequest as error:
            raise _BadParameter(str(error), ctx, param) from error

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        choices = self._option.choices or ()
        return [CompletionItem(choice) for choice in choices if choice.startswith(incomplete)]


def lock_options(defaults: LeaderOptions) -> list[click.Option]:
    """The options of every leader-only command, with these defaults."""
    shown = {"wait": "forever" if defaults.wait is None else f"{defaults.wait:g}"}
    return [
        click.Option(
            [option.flag],
            type=_OptionType(option),
            default=getattr(defaults, option.field),
            show_default=shown.get(option.field, True),
            metavar=f"[{'|'.join(option.choices)}]" if option.choices else option.metavar,
            help=option.help,
        )
        for option in OPTIONS
    ]


# -- flask volcano-locks -------------------------------------------------------------------------


def _client() -> LockClient:
    from .extension import lock_client

    return lock_client(current_app._get_current_object())  # type: ignore[attr-defined]


locks_group = AppGroup(
    "volcano-locks", help="Look at project locks, or release one by force.", no_args_is_help=True
)


@locks_group.command("status")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
def _status(keys: tuple[str, ...]) -> None:
    """Say who holds each lock, and until when."""
    try:
        status(_client, keys, say=click.echo)
    except CommandEnded as end:
        raise ended(end) from end.__cause__


@locks_group.command("force-release")
@click.argument("key", metavar="KEY")
@click.option("--yes", is_flag=True, help="Do not ask.")
def _force_release(key: str, yes: bool) -> None:
    """Free a lock, whoever holds it.

    The old holder works on until its next renewal fails: only the fence protects from it then.
    """
    try:
        force_release(_client, key, confirm=lambda question: yes or _asks(question), say=click.echo)
    except CommandEnded as end:
        raise ended(end) from end.__cause__


def _asks(question: str) -> bool:
    try:
        return click.confirm(question)
    except click.Abort as abort:
        if isinstance(abort.__context__, EOFError):
            raise _Ended("nobody to ask: use --yes", InvalidRequest.exit_code) from None
        raise
