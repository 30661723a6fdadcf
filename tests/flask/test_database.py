"""Flask-SQLAlchemy around a leader-only body: fenced writes, transactions, connections."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import click
import pytest
import sqlalchemy as sa
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from volcano_locks import StaleFence
from volcano_locks.errors import InvalidRequest, LeaseLost
from volcano_locks.sqlalchemy import FencedMixin, fence_table, fenced_transaction, fenced_update
from volcano_locks_flask import leader_only

from ..databases import database
from .processes import ROOT


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)


class Total(FencedMixin, db.Model):
    name: Mapped[str] = mapped_column(sa.String(20), primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


fence_table(db.metadata)


class Line(db.Model):
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(sa.String(20))


@pytest.fixture
def shop(app, tmp_path):
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path / 'shop.sqlite3'}"
    db.init_app(app)
    with app.app_context():
        db.create_all()
        db.session.add(Total(name="daily"))
        db.session.commit()
        db.session.remove()
    yield app
    with app.app_context():
        db.engine.dispose()


def write(lease, amount):
    fenced_update(
        db.session, lease, sa.update(Total).where(Total.name == "daily").values(amount=amount)
    )


def test_a_command_writes_fenced_and_sees_what_it_wrote(shop, runner):
    @shop.cli.command()
    @leader_only("daily")
    def job(lease):
        total = db.session.get(Total, "daily")
        write(lease, total.amount + 5)
        click.echo(f"{total.amount} {total.fencing_token == lease.fencing_token}")
        db.session.commit()

    assert runner.invoke(args=["job"]).output == "5 True\n"
    assert runner.invoke(args=["job"]).output == "10 True\n"


def test_a_leader_that_was_replaced_ends_with_76_and_has_written_nothing(shop, runner, client):
    @shop.cli.command()
    @leader_only("daily", ttl=60)
    @click.option("--replaced", is_flag=True)
    def job(lease, replaced):
        fact = lease.lease  # a body that does not look at its hold, as if it had been frozen
        if replaced:
            client.force_release("daily")
            newer = client.acquire("daily", 60)
            with fenced_transaction(db.session, newer):
                db.session.add(Line(text="by the newer"))
        with fenced_transaction(db.session, fact):
            db.session.add(Line(text="by the older"))

    assert runner.invoke(args=["job"]).exit_code == 0
    replaced = runner.invoke(args=["job", "--replaced"])
    assert replaced.exit_code == 76
    assert "Error: stopped: stale write refused: lock 'daily'" in replaced.stderr
    with shop.app_context():
        lines = db.session.scalars(sa.select(Line.text).order_by(Line.id)).all()
    assert lines == ["by the older", "by the newer"]


def test_a_session_in_a_transaction_is_refused_since_the_lock_goes_around_it(shop, client):
    @leader_only("daily")
    def job(lease):
        write(lease, 1)
        db.session.commit()

    with shop.app_context():
        db.session.get(Total, "daily")  # a read has begun it
        with pytest.raises(InvalidRequest, match=r"began before the lock .*db\.session\.commit"):
            job()
        assert not client.get("daily").held
        db.session.rollback()
        assert job().acquired

    @shop.cli.command()
    @click.pass_context
    def outer(context):
        db.session.get(Total, "daily")
        context.invoke(inner)

    @shop.cli.command()
    @leader_only("daily")
    def inner(lease):
        raise AssertionError("it must not run")

    result = shop.test_cli_runner().invoke(args=["outer"])
    assert (result.exit_code, "began before the lock" in result.stderr) == (64, True)


def test_what_the_body_leaves_uncommitted_cannot_be_committed_after_the_lock_is_free(shop):
    @leader_only("daily")
    def job(lease):
        write(lease, 99)

    with shop.app_context():
        assert job().acquired
        with pytest.raises(LeaseLost):
            db.session.commit()
        db.session.rollback()
        assert db.session.get(Total, "daily").amount == 0


def test_a_stale_write_is_told_from_a_lost_lease_in_a_function(shop, client):
    @leader_only("daily")
    def job(lease):
        newer = type("Newer", (), {"key": "daily", "fencing_token": lease.fencing_token + 1})()
        write(newer, 1)
        db.session.commit()
        write(lease.lease, 2)

    with shop.app_context(), pytest.raises(StaleFence):
        job()


@pytest.mark.needs("postgres")
def test_a_connection_that_died_during_the_wait_does_not_meet_the_bodys_first_query(app):
    @leader_only("daily")
    def job():
        return db.session.scalar(sa.text("select 1"))

    with database("postgresql") as postgres:
        app.config["SQLALCHEMY_DATABASE_URI"] = postgres.url("psycopg")
        db.init_app(app)
        with app.app_context():
            backend = db.session.scalar(sa.text("select pg_backend_pid()"))
            db.session.remove()  # the pool keeps it
            postgres.execute(f"select pg_terminate_backend({backend}, 10000)")
            assert job().value == 1
            db.session.remove()
            db.engine.dispose()


def test_without_flask_sqlalchemy_nothing_of_it_is_imported():
    script = """
import sys
from flask import Flask
from volcano_locks_flask import VolcanoLocks, leader_only
app = Flask("shop")
app.config["VOLCANO_LOCKS"] = {"API_URL": "local:locks"}
VolcanoLocks(app)
app.cli.command("job")(leader_only("job")(lambda: print("ran")))
assert app.test_cli_runner().invoke(args=["job"]).output == "ran\\n"
assert not {"sqlalchemy", "apscheduler", "gevent", "asgiref"} & set(sys.modules)
"""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", script], check=True, cwd=folder, env=environment)
