"""A command that waits for its database, in C code, longer than any test."""

from __future__ import annotations

import click
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from volcano_locks.local import store
from volcano_locks_flask import VolcanoLocks, leader_only

store.PATIENCE = 60  # no test is about a slow disk
app = Flask("slow")
app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite:///:memory:"
VolcanoLocks(app)
db = SQLAlchemy(app)
ENDLESS = "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c"


@app.cli.command()
@leader_only("slow", ttl=60)
def slow():
    click.echo("leading")
    db.session.execute(sa.text(ENDLESS))
