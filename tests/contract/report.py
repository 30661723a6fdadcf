"""Says at the end of a run which forms of the lock service the contract suite covered."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

_FORMS = ("table", "in-process", "served", "live")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    passed: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for outcome, counter in (("passed", passed), ("failed", failed), ("error", failed)):
        for report in terminalreporter.stats.get(outcome, ()):
            found = re.search(r"tests/contract/test_(?:rules|http)\.py::\S*\[(.+)\]", report.nodeid)
            if found and (outcome != "passed" or report.when == "call"):
                form = next((form for form in _FORMS if found.group(1).startswith(form)), None)
                if form is not None:
                    counter[form] += 1
    if not passed and not failed:
        return
    told = ", ".join(
        f"{form} {passed[form]} passed" + (f" {failed[form]} FAILED" if failed[form] else "")
        for form in _FORMS
        if passed[form] or failed[form]
    )
    if not passed["live"] and not failed["live"]:
        told += "; not covered: live (set VOLCANO_TEST_LIVE_URL and VOLCANO_TEST_LIVE_KEY)"
    terminalreporter.write_line(f"contract suite covered: {told}")
