"""What only threads and processes can do to a hold: real threads, forks, signals, sockets."""

from __future__ import annotations

import contextlib
import gc
import linecache
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command.jobs import freeze
from tests.core.fake import Drop, FakeService, clock_for_the_service
from tests.core.simulation import Counting
from volcano_locks import (
    Hold,
    InvalidRequest,
    LeaseLost,
    LockClient,
    OutcomeUnknown,
    Policy,
    TransportFailed,
)
from volcano_locks.contract import Operation
from volcano_locks.testing import ManualClock

ROOT = Path(__file__).parents[2]
RENEW, RELEASE = Operation.RENEW, Operation.RELEASE
PATIENT = Policy(timeout=60, release_budget=60)
"""For real sockets: what is not about time leaves a slow machine the time."""


@pytest.fixture
def client(service: FakeService, clock: ManualClock) -> Iterator[LockClient]:
    options: dict[str, Any] = {"transport": service, "clock": clock}
    with LockClient("sk-test", "https://locks.example", **options) as client:
        yield client


def joined(count: int) -> None:
    """Wait for our background threads to be so many."""
    end = time.monotonic() + 60
    while sum(t.name.startswith("volcano-locks") for t in threading.enumerate()) != count:
        assert time.monotonic() < end, threading.enumerate()
        threading.Event().wait(0.001)


def test_a_loss_callback_is_called_once_with_the_hold(
    client: LockClient, service: FakeService, clock: ManualClock
) -> None:
    calls: list[Hold] = []
    called = threading.Event()

    def on_lost(hold: Hold) -> None:
        calls.append(hold)
        called.set()

    with pytest.raises(LeaseLost):
        with client.hold("job", ttl=30, on_lost=on_lost) as hold:
            service.take_over("job")
            clock.advance(60)
            assert called.wait(60)
    joined(0)
    assert calls == [hold]


