"""A leader-only command that does what a test tells it to."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import connection, transaction

from volcano_locks import LeaseLost, LockClient, Policy
from volcano_locks.local import store
from volcano_locks_django import LeaderOnlyMixin
from volcano_locks_django.conf import lock_settings

store.PATIENCE = 60  # the disk of a test machine may stall
OFTEN = Policy(first_renewal=0.05, poll_interval=0.5, release_budget=60)
"""It hears of a release soon, and no stall costs its lease."""
CLIENT = LockClient.from_settings(lock_settings(), policy=OFTEN)


class Command(LeaderOnlyMixin, BaseCommand):
    lock_key = "job"

    def get_lock_client(self) -> LockClient:
        return CLIENT

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--do", default="")

    def handle(self, *args: Any, lease: Any, do: str, **options: Any) -> None:
        self.stdout.write(f"leading {lease.fencing_token}")
        self.stdout.flush()

        def soon() -> None:
            """Say so once the statement after this one waits."""
            threading.Timer(0.5, lambda: os.write(1, b"waiting\n")).start()

        names = {
            "soon": soon,
            "self": self,
            "lease": lease,
            "query": self.query,
            "connection": connection,
            "transaction": transaction,
            "time": time,
            "os": os,
            "LeaseLost": LeaseLost,
            "CommandError": CommandError,
        }
        exec(do, names)
        self.stdout.write("done")

    def query(self, sql: str) -> Any:
        with connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall()
