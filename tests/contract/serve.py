"""``volcano-locks serve`` for tests that are not about its patience or its clock:
``python -m tests.contract.serve [OPTIONS OF serve]``.

It waits for other processes as long as a test does, however slow the disk is. With ``STANDING_AT``,
milliseconds since 1970, its clock stands there but for what ``clock-shift`` moves it by.
"""

from __future__ import annotations

import os
import sys

from volcano_locks.cli import main
from volcano_locks.local import service, store

if __name__ == "__main__":
    store.PATIENCE = 60
    if at := os.environ.get("STANDING_AT"):
        service.wall_milliseconds = lambda: int(at)
    main(["serve", *sys.argv[1:]])
