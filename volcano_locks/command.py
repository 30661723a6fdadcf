"""Leader-only commands, for any framework's command line.

The law of this module: one run of a command is one lease, and every way that it can end has its own
words and its own exit code. It knows no framework: Django's mixin, Flask's decorator and the general
command line put their own clothes on ``LeaderOptions``, ``KeyTemplate``, ``run_leader_only``,
``status`` and ``force_release``, and decide nothing themselves.

Signals. In the main thread, and only there, a run is interruptible: SIGTERM and SIGHUP raise
``Terminated`` and a lost lease raises ``LeaseLost``, in the acquisition and in the body and nowhere
else. "Nowhere else" is not a flag that could be set a moment too late: a handler looks at the stack
that it interrupted, and raises only where ``_Run._open`` is the innermost frame of ours. Everything
of ours that must not be torn apart (the release above all) runs outside that frame, and a signal
that arrives there is kept until it is done.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import selectors
import signal
import socket
import string
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from .errors import (
    ConfigurationError,
    FenceRejected,
    InvalidRequest,
    LeaseLost,
    LockHeld,
    OutcomeUnknown,
    VolcanoLocksError,
)
from .models import MAX_TTL, check_key, check_ttl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType

    from .client import Hold, LockClient
    from .models import LockState

__all__ = [
    "OPTIONS",
    "CommandEnded",
    "CommandOption",
    "KeyTemplate",
    "LeaderOptions",
    "Terminated",
    "force_release",
    "run_leader_only",
    "status",
]

log = logging.getLogger("volcano_locks.command")
T = TypeVar("T")


# -- the options and the key ---------------------------------------------------------------------


def _seconds(value: object, what: str, most: int) -> float:
    """Seconds from 0 to ``most``, from a number or from its text."""
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        seconds = float(value)
    except ValueError:
        raise InvalidRequest(f"{value!r} is no number of seconds for {what}") from None
    if not 0 <= seconds <= most:  # NaN is refused, too
        raise InvalidRequest(f"{what}: {value!r} is not from 0 to {most:,} seconds")
    return seconds


def _wait(value: object) -> float | None:
    if value is None or (isinstance(value, str) and value.strip().lower() == "forever"):
        return None
    return _seconds(value, "the wait (or 'forever')", MAX_TTL)


def _if_held(value: object) -> str | None:
    if value is None or value in ("skip", "fail"):
        return value
    raise InvalidRequest(f"{value!r} is no choice for a held lock: 'skip' or 'fail'")


def _ttl(value: object) -> int | None:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # check_ttl has the words
            value = int(value)
    return None if value is None else check_ttl(value)


def _min_hold(value: object) -> float:
    return _seconds(value, "the minimum hold", 86_400)


@dataclass(frozen=True)
class CommandOption:
    """One option of every leader-only command, in words that argparse and click share.

    ``parse`` takes the text (or a value that code passed) and gives the value, or raises
    InvalidRequest, which is a ValueError, with words for the person who typed it.
    """

    flag: str
    field: str
    metavar: str
    help: str
    parse: Callable[[object], Any]
    choices: tuple[str, ...] | None = None

    @property
    def dest(self) -> str:
        """The parameter's name in Python: ``lock_wait`` for ``--lock-wait``."""
        return self.flag.lstrip("-").replace("-", "_")


OPTIONS: Final = (
    CommandOption(
        "--lock-wait",
        "wait",
        "SECONDS",
        "Wait so long for the lock if another process holds it, or 'forever'.",
        _wait,
    ),
    CommandOption(
        "--if-held",
        "if_held",
        "{skip,fail}",
        "Another process holds the lock: 'skip' ends with exit code 0, 'fail' with 75. Left out: "
        "skip, or fail after a --lock-wait that ran out.",
        _if_held,
        ("skip", "fail"),
    ),
    CommandOption(
        "--lock-ttl",
        "ttl",
        "SECONDS",
        "Seconds after which the lock is free again if this process dies; renewed while it runs.",
        _ttl,
    ),
    CommandOption(
        "--lock-min-hold",
        "min_hold",
        "SECONDS",
        "Keep others from starting for so long after this start, even if the work is done sooner.",
        _min_hold,
    ),
)


