"""A study on several GPUs: who measures what, and what the death of a Dask worker costs.

The cluster is of this machine, on the loopback: a worker for each of two CPUs that call themselves
GPUs, by a sitecustomize module that stands first on the path of their processes.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from support.studies import INSTANT, SPEC, grid_of, study_of

from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.form import Item
from attnlib.run import cluster, rows, store
from attnlib.run.cluster import asked_gpus, deal, local_cluster, measure_on_gpus, running_cluster
from attnlib.run.jobs import Job, StoppedError
from attnlib.run.lock import hold_gpu
from attnlib.run.study import Sweep

ROOT = Path(__file__).resolve().parents[2]
CASES = tuple(DecodeCase(SPEC, 1, kv_len) for kv_len in range(8, 12))
A, B, C, D = CASES
STUDY = study_of(grid_of(*CASES, rounds=2))
X = "pretended-x"
Y = "pretended-y"
PRETENDED = f"""{INSTANT}
import os, time
from attnlib.run import lock

describe = machine.describe_machine

def pretended(device):
    return {{**describe(device), "gpu": "Pretended", "gpu_id": os.environ["PRETENDED_GPU"]}}

machine.describe_machine = pretended
lock.TRIES = 2
asked_of = lambda spec: time.sleep(60 if spec.head_dim == 64 else 0.1)
"""
OTHER_SPEC = replace(SPEC, head_dim=64)
ENDLESS = study_of(grid_of(*(replace(case, spec=OTHER_SPEC) for case in CASES)))


# ---- the deal


def dealt(*rounds, **on_record):
    """GPU -> the cases of each of its jobs, where each round has one job."""
    jobs = []
    for number, cases in enumerate(rounds):
        items = tuple(Item("sdpa" if case else "copy", "host", case) for case in cases)
        jobs.append(Job("demo", number, "cpu", "", items, ""))
    parts = deal(jobs, {gpu_id: Counter(cases) for gpu_id, cases in on_record.items()})
    return {
        gpu_id: [(job.round, *(item.case for item in job.items)) for job in part]
        for gpu_id, part in parts.items()
    }


def test_case_i_goes_to_gpu_i_modulo_n_with_all_its_rounds():
    expected = {
        "x": [(0, A, C), (1, C, A)],
        "y": [
            (0, B, D),
            (1, D, B),
        ],
    }
    assert (
        dealt(
            (A, B, C, D),
            (D, C, B, A),
            y=[],
            x=[],
        )
        == expected
    )


def test_a_case_stays_on_the_gpu_that_has_most_records_of_it():
    assert dealt(
        (A, B, C),
        x=[C],
        y=[A, C, C],
    ) == {"x": [], "y": [(0, A, B, C)]}
    assert dealt(
        (A, B),
        x=[B],
        y=[A],
    ) == {"x": [(0, B)], "y": [(0, A)]}


def test_ceilings_are_measured_on_each_gpu_that_has_a_case():
    parts = dealt(
        (None,),
        (A, B),
        x=[],
        y=[],
        z=[],
    )
    assert parts == {
        "x": [(0, None), (1, A)],
        "y": [(0, None), (1, B)],
        "z": [],
    }


# ---- what is refused


@pytest.fixture
def three_gpus(monkeypatch):
    monkeypatch.setattr(cluster, "has_driver", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_as_many_gpus_are_taken_as_are_asked_for_of_those_that_are_visible(three_gpus, monkeypatch):
    assert asked_gpus("all") == ["0", "1", "2"]
    assert asked_gpus("2") == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-1a,2")
    assert asked_gpus("2") == ["5", "GPU-1a"]


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", "\u0663", "ALL"])
def test_what_is_no_number_of_gpus_is_refused(text):
    with pytest.raises(ValueError, match=f"--gpus must be all or a number from 1, got '{text}'"):
        asked_gpus(text)


def test_more_gpus_than_there_are_and_none_at_all_are_refused(three_gpus, monkeypatch):
    with pytest.raises(ValueError, match="all or a number from 1 to 3, got '4'"):
        asked_gpus("4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="with a CUDA GPU; none is here"):
        asked_gpus("all")


def test_without_dask_its_install_line_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    for start in (running_cluster("tcp://127.0.0.1:1"), local_cluster([])):
        with pytest.raises(RuntimeError, match=r'pip install -e "\.\[cluster\]"'), start:
            pass


@pytest.fixture
def dask():
    pytest.importorskip("distributed", reason="attnlib[cluster] is not installed")
    return pytest.importorskip("dask")


def test_an_address_that_is_none_is_refused(dask):
    with pytest.raises(ValueError, match="an address such as tcp://HOST:8786, got 'host'"):
        with running_cluster("host"):
            pass


@pytest.mark.parametrize("listens", [True, False])
def test_an_address_that_does_not_answer_is_named(dask, listens, monkeypatch):
    monkeypatch.setattr(cluster, "ANSWER_S", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=f"^no Dask scheduler answers at {address} within"):
            with running_cluster(address):
                pass


class Workers:
    """In place of a client: workers that all say that their GPU is x."""

    def __init__(self, *addresses):
        self.addresses = addresses

    def nthreads(self):
        return dict.fromkeys(self.addresses, 1)

    def run(self, function, *arguments):
        machine = {"gpu": "x", "gpu_id": "x"}
        return {address: (machine, Counter()) for address in self.addresses}


def test_workers_that_share_a_gpu_and_a_cluster_without_any_are_refused():
    with pytest.raises(ValueError, match="own, one and two both have 'x': set CUDA_VISIBLE"):
        measure_on_gpus(STUDY, Sweep(), Workers("one", "two"))
    with pytest.raises(RuntimeError, match="a worker for each GPU, it has none"):
        measure_on_gpus(STUDY, Sweep(), Workers())


# ---- a cluster


@pytest.fixture
def pretended(dask, tmp_path, monkeypatch):
    """Processes started from here take themselves for the GPU that their environment names."""
    (tmp_path / "sitecustomize.py").write_text(PRETENDED)
    paths = [str(tmp_path), str(ROOT), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("PRETENDED_FOR", str(tmp_path))


def on_two_gpus(**more):
    return local_cluster({"PRETENDED_GPU": gpu, **more} for gpu in "xy")


def files_of(machine, data=None):
    """The records that wait to be published, by path."""
    folder = (data or store.data_root()) / "records" / machine / "demo"
    return {path: path.read_bytes() for path in folder.glob("*.json")}


def homes():
    """Case -> machine and round of each of its records, in the order of measuring."""
    found = {}
    for machine in (X, Y):
        frame = store.find("demo", machine)
        for case, round_ in zip(frame.case, frame["round"], strict=True):
            found.setdefault(case, []).append((machine, round_))
    return found


def on_gpu(machine):
    return [(machine, 0), (machine, 1)]


def kill_after_a_record(client, machine, kept):
    """Kill the Dask worker of a GPU once it has a record, which `kept` then holds."""
    gpus = client.run(os.getenv, "PRETENDED_GPU")
    (address,) = [address for address, gpu in gpus.items() if machine.endswith(gpu)]
    process_id = client.run(os.getpid, workers=[address])[address]

    def kill():
        while not files_of(machine):
            time.sleep(0.02)
        os.kill(process_id, signal.SIGKILL)
        kept.update(files_of(machine))

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_killed_dask_worker_comes_back_and_measures_only_what_it_lacked(dask, pretended):
    bar = Mock()
    kept = {}
    with on_two_gpus() as client:
        asked = client.run(dask.config.get, "distributed.diagnostics.nvml")
        assert set(asked.values()) == {False}
        killer = kill_after_a_record(client, X, kept)
        assert measure_on_gpus(STUDY, Sweep(progress=bar), client) == (8, [X, Y])
        killer.join()
        assert 0 < len(kept) < 4
        assert kept.items() <= files_of(X).items(), "what was on disk is not measured again"
        assert {case: sorted(found) for case, found in homes().items()} == {
            A: on_gpu(X),
            B: on_gpu(Y),
            C: on_gpu(X),
            D: on_gpu(Y),
        }
        bar.assert_called_once_with(total=8, unit="item", desc="demo")
        assert sum(call.args[0] for call in bar().update.call_args_list) == 8
        bar().close.assert_called_once_with()
        assert measure_on_gpus(STUDY, Sweep(), client) == (0, [X, Y])
        # In another order the cases stay where they are.
        for path in [
            *list(files_of(X))[:1],
            *list(files_of(Y))[:2],
        ]:
            path.unlink()
        moved = study_of(grid_of(D, C, B, A, rounds=2))
        assert measure_on_gpus(moved, Sweep(), client)[0] == 3
        assert {case: sorted(found) for case, found in homes().items()} == {
            A: on_gpu(X),
            B: on_gpu(Y),
            C: on_gpu(X),
            D: on_gpu(Y),
        }


@pytest.mark.slow
def test_a_dask_worker_that_stays_away_is_told_and_the_same_command_goes_on(
    pretended,
    monkeypatch,
):
    async def nothing():
        pass

    def stay_away(dask_worker):
        dask_worker.instantiate = nothing

    kept = {}
    with on_two_gpus() as client, monkeypatch.context() as patch:
        patch.setattr(cluster, "START_S", 1)
        client.run(stay_away, nanny=True)
        killer = kill_after_a_record(client, X, kept)
        died = "^not all was measured: GPU 'x': its Dask worker died, and did not come back in 1 s$"
        with pytest.raises(RuntimeError, match=died):
            measure_on_gpus(STUDY, Sweep(), client)
        killer.join()
        assert 0 < len(files_of(X)) < 4
        assert len(files_of(Y)) == 4
    with on_two_gpus() as client:
        count, machines = measure_on_gpus(STUDY, Sweep(), client)
    assert 0 < count < 4
    assert machines == [X, Y]
    assert kept.items() <= files_of(X).items(), "what was on disk is not measured again"
    assert sorted(homes()[A]) == sorted(homes()[C]) == on_gpu(X)


@pytest.mark.slow
def test_records_of_other_folders_come_back_and_one_gpu_that_fails_stops_no_other(
    pretended, tmp_path
):
    there = tmp_path / "there"
    there.mkdir()
    with on_two_gpus(ATTNLIB_DATA=str(there)) as own:
        with running_cluster(own.scheduler.address) as client:
            with hold_gpu("y"), pytest.raises(RuntimeError, match="^not all was.* GPU 'y': .*one"):
                measure_on_gpus(STUDY, Sweep(), client)
            assert len(files_of(X)) == 4
            assert len(files_of(Y)) == 0
            assert measure_on_gpus(STUDY, Sweep(), client) == (4, [X, Y])
            records = rows.rows_of(store.read("demo", Y))
            first = files_of(Y, there)
            for path in files_of(Y):
                path.unlink()
            assert measure_on_gpus(STUDY, Sweep(), client) == (4, [X, Y])
            assert files_of(Y, there) == first, "they were there"
            assert rows.rows_of(store.read("demo", Y)) == records
            stops = iter([False, False, True])
            with pytest.raises(StoppedError):
                measure_on_gpus(ENDLESS, Sweep(stop=lambda: next(stops)), client)
            assert_none_left("--end-with-stdin")


def processes(word=""):
    """Those that this test started, and that have the word in their command."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_ours = process.environ().get("PRETENDED_FOR") == os.environ["PRETENDED_FOR"]
            if is_ours and word in " ".join(process.cmdline()):
                found.append(process)
    return found


