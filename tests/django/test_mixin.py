"""LeaderOnlyMixin in one process, on the local lock service: classes, call_command, messages."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import signal
import socket
import subprocess
import sys
import threading
import unittest
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, LabelCommand
from django.db import connection, connections, transaction
from django.test import TestCase, override_settings

from volcano_locks import ConfigurationError, LeaseLost, LockClient, LockHeld, Policy, StaleFence
from volcano_locks_django import (
    LeaderOnlyMixin,
    conf,
    lease_acquired,
    lease_lost,
    lease_released,
)

from .leases import lease as make_lease


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[LockClient]:
    with override_settings(VOLCANO_LOCKS={"API_URL": f"local:{tmp_path / 'locks'}"}):
        yield conf.lock_client()


def held(client: LockClient, key: str) -> bool:
    return client.get(key).held


class Ran:
    """What a command's body saw."""

    def __init__(self) -> None:
        self.leases: list[Any] = []

    def __call__(self, lease: Any) -> None:
        lease.check()
        self.leases.append(lease)


@pytest.fixture
def ran() -> Ran:
    return Ran()


def call(command: BaseCommand, *args: Any, **options: Any) -> tuple[Any, str, str]:
    out, err = io.StringIO(), io.StringIO()
    options.setdefault("skip_checks", True)
    value = call_command(command, *args, stdout=out, stderr=err, **options)
    return value, out.getvalue(), err.getvalue()


# -- no way around the lock ----------------------------------------------------------------------


def plain(ran: Ran) -> type[BaseCommand]:
    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            ran(lease)

    return Command


def mixin_last(ran: Ran) -> type[BaseCommand]:
    class Command(BaseCommand, LeaderOnlyMixin):
        lock_key = "job"

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            ran(lease)

    return Command


def handle_overridden_below(ran: Ran) -> type[BaseCommand]:
    class Command(plain(Ran())):  # type: ignore[misc]
        def handle(self, *args: Any, **options: Any) -> None:
            ran(options["lease"])

    return Command


def handle_calls_super_without_the_lease(ran: Ran) -> type[BaseCommand]:
    class Command(plain(ran)):  # type: ignore[misc]
        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            super().handle(*args, **options)

    return Command