@pytest.mark.parametrize("behaviour", ["raises", "releases", "blocks"])
def test_a_loss_callback_that_misbehaves_harms_nobody(  # R7
    client: LockClient,
    service: FakeService,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
    behaviour: str,
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def on_lost(hold: Hold) -> None:
        entered.set()
        if behaviour == "raises":
            raise ZeroDivisionError
        if behaviour == "releases":
            hold.release()
        else:
            assert go_on.wait(60)

    with pytest.raises(LeaseLost):
        with client.hold("job", ttl=30, on_lost=on_lost) as hold:
            service.take_over("job")
            clock.advance(11, settle=False)
            assert entered.wait(60)
            assert hold.lost
            with pytest.raises(LeaseLost):
                hold.check()
            if behaviour == "releases":
                joined(0)
    go_on.set()
    joined(0)
    assert ("on_lost of lock 'job' failed" in caplog.text) is (behaviour == "raises")


def test_a_callback_hears_of_a_loss_that_a_hanging_renewal_hides(
    service: FakeService, clock: ManualClock
) -> None:
    hangs, called = threading.Event(), threading.Event()

    class Hanging(FakeService):
        def handle_request(self, request: Any) -> Any:
            if request.method == "PATCH":
                hangs.wait(60)
            return super().handle_request(request)

    with LockClient("sk-x", transport=Hanging(clock), clock=clock) as client:
        with pytest.raises(LeaseLost):
            with client.hold("job", ttl=30, on_lost=lambda hold: called.set()):
                joined(2)
                clock.advance(10.9, settle=False)
                clock.advance(20, settle=False)
                assert called.wait(60)
                hangs.set()
    joined(0)


def test_wait_lost_tells_loss_from_time_running_out(
    client: LockClient, service: FakeService, clock: ManualClock
) -> None:
    clock.rush = True
    with pytest.raises(LeaseLost), client.hold("job", ttl=30) as hold:
        assert not hold.wait_lost(5)
        assert hold.wait_lost(0) is False
        service.take_over("job")
        assert hold.wait_lost()
        with pytest.raises(LeaseLost):
            hold.check()
        hold.release()
    assert hold.wait_lost(None)


def test_a_loss_in_a_worker_thread_does_not_touch_the_main_thread(
    client: LockClient, service: FakeService, clock: ManualClock
) -> None:  # R8
    seen: list[BaseException] = []
    inside, lost = threading.Event(), threading.Event()

    def work() -> None:
        try:
            with client.hold("job", ttl=30):
                inside.set()
                assert lost.wait(60)
        except LeaseLost as error:
            seen.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    assert inside.wait(60)
    service.take_over("job")
    clock.advance(60)
    lost.set()
    worker.join(60)
    assert len(seen) == 1


def test_a_signal_between_two_effects_leaves_no_orphan(
    client: LockClient, service: FakeService, clock: ManualClock
) -> None:  # law 8
    """Interrupt at every line that the driver itself runs; tracing stands in for the signal."""
    clock.rush = True
    for stop_at in range(1, 400):
        service.locks.clear()
        lines = 0

        def trace(frame: Any, event: str, arg: object, stop_at: int = stop_at) -> Any:
            nonlocal lines
            name = frame.f_code.co_name
            if name not in {"_drive", "_step"}:
                return trace if name in {"acquire", "_run"} else None
            if event == "line":
                lines += 1
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                if "done" in line:
                    return None  # the result is on its way out: nothing is left to clean up for
                if lines == stop_at:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        service.next(Operation.ACQUIRE, Drop(arrives=True))
        sys.settrace(trace)
        try:
            client.acquire("job", 30)
        except KeyboardInterrupt:
            assert service.free("job"), f"orphan after line {stop_at} of the driver"
        else:
            return
        finally:
            sys.settrace(None)
            service.script.clear()
    raise AssertionError("the driver never ended")


def test_a_renewer_that_cannot_start_releases_the_grant(
    client: LockClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:  # R9
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        with client.hold("job"):
            raise AssertionError("the body ran without a renewer")
    assert service.free("job")


@pytest.mark.parametrize("on_lost", [None, lambda hold: None])
def test_a_forgotten_hold_stops_renewing(
    client: LockClient, service: FakeService, clock: ManualClock, on_lost: Any
) -> None:  # R11
    hold = client.hold("job", ttl=30, on_lost=on_lost)
    hold.__enter__()
    del hold
    gc.collect()
    joined(0)
    clock.advance(60)
    assert not service.sent(RENEW)
    assert service.free("job")


def test_the_client_lives_as_long_as_its_holds(service: FakeService, clock: ManualClock) -> None:
    hold = LockClient("sk-x", transport=service, clock=clock).hold("job", ttl=30)
    with hold:
        gc.collect()
        clock.advance(40)
        hold.check()


def test_twenty_short_holds_and_waiters_fit_into_the_quota(
    service: FakeService, clock: ManualClock
) -> None:  # R14
    service.quota = 600
    with LockClient("sk-x", transport=service, clock=clock) as client:
        holds = [client.hold(f"job{n}", ttl=5) for n in range(20)]
        for hold in holds:
            hold.__enter__()
        service.take_over("busy", ttl=1e6)
        waiters = [
            threading.Thread(target=_wait_for_it, args=(client,), name=f"volcano-locks waiter {n}")
            for n in range(5)
        ]
        for waiter in waiters:
            waiter.start()
        for _ in range(120):
            clock.advance(1)
        assert not [hold.key for hold in holds if hold.lost]
        assert service.refused == 0
        for hold in holds:
            hold.__exit__(None, None, None)
        clock.advance(300)
        for waiter in waiters:
            waiter.join(60)


def _wait_for_it(client: LockClient) -> None:
    from volcano_locks import LockHeld

    with pytest.raises(LockHeld):
        client.hold("busy", wait=300).__enter__()


def test_a_min_hold_runs_a_short_job_once_on_two_machines(
    client: LockClient, service: FakeService, clock: ManualClock
) -> None:  # R15
    runs = []
    for _machine in range(2):
        result = client.with_lock("tick", lambda hold: runs.append(1), ttl=60, min_hold=30)
        clock.advance(2)
    assert len(runs) == 1
    assert not result.acquired


def test_a_forked_child_holds_nothing_and_touches_nothing(  # law 7
    client: LockClient, service: FakeService
) -> None:
    with client.hold("job", ttl=30) as hold:
        requests = len(service.requests)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            verdict = b"believes to lead"
            try:
                hold.release()
                if hold.lost and hold.remaining() == 0 and hold.wait_lost():
                    hold.__exit__(None, None, None)
            except LeaseLost as error:
                untouched = len(service.requests) == requests
                verdict = b"right" if untouched and "parent" in str(error) else b"sent"
            finally:
                os.write(writer, verdict)
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            assert pipe.read() == b"right"
        os.waitpid(child, 0)
        hold.check()
    assert service.free("job")


def test_a_forked_child_gets_connections_of_its_own(client: LockClient) -> None:
    client.get("job")
    mine = client._pool()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"own" if client._pool() is not mine else b"shared")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"own"
    os.waitpid(child, 0)


# -- real processes over local: --------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
        preamble = (
            "import os, sys, time, threading, signal\n"
            "from volcano_locks import *\n"
            f"client = LockClient(api_url='local:{tmp_path}/locks.sqlite3')\n"
        )
        return subprocess.run(
            [sys.executable, *options, "-W", "error", "-c", preamble + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
        )

    return run


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_an_interpreter_that_ends_with_a_live_hold_releases_it(run: Run) -> None:  # R10
    code = """
        forgotten = client.hold('job', ttl=7_776_000).__enter__()
        del forgotten
        keep = client.hold('b', ttl=7_776_000)  # whose renewer sleeps for longer than we wait here
        keep.__enter__()
    """
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")
    seen = run("print(client.get('job').held, client.get('b').held)")
    assert seen.stdout.split()[1] == "False"


@pytest.mark.parametrize("holds", [1, 20])
def test_an_interpreter_that_ends_while_the_service_is_away_ends_soon(
    run: Run, holds: int
) -> None:  # R10
    code = f"""
        from types import SimpleNamespace
        from volcano_locks import client as module
        from volcano_locks._http import httpx
        from volcano_locks.testing import ManualClock
        clock = ManualClock()
        class Away(httpx.BaseTransport):
            def handle_request(self, request):
                if request.method == 'POST':
                    return httpx.Response(201, json={{'fencing_token': 7, 'expires_at': None}})
                clock.advance(request.extensions['timeout']['read'], settle=False)
                raise httpx.ReadTimeout('away')
        client = LockClient('sk-x', transport=Away(), clock=clock)
        holds = [client.hold(f'job{{n}}', ttl=60) for n in range({holds})]
        for hold in holds: hold.__enter__()
        module.time = SimpleNamespace(monotonic=clock.now)
        start = clock.now()
        module._release_at_exit()
        print(clock.now() - start, *[hold.lost for hold in holds])
    """
    done = run(code)
    assert done.returncode == 0, done.stderr
    waited, *lost = done.stdout.split()
    assert 0 < float(waited) < 2
    assert lost == ["True"] * holds
    assert "Traceback" not in done.stderr


def test_acquire_twice_is_a_typed_error_under_dash_o(run: Run) -> None:  # R12
    code = """
        hold = client.hold('job')
        with hold:
            try: hold.__enter__()
            except InvalidRequest as error: print('typed', error)
    """
    assert run(code, "-O").stdout.startswith("typed")


def test_a_stopped_process_sees_its_loss_at_the_first_look(tmp_path: Path, run: Run) -> None:  # R6
    code = (
        "import sys\nfrom volcano_locks import LockClient, LeaseLost\n"
        f"client = LockClient(api_url='local:{tmp_path}/locks.sqlite3')\n"
        "try:\n"
        "    with client.hold('job', ttl=5) as hold:\n"
        "        print('in', flush=True)\n"
        "        sys.stdin.readline()\n"
        "        hold.check()\n"
        "except LeaseLost as error: print('lost', error.reason)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "in\n"
        freeze(process, tmp_path)
        with LockClient(api_url=f"local:{tmp_path}/locks.sqlite3") as client:
            with client.hold("job", wait=60):  # once it can be taken over, the lease is over
                os.kill(process.pid, signal.SIGCONT)
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline().startswith("lost")
        assert process.wait(60) == 0


def test_a_cpu_loop_and_gevent_do_not_hide_a_loss(tmp_path: Path) -> None:  # R5
    code = """
        from gevent import monkey; monkey.patch_all()
        from volcano_locks import LockClient, LeaseLost, Policy
        from volcano_locks.clock import SystemClock
        class Hastening(SystemClock):
            since = float('inf')
            def now(self): return (now := super().now()) + max(0, now - self.since) * 100
        clock = Hastening()
        often = Policy(first_renewal=0.01)
        client = LockClient(api_url='local:' + sys.argv[1], clock=clock, policy=often)
        import gevent
        with client.hold('quiet') as hold:
            first = hold.lease
            while hold.lease is first: gevent.sleep(0.05); hold.check()
        print('kept')
        try:
            with client.hold('job') as hold:
                clock.since = clock.now()
                while not hold.lost: pass      # no greenlet of ours runs here
                hold.check()
        except LeaseLost: print('lost')
    """
    script = textwrap.dedent(code).replace("from gevent", "import sys\nfrom gevent", 1)
    done = subprocess.run(
        [sys.executable, "-c", script, "locks.sqlite3"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["kept", "lost"], done.stderr


# -- real sockets ----------------------------------------------------------------------------------


class Server:
    """A raw HTTP server that grants everything and closes each connection after an answer."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.methods: list[str] = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        body = b'{"expires_at": "2030-01-01T00:00:00Z", "fencing_token": 7, "held": true}'
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                head = b""
                while b"\r\n\r\n" not in head and (part := connection.recv(4096)):
                    head += part
                method = head.split(b" ")[0].decode()
                self.methods.append(method)
                status = {"POST": b"201 Created", "DELETE": b"204 No Content"}.get(
                    method, b"200 OK"
                )
                payload = b"" if method == "DELETE" else body
                connection.sendall(
                    b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(payload), payload)
                )

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(60)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_a_connection_that_the_server_closed_costs_no_renewal(server: Server) -> None:  # H2
    clock = clock_for_the_service()
    options: dict[str, Any] = {"clock": clock, "entropy": Counting(), "policy": PATIENT}
    with LockClient("sk-x", server.url, **options) as client:
        with client.hold("job", ttl=180) as hold:
            for _ in range(5):
                clock.advance(61)
                hold.check()
    assert server.methods.count("PATCH") == 5  # none was lost on a closed connection


def test_a_peer_that_trickles_its_answer_is_bounded() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def trickle() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            # Too much to be there in a quarter of an hour.
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 65000\r\n\r\n")
            while not stop.wait(0.02):
                connection.sendall(b" ")

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with LockClient("sk-x", url, policy=Policy(timeout=0.5)) as client:
        started = time.monotonic()
        with pytest.raises(TransportFailed):
            client.get("job")
        assert time.monotonic() - started < 60
    stop.set()
    thread.join(60)
    listener.close()


def test_pool_exhaustion_is_a_typed_error_and_nothing_was_sent() -> None:  # H3
    from volcano_locks._http import httpx

    silent = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{silent.getsockname()[1]}"
    pool = httpx.Client(limits=httpx.Limits(max_connections=1))
    sent: list[bool] = []

    def ask(timeout: float) -> None:
        client = LockClient("sk-x", url, policy=Policy(timeout=timeout))
        client._pools[os.getpid()] = pool
        with pytest.raises(TransportFailed) as failed:
            client.get("job")
        sent.append(failed.value.sent)

    patient = threading.Thread(target=ask, args=(600,))
    patient.start()
    connection, _ = silent.accept()
    assert connection.recv(1)  # the only connection has a request under way
    ask(0.1)
    assert sent == [False]
    connection.close()
    patient.join(60)
    assert sent == [False, True]
    pool.close()
    silent.close()


def test_closing_a_client_closes_its_sockets(server: Server) -> None:
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    for _ in range(5):
        with LockClient("sk-x", server.url) as client:
            client.get("job")
            with client.hold("job"):
                pass
    gc.collect()
    joined(0)
    end = time.monotonic() + 60  # for the other ends, which the server closes
    while sys.platform == "linux" and len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < end, os.listdir("/proc/self/fd")
        threading.Event().wait(0.001)


def test_a_slow_renewal_is_no_warning_of_ours(
    client: LockClient, service: FakeService, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "volcano_locks")
    service.next(RENEW, Drop())
    with client.hold("job", ttl=30):
        clock.advance(12)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "renewal of lock 'job' failed" in messages[0]
    assert "s left" in messages[0]


def test_a_body_without_length_and_end_is_cut_off(clock: ManualClock) -> None:
    from volcano_locks._http import httpx

    def endless() -> Iterator[bytes]:
        for _ in range(100_000):
            yield b"x" * 10_000
        raise AssertionError("read to the end")

    class Portal(FakeService):
        def handle_request(self, request: Any) -> Any:
            return httpx.Response(200, content=endless())

    client = LockClient("sk-x", transport=Portal(clock), clock=clock)
    with client, pytest.raises(OutcomeUnknown, match="no lock state"):
        client.get("job")


def test_a_signal_while_a_hold_is_left_does_not_leave_its_lease_behind(
    client: LockClient, service: FakeService
) -> None:
    with pytest.raises(KeyboardInterrupt):
        with client.hold("job", ttl=30) as hold:

            def interrupted(timeout: float) -> None:
                raise KeyboardInterrupt

            assert hold._keeper is not None
            hold._keeper.join = interrupted  # type: ignore[assignment]
    assert service.free("job")
    assert len(service.sent(RELEASE)) == 1


def test_a_campaign_keeps_the_terms_of_several_threads_apart(
    client: LockClient, service: FakeService, clock: ManualClock
) -> None:
    campaign = client.campaign("job", ttl=30)
    seen: list[str] = []
    first = threading.Event()

    def older() -> None:
        try:
            with campaign:
                first.set()
                service.locks["job"].owner = None  # force-released
                assert second.wait(60)
        except LeaseLost:
            seen.append("older lost")

    second = threading.Event()
    thread = threading.Thread(target=older)
    thread.start()
    assert first.wait(60)
    with campaign as term:
        second.set()
        thread.join(60)
        term.check()
    assert service.free("job")


@pytest.mark.parametrize("kind", ["async", "generator", "asyncgen"])
def test_work_that_would_run_after_the_release_is_refused(
    client: LockClient, service: FakeService, kind: str
) -> None:
    async def coroutine(hold: Any = None) -> None: ...

    def generator(hold: Any = None) -> Iterator[None]:
        yield

    async def asyncgen(hold: Any = None) -> Any:
        yield

    work = {"async": coroutine, "generator": generator, "asyncgen": asyncgen}[kind]
    with pytest.raises(InvalidRequest, match="after the lock is released"):
        client.leader_only("job")(work)
    with pytest.raises(InvalidRequest, match="after the lock is released"):
        client.with_lock("job", work)
    assert service.free("job")


def test_a_renewer_that_cannot_start_leaves_no_trace_in_the_quota(
    client: LockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            client.hold("job").__enter__()
    assert not client._rules.quota._holders
