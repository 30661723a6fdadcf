"""The commands of the tests in a process that gevent has patched."""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import time  # noqa: E402

from flask.cli import main  # noqa: E402

from tests.flask.app import app, leader_only  # noqa: E402


@app.cli.command()
@leader_only("green", ttl=5)
def green(lease):
    print("leading", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