def handle_from_another_base(ran: Ran) -> type[BaseCommand]:
    class Other:
        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            ran(lease)

    class Command(Other, LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

    return Command


def execute_overridden(ran: Ran) -> type[BaseCommand]:
    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

        def execute(self, *args: Any, **options: Any) -> Any:
            assert held(conf.lock_client(), "job")
            return super().execute(*args, **options)

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            ran(lease)

    return Command


def execute_from_a_base_between(ran: Ran) -> type[BaseCommand]:
    class Timed(BaseCommand):
        def execute(self, *args: Any, **options: Any) -> Any:
            self.timed = held(conf.lock_client(), "job")
            return super().execute(*args, **options)

    class Command(plain(ran), Timed):  # type: ignore[misc]
        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            assert self.timed
            ran(lease)

    return Command


def add_arguments_overridden_without_super(ran: Ran) -> type[BaseCommand]:
    class Command(plain(ran)):  # type: ignore[misc]
        def add_arguments(self, parser: Any) -> None:
            parser.add_argument("--tenant")

    return Command


def create_parser_overridden(ran: Ran) -> type[BaseCommand]:
    class Command(plain(ran)):  # type: ignore[misc]
        def create_parser(self, *args: Any, **kwargs: Any) -> Any:
            return super().create_parser(*args, **kwargs)

    return Command


def an_init_subclass_that_does_not_call_super(ran: Ran) -> type[BaseCommand]:
    class Deaf:
        def __init_subclass__(cls) -> None:
            pass

    class Command(Deaf, LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            ran(lease)

    return Command


def handle_assigned_later(ran: Ran) -> type[BaseCommand]:
    def handle(self: Any, *args: Any, lease: Any, **options: Any) -> None:
        ran(lease)

    command = plain(Ran())
    command.handle = handle  # type: ignore[assignment,method-assign]
    return command


def handle_wrapped_in_a_transaction(ran: Ran) -> type[BaseCommand]:
    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

        @transaction.atomic
        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            ran(lease)

    return Command


def execute_decorated(ran: Ran) -> type[BaseCommand]:
    def checked(execute: Any) -> Any:
        @functools.wraps(execute)
        def decorated(self: Any, *args: Any, **options: Any) -> Any:
            assert held(conf.lock_client(), "job")
            return execute(self, *args, **options)

        return decorated

    base = plain(ran)

    class Command(base):  # type: ignore[misc,valid-type]
        execute = checked(base.execute)

    return Command


CLASSES = [
    plain,
    mixin_last,
    handle_overridden_below,
    handle_calls_super_without_the_lease,
    handle_from_another_base,
    execute_overridden,
    execute_decorated,
    execute_from_a_base_between,
    add_arguments_overridden_without_super,
    create_parser_overridden,
    an_init_subclass_that_does_not_call_super,
    handle_assigned_later,
    handle_wrapped_in_a_transaction,
]


@pytest.mark.parametrize("make", CLASSES, ids=lambda make: make.__name__)
def test_the_lock_is_taken_once_however_the_class_is_built(
    make: Any, locks: LockClient, ran: Ran, sqlite: str
) -> None:
    command = make(ran)()
    acquired = []
    lease_acquired.connect(lambda lease, **_: acquired.append(lease), weak=False, dispatch_uid="t")
    try:
        call(command)
    finally:
        lease_acquired.disconnect(dispatch_uid="t")
    assert len(ran.leases) == len(acquired) == 1
    assert ran.leases[0] is acquired[0]
    assert not held(locks, "job")

    with locks.hold("job"):
        _, out, _ = call(command)
        assert out == "skipped: lock 'job' is held by another process\n"
        with pytest.raises(CommandError, match="held by another") as failed:
            call(command, if_held="fail")
    assert failed.value.returncode == 75
    assert len(ran.leases) == 1


def test_handle_called_directly_takes_the_lock_too(locks: LockClient, ran: Ran) -> None:
    command = plain(ran)()
    command.handle()
    assert len(ran.leases) == 1
    with locks.hold("job"):
        command.handle()
    assert len(ran.leases) == 1


def test_handle_called_with_a_hold_of_your_own_uses_that(locks: LockClient) -> None:
    seen = []

    class Command(LeaderOnlyMixin, BaseCommand):
        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            seen.append(lease)

    with locks.hold("mine") as mine:
        Command().handle(lease=mine)
    assert seen == [mine]
    with pytest.raises(CommandError, match="has been released") as failed:
        Command().handle(lease=mine)
    assert failed.value.returncode == 76
    assert seen == [mine]


@pytest.mark.parametrize("lease", [True, "42", make_lease(5)])
def test_what_is_no_live_hold_does_not_pass_for_one(
    locks: LockClient, ran: Ran, lease: object
) -> None:
    for method in ("handle", "execute"):
        with pytest.raises(CommandError, match="leave it out") as failed:
            getattr(plain(ran)(), method)(lease=lease)
        assert failed.value.returncode == 64
    assert not ran.leases


def test_the_hold_of_another_lock_does_not_pass_for_the_commands(
    locks: LockClient, ran: Ran
) -> None:
    with (
        locks.hold("another") as other,
        pytest.raises(CommandError, match="one of lock 'another', and this needs 'job'"),
    ):
        plain(ran)().handle(lease=other)
    assert not ran.leases


@pytest.mark.parametrize("below", [False, True])
def test_an_option_that_is_stored_as_lease_is_refused_with_the_fix(
    locks: LockClient, ran: Ran, below: bool
) -> None:
    class Command(plain(ran)):  # type: ignore[misc]
        def add_arguments(self, parser: Any) -> None:
            if below:
                parser = parser.add_subparsers().add_parser("sub")
            parser.add_argument("--lease")

    with pytest.raises(ConfigurationError, match="give the option another dest"):
        call(Command(), *(["sub"] if below else []), "--lease", "42")
    assert not ran.leases


@pytest.mark.parametrize("method", ["handle", "execute"])
@pytest.mark.parametrize("passes_lease", [False, True])
def test_a_call_to_itself_with_values_of_another_lock_is_refused(
    locks: LockClient, method: str, passes_lease: bool
) -> None:
    ran = []

    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "billing.{tenant}"

        def add_arguments(self, parser: Any) -> None:
            parser.add_argument("tenant")

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            ran.append((options["tenant"], lease.key))
            if len(ran) < 2:
                given = {"lease": lease} if passes_lease else {}
                getattr(self, method)(**(options | {"tenant": next_one} | given))

    next_one = "b"
    with pytest.raises(CommandError, match=r"'billing\.a'.*'billing\.b'.*call_command") as failed:
        call(Command(), "a")
    assert failed.value.returncode == 64
    assert ran == [("a", "billing.a")]
    assert not held(locks, "billing.a")

    ran.clear()
    next_one = "a"
    call(Command(), "a")
    assert ran == [("a", "billing.a")] * 2


def test_one_instance_in_two_threads_leads_in_one_of_them(locks: LockClient) -> None:
    inside, leave = threading.Event(), threading.Event()
    runs = []

    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            runs.append(lease)
            inside.set()
            assert leave.wait(60)

    command = Command()
    thread = threading.Thread(target=call, args=(command,))
    thread.start()
    assert inside.wait(60)
    _, out, _ = call(command)
    leave.set()
    thread.join()
    assert "skipped" in out
    assert len(runs) == 1


def test_a_label_command_passes_the_lease_to_each_label(locks: LockClient, ran: Ran) -> None:
    class Command(LeaderOnlyMixin, LabelCommand):
        lock_key = "job"

        def handle_label(self, label: str, **options: Any) -> str:
            ran(options["lease"])
            return label

    _, out, _ = call(Command(), "a", "b")
    assert out == "a\nb\n"
    assert ran.leases[0] is ran.leases[1]


async def _async(self: Any, *args: Any, lease: Any, **options: Any) -> None: ...


def _generator(self: Any, *args: Any, lease: Any, **options: Any) -> Iterator[None]:
    yield


def _no_lease(self: Any, *args: Any) -> None: ...


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"handle": _async}, "is async.*asyncio.run"),
        ({"handle": _generator}, "is a generator"),
        ({"handle": _no_lease}, r"takes no lease: write def handle\(self, \*args, lease"),
        ({"handle": staticmethod(_no_lease)}, "is a staticmethod"),
        ({"execute": _async}, "is async"),
        ({"handle": None}, "plain method"),
    ],
)
def test_a_class_that_cannot_be_guarded_is_refused_with_the_fix(
    attributes: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        type("Command", (LeaderOnlyMixin, BaseCommand), attributes)


@pytest.mark.parametrize(
    "attributes",
    [
        {"lock_key": "a b"},
        {"lock_key": "{0}"},
        {"lock_ttl": 1},
        {"lock_wait": -1},
        {"if_held": "maybe"},
        {"lock_min_hold": "long"},
    ],
)
def test_attributes_that_cannot_work_are_refused_when_the_class_is_made(
    attributes: dict[str, Any],
) -> None:
    with pytest.raises(ConfigurationError):
        type("Command", (LeaderOnlyMixin, BaseCommand), attributes)


# -- call_command and the options ----------------------------------------------------------------


def test_the_options_are_those_of_call_command_too(locks: LockClient, ran: Ran) -> None:
    seen: dict[str, Any] = {}
    real = LockClient.hold

    def hold(self: LockClient, key: str, **options: Any) -> Any:
        seen.update(options, key=key)
        return real(self, key, **options)

    command = plain(ran)()
    with mock.patch.object(LockClient, "hold", hold):
        call(command, lock_wait=3, lock_ttl="7", lock_min_hold=0, if_held="skip")
        assert (seen["wait"], seen["ttl"], seen["min_hold"]) == (3.0, 7, 0.0)
        call(command, "--lock-wait", "forever", "--lock-ttl=8")
        assert (seen["wait"], seen["ttl"]) == (None, 8)
        call(command)
        assert (seen["wait"], seen["ttl"]) == (0.0, None)


def test_class_attributes_are_the_defaults(locks: LockClient, ran: Ran) -> None:
    class Command(plain(ran)):  # type: ignore[misc]
        if_held = "fail"
        lock_wait = 0.1

    with locks.hold("job"), pytest.raises(CommandError, match=r"for all of 0\.1 s"):
        call(Command())
    with locks.hold("job"):
        _, out, _ = call(Command(), lock_wait=0, if_held="skip")
    assert out.startswith("skipped")


@pytest.mark.parametrize(
    "options", [{"lock_wait": "soon"}, {"lock_ttl": 3}, {"if_held": "x"}, {"lock_min_hold": -1}]
)
def test_a_bad_option_ends_with_64(locks: LockClient, ran: Ran, options: dict[str, Any]) -> None:
    with pytest.raises(CommandError, match="not run: ") as failed:
        call(plain(ran)(), **options)
    assert failed.value.returncode == 64
    assert not ran.leases


def test_the_key_is_filled_from_the_commands_own_options(locks: LockClient) -> None:
    keys = []

    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "billing.{tenant}"

        def add_arguments(self, parser: Any) -> None:
            parser.add_argument("tenant")

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            keys.append(lease.key)

    call(Command(), "acme")
    assert keys == ["billing.acme"]
    with pytest.raises(CommandError, match="no lock key") as failed:
        call(Command(), "not legal")
    assert failed.value.returncode == 64


def test_the_default_key_is_app_and_command(locks: LockClient) -> None:
    keys = []

    class Command(LeaderOnlyMixin, BaseCommand):
        __module__ = "tests.django.app.management.commands.nightly"

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            keys.append(lease.key)

    call(Command())
    assert keys == ["app.nightly"]


def test_a_command_outside_of_all_apps_must_name_its_key(locks: LockClient) -> None:
    class Command(LeaderOnlyMixin, BaseCommand):
        def handle(self, *args: Any, lease: Any, **options: Any) -> None: ...

    with pytest.raises(CommandError, match="set lock_key") as failed:
        call(Command())
    assert failed.value.returncode == 78


def test_help_makes_no_request(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        override_settings(VOLCANO_LOCKS={"SERVICE_KEY": "ak-anon"}),
        pytest.raises(SystemExit) as left,
    ):
        plain(ran)().run_from_argv(["manage.py", "job", "--help"])
    assert left.value.code == 0
    assert "--lock-min-hold" in capsys.readouterr().out


def typed(command: BaseCommand, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """Exit code, standard output and standard error of the command as ``manage.py`` runs it."""
    with pytest.raises(SystemExit) as left:
        command.run_from_argv(["manage.py", "job", "--skip-checks", *options])
    printed = capsys.readouterr()
    return left.value.code, printed.out, printed.err


def test_a_failing_command_keeps_its_return_code(
    locks: LockClient, capsys: pytest.CaptureFixture[str]
) -> None:
    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            raise CommandError("mine", returncode=9)

    assert typed(Command(), capsys) == (9, "", "CommandError: mine\n")
    assert not held(locks, "job")


@contextlib.contextmanager
def answering(status: int) -> Iterator[str]:
    """A service on loopback that answers every acquisition like this."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(401, 77, "not run: "), (403, 77, "not run: "), (503, 69, "not run: could not find out")],
)
def test_what_the_service_refuses_ends_with_its_code_and_shows_no_key(
    status: int, code: int, words: str, ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"SERVICE_KEY": "sk-secret", "TTL": 180, "TIMEOUT": 60}
    with answering(status) as url, override_settings(VOLCANO_LOCKS=settings | {"API_URL": url}):
        ended, out, err = typed(plain(ran)(), capsys)
    assert (ended, out) == (code, "")
    assert err.startswith(f"CommandError: {words}")
    assert "secret" not in err
    assert not ran.leases


def test_a_service_that_is_down_ends_with_69(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = {"SERVICE_KEY": "sk-test", "API_URL": f"http://127.0.0.1:{port}"}
    with override_settings(VOLCANO_LOCKS=settings):
        code, out, err = typed(plain(ran)(), capsys)
    assert (code, out) == (69, "")
    assert "not run: could not find out whether the lock is free" in err


def test_a_missing_key_ends_with_78_and_says_how_to_go_on(
    ran: Ran,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # no .env
    for name in ("VOLCANO_API_URL", "VOLCANO_SERVICE_KEY", "SERVICE_ROLE_KEY"):
        monkeypatch.delenv(name, raising=False)
    with override_settings(VOLCANO_LOCKS={}):
        code, out, err = typed(plain(ran)(), capsys)
    assert (code, out) == (78, "")
    assert "VOLCANO_SERVICE_KEY" in err
    assert "local:" in err


async def _work() -> None: ...


@pytest.mark.parametrize("returned", [True, 3, _work], ids=["True", "3", "a coroutine"])
def test_an_unprintable_result_is_a_clear_error_and_the_lease_is_released(
    locks: LockClient, returned: Any
) -> None:
    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

        def handle(self, *args: Any, lease: Any, **options: Any) -> Any:
            return returned() if callable(returned) else returned

    with pytest.raises(CommandError, match=r"handle\(\) returned"):
        call(Command())
    assert not held(locks, "job")


def test_text_that_handle_returns_is_printed(locks: LockClient) -> None:
    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

        def handle(self, *args: Any, lease: Any, **options: Any) -> str:
            return "done"

    assert call(Command()) == ("done", "done\n", "")


def test_verbosity_0_skips_in_silence(locks: LockClient, ran: Ran) -> None:
    with locks.hold("job"):
        assert call(plain(ran)(), verbosity=0) == (None, "", "")


def test_a_stale_write_ends_with_76_and_both_tokens(locks: LockClient) -> None:
    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            raise StaleFence("job", offered=5, stored=6)

    with pytest.raises(CommandError, match="stopped: stale write") as failed:
        call(Command())
    assert failed.value.returncode == 76
    assert isinstance(failed.value.__cause__, StaleFence)


def test_a_command_in_a_thread_needs_no_signals(locks: LockClient, ran: Ran) -> None:
    before = signal.getsignal(signal.SIGTERM)
    errors = []

    def work() -> None:
        try:
            call(plain(ran)())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert len(ran.leases) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_command_in_an_event_loops_thread_pool_works(locks: LockClient, ran: Ran) -> None:
    asyncio.run(asyncio.to_thread(call, plain(ran)()))
    assert len(ran.leases) == 1


def test_a_client_of_the_commands_own_is_asked_instead(
    tmp_path: Path, locks: LockClient, ran: Ran
) -> None:
    other = LockClient(api_url=f"local:{tmp_path / 'other'}", key_prefix="other.")

    class Command(plain(ran)):  # type: ignore[misc]
        def get_lock_client(self) -> LockClient:
            return other

    with other, locks.hold("job"):
        call(Command())
    assert ran.leases[0].key == "other.job"


# -- signals of Django ---------------------------------------------------------------------------


@pytest.fixture
def heard() -> Iterator[list[tuple[str, Any]]]:
    found: list[tuple[str, Any]] = []
    signals = {"acquired": lease_acquired, "lost": lease_lost, "released": lease_released}
    for name, sender in signals.items():
        sender.connect(
            lambda sender, command, lease, name=name, **_: found.append((name, sender)),
            weak=False,
            dispatch_uid="heard",
        )
    yield found
    for sender in signals.values():
        sender.disconnect(dispatch_uid="heard")


def test_signals_tell_of_the_lease(locks: LockClient, ran: Ran, heard: list[Any]) -> None:
    command = plain(ran)
    call(command())
    assert heard == [("acquired", command), ("released", command)]
    with locks.hold("job"):
        call(command())
    assert len(heard) == 2


def test_signals_tell_of_a_lost_lease(tmp_path: Path, heard: list[Any]) -> None:
    often = Policy(first_renewal=0.05)
    locks = LockClient(api_url=f"local:{tmp_path / 'locks'}", policy=often)

    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

        def get_lock_client(self) -> LockClient:
            return locks

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            locks.force_release("job")
            assert lease.wait_lost(60)

    with locks, pytest.raises(CommandError) as failed:
        call(Command())
    assert failed.value.returncode == 76
    assert isinstance(failed.value.__cause__, LeaseLost)
    assert [name for name, _ in heard] == ["acquired", "lost"]


def test_an_early_release_is_no_loss(locks: LockClient, heard: list[Any]) -> None:
    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            lease.release()

    call(Command())
    assert [name for name, _ in heard] == ["acquired", "released"]


def test_a_receiver_that_raises_changes_nothing(
    locks: LockClient, ran: Ran, caplog: pytest.LogCaptureFixture
) -> None:
    def receiver(**_: Any) -> None:
        raise ZeroDivisionError

    lease_acquired.connect(receiver)
    try:
        call(plain(ran)())
    finally:
        lease_acquired.disconnect(receiver)
    assert len(ran.leases) == 1
    assert "ZeroDivisionError" in caplog.text


# -- databases -----------------------------------------------------------------------------------


def test_inside_a_transaction_the_command_is_refused(
    locks: LockClient, ran: Ran, sqlite: str
) -> None:
    with (
        pytest.raises(CommandError, match="before the transaction commits") as failed,
        transaction.atomic(),
    ):
        call(plain(ran)())
    assert failed.value.returncode == 64
    assert not ran.leases
    assert not held(locks, "job")


def test_inside_a_testcase_it_works_and_the_connection_stays_open(
    locks: LockClient, ran: Ran, sqlite: str
) -> None:
    class InATest(TestCase):
        def test(self) -> None:
            raw = connection.connection
            call(plain(ran)())
            assert connection.connection is raw
            assert connection.in_atomic_block

    result = unittest.TestResult()
    unittest.TestLoader().loadTestsFromTestCase(InATest).run(result)
    assert result.wasSuccessful(), result.errors + result.failures
    assert len(ran.leases) == 1


def kill(wrapper: Any) -> None:
    """End the server's side of the open connection, as a database restart would."""
    raw, other = wrapper.connection, wrapper.copy()
    statement = {
        "postgresql": lambda: f"select pg_terminate_backend({raw.info.backend_pid}, 60000)",
        "mysql": lambda: f"kill {raw.thread_id()}",
        "sqlite": lambda: "select 1",  # it has no other side
    }[other.vendor]()
    with other.cursor() as cursor:
        cursor.execute(statement)
    other.close()


def test_a_connection_that_died_during_the_wait_is_opened_anew(
    locks: LockClient, alias: str
) -> None:
    rows = []

    class Command(LeaderOnlyMixin, BaseCommand):
        lock_key = "job"

        def handle(self, *args: Any, lease: Any, **options: Any) -> None:
            with connections[alias].cursor() as cursor:
                cursor.execute("select 1")
                rows.append(cursor.fetchone())

    wrapper = connections[alias]
    with wrapper.cursor() as cursor:
        cursor.execute("select 1")
    kill(wrapper)  # as it happens while the command waits for its turn
    call(Command())
    assert rows == [(1,)]


# -- settings ------------------------------------------------------------------------------------


def test_one_client_is_kept_until_the_settings_change(tmp_path: Path) -> None:
    with override_settings(VOLCANO_LOCKS={"api_url": f"local:{tmp_path / 'a'}", "ttl": 9}):
        first = conf.lock_client()
        assert first is conf.lock_client()
        assert "ttl=9" in repr(first)
        with override_settings(DEBUG=True):
            assert conf.lock_client() is first
    with override_settings(VOLCANO_LOCKS={"api_url": f"local:{tmp_path / 'b'}"}):
        assert conf.lock_client() is not first


def test_djangos_settings_win_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOLCANO_LOCKS_TTL", "11")
    monkeypatch.setenv("VOLCANO_LOCKS_KEY_PREFIX", "staging.")
    with override_settings(VOLCANO_LOCKS={"TTL": 12}):
        found = conf.lock_settings()
    assert (found.ttl, found.key_prefix) == (12, "staging.")


@pytest.mark.parametrize("setting", ["local:", {"NO_SUCH": 1}, {"TTL": 1}, {"SERVICE_KEY": "ak-x"}])
def test_settings_that_cannot_work_end_with_78_when_used(setting: Any, ran: Ran) -> None:
    with (
        override_settings(VOLCANO_LOCKS=setting),
        pytest.raises(CommandError, match="not run: ") as failed,
    ):
        call(plain(ran)())
    assert failed.value.returncode == 78


# -- manage.py volcano_locks ---------------------------------------------------------------------


def test_status_and_force_release(locks: LockClient, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    lease = locks.acquire("job")
    assert lease is not None
    call_command("volcano_locks", "status", "job", "other", stdout=out)
    assert f"fencing token {lease.fencing_token}\nother: free\n" in out.getvalue()

    monkeypatch.setattr("builtins.input", lambda: "n")
    with pytest.raises(CommandError, match="nothing was released") as refused:
        call_command("volcano_locks", "force-release", "job", stdout=out)
    assert refused.value.returncode == 1
    assert held(locks, "job")

    call_command("volcano_locks", "force-release", "job", "--yes", stdout=out)
    assert "only the fence protects" in out.getvalue()
    assert not held(locks, "job")


def test_with_nobody_to_ask_force_release_says_so(locks: LockClient, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "django", "volcano_locks", "force-release", "job"],
        env={
            "DJANGO_SETTINGS_MODULE": "tests.django.settings",
            "VOLCANO_API_URL": f"local:{tmp_path / 'locks'}",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 64
    assert "use --yes" in done.stderr


def test_fences_are_shown_by_the_same_command(sqlite: str) -> None:
    out = io.StringIO()
    call_command("volcano_locks", "fence", "status", stdout=out)
    assert "no fenced rows" in out.getvalue()


def test_a_held_lock_is_the_cause_of_the_error(locks: LockClient, ran: Ran) -> None:
    with locks.hold("job"), pytest.raises(CommandError) as failed:
        call(plain(ran)(), if_held="fail")
    assert isinstance(failed.value.__cause__, LockHeld)
