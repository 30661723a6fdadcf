from django.db import models

from volcano_locks_django.models import FencedModel


class Order(models.Model):
    day = models.DateField()
    cents = models.BigIntegerField()


class DailyTotal(models.Model):
    day = models.DateField(primary_key=True)
    orders = models.BigIntegerField(default=0)
    cents = models.BigIntegerField(default=0)


class RollupCursor(FencedModel):
    """How far the roll-up has come: one row. Its fencing token decides who may move it on."""

    last_order = models.BigIntegerField(default=0)
