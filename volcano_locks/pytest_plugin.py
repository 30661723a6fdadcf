"""The pytest plugin: fixtures that come with volcano-locks.

The law of this module: it is imported into every test run of everybody who has volcano-locks
installed, so it imports nothing of its own unless a fixture is used.
"""
