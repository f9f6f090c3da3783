"""The journal of the study `demo`, on the machine of `make_record`."""

import resource
from contextlib import contextmanager

from attnlib.run import store

MACHINE = "test-gpu-0badcafe"
OTHER = {"gpu": "Other", "gpu_id": "1"}


def append(*records):
    for record in records:
        store.append(record)
    return list(records)


def demo_path():
    return store.journal_path("demo", MACHINE)


@contextmanager
def full_disk(most):
    """No file grows beyond `most` bytes: a write ends there, the next one fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def tear(fragment):
    """What a writer leaves that was killed in the middle of a line."""
    demo_path().parent.mkdir(parents=True, exist_ok=True)
    with demo_path().open("ab") as file:
        file.write(fragment)
