"""The application that gunicorn and ``flask run`` serve in the tests.

Each of its processes runs a scheduler, or a campaign for a singleton, and appends what happened to
the log, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import threading
import time

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.schedulers.background import BackgroundScheduler
from flask import Flask, jsonify
from flask_apscheduler import APScheduler
from werkzeug.serving import is_running_from_reloader

from volcano_locks import LeaseLost, LockClient, Policy
from volcano_locks.local import store
from volcano_locks_flask import VolcanoLocks, leader_only

store.PATIENCE = 60  # no test is about a slow disk
locks = VolcanoLocks(
    client_factory=lambda settings: LockClient.from_settings(
        settings, policy=Policy(poll_interval=1)
    )
)


def record(**event):
    line = json.dumps({"pid": os.getpid(), **event}) + "\n"
    descriptor = os.open(os.environ["LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


@leader_only("tick", ttl=5, min_hold=5)
def tick(lease):
    """A job that is over long before another machine's clock strikes."""
    record(event="ran", fence=lease.fencing_token)


def heard(event):
    if event.exception:
        record(event="failed", error=repr(event.exception))
    elif event.retval is not None:
        at = event.scheduled_run_time.isoformat(timespec="seconds")
        record(event="tick", at=at, acquired=event.retval.acquired)


def create_app(kind):
    app = Flask("served")
    locks.init_app(app)
    with app.app_context():
        locks.client.get("tick")  # so that the first tick is not late
    if kind == "apscheduler":
        scheduler = BackgroundScheduler()
        scheduler.add_job(tick, "cron", second="*/10", misfire_grace_time=30)
    elif kind == "flask-apscheduler":
        app.config["SCHEDULER_API_ENABLED"] = False
        scheduler = APScheduler(app=app)
        scheduler.task("cron", id="tick", second="*/10", misfire_grace_time=30)(tick)
    else:
        scheduler = None
    if scheduler is not None:
        scheduler.add_listener(heard, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
        scheduler.start()
    if kind == "singleton":
        threading.Thread(target=lead, args=(app,), daemon=True).start()
    if kind == "reloaded" and is_running_from_reloader():
        threading.Thread(target=lead, args=(app,), daemon=True).start()
    if kind == "preloaded":
        with app.app_context():
            inherited = locks.client.hold("of-the-master", ttl=600).__enter__()

        @app.get("/inherited")
        def inherited_hold():
            return jsonify(lost=inherited.lost, pid=os.getpid())

    @app.get("/pid")
    def pid():
        return jsonify(os.getpid())

    @app.get("/once/<key>")
    def once(key):
        work = leader_only(f"once.{key}", ttl=5, min_hold=600)(os.getpid)
        result = work()
        return jsonify(acquired=result.acquired, pid=os.getpid())

    @app.get("/blocked")
    def blocked():
        """Hold a lock through a loop that lets nothing else run for longer than the TTL."""
        looked = []
        try:
            with locks.client.hold("blocked", ttl=5) as hold:
                end = time.monotonic() + 4.5
                while time.monotonic() < end:
                    pass
                looked.append(hold.lost)
                hold.check()
        except LeaseLost as loss:
            looked.append(loss.reason)
        return jsonify(looked)

    return app


def lead(app):
    """A singleton of the whole deployment, taken over by whoever is left."""
    with app.app_context():
        campaign = locks.client.campaign("singleton", ttl=600)
    for term in campaign:
        with term as hold:
            record(event="leads", fence=hold.fencing_token)
            hold.wait_lost()
