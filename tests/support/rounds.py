"""Rows of measurements in a file of JSON lines, each written whole as soon as it is measured.

A script lists its processes, a fresh one for each round and for all that must not share one. `run`
starts those that have something left, until nothing is or the seconds are over; each of them runs
`measure_left`. A killed run loses the row that it was measuring, and the same command goes on. Rows
of another GPU do not count. What failed is a row, too: delete it to measure it again.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from support.live_run import ended_within

from attnlib.core.backends.table import RECORDED
from attnlib.measure.files import require_writable
from attnlib.measure.machine import describe_versions, identify_gpu
from attnlib.run.lock import hold_gpu
from attnlib.run.rows import strip_folders
from attnlib.run.worker import CONTEXT_LOST, end_with_stdin

TIME_IS_OVER = 3
"""Exit status where rows are left."""
KEPT = (
    "status",
    "reason",
    "kernel_family",
    "oracle_error",
    "plan_us",
    "launch_us",
    "traces_before",
)
REASON_LENGTH = 300


@dataclass(frozen=True)
class Process:
    """The keys of the rows that one process measures, in order, and variables that it needs."""

    keys: tuple[dict, ...]
    environment: dict[str, str] = field(default_factory=dict)


def rows_in(path: Path) -> list[dict]:
    """The rows of a file, none where there is none; a half row at its end is cut off."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def add(path: Path, row: dict) -> None:
    """Append a row, synced."""
    with path.open("a") as file:
        file.write(f"{json.dumps(row)}\n")
        file.flush()
        os.fsync(file.fileno())


def left(process: Process, path: Path, gpu_id: str) -> list[dict]:
    """The keys of a process of which the file has no row of this GPU."""
    rows = [row for row in rows_in(path) if row["gpu_id"] == gpu_id]
    keys = []
    for key in process.keys:
        if not any(key.items() <= row.items() for row in rows):
            keys.append(key)
    return keys


def run(command: list[str], processes: list[Process], path: Path, limit_s: float) -> int:
    """Measure what is left within `limit_s`; `command` and a number start that process.

    Exit status: 0, or `TIME_IS_OVER`. A process that a signal ends costs its row alone; one that
    fails otherwise is an error.
    """
    until = time.monotonic() + limit_s
    try:
        require_writable(path)
    except ValueError as error:
        raise SystemExit(error) from None
    if not torch.cuda.is_available():
        raise SystemExit("this must be measured on a CUDA GPU, none is here")
    gpu = identify_gpu()
    with hold_gpu(gpu["gpu_id"]) as held:
        for number, process in enumerate(processes):
            while left(process, path, gpu["gpu_id"]):
                status = ended_within(
                    max(0.0, until - time.monotonic()),
                    [*command, str(number)],
                    env=os.environ | process.environment,
                    stdin=subprocess.PIPE,
                    pass_fds=(held,),
                )
                if status is None:
                    print(f"{limit_s:g} s are over; the same command measures the rest")
                    return TIME_IS_OVER
                if status not in (0, CONTEXT_LOST):
                    _keep_death(process, path, gpu, status)
    return 0


def _keep_death(process: Process, path: Path, gpu: dict, status: int) -> None:
    """A row of what the process was measuring, if a signal ended it."""
    if status > 0:
        raise SystemExit(f"a process that measures failed with exit status {status}, see above")
    key, *_ = left(process, path, gpu["gpu_id"])
    add(path, {**key, **gpu, "status": "crashed", "reason": f"signal {-status}"})


def measure_left(process: Process, path: Path, measure) -> int:
    """In a process: the row of each key that is left, by `measure(key)`; returns exit status.

    It ends with the process that started it, whose pipe stdin is.
    """
    threading.Thread(target=end_with_stdin, daemon=True).start()
    gpu = identify_gpu()
    here = {**gpu, "versions": describe_versions(RECORDED), "date": time.strftime("%Y-%m-%d")}
    for key in left(process, path, gpu["gpu_id"]):
        try:
            fields = fields_of(measure(key))
        except Exception as error:
            reason = strip_folders(f"{type(error).__name__}: {error}")[:REASON_LENGTH]
            fields = {"status": "error", "reason": reason}
        is_lost = "CUDA error" in fields.get("reason", "")
        if is_lost:
            fields["status"] = "crashed"
        add(path, key | fields | here)
        print(*key.values(), fields.get("us", fields.get("reason", "")), flush=True)
        if is_lost:  # no later call of this process would run
            return CONTEXT_LOST
    return 0


def fields_of(measured: dict) -> dict:
    """What a row keeps of a record's fields: the median (us) and the samples for the times."""
    fields = {name: measured[name] for name in KEPT if name in measured}
    if "run_us" in measured:
        samples = list(measured["run_us"])
        fields |= {"us": round(median(samples), 3), "samples_us": samples}
    return fields


def add_limit(parser: argparse.ArgumentParser) -> None:
    """The option of `run`, and that of the processes which it starts."""
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--seconds", type=seconds, help="measure nothing more after this time")
    limit.add_argument("--process", type=int, help=argparse.SUPPRESS)


def seconds(text: str) -> float:
    """A number above 0."""
    number = float(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def command_of(module: str, *arguments: object) -> list[str]:
    """How a script starts one of its processes; a number follows."""
    words = [str(argument) for argument in arguments]
    return [sys.executable, "-m", module, *words, "--process"]
