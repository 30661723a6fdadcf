"""Real ``flask`` processes over one lock file: each end has its words, its stream and its code."""

from __future__ import annotations

import http.server
import importlib
import json
import signal
import threading
import time

import pytest

from .processes import PATIENCE, ROOT, silent_port


def test_one_machine_leads_and_the_others_skip_fail_or_wait(machines):
    leader = machines.flask("nightly", "--code", "7")
    assert leader.line().endswith("in shop")
    waiting = machines.flask("nightly", "--lock-wait", "600")

    skipped = machines.flask("nightly")
    failed = machines.flask("nightly", "--if-held", "fail")
    ran_out = machines.flask("nightly", "--lock-wait", "0.1")
    status = machines.flask("volcano-locks", "status", "nightly", "other")

    assert skipped.end() == 0
    assert skipped.output == "skipped: lock 'nightly' is held by another process"
    assert skipped.errors() == ""
    assert failed.end() == 75
    assert failed.errors() == "Error: not run: lock 'nightly' is held by another process\n"
    assert failed.output == ""
    assert ran_out.end() == 75
    assert "was held by another process for all of 0.1 s" in ran_out.errors()
    assert status.end() == 0
    held, free = status.seen
    assert held.startswith("nightly: held until ")
    assert free == "other: free"

    leader.tell()
    assert leader.end() == 7  # the command's own code
    assert leader.output.endswith("done")
    assert leader.errors() == ""

    assert waiting.line().startswith("leading ")
    assert int(waiting.seen[0].split()[1]) > int(leader.seen[0].split()[1])
    waiting.tell()
    assert waiting.end() == 0
    assert machines.client.get("nightly").held is False


def test_a_lost_lease_stops_the_running_body_with_76(machines):
    leader = machines.flask("nightly", "--lock-ttl", "5")
    asynchronous = machines.flask("patient", "--lock-ttl", "5")
    leader.until("leading")
    asynchronous.until("leading")
    for key in ("nightly", "patient"):
        machines.client.force_release(key)
    # Both wait in something that nobody wakes; only the loss does.
    assert leader.end() == 76
    assert "Error: stopped: lease of 'nightly' (fencing token" in leader.errors()
    assert "done" not in leader.output
    assert asynchronous.end() == 76
    assert asynchronous.seen == ["leading as patient in shop", "cancelled"]
    assert "Error: stopped: lease of 'patient'" in asynchronous.errors()


def test_a_machine_that_was_suspended_past_its_ttl_stops_at_its_first_look(machines):
    leader = machines.flask("careful", "--lock-ttl", "5")
    leader.until("leading")
    leader.popen.send_signal(signal.SIGSTOP)
    with machines.client.hold("careful", ttl=60, wait=PATIENCE):  # a standby took over meanwhile
        leader.tell("a line that waits for it")
        leader.popen.send_signal(signal.SIGCONT)
        assert leader.end() == 76
    assert "Error: stopped: lease of 'careful'" in leader.errors()


def test_sigterm_releases_and_ends_with_143(machines):
    leader = machines.flask("nightly", "--lock-ttl", "600")
    asynchronous = machines.flask("patient", "--lock-ttl", "600")
    leader.until("leading")
    asynchronous.until("leading")
    waiting = machines.flask("nightly", "--lock-wait", "forever", PYTHONWARNINGS="error")
    assert leader.end(signal.SIGTERM) == 143
    assert leader.errors() == "stopped by SIGTERM\n"
    assert asynchronous.end(signal.SIGTERM) == 143
    assert asynchronous.output.endswith("cancelled")
    assert machines.client.get("patient").held is False
    # Not after the TTL of 600 s, but as soon as the waiter looks: the lock was given back.
    waiting.until("leading")
    assert waiting.end(signal.SIGTERM) == 143
    assert machines.client.get("nightly").held is False


def test_sigterm_ends_a_command_that_waits_for_its_turn(machines):
    with machines.client.hold("nightly", ttl=30):
        waiting = machines.flask("nightly", "--lock-wait", "forever")
        machines.until_refused("nightly")
        assert waiting.end(signal.SIGTERM) == 143
        assert waiting.output == ""


def test_two_sigterms_while_the_job_prints_and_calls_the_service_release_once(machines):
    leader = machines.flask("busy")
    leader.until("leading")
    leader.popen.send_signal(signal.SIGTERM)
    time.sleep(0.02)  # what the scenario says; whichever comes first, the end is the same
    # A second one that comes when all is done kills the dying process: 143, too, for its shell.
    assert leader.end(signal.SIGTERM) in {143, -signal.SIGTERM}
    assert machines.client.get("busy").held is False
    assert "Traceback" not in leader.errors()


def test_the_applications_own_sigterm_handler_is_called_and_restored(machines):
    process = machines.flask("with-handler")
    process.until("leading")
    assert process.end(signal.SIGTERM) == 143
    assert process.seen == ["leading", "the application's own handler", "restored: True"]


