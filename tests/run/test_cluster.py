"""A study on a cluster: who measures what, and what the death of a Dask worker costs.

The cluster is of this machine, on the loopback: a nanny for each of two CPUs that call themselves
two GPUs, by a sitecustomize module that stands first on the path of their worker processes.
"""

import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.studies import INSTANT, SPEC, grid_of, study_of

from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.item import Item
from attnlib.run import cluster, store
from attnlib.run.cluster import measure_on_cluster, share_out
from attnlib.run.jobs import Job
from attnlib.run.study import Sweep

distributed = pytest.importorskip("distributed", reason="attnlib[cluster] is not installed")

CASES = tuple(DecodeCase(SPEC, 1, kv_len) for kv_len in range(8, 12))
STUDY = study_of(grid_of(*CASES, rounds=2))
TWO_GPUS = f"""{INSTANT}
import os, time

describe = machine.describe_machine
machine.describe_machine = lambda device: {{
    **describe(device), "gpu": "Pretended", "gpu_id": os.environ["PRETENDED_GPU"]
}}
asked_of = lambda spec: time.sleep(0.1)  # so that one is killed between two items
"""
ROOT = Path(__file__).resolve().parents[2]
A, B, C, D = CASES


def shares(*jobs, on_record=()):
    """GPU, round and cases of each share of a round's cases, on GPUs x and y (has records)."""
    items = [[Item("sdpa" if case else "copy", "host", case) for case in job] for job in jobs]
    made = [Job("demo", n, "cpu", "", tuple(job)) for n, job in enumerate(items)]
    shared = share_out(made, {"x": Counter(), "y": Counter(on_record)})
    return [(gpu_id, job.round, *(item.case for item in job.items)) for gpu_id, job in shared]


def test_all_rounds_of_a_case_go_to_one_gpu_and_the_load_is_even():
    expected = [("x", 0, A, C), ("y", 0, B, D), ("x", 1, C, A), ("y", 1, D, B)]
    assert shares((A, B, C, D), (D, C, B, A)) == expected


def test_a_case_stays_on_the_gpu_that_has_records_of_it_and_ceilings_are_measured_on_each():
    assert shares((A, B, C), on_record=(A, C, C)) == [("x", 0, B), ("y", 0, A, C)]
    assert shares((None,), (A,)) == [("x", 0, None), ("y", 0, None), ("x", 1, A)]


def test_without_the_library_its_install_line_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(RuntimeError, match=r'pip install "attnlib\[cluster\]"'):
        cluster.connect("tcp://127.0.0.1:1")


@contextmanager
def cluster_of(cls, *workers):
    """A client of a scheduler and a worker or nanny with each of these options, on the loopback."""
    same = {"nthreads": 1, "dashboard": False}
    made = {n: {"cls": cls, "options": same | own} for n, own in enumerate(workers)}
    where = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": distributed.Scheduler, "options": where}
    with distributed.SpecCluster(made, scheduler=scheduler, silence_logs=50) as started:
        with distributed.Client(started, set_as_default=False) as client:
            client.wait_for_workers(len(workers), timeout=60)
            yield client


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """Processes started from here take themselves for the GPU that their environment names."""
    (tmp_path / "sitecustomize.py").write_text(TWO_GPUS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), *sys.path]))
    monkeypatch.setenv("PRETENDED_GPU", "none")


def lines_of(machine):
    path = store.journal_path("demo", machine)
    return path.read_text().splitlines() if path.exists() else []


def kill_after_first_record(machine, process_id):
    while not lines_of(machine):
        time.sleep(0.02)
    os.kill(process_id, signal.SIGKILL)


def pid_of(client, gpu):
    gpus = client.run(os.getenv, "PRETENDED_GPU")
    (address,) = [address for address, name in gpus.items() if name == gpu]
    return client.run(os.getpid, workers=[address])[address]


def test_a_killed_dask_worker_loses_no_record_and_the_same_command_goes_on(two_gpus):
    own = [{"resources": {"GPU": 1}, "env": {"PRETENDED_GPU": gpu}} for gpu in "xy"]
    with cluster_of(distributed.Nanny, *own) as client:
        victim = ("pretended-x", pid_of(client, "x"))
        threading.Thread(target=kill_after_first_record, args=victim, daemon=True).start()
        with pytest.raises(RuntimeError, match="on GPU 'x': its Dask worker died: start it"):
            measure_on_cluster(STUDY, client, Sweep())
        first = lines_of("pretended-x")
        assert 0 < len(first) < len(CASES) == len(lines_of("pretended-y"))
        client.wait_for_workers(2, timeout=60)  # its nanny started another
        counts = measure_on_cluster(STUDY, client, Sweep())
        assert counts == {"ok": 2 * len(CASES)}
        lines = {machine: lines_of(machine) for machine in ("pretended-x", "pretended-y")}
        # A line an item: nothing is there twice, so nothing that was recorded was measured again.
        assert [len(found) for found in lines.values()] == [len(CASES), len(CASES)]
        records = [record for machine in lines for record in store.read("demo", machine)]
        homes = {(record.item.case, record.machine["gpu_id"]) for record in records}
        assert (len(records), len(homes)) == (2 * len(CASES), len(CASES))


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ([{"GPU": 1}] * 2, "a GPU of its own, .* both have 'x'"),
        ([{}], "started with --resources GPU=1, .* has none"),
    ],
)
def test_workers_that_share_a_gpu_or_lack_the_resource_are_refused(resources, words, monkeypatch):
    monkeypatch.setattr(cluster, "describe", lambda device: {"gpu_id": "x"})
    with cluster_of(distributed.Worker, *({"resources": each} for each in resources)) as client:
        with pytest.raises(ValueError, match=words):
            measure_on_cluster(STUDY, client, Sweep())
