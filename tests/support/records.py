"""Records of the study `demo`: its journal, on the machine of `make_record`, and a worker's."""

import resource
from contextlib import contextmanager

from attnlib.run import store
from attnlib.run.worker import Worker

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


def measure(item, device="cpu"):
    """The record that a worker in this process makes of `item`."""
    job = {"study": "demo", "round": 0, "device": device, "command": "repeat me"}
    return Worker(job).measure(item)
