"""What makes a run of tests quick. The shared fixtures are in `support/fixtures.py`."""

import gc
from importlib.util import find_spec

import pytest

OF_LAB = {
    "lab/report": "nbformat",
    "lab/test_choice_card.py": "IPython",
    "lab/test_magic.py": "IPython",
}
"""Files without a GPU test -> a package of `attnlib[lab]`, which a GPU machine may lack."""
collect_ignore = [path for path, package in OF_LAB.items() if find_spec(package) is None]

# Modules and tests live for good: no time goes to seeking garbage among them, nor at the end.
gc.disable()


def pytest_configure(config):
    # The process that only hands tests to workers imports nothing of ours.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("support.fixtures")


def pytest_report_header():
    if collect_ignore:
        return f"not collected, attnlib[lab] is not installed: {', '.join(collect_ignore)}"
    return None


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(100_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure():
    gc.freeze()
