"""What signals and a lost lease do to a running body. Each job is a real process, each signal real."""

from __future__ import annotations

import signal

import pytest

from .jobs import Job, run

TERM, HUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT


@pytest.mark.parametrize(("signum", "code"), [(TERM, 143), (HUP, 129)])
def test_a_signal_releases_and_ends_with_its_exit_code(signum: signal.Signals, code: int) -> None:
    with Job("lead(lambda hold: (say('leading'), time.sleep(600)))") as job:
        job.expect("leading")
        job.send(signum)
        end = job.end()
    assert end == (code, "leading\nreleasing Terminated\nreleased", "")


def test_ctrl_c_releases_and_is_still_a_keyboard_interrupt() -> None:
    with Job("lead(lambda hold: (say('leading'), time.sleep(600)))") as job:
        job.expect("leading")
        job.send(INT)
        end = job.end()
    assert end.code == -INT
    assert "releasing KeyboardInterrupt\nreleased" in end.out


def test_two_sigterms_20_ms_apart_while_the_job_prints_release_once() -> None:
    with Job(
        """
        def body(hold):
            say("leading")
            while True:
                print("x" * 200, flush=True)
        lead(body, releasing=told)
        """
    ) as job:
        job.expect("leading")
        job.expect("xxx")
        for _ in range(2):
            job.send(TERM)
            signal.sigtimedwait([], 0.02)
        job.tell()
        end = job.end()
    assert end.code == 143
    assert end.out.count("releasing") == 1
    assert end.out.count("released") == 1
    assert not end.err


def test_a_storm_of_signals_neither_tears_the_release_nor_doubles_it() -> None:
    with Job("lead(lambda hold: (say('leading'), time.sleep(600)), releasing=told)") as job:
        job.expect("leading")
        for _ in range(20):
            for signum in (TERM, HUP, INT, TERM):
                job.send(signum)
            signal.sigtimedwait([], 0.02)
        job.tell()
        end = job.end()
    assert end.out.count("releasing") == end.out.count("released") == 1
    # Whichever of the first three the kernel delivered first decides.
    assert end.code in {143, 129, -INT}
    assert "Traceback" not in end.err or end.code == -INT


def test_a_signal_during_the_release_after_success_waits_for_it_and_then_ends_the_process() -> None:
    with Job("lead(lambda hold: None, releasing=told); say('not reached')") as job:
        job.expect("releasing")
        job.send(TERM)
        job.tell()
        end = job.end()
    assert end == (143, "releasing None\nreleased", "")


def test_a_signal_while_waiting_for_the_lock_ends_the_wait() -> None:
    with Job(
        """
        def entering():
            say("waiting")
            time.sleep(600)
        lead(lambda hold: say("not reached"), entering=entering, wait=None)
        """
    ) as job:
        job.expect("waiting")
        job.send(TERM)
        end = job.end()
    assert end.code == 143
    assert "not reached" not in end.out


def test_what_was_granted_while_the_signal_came_is_given_back() -> None:
    end = run(
        """
        def entering():
            os.kill(os.getpid(), signal.SIGTERM)
        lead(lambda hold: say("not reached"), entering=entering)
        """
    )
    assert end == (143, "released what was half entered", "")


CLEANS_UP = """
class Acquisition:
    # As a client does it: no exception is in flight while the clean-up waits for the service.
    def __init__(self, outer=None):
        self.outer = outer
    def __call__(self):
        try:
            say("acquiring")
            if self.outer:
                self.outer.lose_soon()
            time.sleep(600)
        except BaseException as error:
            caught = error
        say("sweeping")
        told()
        say("swept")
        raise caught
"""


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(TERM, TERM, 143), (TERM, HUP, 143), (INT, TERM, -INT), (TERM, INT, 143), (INT, INT, -INT)],
)
def test_a_second_signal_does_not_tear_the_clean_up_of_an_interrupted_acquisition(
    first: signal.Signals, second: signal.Signals, code: int
) -> None:
    with Job(
        CLEANS_UP + "lead(lambda hold: say('not reached'), entering=Acquisition(), wait=None)"
    ) as job:
        job.expect("acquiring")
        job.send(first)
        job.expect("sweeping")
        job.send(second)
        job.tell()
        end = job.end()
    assert (end.code, end.out) == (
        code,
        "acquiring\nsweeping\nswept\nreleased what was half entered",
    )