def assert_none_left(word=""):
    for _ in range(100):
        if not processes(word):
            break
        time.sleep(0.1)
    assert processes(word) == []


SWEEP = """
import pickle, sys
from attnlib.run.cluster import local_cluster, measure_on_gpus
from attnlib.run.study import Sweep

if __name__ == "__main__":
    study = pickle.load(open(sys.argv[1], "rb"))
    with local_cluster({"PRETENDED_GPU": gpu} for gpu in "xy") as client:
        print("ready", flush=True)
        measure_on_gpus(study, Sweep(), client)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_sweep_that_is_interrupted_or_killed(number, pretended, tmp_path):
    (tmp_path / "sweep.py").write_text(SWEEP)
    (tmp_path / "study").write_bytes(pickle.dumps(ENDLESS))
    command = [sys.executable, str(tmp_path / "sweep.py"), str(tmp_path / "study")]
    pipe = subprocess.PIPE
    sweep = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert sweep.stdout.readline() == "ready\n"
    while len(processes("--end-with-stdin")) < 2:
        assert sweep.poll() is None, sweep.communicate()[1]
        time.sleep(0.1)
    if number == signal.SIGINT:
        os.killpg(sweep.pid, number)  # as a terminal does
    else:
        sweep.send_signal(number)
    said = sweep.communicate(timeout=20)[1]
    assert_none_left()
    if number == signal.SIGINT:
        # Only the caller's own traceback, wherever it waited in Dask: no line of Dask's log.
        assert said.rstrip().endswith("KeyboardInterrupt"), said
        assert said.count("Traceback") == 1, said
        assert "- distributed." not in said, said
