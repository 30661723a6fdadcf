"""The tables of the fence: one row per lock, and the record of resets.

The law of this module: rows here are moved by ``fencing`` and by the reset command only.
``FencedModel``, the base of your own fenced models, is importable from here as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import models

from .fencing import FencedModel, LockKeyField

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["Fence", "FenceReset", "FencedModel"]


class Fence(models.Model):
    """The fence row of one lock: the token of the newest leader that opened a fenced transaction."""

    key = LockKeyField(primary_key=True)
    fencing_token: models.BigIntegerField[int, int] = models.BigIntegerField(default=0)
    advanced_at: models.DateTimeField[datetime, datetime] = models.DateTimeField()

    class Meta:
        app_label = "volcano_locks"
        ordering = ["key"]

    def __str__(self) -> str:
        return f"{self.key}: {self.fencing_token}"


class FenceReset(models.Model):
    """The record of one ``volcano_locks fence reset``: who forgot which token, where, and why."""

    key: models.CharField[str, str] = models.CharField(max_length=128)
    target: models.CharField[str, str] = models.CharField(
        max_length=200, help_text="the fence row, or the model's label"
    )
    rows: models.BigIntegerField[int, int] = models.BigIntegerField()
    highest_token: models.BigIntegerField[int, int] = models.BigIntegerField(
        help_text="the highest token before the reset"
    )
    reset_at: models.DateTimeField[datetime, datetime] = models.DateTimeField(auto_now_add=True)
    reset_by: models.CharField[str, str] = models.CharField(max_length=200)
    reason: models.TextField[str, str] = models.TextField(blank=True)

    class Meta:
        app_label = "volcano_locks"
        ordering = ["-reset_at", "-id"]

    def __str__(self) -> str:
        return f"{self.key} on {self.target}: {self.highest_token} forgotten"
