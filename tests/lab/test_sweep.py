"""Measuring what a view lacks: real worker processes on the CPU, stopped and not."""

import os
import time
from dataclasses import replace

import pytest
from support.studies import INSTANT

from attnlib.kinds.item import Item
from attnlib.lab.sources import STUDY, ThisGpu, narrow
from attnlib.lab.sweep import Sweep, measure_missing, missing_rounds
from attnlib.run import store, study

HANGS = 4
# A sitecustomize module on PYTHONPATH: of this page size, a worker hangs while it writes a record.
FAULTS = f"""{INSTANT}
import time
from attnlib.run import store
def asked_of(spec):
    if spec.page_size == {HANGS}:
        (path,) = store.data_root().glob("records/*/{STUDY}.jsonl")
        with path.open("ab") as file:
            file.write(b'{{"backend":"sdpa","calls_per_sam')
        time.sleep(60)
"""
CPU = ThisGpu("cpu", ())
ASKED = {"model": "Qwen3-0.6B", "timer": "host", "page_size": 1, "batch": 1, "kv_len": 16}
BACKENDS = ("sdpa", "flashinfer-fa2")
CHOICES = narrow(CPU, {**ASKED, "backends": BACKENDS, "against": "sdpa", "rounds": 2}).choices
ALONE = replace(CHOICES, backends=("sdpa",), rounds=1)


@pytest.fixture
def instant_cpu(instant_jobs, monkeypatch):
    monkeypatch.setattr("attnlib.lab.sources.describe", study.describe)


def rounds_of(jobs):
    return [(job.round, [item.backend for item in job.items]) for job in jobs]


def test_a_round_is_a_process_and_the_odd_one_runs_in_reverse(instant_cpu):
    jobs = missing_rounds(ThisGpu("cpu", ("copy",)), replace(CHOICES, rounds=3))
    forth = ["copy", "sdpa", "flashinfer-fa2"]
    assert rounds_of(jobs) == [(0, forth), (1, forth[::-1]), (2, forth)]
    assert {job.study for job in jobs} == {STUDY}


def test_what_is_on_record_is_not_measured_again(instant_cpu):
    assert measure_missing(CPU, CHOICES) == 4
    assert measure_missing(CPU, CHOICES) == 0
    more = rounds_of(missing_rounds(CPU, replace(CHOICES, rounds=3)))
    assert more == [(2, ["sdpa", "flashinfer-fa2"])]


def test_a_round_is_never_filled_up_by_another_process(instant_cpu):
    assert measure_missing(CPU, replace(ALONE, rounds=2)) == 2
    assert [number for number, _ in rounds_of(missing_rounds(CPU, CHOICES))] == [2, 3]
    other = replace(CHOICES, kv_len=32)
    assert [number for number, _ in rounds_of(missing_rounds(CPU, other))] == [0, 1]


def test_a_release_is_flashinfers_and_no_other_librarys(instant_cpu):
    jobs = missing_rounds(CPU, replace(CHOICES, release="0.6.3"))
    items = [item for job in jobs for item in job.items]
    assert {(i.backend, i.release) for i in items} == {("sdpa", ""), ("flashinfer-fa2", "0.6.3")}


def test_progress_ends_at_its_total(instant_cpu):
    seen = []
    told = {"on_progress": lambda done, total: seen.append((done, total)), "on_end": seen.append}
    Sweep(CPU, CHOICES, **told).run()
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4), "Measured 4 items."]


def test_stopping_kills_the_worker_leaves_whole_records_and_frees_the_gpu(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    measure_missing(CPU, ALONE)
    (record,) = store.read(STUDY, CPU.machine)
    known = (Item("sdpa", "host", ALONE.case), "ok", 0)
    assert (record.item, record.status, record.round) == known
    assert record.command.startswith("python -c 'import attnlib; attnlib.view(")
    assert "\n" not in record.command and "kv_len=16" in record.command
    path = store.journal_path(STUDY, CPU.machine)
    before = path.read_bytes()
    ended = []
    sweep = Sweep(CPU, replace(ALONE, page_size=HANGS), on_progress=print, on_end=ended.append)
    sweep.start()
    deadline = time.monotonic() + 60
    while path.read_bytes() == before:
        assert sweep.is_running and time.monotonic() < deadline, "the worker never wrote"
        time.sleep(0.05)
    sweep.stop()
    assert sweep.wait(20) and not sweep.is_running
    assert ended == ["Stopped. What was measured is kept; the rest is measured next time."]
    assert path.read_bytes() == before
    assert b"calls_per_sam" in store.torn_path(STUDY, CPU.machine).read_bytes()
    assert measure_missing(CPU, replace(ALONE, rounds=2)) == 1


def test_what_goes_wrong_in_the_thread_is_told_and_not_raised(monkeypatch):
    def fail(gpu, choices, **_):
        raise OSError("disk full")

    monkeypatch.setattr("attnlib.lab.sweep.measure_missing", fail)
    ended = []
    Sweep(CPU, ALONE, on_progress=print, on_end=ended.append).run()
    assert ended == ["Not measured: OSError: disk full"]
