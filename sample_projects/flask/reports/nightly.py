"""``flask nightly-report``: leader-only, and fenced up to the row that it writes."""

from __future__ import annotations

import time

import click
import sqlalchemy as sa
from flask.cli import with_appcontext

from volcano_locks import LeaseLost
from volcano_locks.sqlalchemy import fenced_update
from volcano_locks_flask import leader_only

from .models import Order, Report, db

REVENUE = "revenue"


@click.command()
@leader_only("nightly-report", ttl=5)
@click.option("--batch", default=500, show_default=True, help="Orders per transaction.")
@click.option("--pause", default=0.0, help="Seconds of slowness before each write.")
@click.option("--insist", is_flag=True, help="Play a program that ignores that its lease is lost.")
def nightly_report(lease, batch, pause, insist):
    """Add the new orders to the revenue report."""
    click.echo(f"leading with fencing token {lease.fencing_token}")
    while write := next_write(batch):
        try:
            click.echo(f"about to write up to order {write['last_order']}")
            time.sleep(pause)
        except LeaseLost:
            if insist:
                save(lease.lease, write)  # refused by the database
            raise
        save(lease, write)
    report = db.session.get(Report, REVENUE)
    click.echo(f"{report.orders} orders, {report.cents / 100:.2f} in all")


def next_write(batch: int) -> dict[str, int] | None:
    """The report's next values, or None if it is up to date."""
    report = db.session.get(Report, REVENUE, populate_existing=True)
    new = db.session.execute(
        sa.select(Order.id, Order.cents)
        .where(Order.id > report.last_order)
        .order_by(Order.id)
        .limit(batch)
    ).all()
    values = {
        "orders": report.orders + len(new),
        "cents": report.cents + sum(order.cents for order in new),
        "last_order": new[-1].id if new else 0,
    }
    db.session.rollback()  # no transaction stays open through what is slow
    return values if new else None


def save(lease, values: dict[str, int]) -> None:
    fenced_update(
        db.session, lease, sa.update(Report).where(Report.name == REVENUE).values(**values)
    )
    db.session.commit()


@click.command()
@with_appcontext
def init_db():
    """Make the tables, and an empty report."""
    db.create_all()
    db.session.add(Report(name=REVENUE))
    db.session.commit()


@click.command()
@click.argument("number", type=int)
@with_appcontext
def sell(number):
    """Make orders."""
    db.session.add_all(Order(cents=100 + n % 7) for n in range(number))
    db.session.commit()
