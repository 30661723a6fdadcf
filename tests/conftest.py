"""Plugins of the whole suite."""

pytest_plugins = ["tests.contract.report", "tests.databases"]
