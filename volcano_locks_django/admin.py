"""A read-only page of the fence rows: which token last opened a fenced transaction, and when.

The law of this module: a person looks here and changes nothing. A token set by hand would let a
stale writer in, or lock every writer out; ``manage.py volcano_locks fence reset`` is the door.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin

from .models import Fence, FenceReset

if TYPE_CHECKING:
    from django.http import HttpRequest

    ReadOnlyBase = admin.ModelAdmin[Any]
else:
    ReadOnlyBase = admin.ModelAdmin


class ReadOnly(ReadOnlyBase):
    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Fence)
class FenceAdmin(ReadOnly):
    list_display = ("key", "fencing_token", "advanced_at")
    search_fields = ("key",)


@admin.register(FenceReset)
class FenceResetAdmin(ReadOnly):
    list_display = ("reset_at", "key", "target", "rows", "highest_token", "reset_by", "reason")
    search_fields = ("key", "target", "reset_by", "reason")
