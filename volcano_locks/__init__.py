"""Leader-only work on the Volcano project-lock service, fenced up to the database write.

The public names, and nothing else: each is imported when it is first used, so that importing this
package costs less than importing httpx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ._core.policy import Policy
    from .async_client import AsyncCampaign, AsyncHold, AsyncLockClient
    from .client import Campaign, Hold, LockClient
    from .errors import (
        AuthenticationFailed,
        ConfigurationError,
        FenceRejected,
        FenceTargetMissing,
        InvalidRequest,
        LeaseLost,
        LockHeld,
        OutcomeUnknown,
        PermissionDenied,
        RateLimited,
        Refused,
        ServiceUnavailable,
        StaleFence,
        TransportFailed,
        UnexpectedResponse,
        VolcanoLocksError,
    )
    from .models import Lease, LockResult, LockState, Secret
    from .settings import LockSettings

__all__ = [
    "AsyncCampaign",
    "AsyncHold",
    "AsyncLockClient",
    "AuthenticationFailed",
    "Campaign",
    "ConfigurationError",
    "FenceRejected",
    "FenceTargetMissing",
    "Hold",
    "InvalidRequest",
    "Lease",
    "LeaseLost",
    "LockClient",
    "LockHeld",
    "LockResult",
    "LockSettings",
    "LockState",
    "OutcomeUnknown",
    "PermissionDenied",
    "Policy",
    "RateLimited",
    "Refused",
    "Secret",
    "ServiceUnavailable",
    "StaleFence",
    "TransportFailed",
    "UnexpectedResponse",
    "VolcanoLocksError",
]

_HOMES = {
    "._core.policy": ("Policy",),
    ".async_client": ("AsyncCampaign", "AsyncHold", "AsyncLockClient"),
    ".client": ("Campaign", "Hold", "LockClient"),
    ".models": ("Lease", "LockResult", "LockState", "Secret"),
    ".settings": ("LockSettings",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME.get(name, ".errors"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
