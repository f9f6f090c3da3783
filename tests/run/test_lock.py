"""The lock of a GPU: one sweep at a time, and no death leaves it locked."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.studies import SPEC, grid_of, study_of

from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.run import lock
from attnlib.run.lock import hold_gpu, lock_path
from attnlib.run.study import Sweep

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import signal, subprocess, sys
from attnlib.run.lock import hold_gpu
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
with hold_gpu("demo") as held:
    if "worker" in sys.argv:
        nap = [sys.executable, "-c", "import time; time.sleep(0.5)"]
        subprocess.Popen(nap, pass_fds=(held,), stdout=subprocess.DEVNULL)
    print("held", flush=True)
    sys.stdin.read()
"""
TINY = study_of(grid_of(DecodeCase(SPEC, batch_size=1, kv_len=8)))


@contextmanager
def holder(gpu_id="demo", *arguments):
    """Another process that holds the GPU until its stdin closes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", HOLDER.replace("demo", gpu_id), *arguments]
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_second_sweep_is_refused_at_once_with_the_pid_of_the_first_and_another_gpu_is_free(
    monkeypatch,
):
    monkeypatch.setattr(lock, "TRIES", 2)
    with holder() as first:
        with pytest.raises(RuntimeError, match=f"one sweep at a time, process {first.pid} or its"):
            with hold_gpu("demo"):
                pytest.fail("held by two")
        with hold_gpu("another"):
            assert lock_path("another").read_text() == str(os.getpid())


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_holder_that_is_ended_lets_go_at_once(sent):
    with holder() as first:
        first.send_signal(sent)
        first.wait()
        with hold_gpu("demo"):
            pass


def test_a_holder_that_is_killed_lets_go_when_its_last_worker_has_ended(monkeypatch):
    with holder("demo", "worker") as first:
        first.kill()
        first.wait()
        with monkeypatch.context() as patch:
            patch.setattr(lock, "TRIES", 2)
            with pytest.raises(RuntimeError, match=f"process {first.pid} or its last worker holds"):
                with hold_gpu("demo"):
                    pytest.fail("held by two")
        with hold_gpu("demo"):
            pass


def test_two_sweeps_on_one_machine_exclude_each_other_if_there_is_something_to_measure(
    instant_jobs, monkeypatch
):
    monkeypatch.setattr(lock, "TRIES", 2)
    with holder("cpu") as first:
        with pytest.raises(RuntimeError, match=f"GPU 'cpu' must be .* process {first.pid} or"):
            Sweep().measure(TINY)
    assert instant_jobs.jobs == []
    assert Sweep().measure(TINY) == 1
    with holder("cpu"):
        assert Sweep().measure(TINY) == 0


def test_another_user_may_open_the_lock_whatever_our_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNLIB_LOCKS", str(tmp_path))
    before = os.umask(0o077)
    try:
        with hold_gpu("demo"):
            assert lock_path("demo").stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)
