"""Jobs in real processes: whatever kills one costs one item, and the record says how.

Faults come through the overlay, which stands first on the worker's path: a sitecustomize module
in which layers of chosen head_dims fail.
"""

import os
import pickle
import select
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.records import told
from support.studies import CPU, INSTANT

from attnlib.core import AttnSpec
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.form import Item
from attnlib.measure.machine import describe_machine
from attnlib.run import jobs, rows, store
from attnlib.run.jobs import Job, StoppedError, Watch, run_job
from attnlib.run.rows import machine_slug

ROOT = Path(__file__).resolve().parents[2]
KILLED = 24
WAITS = 40
CONTEXT_LOST = 56
OUT_OF_MEMORY = 72
DISK_FULL = 88
FAULTS = f"""{INSTANT}
import os, resource, signal, subprocess, sys
from attnlib.run import store

class OutOfMemoryError(RuntimeError):
    "As torch's, without a second of importing torch."
def fail(error):
    raise error
def fill_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
def die_writing():
    print("last words of /opt/engine/kernel.so", file=sys.stderr, flush=True)
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)

faults = {{
    {KILLED}: die_writing,
    {WAITS}: lambda: subprocess.call(["sleep", "60"], close_fds=False),
    {DISK_FULL}: fill_disk,
    {CONTEXT_LOST}: lambda: fail(RuntimeError("CUDA error: an illegal memory access was ...")),
    {OUT_OF_MEMORY}: lambda: fail(OutOfMemoryError("CUDA out of memory. Tried to ...")),
}}
asked_of = lambda spec: faults.get(spec.head_dim, lambda: None)()
"""


def job_of(study, *head_dims):
    cases = (DecodeCase(AttnSpec(4, 2, n, 4), batch_size=1, kv_len=8) for n in head_dims)
    items = tuple(Item("sdpa", "host", case) for case in cases)
    return Job(study, 3, "cpu", "", items, "repeat me")


def records_of(study):
    """By head_dim, whichever machine wrote them: we write for dead workers."""
    found = []
    for machine in store.machines(study):
        found += rows.rows_of(store.read(study, machine))
    by_head_dim = {row["case.head_dim"]: told(row) for row in found}
    assert len(by_head_dim) == len(found)
    return by_head_dim


def statuses_of(study):
    return {head_dim: record.status for head_dim, record in records_of(study).items()}


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """The overlay with the faults."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "sitecustomize.py").write_text(FAULTS)
    return folder


@pytest.mark.slow
def test_whatever_kills_a_worker_costs_one_item_and_the_record_says_how(faults, monkeypatch):
    machine = describe_machine("cpu")
    done = []
    popen = Mock(side_effect=subprocess.Popen)
    monkeypatch.setattr(jobs.subprocess, "Popen", popen)

    def on_done(count):
        done.append(count)
        # Three items in, the next one waits: only for that one is the limit short.
        monkeypatch.setattr(jobs, "ITEM_TIMEOUT_S", 1.0 if sum(done) == 3 else 120.0)

    bad = {KILLED: "crashed", WAITS: "timeout", CONTEXT_LOST: "crashed"}
    job = job_of("demo", 16, KILLED, 32, WAITS, CONTEXT_LOST, OUT_OF_MEMORY, 48)
    run_job(job, machine, faults, Watch(on_done))
    assert (
        statuses_of("demo")
        == {
            16: "ok",
            32: "ok",
            48: "ok",
            OUT_OF_MEMORY: "error",
        }
        | bad
    )
    assert sum(done) == 7, "the dead ones are counted too"
    assert popen.call_count == 1 + len(bad), "running out of memory costs no process"
    records = records_of("demo")
    assert records[OUT_OF_MEMORY].reason.startswith("OutOfMemoryError: CUDA out of memory. Tried")
    assert records[WAITS].reason.startswith("timeout after 1 s")
    killed = records[KILLED]
    assert killed.reason == "signal SIGKILL; last words of kernel.so"
    assert killed.run_us == ()
    assert killed.round == 3
    assert killed.machine == machine
    assert killed.command == "repeat me"
    assert killed.started_at.endswith("+00:00")
    (unfinished,) = store.measured_path("demo", machine_slug(machine)).glob("*.unfinished")
    assert unfinished.read_bytes().endswith(b"}\n"), "killed as the record was put in its place"


@pytest.fixture
def pipe():
    """The two ends of a pipe: what reads nothing has no writer left."""
    ends = os.pipe()
    yield ends
    os.close(ends[0])


def assert_no_writer_left(alive):
    assert select.select([alive], [], [], 20.0)[0]
    assert os.read(alive, 1) == b""


def test_a_stop_kills_the_worker_with_its_children_and_leaves_its_item_without_a_record(
    faults, pipe
):
    done, (alive, held) = [], pipe
    with pytest.raises(StoppedError):
        watch = Watch(
            done.append,
            stop=lambda: bool(sum(done)),
            held=(held,),
        )
        run_job(job_of("stopped", 16, WAITS, 32), CPU, faults, watch)
    os.close(held)
    assert_no_writer_left(alive)
    assert statuses_of("stopped") == {16: "ok"}


def test_a_full_disk_ends_the_job_with_the_name_of_the_file_and_no_half_record(faults):
    words = r"could not be written, the sweep ends: \[Errno 27\] .*/full/\w+\.json'$"
    with pytest.raises(RuntimeError, match=words):
        run_job(job_of("full", 16, DISK_FULL, 32), CPU, faults, Watch())
    assert statuses_of("full") == {16: "ok"}


SWEEP = """
import pickle, sys
from attnlib.run.jobs import Watch, run_job
job, machine, faults, held = pickle.load(sys.stdin.buffer)
run_job(job, machine, faults, Watch(held=(held,)))
"""


def test_neither_worker_nor_its_children_nor_a_file_outlive_the_sweep_that_started_them(
    faults, data, pipe, tmp_path
):
    # The second item waits for a child for a minute; both would still hold the pipe's end.
    alive, held = pipe
    command = [sys.executable, "-c", SWEEP]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = os.environ | {"TMPDIR": str(scratch)}
    sweep = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=(held,), env=environment
    )
    pickle.dump(
        (
            job_of("orphan", 16, WAITS),
            CPU,
            faults,
            held,
        ),
        sweep.stdin,
    )
    sweep.stdin.close()
    os.close(held)
    while not any(data.glob("records/*/orphan/*.json")):
        assert sweep.poll() is None
        time.sleep(0.05)
    sweep.kill()
    sweep.wait()
    assert_no_writer_left(alive)
    assert list(scratch.iterdir()) == []
    assert statuses_of("orphan") == {16: "ok"}


def test_a_worker_that_cannot_even_start_is_an_error_and_no_record(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os; os.write(2, b'broken'); os._exit(3)")
    with pytest.raises(RuntimeError, match="died before its first item: exit status 3; broken"):
        run_job(job_of("demo", 16), CPU, tmp_path, Watch())
    assert store.machines("demo") == []


@pytest.mark.parametrize("before, after", [("ok", "ok"), ("error", "timeout")])
def test_a_death_replaces_a_failure_but_no_measurement(make_record, before, after):
    job = job_of("demo", 16)
    named = {
        "study": job.study,
        "round": job.round,
        "machine": CPU,
        "item": job.items[0],
    }
    store.keep(make_record(status=before, **named))
    jobs._record_death(job, CPU, job.items[0], "timeout after 1 s")
    assert statuses_of("demo") == {16: after}
