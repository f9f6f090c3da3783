"""Write a file whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> Path:
    """Put `data` in place of the file `path`, synced; returns `path`.

    Killed at any instant, the file is the old one or the new one, never half of either. If writing
    fails, what was there stays and nothing is left beside it; raises OSError.
    """
    unfinished = beside(path)
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def beside(path: Path) -> Path:
    """The unfinished file of this process beside `path`, for writers that need a file's name."""
    return path.with_name(f"{path.name}.{os.getpid()}.unfinished")


def require_writable(out: Path) -> None:
    """ValueError unless a file can be made beside `out` and put in its place."""
    if out.exists() and not out.is_file():
        raise ValueError(f"out must be a file to write, {out} is a folder or a device")
    if not out.parent.is_dir():
        raise ValueError(f"out must be in a folder that there is, got {out}")
    probe = beside(out)
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"out must be in a folder to write to, got {out}: {error}") from error
