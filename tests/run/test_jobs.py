"""Jobs in real processes: whatever kills one costs one item, and the record says how.

Faults come through the overlay, which stands first on the worker's path: a sitecustomize module
that makes `backends.create` fail at chosen head_dims.
"""

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.studies import CPU

from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.item import Item
from attnlib.measure.machine import describe_machine
from attnlib.run import jobs, store
from attnlib.run.jobs import Job, StoppedError, Watch, repeat_command, run_job
from attnlib.run.record import Record, machine_slug

ROOT = Path(__file__).resolve().parents[2]
KILLED, SLEEPS, CONTEXT_LOST, OUT_OF_MEMORY, TORN = 24, 40, 56, 72, 88
FAULTS = f"""
import os, signal, sys, time
from attnlib.core import backends
from attnlib.run import store

def kill():
    print("last words of /opt/engine/kernel.so", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def lose_context():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def run_out_of_memory():
    import torch
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 TiB. GPU 0 has ...")

def die_writing():
    (path,) = store.data_root().glob("records/*/demo.jsonl")
    with path.open("ab") as file:
        file.write(b'{{"backend":"sdpa","calls_per_sam')
    kill()

faults = {{
    {KILLED}: kill,
    {SLEEPS}: lambda: time.sleep(60),
    {CONTEXT_LOST}: lose_context,
    {OUT_OF_MEMORY}: run_out_of_memory,
    {TORN}: die_writing,
}}
create = backends.create

def create_or_fail(name, spec, **options):
    faults.get(spec.head_dim, lambda: None)()
    return create(name, spec, **options)

backends.create = create_or_fail
"""


def item_of(head_dim: int) -> Item:
    return Item("sdpa", "host", DecodeCase(AttnSpec(4, 2, head_dim, 4), batch_size=1, kv_len=8))


def job_of(study: str, *head_dims: int) -> Job:
    return Job(study, 3, "cpu", "", tuple(item_of(head_dim) for head_dim in head_dims))


def records_of(study: str) -> dict[int, Record]:
    """By head_dim, whichever machine wrote them: we write for dead workers."""
    found = [r for machine in store.machines(study) for r in store.read(study, machine)]
    by_head_dim = {record.item.case.spec.head_dim: record for record in found}
    assert len(by_head_dim) == len(found)
    return by_head_dim


def statuses_of(study: str) -> dict[int, str]:
    return {head_dim: record.status for head_dim, record in records_of(study).items()}


