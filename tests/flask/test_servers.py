"""Leader-only work in the processes of real servers: gunicorn, its gevent workers, the reloader."""

from __future__ import annotations

import collections
import http.client
import itertools
import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest

from volcano_locks import LockClient

from .processes import PATIENCE, Machines, run_out


def eventually(what, errors):
    """The first true value of ``what()``. Looks often; fails after its patience."""
    end = time.monotonic() + PATIENCE
    while not (seen := what()):
        assert time.monotonic() < end, errors()
        time.sleep(0.02)
    return seen


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class Log:
    """What the processes of one deployment have recorded."""

    def __init__(self, path):
        self.path = path
        path.touch()

    def events(self, name):
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [line for line in lines if line["event"] == name]

    def until(self, what):
        return eventually(what, self.path.read_text)


class Site:
    """A served application, its log and its address."""

    def __init__(self, machines: Machines, kind: str) -> None:
        self._machines = machines
        self._kind = kind
        self.log = Log(machines.directory / f"{kind}.log")
        url = f"local:{machines.directory / kind}.sqlite3"
        self._environment = {"LOG": str(self.log.path), "VOLCANO_API_URL": url}
        self.client = LockClient(api_url=url)

    def gunicorn(self, *arguments: str):
        self.process = self._machines.start(
            *("-m", "gunicorn", "--bind", "127.0.0.1:0", "--workers", "3"),
            *(
                "--timeout",
                "120",
                "--no-control-socket",
                *arguments,
                f"tests.flask.served:create_app('{self._kind}')",
            ),
            **self._environment,
        )
        return self

    def debug(self):
        """``flask run --debug``, with a reloader that watches the file ``site.py``."""
        self.source = self._machines.directory / "served_site.py"
        self.source.write_text(
            f"from tests.flask.served import create_app\napp = create_app('{self._kind}')\n"
        )
        self.process = self._machines.flask(
            *("run", "--debug", "--port", "0"), app="served_site", **self._environment
        )
        return self

    def get(self, path):
        """The answer, as soon as somebody listens."""

        def listens():
            return re.search(
                r"(?:Listening at:|Running on) (http://\S+:\d+)", self.process.errors()
            )

        url = eventually(listens, self.process.errors)[1] + path

        def answer():
            try:
                with urllib.request.urlopen(url, timeout=PATIENCE) as response:
                    return json.loads(response.read())
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError):
                    raise
                return None

        return eventually(answer, self.process.errors)

    def ticks(self):
        """The results per tick, of the ticks at which all three workers have looked."""
        results = collections.defaultdict(list)
        for event in self.log.events("tick"):
            results[event["at"]].append((event["acquired"], event["pid"]))
        return [found for found in results.values() if len(found) == 3]

    def starts(self, key):
        """The instants at which terms began, by the service's clock: milliseconds."""
        return [term.started for term in self.client._local.store.read().tenures if term.key == key]

    def terms(self, number):
        """The first terms of the singleton, as soon as there are so many."""
        return self.log.until(lambda: len(found := self.log.events("leads")) >= number and found)


@pytest.fixture
def site(machines):
    sites = []

    def make(kind):
        sites.append(Site(machines, kind))
        return sites[-1]

    yield make
    for made in sites:
        made.client.close()


def test_scheduled_in_three_workers_a_job_runs_once_per_tick(site):
    sites = [
        site("flask-apscheduler").gunicorn(),
        site("apscheduler").gunicorn("--worker-class", "gevent"),
    ]

    def once(found):
        return sorted(acquired for acquired, _ in found) == [False, False, True]

    for served in sites:
        served.log.until(lambda s=served: len(s.ticks()) >= 2)
        # A worker that the machine kept from looking for so long starts once more, and rightly.
        for one, following in itertools.pairwise(served.starts("tick")):
            assert following - one >= 5_000, "the minimum hold"
        served.log.until(lambda s=served: sum(map(once, s.ticks())) >= 2)
        for found in served.ticks():
            assert len({pid for _, pid in found}) == 3
        assert served.log.events("failed") == []
        fences = [event["fence"] for event in served.log.events("ran")]
        assert fences == sorted(set(fences))


def test_after_preload_workers_lock_for_themselves_and_leave_the_masters_hold_alone(site):
    served = site("preloaded").gunicorn("--preload", "--worker-class", "gthread", "--threads", "4")
    served.get("/inherited")
    answers = []

    def ask(number):
        answers.append(served.get("/once/a"))
        answers.append(served.get("/inherited"))

    askers = [threading.Thread(target=ask, args=(n,)) for n in range(12)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert sum(answer.get("acquired", False) for answer in answers) == 1
    assert all(answer["lost"] for answer in answers if "lost" in answer)
    worker = answers[0]["pid"]
    assert worker != served.process.popen.pid
    os.kill(worker, signal.SIGTERM)  # its exit does not release what it never held
    eventually(lambda: is_gone(worker), served.process.errors)
    assert served.client.get("of-the-master").held
    assert served.process.end(signal.SIGTERM) == 0
    assert not served.client.get("of-the-master").held  # the master's exit does


def test_of_three_workers_one_leads_another_takes_over_and_the_end_gives_it_back(site):
    served = site("singleton").gunicorn()
    first = served.terms(1)[0]
    assert first["pid"] != served.process.popen.pid
    os.kill(first["pid"], signal.SIGKILL)
    run_out(served.client, "singleton")
    second = served.terms(2)[1]
    assert second["pid"] != first["pid"]
    assert served.process.end(signal.SIGTERM) == 0
    assert not served.client.get("singleton").held
    # The others may have led for an instant each, before they stopped as well.
    leads = served.log.events("leads")
    assert [event["fence"] for event in leads] == sorted({event["fence"] for event in leads})
    assert len({event["pid"] for event in leads}) == len(leads)


def test_under_the_debug_reloader_one_of_two_processes_leads_and_the_other_takes_over(site):
    served = site("singleton").debug()
    first = served.terms(1)[0]
    child = served.get("/pid")  # the reloader's child serves; both have loaded the application
    assert first["pid"] == served.process.popen.pid != child
    assert len(served.log.events("leads")) == 1
    served.process.popen.send_signal(signal.SIGKILL)
    run_out(served.client, "singleton")
    assert served.terms(2)[1]["pid"] == child


def test_a_reloaders_restart_is_not_locked_out_by_its_own_old_lease(site):
    served = site("reloaded").debug()
    first = served.terms(1)[0]  # for ten minutes, if nobody gave it back
    served.get("/pid")
    changed = served.source.stat().st_mtime + 10
    os.utime(served.source, (changed, changed))
    second = served.terms(2)[1]
    assert second["pid"] != first["pid"]
    assert second["fence"] > first["fence"]


def test_a_gevent_worker_that_was_blocked_past_its_ttl_knows_at_once(site):
    served = site("blocked").gunicorn("--worker-class", "gevent")
    lost, reason = served.get("/blocked")
    assert lost is True
    assert "no renewal got through" in reason