@dataclass(frozen=True)
class LeaderOptions:
    """How one run takes its lock; a value that exists is a legal one.

    ``wait``: seconds to wait for a held lock, None for ever. ``if_held``: "skip" (exit 0) or "fail"
    (exit 75) if it is held still; None means skip, or fail if there was a wait and it ran out.
    ``ttl``: whole seconds, None for the settings' TTL. ``min_hold``: seconds from the acquisition on
    in which nobody else may start. Numbers may be given as text. Raises InvalidRequest.
    """

    wait: float | None = 0
    if_held: Literal["skip", "fail"] | None = None
    ttl: int | None = None
    min_hold: float = 0

    def __post_init__(self) -> None:
        for option in OPTIONS:
            object.__setattr__(self, option.field, option.parse(getattr(self, option.field)))

    @property
    def skips(self) -> bool:
        """Whether a held lock is a normal end of the command."""
        return self.if_held == "skip" or (self.if_held is None and self.wait == 0)


class KeyTemplate:
    """A lock key with places for a command's parameters: ``"billing.{tenant}"``.

    Raises ConfigurationError for a template that can make no legal key.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            parts = list(string.Formatter().parse(text))
            if any(
                name is not None and (not name.isidentifier() or spec or conversion)
                for _, name, spec, conversion in parts
            ):
                raise ValueError("only plain names can stand in braces")
            self.fields: Final = tuple(dict.fromkeys(name for _, name, _, _ in parts if name))
            check_key(text.format_map(dict.fromkeys(self.fields, "x")))
        except (ValueError, TypeError) as error:
            raise ConfigurationError(
                f"lock key {text!r}: {error}. Write it like 'billing' or 'billing.{{tenant}}', "
                "with the names of the command's parameters in the braces"
            ) from None

    def __repr__(self) -> str:
        return f"KeyTemplate({self.text!r})"

    def fill(self, parameters: Mapping[str, object]) -> str:
        """The key of one run. Raises InvalidRequest if a value is missing or makes no legal key."""
        values = {}
        for name in self.fields:
            value = parameters.get(name)
            values[name] = "" if value is None else str(value)
            if not values[name]:
                raise InvalidRequest(
                    f"the lock key {self.text!r} needs a value for {name!r}, and there is none"
                )
        return check_key(self.text.format_map(values))


# -- how a run ends ------------------------------------------------------------------------------


class Terminated(SystemExit):
    """SIGTERM or SIGHUP: unwind, release, then exit with 128 + the signal's number (143, 129)."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class CommandEnded(Exception):
    """The command is over with a message and an exit code that is not 0.

    ``__cause__`` is the VolcanoLocksError that says why. Frameworks turn this into their own error.
    """

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def _held(error: LockHeld, options: LeaderOptions) -> str:
    if options.wait:
        return f"lock {error.key!r} was held by another process for all of {options.wait:g} s"
    return f"lock {error.key!r} is held by another process"


def _words(error: VolcanoLocksError, options: LeaderOptions, *, led: bool) -> str:
    """What a person reads. Held, unknown and refused never look alike."""
    if led:
        stopped = isinstance(error, (LeaseLost, FenceRejected))
        return f"stopped: {error}" if stopped else str(error)
    if isinstance(error, LockHeld):
        return f"not run: {_held(error, options)}"
    if isinstance(error, OutcomeUnknown):
        return f"not run: could not find out whether the lock is free: {error}"
    return f"not run: {error}"


def run_leader_only(
    client: Callable[[], LockClient],
    key: Callable[[], str],
    options: LeaderOptions,
    work: Callable[[Hold], T],
    *,
    say: Callable[[str], object],
    interrupts: Sequence[Callable[[], object]] = (),
) -> T | None:
    """Run ``work(hold)`` as the leader of ``key()``, or say why not.

    Returns what the work returned, or None if it was skipped, after ``say`` was given the line for
    standard output. Raises CommandEnded for every other end that is ours; the work's own exceptions
    come through as they are, and ``Terminated`` after a signal (main thread only).

    ``client`` and ``key`` are called here, so that what they raise gets its words and exit code;
    a key is made before anything is sent. ``interrupts`` are called from another thread, as often
    as needed, when the work should stop but waits in code that does not hear signals, such as a
    database driver; they break that wait.
    """
    led = False

    def leading(hold: Hold) -> T:
        nonlocal led
        led = True
        return work(hold)

    try:
        name = key()
        locks = client()

        def hold(on_lost: Callable[..., None] | None) -> Hold:
            return locks.hold(
                name,
                ttl=options.ttl,
                wait=options.wait,
                min_hold=options.min_hold,
                on_lost=on_lost,
            )

        return _lead(hold, leading, interrupts)
    except LockHeld as error:
        if led:
            raise  # about another lock, which the work asked for
        if not options.skips:
            raise CommandEnded(_words(error, options, led=led), error.exit_code) from error
        line = f"skipped: {_held(error, options)}"
        try:
            say(line)
        except Exception as cause:  # full or closed, in each framework's way: still a skip
            log.warning("%s (which could not be printed: %r)", line, cause)
        return None
    except VolcanoLocksError as error:
        raise CommandEnded(_words(error, options, led=led), error.exit_code) from error


