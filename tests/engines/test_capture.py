"""The file of captured steps: nothing waits, and what is cut short costs one line."""

import errno
import fcntl
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from attnlib.engines import arms, capture, points

STEP = capture.CapturedStep(
    mode="decode",
    batch_size=2,
    lengths="40+8",
    q_lengths="",
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=16,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    kind="mha",
    backend="fa3",
    release="0.5.23",
    draft=False,
)


def test_a_lock_that_another_process_holds_is_not_waited_for(tmp_path):
    path = tmp_path / "steps.jsonl"
    holder = "import fcntl, sys; held = open(sys.argv[1], 'ab'); fcntl.flock(held, 2); print(); "
    holder += "sys.stdout.flush(); input()"
    command = [sys.executable, "-c", holder, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        own = path.open("rb")
        with pytest.raises(BlockingIOError):
            fcntl.flock(own, fcntl.LOCK_SH | fcntl.LOCK_NB)
        child = os.fork()
        if not child:  # a write that waits must not hold the suite
            capture.Capture(str(path)).write(STEP)
            os._exit(0)
        process.communicate(b"\n", timeout=20)
    assert os.waitpid(child, 0) == (child, 0)
    assert capture.read(path) == [STEP]


@pytest.mark.parametrize("with_reader", [False, True])
def test_a_fifo_is_refused_at_once(tmp_path, with_reader):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if with_reader else None
    with pytest.raises(ValueError, match=r"CAPTURE must be a .* got .*fifo is no regular file"):
        points._capture(arms.SGLANG, str(path))
    if reader is not None:
        os.close(reader)


@pytest.mark.parametrize("kept", [9, 40, 150])
def test_a_line_that_was_cut_short_costs_one_line(tmp_path, caplog, kept):
    path = tmp_path / "steps.jsonl"
    steps = [replace(STEP, batch_size=number) for number in range(1, 5)]
    writer = capture.Capture(str(path))
    writer.write(steps[0])
    writer.write(steps[1])
    whole = path.read_bytes()
    first = len(whole) // 2
    path.write_bytes(whole[: first + kept])
    writer.write(steps[2])
    writer.write(steps[3])
    assert capture.read(path) == [steps[0], steps[2], steps[3]]
    assert caplog.messages == [f"{path}:2 was cut short and is left out"]


def test_a_full_disk_is_one_warning_and_the_steps_before_it_stay(tmp_path, monkeypatch, caplog):
    path = tmp_path / "steps.jsonl"
    monkeypatch.setattr(arms.STATE, "capture", capture.Capture(str(path)))
    arms.STATE.capture.write(STEP)
    whole = os.write
    full = [lambda file, line: whole(file, line[:50]), None]

    def write(file, line):
        if full[0] is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return full[0](file, line)

    monkeypatch.setattr(os, "write", write)
    for _ in range(3):
        if arms.STATE.capture is None:
            break
        with points.ending_capture(arms.VLLM, arms.STATE.capture):
            arms.STATE.capture.write(STEP)
    monkeypatch.undo()
    (message,) = caplog.messages
    assert "50 of " in message and "no further step is captured, vLLM goes on" in message
    assert capture.read(path) == [STEP]


def test_lines_of_four_writers_are_whole(tmp_path):
    path = tmp_path / "steps.jsonl"
    children = []
    for number in range(1, 5):
        child = os.fork()
        if not child:
            writer = capture.Capture(str(path))
            for _ in range(50):
                writer.write(replace(STEP, batch_size=number))
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    counts = [step.batch_size for step in capture.read(path)]
    assert [counts.count(number) for number in range(1, 5)] == [50] * 4
