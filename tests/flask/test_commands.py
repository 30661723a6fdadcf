"""Commands under ``@app.cli.command()``: what click sees, and what is refused."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading

import click
import pytest
from flask import Blueprint, Flask, current_app
from flask.cli import AppGroup, with_appcontext

from volcano_locks.errors import ConfigurationError
from volcano_locks_flask import VolcanoLocks, leader_only


def held(client, key):
    return client.get(key).held


def test_name_help_parameters_and_application_are_kept(app, runner, client):
    @app.cli.command()
    @click.argument("tenant")
    @leader_only("billing", ttl=60)
    @click.option("--month", type=int, default=11, show_default=True, help="Which month.")
    def bill_customers(lease, tenant, month):
        """Send the bills."""
        click.echo(f"{current_app.name} {tenant} {month} {held(client, lease.key)}")

    assert app.cli.commands["bill-customers"] is bill_customers
    result = runner.invoke(args=["bill-customers", "acme", "--month", "3"])
    assert (result.exit_code, result.output) == (0, "shop acme 3 True\n")
    assert not held(client, "billing")
    text = runner.invoke(args=["bill-customers", "--help"]).output
    assert "Send the bills." in text
    assert text.index("--month") < text.index("--lock-wait") < text.index("--if-held")
    assert "[default: 60]" in text
    assert "[skip|fail]" in text
    assert "--lease" not in text


def test_options_given_on_the_command_line_win_over_the_decorators(app, runner, client):
    @app.cli.command()
    @leader_only("k", ttl=60, if_held="fail")
    def job(lease):
        click.echo(lease.ttl)

    assert runner.invoke(args=["job"]).output == "60\n"
    assert runner.invoke(args=["job", "--lock-ttl", "77"]).output == "77\n"
    with client.hold("k", ttl=30):
        failed = runner.invoke(args=["job"])
        assert failed.exit_code == 75
        assert failed.stderr == "Error: not run: lock 'k' is held by another process\n"
        assert failed.stdout == ""
        skipped = runner.invoke(args=["job", "--if-held", "skip"])
        assert skipped.exit_code == 0
        assert skipped.stdout == "skipped: lock 'k' is held by another process\n"
        assert skipped.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lock-wait", "soon"], "Invalid value for '--lock-wait'"),
        (["--lock-wait", "-1"], "Invalid value for '--lock-wait'"),
        (["--lock-wait", "nan"], "Invalid value for '--lock-wait'"),
        (["--if-held", "maybe"], "'skip' or 'fail'"),
        (["--lock-ttl", "4"], "whole seconds from 5"),
        (["--lock-min-hold", "x"], "Invalid value for '--lock-min-hold'"),
    ],
)
def test_an_option_that_cannot_be_is_a_usage_error_before_anything_is_sent(
    app, runner, service, arguments, words
):
    @app.cli.command()
    @leader_only("k")
    def job():
        raise AssertionError("it must not run")

    result = runner.invoke(args=["job", *arguments])
    assert result.exit_code == 64
    assert words in result.stderr
    assert "Usage: " in result.stderr


def test_the_key_is_filled_from_the_parameters(app, runner):
    @app.cli.command()
    @click.argument("tenant")
    @click.option("--month", default=1)
    @leader_only("billing.{tenant}.{month}")
    def bill(lease, tenant, month):
        click.echo(lease.key)

    assert runner.invoke(args=["bill", "acme", "--month", "7"]).output == "billing.acme.7\n"
    for wrong in ("a/b", "with space", "x" * 128, ""):
        result = runner.invoke(args=["bill", wrong])
        assert result.exit_code == 64, result.output
        assert "Usage: " in result.stderr
        assert "not run: " in result.stderr


def test_help_and_completion_ask_no_service_and_need_no_configuration():
    def factory(settings):
        raise AssertionError("no client is needed for this")

    app = Flask("shop")
    app.config["VOLCANO_LOCKS"] = {"API_URL": "not a URL"}
    VolcanoLocks(app, client_factory=factory)

    @app.cli.command()
    @leader_only("k")
    def job():
        raise AssertionError("it must not run")

    runner = app.test_cli_runner()
    assert "--lock-wait" in runner.invoke(args=["job", "--help"]).output
    completed = runner.invoke(
        args=[],
        prog_name="flask",
        complete_var="_FLASK_COMPLETE",
        env={
            "_FLASK_COMPLETE": "bash_complete",
            "COMP_WORDS": "flask job --if-held s",
            "COMP_CWORD": "3",
        },
    )
    assert completed.output == "plain,skip\n"


def test_groups_and_blueprints_and_plain_click_commands_can_be_leader_only(app, runner):
    group = AppGroup("reports")
    blueprint = Blueprint("shop", __name__)
    app.cli.add_command(group)

    @group.command("daily")
    @leader_only("daily")
    def daily(lease):
        click.echo(f"{lease.key} {current_app.name}")

    @blueprint.cli.command("stock")
    @leader_only("stock")
    def stock(lease):
        click.echo(f"{lease.key} {current_app.name}")

    @click.command("plain")
    @leader_only("plain")
    @with_appcontext
    def beneath(lease):
        click.echo(f"{lease.key} {current_app.name}")

    @click.command("other")
    @with_appcontext
    @leader_only("other")
    def above(lease):
        click.echo(f"{lease.key} {current_app.name}")

    app.register_blueprint(blueprint)
    app.cli.add_command(beneath)
    app.cli.add_command(above)
    for arguments in (["reports", "daily"], ["shop", "stock"], ["plain"], ["other"]):
        result = runner.invoke(args=arguments)
        assert result.output == f"{arguments[-1]} shop\n", result.stderr


def test_clicks_own_decorators_can_stand_above_and_beneath(app, runner):
    @app.cli.command()
    @click.pass_context
    @leader_only("k")
    @click.pass_obj
    def job(script_info, context, lease):
        click.echo(f"{type(script_info).__name__} {context.command.name} {lease.key}")

    assert runner.invoke(args=["job"]).output == "ScriptInfo job k\n"


def test_a_command_that_takes_no_lease_is_guarded_as_well(app, runner, client):
    @app.cli.command()
    @leader_only("k")
    def job():
        click.echo(held(client, "k"))

    assert runner.invoke(args=["job"]).output == "True\n"


def test_a_wrapper_that_takes_anything_passes_the_lease_on(app, runner):
    def noisy(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        del wrapper.__wrapped__  # as by a decorator that does not tell what it wraps
        return wrapper

    @app.cli.command()
    @leader_only("k")
    @noisy
    def job(lease):
        click.echo(lease.key)

    assert runner.invoke(args=["job"]).output == "k\n"


def test_an_async_body_runs_to_its_end_in_the_same_context(app, runner, client):
    @app.cli.command()
    @leader_only("k")
    async def job(lease):
        await asyncio.sleep(0)
        command = click.get_current_context().command.name
        click.echo(f"{current_app.name} {command} {held(client, lease.key)}")

    result = runner.invoke(args=["job"])
    assert result.output == "shop job True\n"
    assert not held(client, "k")


def test_the_commands_own_exit_and_errors_come_through_and_release(app, runner, client):
    @app.cli.command()
    @leader_only("k")
    @click.argument("how")
    def job(how):
        if how == "exit":
            click.get_current_context().exit(5)
        if how == "usage":
            raise click.UsageError("not like this")
        if how == "click":
            raise click.ClickException("no luck")
        raise KeyError(how)

    assert runner.invoke(args=["job", "exit"]).exit_code == 5
    wrong = runner.invoke(args=["job", "usage"])
    assert (wrong.exit_code, "not like this" in wrong.stderr) == (2, True)
    failed = runner.invoke(args=["job", "click"])
    assert (failed.exit_code, failed.stderr) == (1, "Error: no luck\n")
    assert isinstance(runner.invoke(args=["job", "boom"]).exception, KeyError)
    assert not held(client, "k")


def test_one_command_invokes_another_each_under_its_own_lock(app, runner, client):
    @app.cli.command()
    @leader_only("inner")
    def inner(lease):
        click.echo(f"{held(client, 'outer')} {held(client, 'inner')}")

    @app.cli.command()
    @leader_only("outer")
    def outer(lease):
        click.get_current_context().invoke(inner)
        click.get_current_context().invoke(inner, lock_ttl="9")
        click.echo(f"{held(client, 'outer')} {held(client, 'inner')}")

    assert runner.invoke(args=["outer"]).output == "True True\nTrue True\nTrue False\n"
    with client.hold("inner"):
        assert "skipped: lock 'inner'" in runner.invoke(args=["outer"]).output
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_command_can_be_run_in_a_thread(app, client):
    @app.cli.command()
    @leader_only("k")
    def job(lease):
        click.echo(held(client, lease.key))

    results = []

    def run():
        results.append(app.test_cli_runner().invoke(args=["job"]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert (results[0].exit_code, results[0].output) == (0, "True\n")


def test_flask_volcano_locks_looks_at_locks_and_frees_one(runner, client):
    lease = client.acquire("stuck", 30)
    shown = runner.invoke(args=["volcano-locks", "status", "stuck", "free-one"])
    assert f"unless renewed, fencing token {lease.fencing_token}" in shown.stdout
    assert "free-one: free" in shown.stdout

    nobody = runner.invoke(args=["volcano-locks", "force-release", "stuck"])
    assert (nobody.exit_code, "use --yes" in nobody.stderr) == (64, True)
    assert (
        runner.invoke(args=["volcano-locks", "force-release", "stuck"], input="n\n").exit_code == 1
    )
    assert held(client, "stuck")
    freed = runner.invoke(args=["volcano-locks", "force-release", "stuck"], input="y\n")
    assert freed.exit_code == 0
    assert "only the fence protects" in freed.stdout
    assert not held(client, "stuck")
    for wrong in (["status", "a/b"], ["force-release", "a/b", "--yes"]):
        assert runner.invoke(args=["volcano-locks", *wrong]).exit_code == 64
    assert runner.invoke(args=["volcano-locks", "status"]).exit_code == 2


# -- what cannot be guarded ----------------------------------------------------------------------


def test_above_the_command_it_is_an_error_when_it_is_decorated():
    app = Flask("shop")
    with pytest.raises(TypeError, match=r"above @\.\.\.command\(\).* put it beneath"):

        @leader_only("k")
        @app.cli.command()
        def job():
            pass

    with pytest.raises(TypeError, match="put it beneath"):

        @leader_only("k")
        @app.cli.group()
        def group():
            pass


def test_without_its_key_it_is_an_error_when_it_is_decorated():
    with pytest.raises(TypeError, match=r"write @leader_only\(\"key\"\)"):

        @leader_only
        def job():
            pass


def generator(lease):
    yield


async def async_generator(lease):
    yield


class Job:
    def __call__(self, lease):
        pass


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (generator, "generator"),
        (async_generator, "generator"),
        (functools.wraps(generator)(lambda lease: generator(lease)), "generator"),
        (staticmethod(len), "put it beneath @staticmethod"),
        (classmethod(len), "put it beneath @classmethod"),
        (Job, "cannot guard this type"),
        (Job(), "cannot guard this Job"),
        ("job", "cannot guard this str"),
        (None, "cannot guard this NoneType"),
        (leader_only("one")(lambda: None), "leader-only already"),
        (click.option("--lock-wait")(lambda lock_wait: None), "takes the name"),
        (click.option("--x", "lock_ttl")(lambda lock_ttl: None), "takes the name"),
        (click.option("--lease")(lambda lease: None), "takes the name"),
        (eval("lambda lease, /: None"), "cannot be positional-only"),
    ],
)
def test_what_it_cannot_guard_is_an_error_when_it_is_decorated(thing, words):
    with pytest.raises(TypeError, match=words):
        leader_only("k")(thing)


@pytest.mark.parametrize(
    ("key", "options", "words"),
    [
        ("a/b", {}, "no lock key"),
        ("billing.{tenant!r}", {}, "plain names"),
        ("billing.{tenant}", {}, "no parameter 'tenant'"),
        ("billing.{lease}", {}, "no parameter 'lease'"),
        ("k", {"ttl": 4}, "whole seconds from 5"),
        ("k", {"wait": -1}, "wait"),
        ("k", {"if_held": "wait"}, "'skip' or 'fail'"),
        ("k", {"min_hold": float("nan")}, "minimum hold"),
    ],
)
def test_a_key_or_option_that_cannot_work_is_an_error_when_it_decorates(key, options, words):
    with pytest.raises(ConfigurationError, match=words):
        leader_only(key, **options)(lambda lease: None)


def test_a_group_is_refused_before_its_commands_run_since_its_lock_would_not_cover_them(
    app, runner, client
):
    @app.cli.group()
    @leader_only("k")
    def group():
        raise AssertionError("it must not run")

    @group.command()
    def job():
        raise AssertionError("it must not run")

    result = runner.invoke(args=["group", "job"])
    assert result.exit_code == 64
    assert "Put leader_only on the commands" in result.stderr


@pytest.mark.parametrize("made", [lambda: asyncio.sleep(0), lambda: (x for x in ())])
def test_work_that_is_handed_back_instead_of_done_is_an_error_and_the_lock_is_free(
    app, runner, client, made
):
    @app.cli.command()
    @leader_only("k")
    def job():
        return made()

    result = runner.invoke(args=["job"])
    assert result.exit_code == 78
    assert "after the lock is released" in result.stderr
    assert not held(client, "k")


def test_a_wrapper_that_passes_nothing_on_does_not_silence_the_lock(app, runner, client):
    def timed(function):
        @functools.wraps(function)
        def wrapper(**options):
            return function()

        return wrapper

    @app.cli.command()
    @timed
    @leader_only("k", ttl=60)
    def job(lease):
        click.echo(lease.ttl)

    assert runner.invoke(args=["job", "--lock-ttl", "77"]).output == "77\n"
    with client.hold("k", ttl=30):
        result = runner.invoke(args=["job", "--if-held", "fail"])
    assert result.exit_code == 75
    assert result.stderr == "Error: not run: lock 'k' is held by another process\n"


def test_a_command_that_is_made_without_the_locks_options_speaks_of_a_held_lock(app, client):
    @leader_only("k", if_held="fail")
    def job():
        raise AssertionError("it must not run")

    app.cli.add_command(click.Command("job", callback=job))
    with client.hold("k", ttl=30):
        result = app.test_cli_runner().invoke(args=["job"])
    assert result.exit_code == 75
    assert "is held by another process" in result.stderr