def test_sigterm_does_not_tear_the_clean_up_that_the_loss_of_an_outer_lease_began() -> None:
    with Job(
        CLEANS_UP
        + """
lead(lambda outer: lead(print, key="inner", entering=Acquisition(outer), wait=None))
        """
    ) as job:
        job.expect("sweeping")
        job.send(TERM)
        job.tell()
        end = job.end()
    assert "swept" in end.out
    assert end.code in {76, 143}


def test_an_existing_handler_is_still_called_and_comes_back_afterwards() -> None:
    end = run(
        """
        def mine(signum, frame):
            say("mine", signum)
        signal.signal(signal.SIGTERM, mine)
        hup, urg = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGURG)
        try:
            lead(lambda hold: os.kill(os.getpid(), signal.SIGTERM))
        except Terminated as ended:
            say("ended", ended.code)
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGHUP) is hup
        assert signal.getsignal(signal.SIGURG) is urg
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.set_wakeup_fd(-1) == -1
        """
    )
    assert end == (0, "mine 15\nreleasing Terminated\nreleased\nended 143", "")


def test_an_existing_handler_hears_a_signal_of_the_release_after_the_release() -> None:
    with Job(
        """
        signal.signal(signal.SIGTERM, lambda signum, frame: say("mine", signum))
        lead(lambda hold: None, releasing=told)
        say("went on")
        """
    ) as job:
        job.expect("releasing")
        job.send(TERM)
        job.tell()
        end = job.end()
    assert end == (0, "releasing None\nreleased\nmine 15\nwent on", "")


def test_a_handler_that_raises_its_own_exit_keeps_it() -> None:
    end = run(
        """
        signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(5))
        lead(lambda hold: os.kill(os.getpid(), signal.SIGTERM))
        """
    )
    assert end == (5, "releasing SystemExit\nreleased", "")


