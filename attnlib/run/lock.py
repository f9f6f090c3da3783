"""One sweep per GPU: a file lock that two sweeps on one GPU cannot both hold.

Two sweeps at once would time each other. The lock is `flock` on a file in the temporary folder,
where two checkouts meet. The kernel gives it up when the last process that holds it is gone, in
whatever way. A worker holds its sweep's lock too (`jobs`), so a sweep that was killed keeps the GPU
until the last of its workers has ended.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LAST_WORKER_S = 30.0
"""How long the worker of a killed sweep may take to end: it dies with its sweep, in milliseconds,
unless it sits in a call that does not let its watching thread run."""
POLL_S = 0.05


def lock_path(gpu_id: str) -> Path:
    """The lock file of a GPU; it holds the holder's process id and is never removed."""
    return Path(tempfile.gettempdir(), f"attnlib-gpu-{gpu_id}.lock")


@contextmanager
def hold_gpu(gpu_id: str) -> Iterator[int]:
    """Hold the GPU for the block; gives the file descriptor, for workers to hold as well.

    Raises RuntimeError that names the holder's process id, at once while that process lives. If
    it is dead, its last worker is given `LAST_WORKER_S` to end.
    """
    path = lock_path(gpu_id)
    file = _open(path)
    try:
        _take(file, path, gpu_id)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield file
    finally:
        os.close(file)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        file = os.open(path, flags | os.O_CREAT, 0o666)
    # Another user's sweep must be able to open it, whatever our umask.
    os.fchmod(file, 0o666)
    return file


def _take(file: int, path: Path, gpu_id: str) -> None:
    deadline = time.monotonic() + LAST_WORKER_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 20, 0).decode()
        if _is_alive(holder) or time.monotonic() > deadline:
            raise RuntimeError(
                f"GPU {gpu_id!r} must be measured by one sweep at a time, "
                f"process {holder or 'unknown'} holds {path}"
            )
        time.sleep(POLL_S)


def _is_alive(process_id: str) -> bool:
    # Empty for an instant, between a holder's taking the lock and its writing down who it is.
    if not process_id.isdigit():
        return False
    try:
        os.kill(int(process_id), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
