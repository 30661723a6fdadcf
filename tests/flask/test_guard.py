"""The guard's two laws for both uses of a function, and mutants that break them: they are caught."""

from __future__ import annotations

import contextlib
import threading

import pytest

from volcano_locks import LockClient, LockResult, VolcanoLocksError
from volcano_locks.errors import OutcomeUnknown
from volcano_locks.local.transport import LocalTransport
from volcano_locks_flask import decorator, leader_only


def as_command(app, guarded):
    app.cli.command("job")(guarded)
    app.test_cli_runner().invoke(args=["job"])


def as_function(app, guarded):
    with app.app_context(), contextlib.suppress(VolcanoLocksError):
        guarded()


both_uses = pytest.mark.parametrize("start", [as_command, as_function])


def most_bodies_at_once(app, start):
    """How many bodies run at most at one time when two machines start the work."""
    running, most = [], []
    inside, go = threading.Event(), threading.Event()

    def body():
        running.append(None)
        most.append(len(running))
        inside.set()
        assert go.wait(60)
        running.pop()

    def machine():
        thread = threading.Thread(target=start, args=(app, leader_only("k", ttl=60)(body)))
        thread.start()
        return thread

    first = machine()
    assert inside.wait(60)
    inside.clear()
    second = machine()
    while second.is_alive() and not inside.is_set():  # turned away, or inside
        second.join(0.01)
    go.set()
    first.join()
    second.join()
    return max(most)


def runs_without_an_answer(app, start, monkeypatch):
    """Whether a body runs although nobody could say who leads."""
    ran = []

    def cut(self, request):
        raise ConnectionResetError("cut")

    monkeypatch.setattr(LocalTransport, "handle_request", cut)
    start(app, leader_only("k")(lambda: ran.append(None)))
    return bool(ran)


@both_uses
def test_one_body_runs_at_a_time(app, start):
    assert most_bodies_at_once(app, start) == 1


@both_uses
def test_no_body_runs_if_nobody_could_say_who_leads(app, start, monkeypatch):
    assert not runs_without_an_answer(app, start, monkeypatch)


# -- mutants -------------------------------------------------------------------------------------


def unlocked_command(client, key, options, work, **_):
    return work(None)


def unlocked_function(self, key, work, **_):
    return LockResult(acquired=True, value=work(None))


def open_command(client, key, options, work, **rest):
    try:
        return run_leader_only(client, key, options, work, **rest)
    except decorator.CommandEnded as ended:
        if isinstance(ended.__cause__, OutcomeUnknown):
            return work(None)
        raise


def open_function(self, key, work, **options):
    try:
        return with_lock(self, key, work, **options)
    except OutcomeUnknown:
        return LockResult(acquired=True, value=work(None))


run_leader_only, with_lock = decorator.run_leader_only, LockClient.with_lock


@both_uses
def test_a_guard_that_takes_no_lock_is_caught(app, start, monkeypatch):
    monkeypatch.setattr(decorator, "run_leader_only", unlocked_command)
    monkeypatch.setattr(LockClient, "with_lock", unlocked_function)
    assert most_bodies_at_once(app, start) == 2


@both_uses
def test_a_guard_that_fails_open_is_caught(app, start, monkeypatch):
    monkeypatch.setattr(decorator, "run_leader_only", open_command)
    monkeypatch.setattr(LockClient, "with_lock", open_function)
    assert most_bodies_at_once(app, start) == 1
    assert runs_without_an_answer(app, start, monkeypatch)