def test_an_ignored_hangup_stays_ignored() -> None:
    end = run(
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        lead(lambda hold: (os.kill(os.getpid(), signal.SIGHUP), say("still here")))
        """
    )
    assert end == (0, "still here\nreleasing None\nreleased", "")


def test_the_handlers_that_a_body_leaves_behind_are_its_own() -> None:
    end = run(
        """
        def theirs(signum, frame): ...
        lead(lambda hold: signal.signal(signal.SIGTERM, theirs))
        assert signal.getsignal(signal.SIGTERM) is theirs
        """
    )
    assert end.code == 0, end.err


def test_a_child_of_the_body_hears_sigterm_as_if_nobody_led() -> None:
    end = run(
        """
        command._NAP = 0.01
        def body(hold):
            ready, tell = os.pipe()
            child = os.fork()
            if not child:
                os.write(tell, b"!")
                time.sleep(600)
                os._exit(1)
            os.read(ready, 1)  # Python drops what arrives in the middle of a fork
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})  # deaf, as in a database
            os.kill(child, signal.SIGTERM)
            say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            watched()  # its signal is nothing to this process
        lead(body, interrupts=[lambda: (say("broke a wait"), os._exit(1))])
        """
    )
    # Not the third: from 3.12 on Python warns there of any fork beside a thread.
    assert end[:2] == (0, "child -15\nreleasing None\nreleased")


# -- the lost lease ------------------------------------------------------------------------------

STUCK = {
    "in a system call": "time.sleep(600)",
    "reading a pipe": "os.read(os.pipe()[0], 1)",
    "waiting for a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "waiting for a child": "import subprocess; subprocess.run(['sleep', '600'])",
    "computing": "sum(sum(range(1000)) for _ in iter(int, 1))",
}


@pytest.mark.parametrize("waits", STUCK)
def test_a_lost_lease_is_raised_in_a_body_that_is(waits: str) -> None:
    end = run(
        f"""
        def body(hold):
            say("leading")
            try:
                hold.lose_soon()
                {STUCK[waits]}
            except LeaseLost as lost:
                say("heard")
                raise
        lead(body)
        """
    )
    assert end.code == 76
    assert end.out == "leading\nheard\nreleasing LeaseLost\nreleased"
    assert end.err == "stopped: lease of 'job' (fencing token 7) is lost: it was taken\n"


def test_a_body_that_swallows_the_loss_gets_it_again() -> None:
    end = run(
        """
        def body(hold):
            for _ in range(3):
                try:
                    hold.lose_soon()
                    time.sleep(600)
                except Exception as error:
                    say("swallowed", type(error).__name__)
            say("went on")
        lead(body)
        """
    )
    assert end.code == 76
    assert end.out.count("swallowed LeaseLost") == 3


def test_a_body_that_handles_the_loss_is_left_alone() -> None:
    end = run(
        """
        presses, press = threading.Semaphore(0), command._Run._press
        def counted(self, unheard):
            press(self, unheard)
            presses.release()
        command._Run._press, command._AGAIN = counted, 0.05
        def told_again():
            for _ in range(3):
                assert presses.acquire(timeout=60), "nobody tells it any more"
        def body(hold):
            try:
                hold.lose_soon()
                time.sleep(600)
            except LeaseLost:
                told_again()
                say("handled")
                raise
            finally:
                told_again()
                say("cleaned up")
        lead(body)
        """
    )
    assert end == (
        76,
        "handled\ncleaned up\nreleasing LeaseLost\nreleased",
        "stopped: lease of 'job' (fencing token 7) is lost: it was taken\n",
    )


def test_a_loss_that_comes_as_the_body_ends_does_not_tear_the_release() -> None:
    end = run(
        """
        def outlive_the_watcher():
            for thread in threading.enumerate():
                if thread.name.startswith("lease-watch"):
                    thread.join()
        lead(lambda hold: hold.lose(), releasing=outlive_the_watcher)
        """
    )
    assert end.code == 76
    assert end.out.endswith("\nreleased")


def test_sigterm_after_the_loss_does_not_disturb_its_handling() -> None:
    with Job(
        """
        def body(hold):
            try:
                hold.lose_soon()
                time.sleep(600)
            except LeaseLost:
                say("handling")
                time.sleep(600)
        lead(body)
        """
    ) as job:
        job.expect("handling")
        job.send(TERM)
        end = job.end()
    assert end.code == 143
    assert end.out.endswith("releasing Terminated\nreleased")


def test_a_lease_lost_in_a_worker_thread_does_not_interrupt_the_main_thread() -> None:
    end = run(
        """
        def body(hold):
            hold.lose_soon()
            while True:
                time.sleep(0.01)
                hold.check()
        def worker():
            try:
                lead(body)
            except SystemExit as ended:
                say("worker", ended.code)
        before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGURG)]
        thread = threading.Thread(target=worker)
        thread.start()
        thread.join()
        for left in set(threading.enumerate()) - {threading.main_thread()}:
            left.join()  # then nobody is there any more who could
        assert before == [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGURG)]
        say("main went on")
        """
    )
    assert end.code == 0
    assert end.out == "releasing LeaseLost\nreleased\nworker 76\nmain went on"


def test_a_watcher_that_cannot_start_costs_the_run_and_not_the_lock() -> None:
    """Scenario R9."""
    end = run(
        """
        def start(self):
            raise RuntimeError("can't start new thread")
        threading.Thread.start = start
        lead(lambda hold: say("not reached"))
        """
    )
    assert (end.code, end.out) == (1, "releasing RuntimeError\nreleased")
    assert end.err.endswith("RuntimeError: can't start new thread\n")


def test_a_body_with_more_than_1024_open_files_is_told_of_the_loss() -> None:
    end = run(
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        lead(lambda hold: (hold.lose_soon(), time.sleep(600), say("went on")))
        """
    )
    assert (end.code, end.out) == (76, "releasing LeaseLost\nreleased")
    assert "Traceback" not in end.err


