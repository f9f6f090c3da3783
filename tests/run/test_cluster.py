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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.studies import SPEC, grid_of, study_of

from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.item import Item
from attnlib.run import cluster, store
from attnlib.run.cluster import measure_on_cluster, share_out
from attnlib.run.jobs import Job
from attnlib.run.study import Sweep

distributed = pytest.importorskip("distributed", reason="attnlib[cluster] is not installed")

CASES = tuple(DecodeCase(SPEC, 1, kv_len) for kv_len in range(8, 14))
STUDY = study_of(grid_of(*CASES, rounds=2))
TWO_GPUS = """
import os
from attnlib.measure import machine

describe = machine.describe_machine
machine.describe_machine = lambda device: {
    **describe(device), "gpu": "Pretended", "gpu_id": os.environ["PRETENDED_GPU"]
}
"""
ROOT = Path(__file__).resolve().parents[2]


def job_of(*cases: DecodeCase | None, round_: int = 0) -> Job:
    items = tuple(Item("sdpa" if case else "copy", "host", case) for case in cases)
    return Job("demo", round_, "cpu", "", items)


def cases_by_gpu(shares: list[tuple[str, Job]]) -> list[tuple[str, int, list]]:
    return [(gpu_id, job.round, [item.case for item in job.items]) for gpu_id, job in shares]


def test_all_rounds_of_a_case_go_to_one_gpu_and_the_load_is_even():
    jobs = [job_of(*CASES[:4]), job_of(*CASES[3::-1], round_=1)]
    a, b, c, d = CASES[:4]
    assert cases_by_gpu(share_out(jobs, {"x": Counter(), "y": Counter()})) == [
        ("x", 0, [a, c]),
        ("y", 0, [b, d]),
        ("x", 1, [c, a]),
        ("y", 1, [d, b]),
    ]


def test_a_case_stays_on_the_gpu_that_has_records_of_it():
    a, b, c = CASES[:3]
    known = {"x": Counter(), "y": Counter({a: 1, c: 2})}
    assert cases_by_gpu(share_out([job_of(a, b, c)], known)) == [("x", 0, [b]), ("y", 0, [a, c])]


def test_ceilings_are_measured_on_every_gpu():
    shares = share_out([job_of(None), job_of(CASES[0])], {"x": Counter(), "y": Counter()})
    assert cases_by_gpu(shares) == [("x", 0, [None]), ("y", 0, [None]), ("x", 0, [CASES[0]])]


def test_without_the_library_its_install_line_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(RuntimeError, match=r'pip install "attnlib\[cluster\]"'):
        cluster.connect("tcp://127.0.0.1:1")


@contextmanager
def cluster_of(*gpus: str, resources: dict[str, int] | None = None) -> Iterator[Any]:
    """A client of a scheduler and a nanny for each GPU, all on the loopback."""

    def options(gpu: str) -> dict[str, Any]:
        env = {"PRETENDED_GPU": gpu}
        chosen = {"GPU": 1} if resources is None else resources
        return {"nthreads": 1, "resources": chosen, "env": env, "dashboard": False}

    workers = {n: {"cls": distributed.Nanny, "options": options(g)} for n, g in enumerate(gpus)}
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"},
    }
    with distributed.SpecCluster(workers, scheduler=scheduler, silence_logs=50) as made:
        with distributed.Client(made, set_as_default=False) as client:
            client.wait_for_workers(len(gpus), timeout=60)
            yield client


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from here take themselves for the GPU that their environment names."""
    (tmp_path / "sitecustomize.py").write_text(TWO_GPUS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), *sys.path]))
    monkeypatch.setenv("PRETENDED_GPU", "none")


def lines_of(machine: str) -> list[str]:
    path = store.journal_path("demo", machine)
    return path.read_text().splitlines() if path.exists() else []


def kill_after_first_record(machine: str, process_id: int) -> None:
    while not lines_of(machine):
        time.sleep(0.02)
    os.kill(process_id, signal.SIGKILL)


def pid_of(client: Any, gpu: str) -> int:
    gpus = client.run(os.getenv, "PRETENDED_GPU")
    (address,) = [address for address, name in gpus.items() if name == gpu]
    return client.run(os.getpid, workers=[address])[address]


def test_a_killed_dask_worker_loses_no_record_and_repeats_none(two_gpus):
    with cluster_of("x", "y") as client:
        killed = pid_of(client, "x")
        killer = threading.Thread(
            target=kill_after_first_record, args=("pretended-x", killed), daemon=True
        )
        killer.start()
        counts = measure_on_cluster(STUDY, client, Sweep())
        killer.join()
        assert pid_of(client, "x") != killed
        assert counts == {"ok": 2 * len(CASES)}
        lines = {machine: lines_of(machine) for machine in ("pretended-x", "pretended-y")}
        # A line an item: nothing is there twice, so nothing that was recorded was measured again.
        assert [len(found) for found in lines.values()] == [len(CASES), len(CASES)]
        records = [record for machine in lines for record in store.read("demo", machine)]
        assert len(records) == 2 * len(CASES)
        homes = {(record.item.case, record.machine["gpu_id"]) for record in records}
        assert len(homes) == len(CASES)
        assert measure_on_cluster(STUDY, client, Sweep()) == counts
        assert lines == {machine: lines_of(machine) for machine in lines}


def test_two_workers_on_one_gpu_are_refused(two_gpus):
    with cluster_of("x", "x") as client:
        with pytest.raises(ValueError, match="a GPU of its own, .* both have 'x'"):
            measure_on_cluster(STUDY, client, Sweep())


def test_a_worker_without_the_resource_is_refused(two_gpus):
    with cluster_of("x", resources={}) as client:
        with pytest.raises(ValueError, match="started with --resources GPU=1, .* has none"):
            measure_on_cluster(STUDY, client, Sweep())
