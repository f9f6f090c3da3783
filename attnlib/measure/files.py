"""Write a file whole or not at all; read one that may not be larger than it should."""

import os
from pathlib import Path
from tempfile import TemporaryFile

UNFINISHED = ".unfinished"
MOST_BYTES = 1 << 26
"""Most bytes of a file that is read at once: /dev/zero never ends."""


def write_whole(path: Path, data: bytes) -> Path:
    """Put `data` in place of the file `path`, synced; returns `path`.

    Killed at any instant, the file is the old one or the new one, never half of either; beside it
    may lie one that ends in `UNFINISHED`. If writing fails, as on a full disk, what was there stays
    and nothing is left beside it; raises OSError that names the file.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def read_limited(path: Path) -> bytes:
    """The bytes of a file; ValueError if it has more than `MOST_BYTES`, FileNotFoundError that says
    so where there is none."""
    if not path.exists():
        raise FileNotFoundError(f"{path} must be a file, there is none")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path} must have at most {MOST_BYTES >> 20} MiB, it has more")
    return data


def remove_unfinished(folder: Path) -> None:
    """Remove what writers left in `folder` that were killed; those that live go on."""
    for path in folder.glob(f"*{UNFINISHED}"):
        try:
            *_, process, _ = path.name.split(".")
            os.kill(int(process), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (ValueError, PermissionError):  # not ours, or of another user who lives
            pass


def require_writable(out: Path) -> None:
    """ValueError unless a file can be made beside `out` and put in its place."""
    if out.exists() and not out.is_file():
        raise ValueError(f"out must be a file to write, {out} is a folder or a device")
    try:
        TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise ValueError(f"out must be in a folder to write to, got {out}: {error}") from error