# -- signals -------------------------------------------------------------------------------------


def _lead(
    hold: Callable[[Callable[..., None] | None], Hold],
    work: Callable[[Hold], T],
    interrupts: Sequence[Callable[[], object]],
) -> T:
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "pthread_kill"):
        return _Run(hold, work, interrupts).run()
    with hold(None) as held:
        return work(held)


_ENDING: Final = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
_URGENT: Final = getattr(signal, "SIGURG", signal.SIGTERM)
"""Carries the loss from the watcher to the main thread. Ignored by default: a late one is harmless."""

_PATIENCE: Final = 0.25
"""Seconds that the main thread has to hear a signal before the waits of databases are broken."""
_AGAIN: Final = 1.0
"""Seconds after which a body that swallowed LeaseLost and runs on gets it once more."""
_NAP: Final = 1.0
"""Seconds. The watcher is woken by every event; it looks at the clock this often because the waits
of the operating system do not count the time in which the machine was suspended."""


def _in_flight(kind: type[BaseException]) -> bool:
    """Whether the interrupted code is unwinding from, or handling, such an exception."""
    error = sys.exc_info()[1]
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return True
        seen.add(id(error))
        error = error.__context__
    return False


def _lost(hold: Hold) -> bool:
    """Whether the body must be told; if it gave the lease back itself, it knows."""
    return hold.lost and not hold.released