def test_a_service_that_is_down_is_69_and_no_skip(machines):
    with silent_port() as port:
        down = machines.run(
            "nightly",
            VOLCANO_API_URL=f"http://127.0.0.1:{port}",
            VOLCANO_SERVICE_KEY="sk-never-shown",
        )
    assert down.popen.returncode == 69
    assert "Error: not run: could not find out whether the lock is free" in down.errors()
    assert down.output == ""
    assert "sk-never-shown" not in down.errors()


@pytest.fixture
def refusing_service():
    """A service that knows no such key, and the requests that it got."""
    requests = []

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append((self.path, self.headers["Authorization"]))
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"error": "invalid credential"}).encode()
            self.send_response(401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_DELETE = do_POST

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()


def test_a_refused_service_key_is_77_and_is_not_shown(machines, refusing_service):
    url, requests = refusing_service
    refused = machines.run(
        "nightly",
        VOLCANO_API_URL=url,
        VOLCANO_SERVICE_KEY="sk-never-shown",
        VOLCANO_LOCKS_TIMEOUT=f"{PATIENCE}",  # else a slow answer were a second request
    )
    assert requests == [("/locks/nightly/lease", "Bearer sk-never-shown")]
    assert refused.popen.returncode == 77
    assert refused.errors().startswith("Error: not run: ")
    assert "sk-never-shown" not in refused.errors() + refused.output
    assert refused.output == ""


def test_no_service_key_is_78_and_says_how_to_get_going(machines):
    lost = machines.run("nightly", VOLCANO_API_URL="")
    assert lost.popen.returncode == 78
    assert "VOLCANO_API_URL=local:" in lost.errors()


def test_an_operator_frees_a_lock_by_force_after_being_asked(machines):
    with machines.client.hold("stuck", ttl=3_600) as hold:  # not renewed before it is freed
        asked = machines.flask("volcano-locks", "force-release", "stuck")
        asked.tell("n")
        assert asked.end() == 1
        assert "nothing but the fence protects" in asked.output
        assert "nothing was released" in asked.errors()
        assert machines.client.get("stuck").held is True

        freed = machines.run("volcano-locks", "force-release", "stuck", "--yes")
        assert freed.popen.returncode == 0
        assert "only the fence protects" in freed.output
        assert machines.client.get("stuck").held is False
        hold.release()


# -- gevent and databases ------------------------------------------------------------------------


def test_under_gevent_a_command_hears_sigterm_and_a_lost_lease(machines):
    command = ("-m", "tests.flask.greened", "--app", "tests.flask.greened")
    stopped = machines.start(*command, "green")
    replaced = machines.start(
        *command, "green", "--lock-ttl", "5", VOLCANO_LOCKS_KEY_PREFIX="other."
    )
    struck = machines.start(*command, "struck")
    replaced.until("leading")
    machines.client.force_release("other.green")
    stopped.until("leading")
    assert stopped.end(signal.SIGTERM) == 143
    assert stopped.errors() == "stopped by SIGTERM\n"
    assert struck.end() == 143
    assert struck.errors() == "stopped by SIGTERM\n"
    for key in ("green", "struck"):
        assert machines.client.get(key).held is False
    assert replaced.end() == 76
    assert "Error: stopped: lease of 'other.green'" in replaced.errors()


def test_sigterm_and_a_lost_lease_break_a_wait_for_the_database(machines):
    stopped = machines.flask("slow", app="tests.flask.slow")
    stopped.until("leading")
    replaced = machines.flask(
        *("slow", "--lock-ttl", "5"), app="tests.flask.slow", VOLCANO_LOCKS_KEY_PREFIX="other."
    )
    replaced.until("leading")
    machines.client.force_release("other.slow")
    assert stopped.end(signal.SIGTERM) == 143
    assert stopped.errors() == "stopped by SIGTERM\n"
    assert machines.client.get("slow").held is False
    assert replaced.end() == 76
    assert "Error: stopped: lease of 'other.slow'" in replaced.errors()


def test_cron_on_two_machines_with_differing_clocks_runs_a_short_job_once(machines, monkeypatch):
    sample = ROOT / "sample_projects" / "flask"
    database = f"sqlite:///{machines.directory / 'reports.sqlite3'}"
    monkeypatch.setenv("REPORTS_DATABASE", database)
    monkeypatch.syspath_prepend(str(sample))
    reports = importlib.import_module("reports")
    app = reports.create_app()
    for arguments in (["init-db"], ["sell", "10"]):
        assert app.test_cli_runner().invoke(args=arguments).exit_code == 0
    with app.app_context():
        reports.db.engine.dispose()

    cron = machines.start(
        *(str(sample / "cron.py"), "--skew", "2", "--min-hold", "300"), REPORTS_DATABASE=database
    )
    assert cron.end() == 0  # soon: the first did not stay for its minimum hold
    skips = "skipped: lock 'reports.nightly-report' is held by another process"
    leader, follower = ("machine-a", "machine-b")
    if f"{leader}: {skips}" in cron.seen:  # overtaken, on its way to the lock
        leader, follower = follower, leader
    (skipped,) = (line for line in cron.seen if line.startswith(follower))
    assert skipped == f"{follower}: {skips}"
    assert any(line.startswith(f"{leader}: leading with fencing token") for line in cron.seen)
    assert cron.output.count("leading") == 1
