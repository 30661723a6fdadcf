"""Ratios, measured in one run: the candidates take turns, so that a noisy machine hits all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One comparison. ``ratio`` is ours / theirs by medians; ``bound`` is the most it may be."""

    name: str
    ours_us: float
    theirs_us: float
    bound: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.ours_us / self.theirs_us

    @property
    def fine(self) -> bool:
        return self.bound is None or self.ratio <= self.bound


def compare(
    name: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    rounds: int = 400,
    warmup: int = 20,
    bound: float | None = None,
    note: str = "",
) -> Result:
    """Time both in turn, the first place changing with every round; medians in microseconds."""
    for _ in range(warmup):
        ours()
        theirs()
    spent: tuple[list[int], list[int]] = ([], [])
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                work = (ours, theirs)[which]
                start = time.perf_counter_ns()
                work()
                spent[which].append(time.perf_counter_ns() - start)
    finally:
        gc.enable()
    mine, other = (statistics.median(times) / 1_000 for times in spent)
    return Result(name, mine, other, bound, note)
