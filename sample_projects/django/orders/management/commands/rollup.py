import time

from django.core.management.base import BaseCommand

from orders.rollup import next_batch, write_batch
from volcano_locks import LeaseLost
from volcano_locks_django import LeaderOnlyMixin


class Command(LeaderOnlyMixin, BaseCommand):
    help = "Roll new orders up into daily totals, on one machine at a time."
    lock_key = "rollup"
    lock_ttl = 30

    def add_arguments(self, parser):
        parser.add_argument("--batch", type=int, default=500, help="orders per transaction")
        parser.add_argument(
            "--pause", type=float, default=0, help="seconds of slow work before each write"
        )
        parser.add_argument(
            "--insist",
            action="store_true",
            help="for the demo: write once more although the lease is lost, as a process does that "
            "was frozen between its last look at the lease and the write",
        )

    def handle(self, *args, lease, batch, pause, insist, **options):
        self.stdout.write(f"leading with fencing token {lease.fencing_token}")
        orders = 0
        while True:
            last, added = next_batch(batch)
            if not added:
                break
            count = sum(number for number, _ in added.values())
            self.stdout.write(f"read {count} orders, up to {last}")
            try:
                time.sleep(pause)
            except LeaseLost as lost:
                if not insist:
                    raise
                self.stdout.write(f"told to stop: {lost}")
                write_batch(lease.lease, last, added)
            else:
                write_batch(lease, last, added)
            orders += count
        self.stdout.write(f"done: {orders} orders rolled up")
