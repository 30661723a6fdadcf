"""Plain functions and scheduler jobs: they answer with a LockResult."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest
from apscheduler.schedulers.background import BackgroundScheduler
from flask import Flask, current_app
from flask_apscheduler import APScheduler

from volcano_locks import LockHeld, LockResult
from volcano_locks.errors import ConfigurationError, InvalidRequest, LeaseLost
from volcano_locks.local.transport import LocalTransport
from volcano_locks_flask import VolcanoLocks, extension, leader_only


@pytest.fixture
def context(app):
    with app.app_context():
        yield


@pytest.fixture
def only_app(app, monkeypatch):
    """The app as the only one of its process."""
    monkeypatch.setattr(extension, "_apps", weakref.WeakSet([app]))
    return app


@leader_only("sum.{first}", ttl=30)
def add(first, second=2, *, lease):
    """Add under a lock."""
    return first + second, lease.key


def test_a_function_returns_what_it_made_and_whether_it_ran(context, client):
    assert add(1) == LockResult(acquired=True, value=(3, "sum.1"))
    assert add(first=1, second=5).value == (6, "sum.1")
    with client.hold("sum.1"):
        assert add(1) == LockResult(acquired=False, value=None)
        assert add(2).acquired
    assert add.__name__ == "add"
    assert add.__doc__ == "Add under a lock."
    assert not client.get("sum.1").held


def test_a_wrong_call_is_a_type_error_and_takes_no_lock(context, client):
    with pytest.raises(TypeError, match="first"):
        add()
    with pytest.raises(InvalidRequest, match="no lock key"):
        add("a/b")


def test_a_held_lock_is_an_error_only_if_asked_for(context, client):
    @leader_only("k", if_held="fail")
    def job():
        raise AssertionError("it must not run")

    with client.hold("k"), pytest.raises(LockHeld):
        job()


def test_a_method_keeps_its_self(context):
    class Reports:
        name = "daily"

        @leader_only("k")
        def make(self, lease):
            return self.name, lease.key

    assert Reports().make().value == ("daily", "k")


def test_a_lost_lease_in_a_thread_is_told_there_and_nowhere_else(app, client):
    entered, lost = threading.Event(), threading.Event()
    ends = []

    @leader_only("k", ttl=5)
    def job(lease):
        entered.set()
        lost.set() if lease.wait_lost(60) else None
        lease.check()

    def run():
        with app.app_context():
            try:
                job()
            except LeaseLost as error:
                ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(60)
    client.force_release("k")
    assert lost.wait(60)  # nothing interrupts this wait, though the lease is lost meanwhile
    thread.join()
    assert ends[0].key == "k"


def test_an_async_function_is_run_to_its_end_and_cancelled_with_its_lease(context, client):
    steps = []

    @leader_only("k", ttl=5)
    async def job(lease):
        client.force_release("k")
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("cancelled")

    @leader_only("k", ttl=5)
    async def quick(lease):
        return current_app.name

    assert quick().value == "shop"
    with pytest.raises(LeaseLost):
        job()
    assert steps == ["cancelled"]

    async def inside_a_loop():
        with pytest.raises(ConfigurationError, match="AsyncLockClient"):
            quick()

    asyncio.run(inside_a_loop())
    assert not client.get("k").held


def test_outside_of_a_context_it_runs_in_that_of_the_only_app(only_app):
    @leader_only("k")
    def job():
        return current_app.name

    assert job().value == "shop"
    assert not current_app


def test_outside_of_a_context_it_does_not_guess_between_apps(only_app, service):
    @leader_only("k")
    def job():
        raise AssertionError("it must not run")

    other = Flask("other")
    VolcanoLocks(other)
    with pytest.raises(ConfigurationError, match=r"2 apps with a VolcanoLocks.*app_context"):
        job()


def test_a_function_without_any_app_is_told_so(monkeypatch):
    monkeypatch.setattr(extension, "_apps", weakref.WeakSet())
    with pytest.raises(ConfigurationError, match="no app with a VolcanoLocks"):
        add(1)


# -- schedulers ----------------------------------------------------------------------------------


def test_a_scheduler_runs_it_as_a_job_without_knowing_the_lease(only_app):
    done = threading.Event()
    results = []

    def hear(event):
        results.append(event.retval)
        done.set()

    scheduler = BackgroundScheduler()
    scheduler.add_listener(hear)
    scheduler.add_job(
        add, args=[40], misfire_grace_time=None
    )  # APScheduler checks that the arguments fit
    scheduler.start()
    try:
        while not results or results[-1] is None:
            assert done.wait(60)
            done.clear()
    finally:
        scheduler.shutdown()
    assert results[-1] == LockResult(acquired=True, value=(42, "sum.40"))


def test_a_lost_connection_is_the_jobs_error_and_no_silent_skip(only_app, service, monkeypatch):
    from apscheduler.events import EVENT_JOB_ERROR

    from volcano_locks import TransportFailed

    def broken(self, request):
        raise ConnectionResetError("cut")

    monkeypatch.setattr(LocalTransport, "handle_request", broken)
    errors, done = [], threading.Event()
    scheduler = BackgroundScheduler()
    scheduler.add_listener(
        lambda event: (errors.append(event.exception), done.set()), EVENT_JOB_ERROR
    )
    scheduler.add_job(add, args=[1], misfire_grace_time=None)
    scheduler.start()
    try:
        assert done.wait(60)
    finally:
        scheduler.shutdown()
    assert isinstance(errors[0], TransportFailed)


def test_above_a_schedulers_decorator_it_is_an_error_since_the_bare_function_is_scheduled():
    scheduler = BackgroundScheduler()
    with pytest.raises(TypeError, match="above the scheduler's decorator"):

        @leader_only("k")
        @scheduler.scheduled_job("interval", seconds=60)
        def job():
            pass

    flask_scheduler = APScheduler()
    with pytest.raises(TypeError, match="above the scheduler's decorator"):

        @leader_only("k")
        @flask_scheduler.task("interval", id="other", seconds=60)
        def other():
            pass

    @flask_scheduler.task("interval", id="right", seconds=60)
    @leader_only("k")
    def right():
        pass
