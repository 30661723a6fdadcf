"""Leader-only work in Flask: ``VolcanoLocks`` configures an app, ``leader_only`` guards its work."""

from __future__ import annotations

from .decorator import leader_only
from .extension import VolcanoLocks

__all__ = ["VolcanoLocks", "leader_only"]
