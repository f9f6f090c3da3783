"""A job: the items of one (round, release), run in a fresh subprocess that may die.

The `worker` keeps each record itself. If it dies, the item it had started gets a record that says
how, and the rest of the job goes on in a new process. If we die, it dies too: its stdin is ours.
Its process group, such as a compiler that it runs, dies with it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from ..measure.calls.form import Item
from . import store
from .rows import record_id, row_of, strip_folders
from .schema import now
from .worker import CANNOT_WRITE

ITEM_TIMEOUT_S = 600.0
"""Long enough for FlashInfer to compile a kernel module first: fa3 took 54 s on 16 cores."""
POLL_S = 0.1
WORKER = (sys.executable, "-m", "attnlib.run.worker")
Machine = dict[str, Any]
"""What `describe_machine` says."""


class StoppedError(Exception):
    """A sweep was stopped by whoever asked for it: what it measured stays, the rest is missing."""


@dataclass(frozen=True)
class Job:
    """Items of one round and release of a study; `command` measures them again."""

    study: str
    round: int
    device: str
    release: str
    items: tuple[Item, ...]
    command: str

    def id_of(self, item: Item, machine: Machine) -> str:
        """The id of the item's record on a machine."""
        return record_id(
            study=self.study,
            round_=self.round,
            item=item,
            gpu_id=machine["gpu_id"],
        )


@dataclass(frozen=True)
class Watch:
    """What goes on beside a job: `on_done` gets the number of further items done.

    Once `stop` says so, the worker is killed and StoppedError raised; the item that was being
    measured has no record, since it did not fail. `held` are file descriptors of locks that the
    workers hold too, should they outlive us.
    """

    on_done: Callable[[int], object] = lambda count: None
    stop: Callable[[], bool] | None = None
    held: tuple[int, ...] = ()


def run_job(
    job: Job,
    machine: Machine,
    overlay: Path | None,
    watch: Watch,
) -> None:
    """Run `job` to its end, in as many processes as it takes; one record per item, always."""
    left = job.items
    while left:
        rest = replace(job, items=left)
        done, died_measuring, words = _run_process(rest, overlay, watch)
        if died_measuring:
            _record_death(job, machine, left[done], words)
            done += 1
            watch.on_done(1)
        elif not done:
            raise RuntimeError(f"a worker died before its first item: {words}")
        left = left[done:]


def _run_process(
    job: Job,
    overlay: Path | None,
    watch: Watch,
) -> tuple[int, bool, str]:
    """How many items a process did, whether it died measuring the next one, and how it ended."""
    # Files without a name: if we are killed, nothing of them stays.
    with TemporaryFile() as job_file, TemporaryFile() as progress, TemporaryFile() as log:
        form = {
            "study": job.study,
            "round": job.round,
            "device": job.device,
            "command": job.command,
            "progress": f"/dev/fd/{progress.fileno()}",
            "items": [item.to_dict() for item in job.items],
        }
        job_file.write(json.dumps(form).encode())
        job_file.flush()
        with subprocess.Popen(
            [
                sys.executable,
                "-m",
                "attnlib.run.worker",
                "--end-with-stdin",
                f"/dev/fd/{job_file.fileno()}",
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=worker_environment(overlay),
            pass_fds=(job_file.fileno(), progress.fileno(), *watch.held),
            start_new_session=True,
        ) as process:
            try:
                how = _wait(process, progress, watch)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        last_words = _text_of(log).strip()[-500:]
        if process.returncode == CANNOT_WRITE:
            raise RuntimeError(f"a record could not be written, the sweep ends: {last_words}")
        words = f"{how}; {last_words}"
        return _count_done(progress), _text_of(progress).endswith("start\n"), words


def _wait(
    process: subprocess.Popen[bytes],
    progress: IO[bytes],
    watch: Watch,
) -> str:
    """Wait for a worker, telling what is done; how it ended. Raises StoppedError."""
    seen, last = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(POLL_S)
        if watch.stop and watch.stop():
            raise StoppedError
        count = _count_done(progress)
        watch.on_done(count - seen)  # of 0 items too: a bar shows the time that one takes
        if count > seen:
            seen, last = count, time.monotonic()
        if time.monotonic() - last > ITEM_TIMEOUT_S:
            return f"timeout after {ITEM_TIMEOUT_S:.0f} s"
    watch.on_done(_count_done(progress) - seen)
    code = process.returncode
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _count_done(progress: IO[bytes]) -> int:
    return _text_of(progress).count("done\n")


def worker_environment(overlay: Path | None = None) -> dict[str, str]:
    """Environment of a worker process: the overlay first, then this very package, then ours."""
    package = Path(__file__).resolve().parents[2]
    others = os.environ.get("PYTHONPATH")
    paths = []
    for path in (overlay, package, others):
        if path:
            paths.append(str(path))
    data = store.data_root().resolve()
    return {
        **os.environ,
        "ATTNLIB_DATA": str(data),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _record_death(
    job: Job,
    machine: Machine,
    item: Item,
    words: str,
) -> None:
    row = row_of(
        item,
        machine,
        study=job.study,
        round=job.round,
        status="timeout" if words.startswith("timeout") else "crashed",
        reason=strip_folders(words),
        command=job.command,
        started_at=now(),
    )
    # Killed after its record was on disk, before it could say so: the measurement is good.
    if not store.is_kept_ok(row):
        store.keep(row)