def test_a_watcher_that_cannot_listen_says_so_and_still_tells_of_the_loss() -> None:
    end = run(
        """
        import selectors
        def full(*_):
            raise OSError(24, "Too many open files")
        selectors.DefaultSelector = full
        lead(lambda hold: (hold.lose_soon(), time.sleep(600), say("went on")))
        """
    )
    assert (end.code, end.out) == (76, "releasing LeaseLost\nreleased")
    assert "Too many open files" in end.err
    assert "lock 'job': signals cannot be listened for any more" in end.err


def test_the_loss_of_an_outer_lease_reaches_an_inner_body_and_both_are_released() -> None:
    end = run(
        """
        def outer(hold):
            lead(lambda inner: (hold.lose_soon(), time.sleep(600)), key="inner")
        lead(outer)
        """
    )
    assert end.code == 76
    assert end.out == "releasing LeaseLost\nreleased\nreleasing SystemExit\nreleased"


def test_sigterm_in_a_nested_run_releases_both() -> None:
    with Job(
        """
        lead(lambda outer: lead(lambda inner: (say("leading"), time.sleep(600)), releasing=told))
        """
    ) as job:
        job.expect("leading")
        job.send(TERM)
        signal.sigtimedwait([], 0.05)
        job.send(TERM)
        job.tell()
        end = job.end()
    assert end.code == 143
    assert end.out.count("releasing Terminated") == end.out.count("released") == 2


def test_sigterm_during_the_release_of_an_inner_run_ends_the_outer_body_right_after_it() -> None:
    with Job(
        """
        def outer(hold):
            lead(lambda inner: None, key="inner", releasing=told)
            say("went on")
        lead(outer)
        """
    ) as job:
        job.expect("releasing")
        job.send(TERM)
        job.tell()
        end = job.end()
    assert end == (143, "releasing None\nreleased\nreleasing Terminated\nreleased", "")


# -- waits that hear no signal -------------------------------------------------------------------

ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"


def test_a_long_query_of_sqlite_is_broken_for_a_lost_lease() -> None:
    end = run(
        f"""
        db = sqlite3.connect(":memory:", check_same_thread=False)
        def body(hold):
            hold.lose_soon()
            db.execute("{ENDLESS}").fetchall()
        lead(body, interrupts=[db.interrupt])
        """
    )
    assert (end.code, end.out) == (76, "releasing LeaseLost\nreleased")


def test_a_long_query_of_sqlite_is_broken_for_sigterm() -> None:
    with Job(
        f"""
        db = sqlite3.connect(":memory:", check_same_thread=False)
        def body(hold):
            say("leading")
            db.execute("{ENDLESS}").fetchall()
        lead(body, interrupts=[db.interrupt])
        """
    ) as job:
        job.expect("leading")
        job.send(TERM)
        end = job.end()
    assert (end.code, end.out) == (143, "leading\nreleasing Terminated\nreleased")


@pytest.mark.parametrize("reason", ["loss", "sigterm"])
def test_the_busy_wait_of_sqlite_ends_early(reason: str, tmp_path) -> None:
    with Job(
        f"""
        writer = sqlite3.connect({str(tmp_path / "db")!r})
        writer.execute("begin immediate")
        db = sqlite3.connect({str(tmp_path / "db")!r}, timeout=60, check_same_thread=False)
        def body(hold):
            say("leading")
            {"hold.lose_soon()" if reason == "loss" else ""}
            db.execute("begin immediate")
        lead(body, interrupts=[db.interrupt])
        """
    ) as job:
        job.expect("leading")
        if reason == "sigterm":
            job.send(TERM)
        end = job.end(limit=40)  # of the 60
    assert end.code == (76 if reason == "loss" else 143)
