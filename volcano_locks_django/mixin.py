"""Leader-only management commands.

The law of this module: whatever a class with ``LeaderOnlyMixin`` does in ``execute`` and ``handle``
it does under its lock, or the class is refused when it is made. The order of its bases and the
methods that a subclass overrides make no difference: every class in the line gets its methods
wrapped, and the outermost call takes the lock once. How a lock is taken, lost and left is decided
by ``volcano_locks.command``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from django.apps import apps
from django.core.management.base import CommandError, OutputWrapper
from django.db import Error as DatabaseClosed
from django.db import connections

from volcano_locks import ConfigurationError, Hold, InvalidRequest, VolcanoLocksError
from volcano_locks.command import (
    OPTIONS,
    CommandEnded,
    KeyTemplate,
    LeaderOptions,
    run_leader_only,
)

from .conf import lock_client
from .interrupt import database_waits
from .signals import lease_acquired, lease_lost, lease_released

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

    from volcano_locks import LockClient

__all__ = ["LeaderOnlyMixin"]


@dataclass(frozen=True)
class _Run:
    """A command that runs under its lock, with the key and the options that it was filled from."""

    command: object
    hold: Hold
    key: str
    options: Mapping[str, Any]


_leading: ContextVar[tuple[_Run, ...]] = ContextVar("leading", default=())
"""The runs whose lock this thread holds. A new thread holds none."""


class LeaderOnlyMixin:
    """Makes a ``BaseCommand`` run on one machine at a time; ``handle`` gets the live ``lease``.

    ``lock_key``: the lock, None for ``"<app>.<command>"``; ``"billing.{tenant}"`` is filled from the
    command's options. ``lock_ttl``: seconds, None for the settings' TTL. ``lock_wait``: seconds to
    wait for a held lock, None for ever. ``if_held``: "skip" (exit 0) or "fail" (exit 75); None
    means skip, or fail after a wait that ran out. ``lock_min_hold``: seconds from the start in which
    no other may start. Each but the key can be given as an option: ``--lock-ttl`` and so on.

    Ends with CommandError, whose ``returncode`` is the exit code and whose ``__cause__`` is the
    volcano_locks error. In the main thread SIGTERM and SIGHUP release and exit (143, 129), and a
    lost lease raises LeaseLost in the running body; in other threads call ``lease.check()``.
    """

    lock_key: ClassVar[str | None] = None
    lock_ttl: ClassVar[int | None] = None
    lock_wait: ClassVar[float | None] = 0
    if_held: ClassVar[Literal["skip", "fail"] | None] = None
    lock_min_hold: ClassVar[float] = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _guard(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Again, since a base with an __init_subclass__ of its own, or a later assignment to the
        # class, may have put an unguarded method in front.
        _guard(cls)
        return super().__new__(cls)

    def get_lock_client(self) -> LockClient:
        """The client that this command asks: the one of the settings. Override it for another."""
        return lock_client()


_ABSENT = object()


# -- the class -----------------------------------------------------------------------------------


def _guard(cls: type[LeaderOnlyMixin]) -> None:
    """Wrap what ``cls`` inherits or defines, where that is not wrapped yet. Raises TypeError or
    ConfigurationError for a class that cannot be guarded."""
    if isinstance(cls.lock_key, str):
        KeyTemplate(cls.lock_key)
    try:
        LeaderOptions(cls.lock_wait, cls.if_held, cls.lock_ttl, cls.lock_min_hold)
    except InvalidRequest as error:
        raise ConfigurationError(f"{cls.__module__}.{cls.__qualname__}: {error}") from None
    for name, wrap in _WRAPPERS.items():
        method = inspect.getattr_static(cls, name, _ABSENT)
        # By identity: functools.wraps copies the mark to a decorator that works outside the lock.
        if method is _ABSENT or getattr(method, "_leader_only", _ABSENT) is method:
            continue
        _check_method(cls, name, method)
        if name not in vars(cls):
            method = _inherited(cls, name, method)
        guarded: Any = wrap(method)
        guarded._leader_only = guarded
        setattr(cls, name, guarded)


def _check_method(cls: type, name: str, method: Any) -> None:
    where = f"{cls.__module__}.{cls.__qualname__}.{name}"
    if isinstance(method, (staticmethod, classmethod, property)) or not callable(method):
        raise TypeError(f"{where} is a {type(method).__name__}: a plain method can be leader-only")
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(
            f"{where} is async, and Django does not await it; call asyncio.run(work(lease)) in a "
            "plain handle()"
        )
    if inspect.isgeneratorfunction(method):
        raise TypeError(f"{where} is a generator: its body would run after the lock is released")
    if name == "handle":
        parameters = inspect.signature(method).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        if "lease" not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise TypeError(
                f"{where} takes no lease: write def handle(self, *args, lease, **options)"
            )


def _inherited(cls: type, name: str, method: Any) -> Callable[..., Any]:
    # By super(), not the function found: a later class may put another base in between.
    @functools.wraps(method)
    def inherited(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), name)(*args, **kwargs)

    return inherited


def _parser(create_parser: Callable[..., CommandParser]) -> Callable[..., CommandParser]:
    @functools.wraps(create_parser)
    def guarded(self: LeaderOnlyMixin, *args: Any, **kwargs: Any) -> CommandParser:
        parser = create_parser(self, *args, **kwargs)
        if _has_lease(parser):
            raise ConfigurationError(
                f"{type(self).__module__} has an option of its own that is stored as 'lease', the "
                "name under which handle() gets its live lease: give the option another dest"
            )
        if not hasattr(parser, "_leader_only"):
            parser._leader_only = True  # type: ignore[attr-defined]
            group = parser.add_argument_group("leader-only")
            # Kept as text: what is wrong with it is said with exit code 64 like all else here.
            for option in OPTIONS:
                group.add_argument(
                    option.flag,
                    metavar=option.metavar,
                    default=getattr(self, option.dest),
                    help=option.help,
                )
        return parser

    return guarded


def _has_lease(parser: argparse.ArgumentParser) -> bool:
    return any(
        action.dest == "lease"
        or (
            isinstance(action, argparse._SubParsersAction)
            and any(_has_lease(choice) for choice in action.choices.values())
        )
        for action in parser._actions
    )


# -- one run -------------------------------------------------------------------------------------


def _refuse(text: str) -> NoReturn:
    raise CommandError(f"not run: {text}", returncode=InvalidRequest.exit_code)


def _lease_of(command: Any, options: Mapping[str, Any]) -> Hold | None:
    """The live hold that this call runs under; None if it has to take the lock.

    Raises CommandError if what the caller gave is no such hold, or one of another lock.
    """
    lease = options.get("lease")
    if lease is not None and not isinstance(lease, Hold):
        _refuse(
            f"the lease given is {type(lease).__name__}, not the live hold of a lock client: leave "
            "it out, and the command takes its lock itself"
        )
    run = next((run for run in _leading.get() if run.command is command), None)
    try:
        if run is not None and lease in (None, run.hold):
            key = _key(command).fill({**run.options, **options})
            if key != run.key:
                _refuse(
                    f"the command runs under lock {run.key!r}, and calls itself with values that "
                    f"need lock {key!r}: use call_command(), which takes that lock, too"
                )
            return run.hold
        if lease is not None:
            lease.check()
            # The end of it: the hold's key begins with the prefix of its client.
            if command.lock_key and not lease.key.endswith(key := _key(command).fill(options)):
                _refuse(f"the lease given is one of lock {lease.key!r}, and this needs {key!r}")
    except VolcanoLocksError as error:
        raise CommandError(f"not run: {error}", returncode=error.exit_code) from error
    return lease


def _execute(execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        if _lease_of(self, options) is not None:
            return execute(self, *args, **options)
        if options.get("stdout"):
            self.stdout = OutputWrapper(options["stdout"])
        if options.get("stderr"):
            self.stderr = OutputWrapper(options["stderr"])
        return _lead(self, options, lambda hold: execute(self, *args, **options))

    return guarded


def _handle(handle: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handle)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        lease = _lease_of(self, options)
        options.pop("lease", None)
        if lease is None:  # called directly, not through execute
            return _lead(self, options, lambda hold: guarded(self, *args, lease=hold, **options))
        output = handle(self, *args, lease=lease, **options)
        if output is None or isinstance(output, str):
            return output
        if inspect.iscoroutine(output):
            output.close()
        raise CommandError(
            f"{type(self).__module__}: handle() returned {type(output).__name__}; Django prints what "
            "it returns, so return text or nothing (and await nothing: call asyncio.run in it)"
        )

    return guarded


_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "handle": _handle,
    "execute": _execute,
    "create_parser": _parser,
}


def _lead(command: Any, options: dict[str, Any], work: Callable[[Hold], Any]) -> Any:
    cls = type(command)
    led: list[Hold] = []

    def leading(hold: Hold) -> Any:
        led.append(hold)
        _drop_dead_connections()
        mark = _leading.set((*_leading.get(), _Run(command, hold, filled[0], options)))
        try:
            lease_acquired.send_robust(cls, command=command, lease=hold)
            return work(hold)
        finally:
            _leading.reset(mark)
            if hold.lost and not hold.released:
                lost.append(hold)

    lost: list[Hold] = []
    filled: list[str] = []

    def key() -> str:
        filled.append(_key(command).fill(options))
        return filled[0]

    def say(line: str) -> None:
        if int(options.get("verbosity", 1)) > 0:
            command.stdout.write(line)

    given = {
        option.field: options.get(option.dest, getattr(command, option.dest)) for option in OPTIONS
    }
    try:
        _refuse_transaction()
        with database_waits() as interrupt:
            return run_leader_only(
                command.get_lock_client,
                key,
                LeaderOptions(**given),
                leading,
                say=say,
                interrupts=[interrupt],
            )
    except CommandEnded as ended:
        raise CommandError(str(ended), returncode=ended.exit_code) from ended.__cause__
    except InvalidRequest as error:
        raise CommandError(f"not run: {error}", returncode=error.exit_code) from error
    finally:
        for hold in led:
            signal = lease_lost if lost else lease_released
            signal.send_robust(cls, command=command, lease=hold)


def _key(command: LeaderOnlyMixin) -> KeyTemplate:
    if command.lock_key is not None:
        return KeyTemplate(command.lock_key)
    module = type(command).__module__
    app = apps.get_containing_app_config(module)
    if app is None:
        raise ConfigurationError(
            f"{module} is in no installed app, so it has no default lock key: set lock_key on the "
            "command"
        )
    return KeyTemplate(f"{app.label}.{module.rpartition('.')[2]}")


def _drop_dead_connections() -> None:
    """The wait for the lock may have outlived an open connection: the body's first query works."""
    for connection in connections.all(initialized_only=True):
        if (
            connection.connection is not None
            and not connection.in_atomic_block  # TestCase's, and it stays
            and not connection.is_usable()
        ):
            with contextlib.suppress(DatabaseClosed):  # some drivers say that it is closed already
                connection.close()


def _refuse_transaction() -> None:
    for connection in connections.all(initialized_only=True):
        # The blocks of TestCase are no transaction of the application's.
        if not all(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks):
            raise InvalidRequest(
                f"called inside a transaction on {connection.alias!r}: the lock would be free again "
                "before the transaction commits, and the next leader would not see its writes. "
                "Call the command outside of atomic(), for example from transaction.on_commit()"
            )
