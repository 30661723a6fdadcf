"""The commands of the tests in a process that gevent has patched."""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import os  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402

from flask.cli import main  # noqa: E402

from tests.flask.app import app, leader_only  # noqa: E402


@app.cli.command()
@leader_only("green", ttl=60)
def green():
    print("leading", flush=True)
    time.sleep(600)


@app.cli.command()
@leader_only("struck", ttl=60)
def struck():
    """The signal strikes another greenlet than the one that runs the body."""
    other = threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGTERM))
    other.start()
    other.join()
    time.sleep(600)


if __name__ == "__main__":
    main()