class _Run(Generic[T]):
    """One interruptible run in the main thread."""

    def __init__(
        self,
        hold: Callable[[Callable[..., None] | None], Hold],
        work: Callable[[Hold], T],
        interrupts: Sequence[Callable[[], object]],
    ) -> None:
        self._make_hold = hold
        self._work = work
        self._interrupts = interrupts
        self._pid = os.getpid()
        self._os_thread = threading.get_native_id()
        self._previous: dict[int, Any] = {}
        self._late: list[int] = []  # signals that came where nothing may be raised
        self._opened = False
        self._acquiring = True
        self._struck = False  # the acquisition was interrupted and cleans up: nothing may tear that
        self._over = False
        self._ended = threading.Event()  # the body is over; the watcher does nothing more
        self._loss: LeaseLost | None = None  # to be raised in the body; from the watcher
        self._told = False  # it was
        self._echo = 0  # counts urgent signals heard, for the watcher
        self._broke_a_wait = False
        self._ear, self._mouth = socket.socketpair()
        self._old_wakeup = -1

    # .. the main thread ..

    def run(self) -> T:
        # This frame and those it calls are calm, all but those below _open.
        try:
            try:
                self._install()
                return self._session()
            finally:
                self._restore()
        finally:
            self._catch_up()

    def _session(self) -> T:
        hold = self._make_hold(self._wake)
        try:
            self._open(hold.__enter__)
        except BaseException:
            # Interrupted between the grant and its first use: InvalidRequest says there was none.
            with contextlib.suppress(InvalidRequest):
                hold.release()
            raise
        self._acquiring = self._struck = False
        try:
            watcher = threading.Thread(
                target=self._watch, args=(hold,), name=f"lease-watch {hold.key}", daemon=True
            )
            watcher.start()
            try:
                value: T = self._open(self._work, hold)
            finally:
                self._ended.set()
                self._wake()
                watcher.join()
        except BaseException as error:
            ending = self._ending(error)
            hold.__exit__(type(ending), ending, ending.__traceback__)
            if ending is error:
                raise
            raise ending from error
        hold.__exit__(None, None, None)
        return value

    def _open(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call it interruptibly: below this frame, and nowhere else, the handlers may raise."""
        self._opened = True
        try:
            if self._late:
                raise Terminated(self._late.pop(0))
            return function(*args)
        finally:
            self._opened = False

    def _ending(self, error: BaseException) -> BaseException:
        """What the body ended with. An error that we provoked by breaking a database wait, and
        that got away before the handler had its turn, stands for the reason why we broke it."""
        if not self._broke_a_wait or not isinstance(error, Exception) or _in_flight(LeaseLost):
            return error
        if self._late:
            return Terminated(self._late.pop(0))
        return error if self._loss is None or self._told else self._loss

    def _catch_up(self) -> None:
        """Hand out the signals that came while nothing could be raised, now that all is released."""
        leaving = sys.exc_info()[1]
        for signum in dict.fromkeys(self._late):
            previous = self._previous.get(signum)
            if callable(previous) and previous is not signal.default_int_handler:
                # With the frame outside of this run: an outer run may raise there.
                previous(signum, sys._getframe(2))
            elif leaving is None or isinstance(leaving, Exception):
                raise KeyboardInterrupt if signum == signal.SIGINT else Terminated(signum)

    # .. handlers: they raise or set a flag, and touch no lock ..

    def _install(self) -> None:
        for signum in (*_ENDING, signal.SIGINT, _URGENT):
            previous = signal.getsignal(signum)
            # None: installed by C code, which we could not put back. Ignored: nohup, and it stays so.
            if previous is None or (previous is signal.SIG_IGN and signum != _URGENT):
                continue
            self._previous[signum] = previous
            signal.signal(signum, self._on_loss if signum == _URGENT else self._on_signal)
        self._ear.setblocking(False)
        self._mouth.setblocking(False)
        # The wakeup fd tells the watcher about a signal that the main thread cannot hear yet.
        self._old_wakeup = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        if self._old_wakeup != -1:
            signal.set_wakeup_fd(self._old_wakeup, warn_on_full_buffer=False)
        _runs.append(self)

    def _restore(self) -> None:
        self._over = True
        if self in _runs:
            _runs.remove(self)
        if self._old_wakeup == -1:
            mine = self._mouth.fileno()
            if (current := signal.set_wakeup_fd(-1)) not in (-1, mine):
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        for signum, previous in self._previous.items():
            if signal.getsignal(signum) in (self._on_signal, self._on_loss):
                signal.signal(signum, previous)
        self._ear.close()
        self._mouth.close()

    def _may_raise(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code is _OPEN:
                return True
            if frame.f_code is _RUN:
                return False
            frame = frame.f_back
        return False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        previous = self._previous.get(signum, signal.SIG_DFL)
        if self._over or os.getpid() != self._pid:
            _as_before(previous, signum, frame)
        elif (
            self._struck
            or _in_flight(Terminated)
            or not (self._may_raise(frame) or self._in_other_stack(frame))
        ):
            self._late.append(signum)
        else:
            hub = _hub_of_other_greenlet()
            # The state says it, since no exception is in flight while a client cleans up.
            self._struck = self._acquiring
            if callable(previous):
                previous(signum, frame)  # SIGINT: raises KeyboardInterrupt, as ever
            if signum in _ENDING:
                if hub is None:
                    raise Terminated(signum)
                hub.loop.run_callback(self._throw, hub.parent, Terminated(signum))
            else:
                self._struck = False

    def _on_loss(self, signum: int, frame: FrameType | None) -> None:
        self._echo += 1
        loss, previous = self._loss, self._previous.get(signum)
        if loss is not None and not self._told and self._may_raise(frame) and not self._over:
            self._told = True
            if not _in_flight(LeaseLost) and not _in_flight(Terminated):
                raise loss
        elif callable(previous) and not self._struck:
            # The loss of an outer lease may be raised in this acquisition, and then it is struck.
            self._struck = self._acquiring
            previous(signum, frame)
            self._struck = False

    def _in_other_stack(self, frame: FrameType | None) -> bool:
        """Whether a greenlet's hub was interrupted while the body waits: raising reaches the body."""
        while frame is not None:
            if frame.f_code is _RUN:
                return False
            frame = frame.f_back
        return self._opened

    # .. the watcher's thread ..

    def _wake(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it is gone
            self._mouth.send(b"\0")

    def _watch(self, hold: Hold) -> None:
        # Under gevent this "thread" is a greenlet of the main thread, whose signals must stay open.
        apart = threading.get_native_id() != self._os_thread
        if apart:
            signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDING, signal.SIGINT, _URGENT})
        try:
            self._listen(hold, apart)
        except Exception:
            log.exception(
                "lock %r: signals cannot be listened for any more, so only the lease is watched; a "
                "signal that comes while the command waits in a database is heard after that wait",
                hold.key,
            )
            while not (_lost(hold) or self._ended.wait(_PATIENCE)):
                pass
        if not self._ended.is_set():
            (self._tell_loss if apart else self._throw_loss)(hold)

    def _listen(self, hold: Hold, apart: bool) -> None:
        """Until the lease is lost or the body is over."""
        # select() itself hears no descriptor from 1024 on.
        with selectors.DefaultSelector() as selector:
            selector.register(self._ear, selectors.EVENT_READ)
            while not (self._ended.is_set() or _lost(hold)):
                selector.select(_NAP if hold.lost else min(_NAP, hold.remaining() + 0.001))
                try:
                    heard = set(self._ear.recv(4096))
                except BlockingIOError:
                    heard = set()
                if apart and not _lost(hold) and heard.intersection(_ENDING):
                    self._press(lambda: False)

    def _tell_loss(self, hold: Hold) -> None:
        try:
            hold.check()
        except LeaseLost as loss:
            self._loss = loss
        while not self._ended.is_set() and self._loss is not None:
            self._press(lambda: not self._told)
            if not self._ended.wait(_AGAIN):
                # Still running. A body that handles LeaseLost is left alone (the handler sees
                # that), one that swallowed it gets it again.
                self._loss, self._told = copy.copy(self._loss), False

    def _throw_loss(self, hold: Hold) -> None:
        hub = sys.modules["gevent"].get_hub()
        try:
            hold.check()
        except LeaseLost as loss:
            self._loss = loss
            hub.loop.run_callback(self._throw, hub.parent, loss)

    def _throw(self, main: Any, error: LeaseLost | Terminated) -> None:
        """Raise it in the main greenlet. Called in gevent's hub: the main greenlet waits for sure."""
        may = not self._over and self._may_raise(main.gr_frame)
        if isinstance(error, LeaseLost):
            self._told = may
        elif self._over:
            _as_before(self._previous.get(error.signum, signal.SIG_DFL), error.signum, None)
        elif not may:
            self._late.append(error.signum)
        if may:
            main.throw(error)

    def _press(self, unheard: Callable[[], bool]) -> None:
        """Signal the main thread until it has heard; break its database wait if it does not."""
        main, start, broke, echo = threading.main_thread().ident, time.monotonic(), 0.0, self._echo
        assert main is not None
        while not self._ended.is_set() and (self._echo == echo or unheard()):
            signal.pthread_kill(main, _URGENT)
            pressed = time.monotonic() - start
            if self._echo == echo and pressed - broke > _PATIENCE:
                broke = pressed
                self._break_waits()
            # Each signal also cuts one nap of SQLite's busy handler short, which counts naps and
            # not time: pressing fast ends its wait early.
            self._ended.wait(0.002 if pressed < 5 else 0.05)

    def _break_waits(self) -> None:
        for interrupt in self._interrupts:
            self._broke_a_wait = True
            try:
                interrupt()
            except Exception:
                log.warning("a wait of the command could not be interrupted", exc_info=True)


