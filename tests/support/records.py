"""Records of the study `demo`: a right one, where they are kept, and those of a worker."""

import resource
from contextlib import contextmanager
from types import SimpleNamespace

from attnlib.core import AttnSpec
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.form import Item
from attnlib.run import rows, store
from attnlib.run.worker import Worker

CASE = DecodeCase(
    AttnSpec(8, 2, 64, 16),
    batch_size=3,
    kv_len=40,
    lengths="ragged",
    seed=5,
)
ITEM = Item("flashinfer-fa2", "graph", CASE, "0.6.3")
CEILING = {"item": Item("copy", "graph"), "oracle_error": None, "oracle_budget": None}
GPU = {"gpu": "Test GPU", "gpu_id": "0badcafe", "num_sms": 4}
MACHINE = "test-gpu-0badcafe"
OTHER = {"gpu": "Other", "gpu_id": "1"}
OTHER_MACHINE = "other-1"
NO_TIMES = {"run_us": (), "plan_us": (), "calls_per_sample": 0, "kernels": ()}
RIGHT = {
    "study": "demo",
    "round": 0,
    "status": "ok",
    "versions": {"torch": "2.13.0", "flashinfer-python": "0.6.3"},
    "command": "python -m attnlib measure demo",
    "started_at": "2026-01-02T03:04:05+00:00",
    "reported_backend": "fa2",
    "kernel_family": "fa2",
    "kernels": (
        {"name": "AttendKernel", "launches": 1.0, "gpu_us": 8.25},
        {"name": "MergeKernel", "launches": 2.0, "gpu_us": 1.5},
    ),
    "run_us": (10.125, 12.0, 11.0),
    "calls_per_sample": 64,
    "plan_us": (50.0, 40.0),
    "oracle_error": 0.002,
    "oracle_budget": 0.008,
    "oracle_rows": 24,
    "work_per_call": 4096.0,
    "state_before": {"sm_clock_mhz": 1980},
    "state_after": {"sm_clock_mhz": 1965},
}


def right_row(item=ITEM, machine=GPU, **overrides):
    """A right record, less what the overrides change; a status other than ok takes its times."""
    failed = overrides.get("status", "ok") != "ok"
    fields = {**RIGHT, **(NO_TIMES if failed else {}), **overrides}
    return rows.row_of(item, machine, **fields)


def keep(*made):
    """Store the records; returns them as they are read."""
    for row in made:
        store.keep(row)
    return whole(*made)


def whole(*made):
    """The records as they are read: with what is empty, lists in place of tuples."""
    return rows.rows_of(rows.table_of(made))


def found(machine=MACHINE, study="demo"):
    """The records that the store has."""
    return rows.rows_of(store.read(study, machine))


def measured_folder():
    """Where records of `demo` wait to be published."""
    return store.measured_path("demo", MACHINE)


@contextmanager
def full_disk(most):
    """No file grows beyond `most` bytes: a write ends there, the next one fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def measure(item, device="cpu"):
    """The record that a worker in this process makes of `item`, which must be right."""
    job = {"study": "demo", "round": 0, "device": device, "command": "repeat me"}
    row = Worker(job).measure(item)
    rows.require_record(row)
    return told(whole(row)[0], item)


def told(row, item=None):
    """A record's columns as attributes: lists as tuples, members as dicts."""
    plain = {name: value for name, value in row.items() if "." not in name}
    for name, value in plain.items():
        if isinstance(value, list):
            plain[name] = tuple(value)
    groups = {name: rows.members(row, name) for name in ("machine", "versions")}
    empty = {"oracle_error": None, "oracle_budget": None}
    return SimpleNamespace(**{**empty, **plain, **groups, "item": item})
