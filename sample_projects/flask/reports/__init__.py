"""The reports application: ``flask --app reports ...``."""

from __future__ import annotations

import os

from flask import Flask

from volcano_locks_flask import VolcanoLocks

from .models import db
from .nightly import init_db, nightly_report, sell

locks = VolcanoLocks()


def create_app() -> Flask:
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ.get(
        "REPORTS_DATABASE", "sqlite:///reports.sqlite3"
    )
    # Over the environment: this app's locks have names of their own in the project.
    app.config["VOLCANO_LOCKS"] = {"KEY_PREFIX": "reports."}
    db.init_app(app)
    locks.init_app(app)
    for command in (init_db, sell, nightly_report):
        app.cli.add_command(command)
    return app