def _hub_of_other_greenlet() -> Any:
    """gevent's hub, if one of its greenlets was interrupted: raising there would only end that one."""
    gevent = sys.modules.get("gevent")
    if gevent is None:
        return None
    hub = gevent.get_hub()
    return hub if gevent.getcurrent().parent is hub else None


_OPEN: Final = _Run._open.__code__
_RUN: Final = _Run.run.__code__
_runs: list[_Run[Any]] = []


def _as_before(previous: Any, signum: int, frame: FrameType | None) -> None:
    """Do what would have happened if our handler had never been there."""
    if callable(previous):
        previous(signum, frame)
    elif previous is signal.SIG_DFL and signum != _URGENT:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _forget_after_fork() -> None:
    # The child shares the parent's socket: its signals must not reach the parent's watcher.
    if _runs:
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


# -- operators' commands -------------------------------------------------------------------------


def status(
    client: Callable[[], LockClient], keys: Iterable[str], *, say: Callable[[str], object]
) -> None:
    """Say one line per key: held until when and under which fencing token, or free.

    Raises CommandEnded at the first key that cannot be read.
    """
    try:
        locks = client()
        for key in keys:
            say(f"{key}: {_shown(locks.get(key))}")
    except VolcanoLocksError as error:
        raise CommandEnded(str(error), error.exit_code) from error


def _shown(state: LockState) -> str:
    if not state.held:
        return "free"
    until = state.expires_at
    times = "" if until is None else f" until {until:%Y-%m-%d %H:%M:%S} UTC unless renewed"
    return f"held{times}, fencing token {state.fencing_token}"


def force_release(
    client: Callable[[], LockClient],
    key: str,
    *,
    confirm: Callable[[str], bool],
    say: Callable[[str], object],
) -> None:
    """Drop whatever lease there is, if ``confirm(question)`` is True. Source: contract rule 8.

    Raises CommandEnded if it is not, or if the service could not or would not do it.
    """
    try:
        check_key(key)
        if not confirm(
            f"Release lock {key!r}? Its holder may still be at work and is told only when it "
            "renews next; until then nothing but the fence protects your data from its writes."
        ):
            raise CommandEnded(f"{key}: nothing was released", 1)
        client().force_release(key)
    except VolcanoLocksError as error:
        raise CommandEnded(str(error), error.exit_code) from error
    say(
        f"{key}: released. An old holder works on until its next renewal fails; only the fence "
        "protects from it now: fenced writes with its older token are refused."
    )
