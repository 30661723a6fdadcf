"""Takes the picture of the page of ``volcano-locks serve``: ``python -m docs.screenshot``.

Needs Chromium. The ten minutes on the picture pass by shifting the service's clock.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.contract.served import KEY, served
from volcano_locks import LockClient
from volcano_locks._http import httpx

IMAGES = Path(__file__).parent / "images"
TURNS = [
    ("daily-rollup", 60, 45, "release"),
    ("order-consumer", 300, 20, None),
    ("daily-rollup", 60, 70, None),
    ("report.tenant-7", 30, 25, "release"),
    ("daily-rollup", 120, 90, "force"),
    ("report.tenant-7", 60, 50, "release"),
    ("daily-rollup", 120, 60, "release"),
    ("order-consumer", 300, 15, None),
    ("report.tenant-7", 60, 20, None),
    ("daily-rollup", 60, 12, None),
]


def main() -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with served("--faults") as server, LockClient(KEY, server.url) as locks:
        shift = -sum(turn[2] for turn in TURNS)
        for key, ttl, seconds, ending in TURNS:
            httpx.post(f"{server.url}/_faults", json={"fault": "clock-shift", "seconds": shift})
            lease = locks.acquire(key, ttl=ttl)
            for _ in range(2):
                locks.acquire(key)
            shift += seconds
            httpx.post(f"{server.url}/_faults", json={"fault": "clock-shift", "seconds": shift})
            if ending == "release" and lease is not None:
                locks.release(lease)
            elif ending == "force":
                locks.force_release(key)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                page = browser.new_page(
                    color_scheme=scheme, viewport={"width": 1180, "height": 760}
                )
                page.goto(server.url)
                page.get_by_text("Live.").wait_for()
                page.screenshot(path=IMAGES / f"page-{scheme}.png")
            browser.close()


if __name__ == "__main__":
    main()
