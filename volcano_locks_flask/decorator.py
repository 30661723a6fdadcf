"""``@leader_only``: a function of a Flask application that one process runs at a time.

The law of this module: the body never runs without its lock. What cannot be guarded is refused when
it is decorated, and what can be seen only later (a group's callback, a body that hands its work back
as a coroutine or a generator) is refused before or instead of a silent, unguarded success. How a lock
is taken, lost and left is decided by ``volcano_locks.command`` and ``LockClient``.

One function, two uses. click passes all lock options, always: with them it is a command, which
speaks by messages and exit codes. Without them it is a function, which returns a LockResult.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import click
from flask import current_app, has_app_context
from flask.cli import with_appcontext

from volcano_locks.command import (
    OPTIONS,
    CommandEnded,
    KeyTemplate,
    LeaderOptions,
    Terminated,
    run_leader_only,
)
from volcano_locks.errors import ConfigurationError, InvalidRequest, LockHeld
from volcano_locks.models import LockResult

from .cli import ended, lock_options, terminated, usage
from .database import database_waits, drop_dead_connections, refuse_open_transaction
from .extension import application, lock_client

if TYPE_CHECKING:
    from flask import Flask

    from volcano_locks.client import Hold, LockClient

__all__ = ["leader_only"]

Params = ParamSpec("Params")
T = TypeVar("T")

_FLAGS = frozenset(option.flag for option in OPTIONS)
_DESTS = frozenset(option.dest for option in OPTIONS)
_LEASE = "lease"


def leader_only(
    key: str,
    *,
    ttl: int | None = None,
    wait: float | None = 0,
    if_held: Literal["skip", "fail"] | None = None,
    min_hold: float = 0,
) -> Callable[[Callable[..., T]], Callable[..., LockResult[T]]]:
    """Let one process at a time run the function; a parameter named ``lease`` gets the live hold.

    ``key``: the lock; ``"billing.{tenant}"`` is filled from the function's parameters. ``ttl``:
    seconds, None for the settings' TTL. ``wait``: seconds to wait for a held lock, None for ever.
    ``min_hold``: seconds from the start in which no other may start.

    Under ``@app.cli.command()`` these are defaults of options that the command gets (``--lock-ttl``
    and so on). A held lock ends it with exit code 0 (``if_held="skip"``) or 75 (``"fail"``; None: skip,
    or fail after a wait that ran out), a lost lease with 76. In the main thread SIGTERM and SIGHUP
    release and exit (143, 129), and a lost lease raises LeaseLost in the running body.

    Called as a function, it returns ``LockResult(acquired, value)``; a held lock is no error, but for
    ``if_held="fail"``, which raises LockHeld. Call ``lease.check()`` before writes: nothing interrupts
    a function. Outside of an application context it runs in that of the process's only app.

    An async body is run to its end, and cancelled if the lease is lost. Raises TypeError or
    ConfigurationError, when it decorates, for what it cannot guard.
    """
    if not isinstance(key, str):
        raise TypeError('write @leader_only("key"): it takes the key of the lock')
    template = KeyTemplate(key)
    try:
        options = LeaderOptions(wait, if_held, ttl, min_hold)
    except InvalidRequest as error:
        raise ConfigurationError(f"leader_only({key!r}): {error}") from None

    def decorate(function: Callable[..., T]) -> Callable[..., LockResult[T]]:
        signature = _check(function, template)
        work = _Work(function, signature, template)

        @functools.wraps(function)
        def led(*args: Any, **kwargs: Any) -> Any:
            kwargs = _dropped_options(led, options) | kwargs
            if kwargs.keys() >= _DESTS:
                return with_appcontext(work.as_command)(*args, **kwargs)
            return work.as_function(options, args, kwargs)

        visible = [p for name, p in signature.parameters.items() if name != _LEASE]
        led.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
        led._leader_only = True  # type: ignore[attr-defined]
        # click shows the parameters of this list from its end.
        led.__click_params__ = [  # type: ignore[attr-defined]
            *reversed(lock_options(options)),
            *getattr(function, "__click_params__", ()),
        ]
        return led

    return decorate


def _dropped_options(led: Callable[..., Any], options: LeaderOptions) -> dict[str, Any]:
    """The lock's options of the click command that runs ``led``, if a wrapper did not pass them on.

    Without them the command would run as a plain function, and be silent about a held lock.
    """
    context = click.get_current_context(silent=True)
    callback: Any = None if context is None else context.command.callback
    while callback is not None and callback is not led:
        callback = getattr(callback, "__wrapped__", None)
    if context is None or callback is None:
        return {}
    defaults = {option.dest: getattr(options, option.field) for option in OPTIONS}
    return {dest: context.params.get(dest, default) for dest, default in defaults.items()}


# -- what can be guarded -------------------------------------------------------------------------


def _check(function: object, template: KeyTemplate) -> inspect.Signature:
    where = f"leader_only({template.text!r})"
    if isinstance(function, click.Command):
        raise TypeError(
            f"{where} is above @...command(), where the command {function.name!r} is made already, "
            "unguarded: put it beneath, next to the function"
        )
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(f"{where}: put it beneath @{type(function).__name__}")
    if not (inspect.isroutine(function) or isinstance(function, functools.partial)):
        raise TypeError(
            f"{where} cannot guard this {type(function).__name__}: put it next to the function, "
            "beneath what makes a task or a job of it"
        )
    inner = inspect.unwrap(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise TypeError(f"{where}: a generator's body would run after the lock is released")
    if hasattr(function, "_leader_only"):
        raise TypeError(f"{where}: the function is leader-only already; one lock guards one body")
    if _is_scheduled(function):
        raise TypeError(
            f"{where} is above the scheduler's decorator, which has scheduled the function already, "
            "unguarded: put it beneath, next to the function"
        )
    for parameter in getattr(function, "__click_params__", ()):
        taken = _FLAGS.intersection(parameter.opts) or _DESTS.intersection({parameter.name})
        if taken or parameter.name == _LEASE:
            raise TypeError(
                f"{where}: the command's own {parameter.human_readable_name!r} takes the name of "
                "what leader_only adds; rename it"
            )
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise TypeError(f"{where}: {function!r} does not tell its parameters") from None
    lease = signature.parameters.get(_LEASE)
    if lease is not None and lease.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise TypeError(f"{where}: lease is given by name, it cannot be positional-only")
    names = signature.parameters.keys() - {_LEASE}
    unknown = [name for name in template.fields if name not in names]
    if unknown and not _takes_any(signature):
        raise ConfigurationError(
            f"{where}: the function has no parameter {unknown[0]!r} to fill the key from"
        )
    return signature


def _is_scheduled(function: object) -> bool:
    """Whether an APScheduler job runs this very function: its decorators return it unchanged."""
    jobs = sys.modules.get("apscheduler.job")
    return jobs is not None and any(
        isinstance(referrer, jobs.Job) and referrer.func is function
        for referrer in gc.get_referrers(function)
    )


def _takes_any(signature: inspect.Signature) -> bool:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


# -- one run -------------------------------------------------------------------------------------


class _Work:
    """The function with what is known about it since it was decorated."""

    def __init__(
        self, function: Callable[..., Any], signature: inspect.Signature, template: KeyTemplate
    ) -> None:
        self._function = function
        self._signature = signature
        self._template = template
        self._gives_lease = _LEASE in signature.parameters or _takes_any(signature)
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(function))

    def as_command(self, *args: Any, **kwargs: Any) -> Any:
        context = click.get_current_context()
        if isinstance(context.command, click.Group):
            raise usage(
                f"{context.command.name!r} is a group: its lock would be free again before the "
                "command runs. Put leader_only on the commands"
            )
        given = {option.field: kwargs.pop(option.dest) for option in OPTIONS}
        app = _current()
        led = False

        def leading(hold: Hold) -> Any:
            nonlocal led
            led = True
            drop_dead_connections(app)
            return self._run(hold, args, kwargs)

        def client() -> LockClient:
            refuse_open_transaction(app)
            return lock_client(app)

        try:
            with database_waits(app) as interrupt:
                return run_leader_only(
                    client,
                    lambda: self._template.fill(kwargs),
                    LeaderOptions(**given),
                    leading,
                    say=click.echo,
                    interrupts=[interrupt],
                )
        except CommandEnded as end:
            typed_wrong = isinstance(end.__cause__, InvalidRequest) and not led
            raise ended(end, usage_error=typed_wrong) from end.__cause__
        except InvalidRequest as error:
            raise usage(f"not run: {error}") from error
        except Terminated as end:
            terminated(end)
            raise

    def as_function(
        self, options: LeaderOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LockResult[Any]:
        app = application()
        with contextlib.nullcontext() if has_app_context() else app.app_context():
            key = self._template.fill(self._arguments(args, kwargs))
            refuse_open_transaction(app)

            def leading(hold: Hold) -> Any:
                drop_dead_connections(app)
                return self._run(hold, args, kwargs)

            result = lock_client(app).with_lock(
                key, leading, ttl=options.ttl, wait=options.wait, min_hold=options.min_hold
            )
        if not result.acquired and options.if_held == "fail":
            raise LockHeld(key)
        return result

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The parameters by name, defaults too. Raises TypeError for a call that cannot be right."""
        given = dict.fromkeys([_LEASE] if _LEASE in self._signature.parameters else [])
        bound = self._signature.bind(*args, **kwargs, **given)
        bound.apply_defaults()
        return {**bound.arguments, **kwargs}

    def _run(self, hold: Hold, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._gives_lease:
            kwargs = {**kwargs, _LEASE: hold}
        if self._is_async:
            return _run_async(hold, functools.partial(self._function, *args, **kwargs))
        value = self._function(*args, **kwargs)
        if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
            if inspect.iscoroutine(value):
                value.close()
            raise ConfigurationError(
                f"{self._function!r} returned a {type(value).__name__}, whose work would be done "
                "after the lock is released: do it in the body"
            )
        return value


def _current() -> Flask:
    return current_app._get_current_object()  # type: ignore[attr-defined, no-any-return]


def _run_async(hold: Hold, body: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the body in a loop of its own, in this thread: click's and Flask's contexts go along."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_until_lost(hold, body))
    raise ConfigurationError(
        "an event loop runs in this thread already; in async code use AsyncLockClient.leader_only"
    )


async def _until_lost(hold: Hold, body: Callable[[], Coroutine[Any, Any, T]]) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(body())

    def watch() -> None:
        if hold.wait_lost():
            with contextlib.suppress(RuntimeError):  # the loop is closed: the body was over before
                loop.call_soon_threadsafe(task.cancel)

    threading.Thread(target=watch, name=f"lease-watch {hold.key}", daemon=True).start()
    try:
        return await task
    except asyncio.CancelledError:
        hold.check()
        raise
