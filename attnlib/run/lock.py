"""One sweep per GPU: a file lock that two sweeps on one GPU cannot both hold.

Two sweeps at once would time each other. The lock is `flock` on a file in /tmp (`ATTNLIB_LOCKS`:
in another folder), where two checkouts meet. The kernel gives it up when the last process that
holds it is gone. A worker holds its sweep's lock too (`jobs`), so a killed sweep keeps the GPU
until its last one ends.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TRIES = 60
POLL_S = 0.05  # for the last worker of a killed sweep to end


def lock_path(gpu_id: str) -> Path:
    """The lock file of a GPU; it holds the holder's process id and is never removed."""
    return Path(os.environ.get("ATTNLIB_LOCKS") or "/tmp", f"attnlib-gpu-{gpu_id}.lock")


@contextmanager
def hold_gpu(gpu_id: str) -> Iterator[int]:
    """Hold the GPU for the block; gives the file descriptor, for workers to hold as well.

    Raises RuntimeError that names the holder's process id if it is not free in three seconds.
    """
    with hold(lock_path(gpu_id), f"GPU {gpu_id!r} must be measured by one sweep at a time") as file:
        yield file


@contextmanager
def hold(path: Path, words: str) -> Iterator[int]:
    """Hold the lock file `path` for the block; RuntimeError begins with `words` if it is taken."""
    file = _open(path)
    try:
        for _ in range(TRIES):
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(POLL_S)
        else:
            holder = os.pread(file, 20, 0).decode() or "unknown"
            raise RuntimeError(f"{words}, process {holder} or its last worker holds {path}")
        os.ftruncate(file, 0)
        os.pwrite(
            file,
            str(os.getpid()).encode(),
            0,
        )
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
