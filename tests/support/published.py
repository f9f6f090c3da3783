"""The published records, read once."""

from functools import cache

import pytest

from attnlib.kinds.item import Item
from attnlib.run import store
from attnlib.studies import STUDIES


@cache
def published(name):
    """The frame of a study's published records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATTNLIB_DATA", raising=False)
        return store.load(name, STUDIES[name].reference_machine)


def live(name):
    """Of `published`, the records that a notebook on a GPU would measure."""
    jobs, frame = STUDIES[name].jobs(headline=True), published(name)
    asked = {(job.round, item) for job in jobs for item in job.items}
    named = frame[["round", "backend", "timer", "case", "release"]].itertuples(index=False)
    return frame[[(round_, Item(*item)) in asked for round_, *item in named]]


def pick(table, **wanted):
    """The rows that have these values."""
    for name, value in wanted.items():
        table = table[table[name] == value]
    return table
