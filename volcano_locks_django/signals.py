"""Django signals around the body of a leader-only command.

Each is sent in the thread that runs the command, with ``sender``: the command's class, ``command``:
the instance, ``lease``: its hold. Receivers that raise are logged and change nothing
(``send_robust``).

- ``lease_acquired``: the lock is ours; ``handle`` is about to run.
- ``lease_lost``: ``handle`` is over, and the lease was lost before it ended.
- ``lease_released``: ``handle`` is over, and the lease was given back (or, if the service could not
  be reached, runs out by itself).
"""

from __future__ import annotations

from django.dispatch import Signal

__all__ = ["lease_acquired", "lease_lost", "lease_released"]

lease_acquired = Signal()
lease_lost = Signal()
lease_released = Signal()
