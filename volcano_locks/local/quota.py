"""The quota of a project: so many operations in a fixed minute (rule 10).

The law of this module: pure like the table. Every operation counts, whatever its answer; the minute
is the clock's own, not the caller's.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["Usage", "spend"]

WINDOW_MS: Final = 60_000


class Usage(NamedTuple):
    """Operations of one minute: ``window`` counts minutes since 1970; ``refused`` ones are apart."""

    window: int
    used: int
    refused: int = 0


def spend(usage: Usage | None, now: int, quota: int) -> tuple[Usage, int | None]:
    """The usage afterwards, and None, or the whole seconds until the minute ends if it is used up."""
    window = now // WINDOW_MS
    if usage is None or usage.window != window:
        usage = Usage(window, 0)
    if usage.used < quota:
        return Usage(window, usage.used + 1, usage.refused), None
    left = (window + 1) * WINDOW_MS - now
    return Usage(window, usage.used, usage.refused + 1), -(-left // 1_000)
