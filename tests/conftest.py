"""Plugins of the whole suite, and patience with a slow machine where libraries have little."""

import signal

from hypothesis import HealthCheck, settings

from volcano_locks import testing

pytest_plugins = ["tests.contract.report", "tests.databases"]

# How long an example takes to make or to run is the machine's matter.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
testing._PATIENCE = 60.0

# Under nohup a hangup is ignored, and processes inherit that; a handler they do not inherit.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
