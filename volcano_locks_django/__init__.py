"""Leader-only commands and fenced writes for Django.

Models can be imported only once Django has loaded its applications, so the names here are looked up
when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fencing import (
        FencedManager,
        FencedModel,
        FencedQuerySet,
        FenceWarning,
        FencingTokenField,
        LockKeyField,
        fenced_transaction,
    )
    from .mixin import LeaderOnlyMixin
    from .models import Fence, FenceReset
    from .signals import lease_acquired, lease_lost, lease_released

__all__ = [
    "Fence",
    "FenceReset",
    "FenceWarning",
    "FencedManager",
    "FencedModel",
    "FencedQuerySet",
    "FencingTokenField",
    "LeaderOnlyMixin",
    "LockKeyField",
    "fenced_transaction",
    "lease_acquired",
    "lease_lost",
    "lease_released",
]

_HOME = dict.fromkeys(__all__, ".fencing") | {
    "Fence": ".models",
    "FenceReset": ".models",
    "LeaderOnlyMixin": ".mixin",
    "lease_acquired": ".signals",
    "lease_lost": ".signals",
    "lease_released": ".signals",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
