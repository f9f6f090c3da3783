"""What makes a run of tests quick. The shared fixtures are in `support/fixtures.py`."""

import gc

import pytest

# Modules and tests live for good: no time goes to seeking garbage among them, nor at the end.
gc.disable()


def pytest_configure(config):
    # The process that only hands tests to workers imports nothing of ours.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("support.fixtures")


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(100_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure():
    gc.freeze()
