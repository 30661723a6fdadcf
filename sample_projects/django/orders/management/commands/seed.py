from datetime import date, timedelta

from django.core.management.base import BaseCommand

from orders.models import Order


class Command(BaseCommand):
    help = "Add orders, spread over the days of January 2026."

    def add_arguments(self, parser):
        parser.add_argument("count", type=int, nargs="?", default=1000)

    def handle(self, *args, count, **options):
        first = date(2026, 1, 1)
        Order.objects.bulk_create(
            [Order(day=first + timedelta(days=n % 31), cents=100 + n) for n in range(count)],
            batch_size=1000,
        )
        self.stdout.write(f"{count} orders added")