@dataclass
class Run:
    """The overlay with the faults, and what a job left behind."""

    faults: Path
    machine: dict[str, Any]
    started: list[object] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    records: dict[int, Record] = field(default_factory=dict)
    torn: bytes = b""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One job with an item of each fault, and a good one before, between and after them."""
    found = Run(tmp_path_factory.mktemp("faults"), describe_machine("cpu"))
    (found.faults / "sitecustomize.py").write_text(FAULTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNLIB_DATA", str(tmp_path_factory.mktemp("data")))
        popen = subprocess.Popen
        patch.setattr(
            jobs.subprocess, "Popen", lambda *a, **k: found.started.append(a) or popen(*a, **k)
        )

        def on_done(count: int) -> None:
            found.done.append(count)
            # Three items in, the next one sleeps: only for that one is the limit short.
            limit_s = 1.0 if sum(found.done) == 3 else 120.0
            patch.setattr(jobs, "ITEM_TIMEOUT_S", limit_s)

        faults = (KILLED, 32, SLEEPS, TORN, CONTEXT_LOST, OUT_OF_MEMORY)
        run_job(job_of("demo", 16, *faults, 48), found.machine, found.faults, Watch(on_done))
        found.records = records_of("demo")
        found.torn = store.torn_path("demo", machine_slug(found.machine)).read_bytes()
        yield found


def test_every_item_of_a_job_gets_one_record_and_good_ones_are_measured(run):
    statuses = {head_dim: record.status for head_dim, record in run.records.items()}
    bad = {KILLED: "crashed", SLEEPS: "timeout", TORN: "crashed", CONTEXT_LOST: "crashed"}
    assert statuses == {16: "ok", 32: "ok", 48: "ok", OUT_OF_MEMORY: "error"} | bad
    assert {record.round for record in run.records.values()} == {3}
    assert sum(run.done) == 8, "the dead ones are counted too"


def test_a_death_costs_its_process_and_running_out_of_memory_not_even_that(run):
    assert len(run.started) == 1 + 4
    reason = run.records[OUT_OF_MEMORY].reason
    assert reason.startswith("OutOfMemoryError: CUDA out of memory. Tried")


def test_a_record_of_a_death_says_how_and_names_machine_time_command_and_no_folder(run):
    killed, slept = run.records[KILLED], run.records[SLEEPS]
    assert killed.run_us == slept.run_us == ()
    assert killed.reason == "signal SIGKILL; last words of kernel.so"
    assert slept.reason.startswith("timeout after 1 s")
    assert killed.machine == run.machine
    assert killed.command == "python -m attnlib measure demo"
    assert killed.started_at.endswith("+00:00")


def test_a_line_that_a_worker_was_writing_when_it_was_killed_is_set_aside(run):
    assert run.torn == b'{"backend":"sdpa","calls_per_sam\n'


def test_a_stop_kills_the_worker_and_leaves_its_item_without_a_record(run):
    done: list[int] = []
    watch = Watch(done.append, stop=lambda: bool(sum(done)))
    with pytest.raises(StoppedError):
        run_job(job_of("stopped", 16, SLEEPS, 32), CPU, run.faults, watch)
    assert statuses_of("stopped") == {16: "ok"}


SWEEP = """
import json, sys
from pathlib import Path
from attnlib.kinds.item import Item
from attnlib.run.jobs import Job, Watch, run_job
form, faults = json.loads(sys.argv[1]), Path(sys.argv[2])
items = tuple(Item.from_dict(item) for item in form["items"])
job, held = Job("orphan", 0, "cpu", "", items), (int(sys.argv[3]),)
run_job(job, form["machine"], faults, Watch(held=held))
"""


def test_a_worker_does_not_outlive_the_sweep_that_started_it(run, data):
    # The second item sleeps for a minute: a worker that lived on would still hold the pipe's end.
    items = [item_of(head_dim).to_dict() for head_dim in (16, SLEEPS)]
    form = json.dumps({"items": items, "machine": CPU})
    alive, held = os.pipe()
    command = [sys.executable, "-c", SWEEP, form, str(run.faults), str(held)]
    sweep = subprocess.Popen(command, cwd=ROOT, pass_fds=(held,))
    os.close(held)
    while not any(path.stat().st_size for path in data.glob("records/*/orphan.jsonl")):
        assert sweep.poll() is None
        time.sleep(0.05)
    sweep.kill()
    sweep.wait()
    assert select.select([alive], [], [], 20.0)[0] and os.read(alive, 1) == b""
    os.close(alive)
    assert statuses_of("orphan") == {16: "ok"}


def test_a_worker_that_cannot_even_start_is_an_error_and_no_record(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os; os.write(2, b'broken'); os._exit(3)")
    with pytest.raises(RuntimeError, match="died before its first item: exit status 3; broken"):
        run_job(job_of("demo", 16), CPU, tmp_path, Watch())
    assert store.machines("demo") == []


def test_a_job_without_items_starts_no_process(monkeypatch):
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
    run_job(job_of("demo"), CPU, None, Watch())


def test_the_command_of_a_record_is_the_jobs_own_or_quotes_the_studys_name():
    assert repeat_command(job_of("a b")) == "python -m attnlib measure 'a b'"
    assert repeat_command(replace(job_of("a"), command="make a")) == "make a"
