"""Orders into daily totals: each order counted once, in batches, under the lease of one leader."""

from collections import defaultdict

from django.db import transaction
from django.db.models import F

from .models import DailyTotal, Order, RollupCursor


def next_batch(size: int) -> tuple[int, dict]:
    """The last order of the next batch, and what the batch adds to each day: read only."""
    cursor, _ = RollupCursor.objects.get_or_create(pk=1)
    added = defaultdict(lambda: [0, 0])
    last = cursor.last_order
    for order in Order.objects.filter(pk__gt=cursor.last_order).order_by("pk")[:size]:
        added[order.day][0] += 1
        added[order.day][1] += order.cents
        last = order.pk
    return last, dict(added)


def write_batch(lease, last: int, added: dict) -> None:
    """Move the cursor and add to the totals: both or neither, and only as the newest leader.

    The fenced update comes first. It raises StaleFence if a newer leader has moved the cursor, and
    the transaction, totals and all, is rolled back.
    """
    with transaction.atomic():
        RollupCursor.objects.filter(pk=1).fenced_update(lease, last_order=last)
        for day, (orders, cents) in added.items():
            DailyTotal.objects.get_or_create(day=day)
            DailyTotal.objects.filter(day=day).update(
                orders=F("orders") + orders, cents=F("cents") + cents
            )
