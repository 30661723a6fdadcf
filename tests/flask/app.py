"""The application whose commands the tests start as real processes."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import click
from flask import Flask, current_app

from volcano_locks.local import store
from volcano_locks_flask import VolcanoLocks, leader_only

store.PATIENCE = 60  # no test is about a slow disk
app = Flask("shop")
locks = VolcanoLocks(app)


@app.cli.command()
@click.option("--code", default=0)
@leader_only("nightly", ttl=60)
def nightly(lease, code):
    """Write the report, until a line is typed."""
    click.echo(f"leading {lease.fencing_token} in {current_app.name}")
    sys.stdin.readline()
    click.echo("done")
    click.get_current_context().exit(code)


@app.cli.command()
@leader_only("careful", ttl=60)
def careful(lease):
    """Look at the lease after each line."""
    click.echo("leading")
    for _ in sys.stdin:
        lease.check()


@app.cli.command()
@leader_only("patient", ttl=60)
async def patient(lease):
    """Wait in an event loop."""
    click.echo(f"leading as {click.get_current_context().info_name} in {current_app.name}")
    try:
        await asyncio.Event().wait()
    finally:
        click.echo("cancelled")


@app.cli.command()
@leader_only("busy", ttl=60)
def busy(lease):
    """Print, and call the service, as fast as can be: half as often as the quota of a minute allows."""
    click.echo("leading")
    for _ in range(300):
        click.echo(locks.client.get("another").held)
    time.sleep(600)


@app.cli.command()
@leader_only("old-handler", ttl=60)
def old_handler(lease):
    click.echo("leading")
    sys.stdin.readline()


def hear(signum, frame):
    print("the application's own handler", flush=True)


@app.cli.command()
@click.pass_context
def with_handler(context):
    """Has a SIGTERM handler of its own, before and after the leader-only part."""
    signal.signal(signal.SIGTERM, hear)
    try:
        context.invoke(old_handler)
    finally:
        click.echo(f"restored: {signal.getsignal(signal.SIGTERM) is hear}")
