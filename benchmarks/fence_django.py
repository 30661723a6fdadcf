"""A fenced update of one row through Django's ORM, against the plain one, on PostgreSQL.

Both go to one table, in autocommit, one statement each, and take turns. The bound is for PostgreSQL as
it ships, where a commit reaches the disk. Without that (fsync off) the processor time of both sides is
all that is left; these lines show what the fence itself costs, with and without the column of the key.
"""

from __future__ import annotations

import os
from datetime import datetime, timezone
from typing import Any

from benchmarks._measure import Result, compare


def run() -> list[Result]:
    """The comparisons; PostgreSQL from the wheel, or the server that VOLCANO_TEST_POSTGRES names."""
    import django
    from django.conf import settings

    from tests.databases import database, running

    with running(), database("postgresql") as db:
        if not settings.configured:
            settings.configure(INSTALLED_APPS=["volcano_locks_django"], DATABASES={}, USE_TZ=True)
            django.setup()
        from django.db import connections, models

        from volcano_locks.models import Lease, Secret
        from volcano_locks_django import FencedModel

        class Cursor(FencedModel):
            position = models.BigIntegerField(default=0)

            class Meta:
                app_label = "volcano_locks"

        class BoundCursor(FencedModel):
            fencing_key = None
            fence_key = "rollup"
            position = models.BigIntegerField(default=0)

            class Meta:
                app_label = "volcano_locks"

        connections.databases["bench"] = connections.databases["default"] | db.django()
        lease = Lease("rollup", None, 2**52 + 1, datetime.now(timezone.utc), Secret("ownership"))
        number = iter(range(10**9))

        def measure(model: Any, name: str, rounds: int, bound: float | None) -> Result:
            rows = model.objects.db_manager("bench")

            def ours() -> None:
                rows.filter(pk=1).fenced_update(lease, position=next(number))

            def theirs() -> None:
                rows.filter(pk=1).update(position=next(number))

            return compare(name, ours, theirs, rounds=rounds, bound=bound)

        connection = connections["bench"]
        with connection.schema_editor() as editor:
            for model in (Cursor, BoundCursor):
                editor.create_model(model)
        for model in (Cursor, BoundCursor):
            model.objects.using("bench").create(pk=1)
        what = "fenced update of one row / Django's update()"
        try:
            found = [
                measure(Cursor, f"{what}, no fsync", 1000, None),
                measure(BoundCursor, f"{what}, bound to one lock, no fsync", 1000, None),
            ]
            if "VOLCANO_TEST_POSTGRES" not in os.environ:  # the wheel's server is ours to set
                db.execute("ALTER SYSTEM RESET fsync", "SELECT pg_reload_conf()")
            return [measure(Cursor, what, 300, 1.10), *found]
        finally:
            connection.close()


if __name__ == "__main__":
    for found in run():
        print(f"{found.name}: {found.ours_us:.0f} / {found.theirs_us:.0f} us = {found.ratio:.3f}")
