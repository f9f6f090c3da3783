"""The records on disk: `<data>/records/<machine>/<study>.jsonl`, appended, never rewritten.

One folder a machine, so two GPUs never share a table by accident. `append` writes one whole line
under a lock and syncs it before it returns. `load` gives a DataFrame, one row a record.
`<data>` is the repository's data folder, or what `ATTNLIB_DATA` names. No torch here.

A writer may be killed at any instant, so its last line may be cut short. Nobody was told that such
a line is stored, and under the exclusive lock it can only be a dead writer's:

| who meets a torn last line | does |
|---|---|
| `read`, and all that only reads | ValueError with file and line: a copy cut short is no study |
| `append`, `mend` | moves its bytes to `<study>.jsonl.torn`, syncs, cuts the file to whole lines |
| a kill between those two steps | leaves both; the next writer sets the same bytes aside again |

So a killed sweep resumes, and what it was writing is measured again; the bytes stay to be seen.
A line that ends whole and is no record was not left by a kill: all refuse it, and no one moves it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ..kinds.cases import Case
from ..kinds.decode.case import DecodeCase
from ..kinds.extend.case import ExtendCase
from ..kinds.mla.case import MlaCase
from ..kinds.step.case import StepCase
from .record import Record

if TYPE_CHECKING:
    import pandas as pd

COMPARABLE = ("gpu_id", "power_limit_w", "timer", "schema")
"""Columns that must not differ within one comparison: each moves times, whatever the backend."""


def data_root() -> Path:
    """The data folder: `ATTNLIB_DATA`, or `data` beside the package."""
    named = os.environ.get("ATTNLIB_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[2] / "data"


def record_path(study: str, machine: str) -> Path:
    """The file of a study's records on a machine."""
    return data_root() / "records" / machine / f"{study}.jsonl"


def machines(study: str) -> list[str]:
    """The machines that have records of `study`, sorted."""
    return sorted(path.parent.name for path in data_root().glob(f"records/*/{study}.jsonl"))


def torn_path(study: str, machine: str) -> Path:
    """Where the torn last lines of killed writers are kept; missing if there never was one."""
    path = record_path(study, machine)
    return path.with_name(f"{path.name}.torn")


def append(record: Record) -> Path:
    """Add `record` to its file; on return it is on disk, whole. A torn last line is set aside."""
    path = record_path(record.study, record.machine_slug)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (record.to_json() + "\n").encode()
    with _locked(path) as file:
        _set_torn_line_aside(file, torn_path(record.study, record.machine_slug))
        file.write(line)
        _sync(file)
    return path


def mend(study: str, machine: str) -> int:
    """Set a killed writer's torn last line aside, so that the file reads; its length in bytes."""
    path = record_path(study, machine)
    if not path.exists():
        return 0
    with _locked(path) as file:
        return _set_torn_line_aside(file, torn_path(study, machine))


def read(study: str, machine: str) -> list[Record]:
    """Records of a study on a machine, oldest first; of one id the newest stands.

    Raises FileNotFoundError naming the machines that have the study, and ValueError naming file
    and line for a line cut short, a newer schema, a field that is not right or another machine's.
    """
    path = record_path(study, machine)
    if not path.exists() or not path.stat().st_size:
        have = ", ".join(machines(study)) or "none"
        raise FileNotFoundError(f"no records of study {study!r} on {machine!r}; machines: {have}")
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        lines = file.readlines()
    newest: dict[str, Record] = {}
    for number, line in enumerate(lines, 1):
        record = _parse(path, number, line)
        if record.machine_slug != machine:
            raise ValueError(
                f"{path} line {number} must be of {machine!r}, it is of {record.machine_slug!r}"
            )
        newest.pop(record.id, None)
        newest[record.id] = record
    return list(newest.values())


def load(study: str, machine: str) -> pd.DataFrame:
    """The records of a study on a machine, as `frame` has them."""
    return frame(read(study, machine))


def frame(records: Iterable[Record]) -> pd.DataFrame:
    """One row a record: identity, case fields, status, medians (us), kernels, oracle, versions."""
    import pandas as pd

    return pd.DataFrame([_row(record) for record in records])


def require_comparable(rows: pd.DataFrame) -> None:
    """ValueError unless all rows share GPU, power limit, timer and schema (`COMPARABLE`).

    For whoever divides one row by another or puts them in one comparison. It names the column and
    two of its values. A machine without a power limit has 0.
    """
    for name in COMPARABLE:
        seen = rows[name].unique().tolist()
        if len(seen) > 1:
            raise ValueError(
                f"{name} must be the same in all rows of a comparison, "
                f"got {seen[0]!r} and {seen[1]!r}"
            )


def provenance(study: str, machine: str) -> dict[str, Any]:
    """Where a study's numbers come from: file, sha256, machine, versions seen, days."""
    path, records = record_path(study, machine), read(study, machine)
    days = sorted(record.started_at[:10] for record in records)
    return {
        "study": study,
        "file": path.relative_to(data_root().parent).as_posix(),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "records": len(records),
        "machine": records[-1].machine,
        "versions": _versions_seen(records),
        "measured": days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}",
        "commands": sorted({record.command for record in records}),
    }


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _set_torn_line_aside(file: IO[bytes], aside: Path) -> int:
    whole = _whole_bytes(file)
    file.seek(whole)
    torn = file.read()
    if torn:
        with aside.open("ab") as kept:
            kept.write(torn + b"\n")
            _sync(kept)
        file.truncate(whole)
        _sync(file)
    return len(torn)


def _whole_bytes(file: IO[bytes]) -> int:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read() in (b"", b"\n"):
        return size
    file.seek(0)
    return file.read().rfind(b"\n") + 1


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _parse(path: Path, number: int, line: str) -> Record:
    if not line.endswith("\n"):
        raise ValueError(f"{path} line {number} must be a whole record, it is cut short: remove it")
    try:
        return Record.from_json(line)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} line {number} must be a record: {error}") from error


def _row(record: Record) -> dict[str, Any]:
    item, case = record.item, record.item.case
    return {
        "id": record.id,
        "study": record.study,
        "round": record.round,
        "backend": item.backend,
        "release": item.release,
        "timer": item.timer,
        **(case.to_dict() if case else {}),
        "heads": _heads(case),
        "status": record.status,
        "reason": record.reason,
        "reported_backend": record.reported_backend,
        "kernel_family": record.kernel_family,
        "kernels": ", ".join(_kernel_label(kernel) for kernel in record.kernels),
        "kernel_us": round(sum(kernel["gpu_us"] for kernel in record.kernels), 3),
        "run_us": float(np.median(record.run_us)) if record.run_us else float("nan"),
        "plan_us": float(np.median(record.plan_us)) if record.plan_us else float("nan"),
        "samples": len(record.run_us),
        "oracle_error": record.oracle_error,
        "oracle_budget": record.oracle_budget,
        "work_per_call": record.work_per_call,
        "sm_clock_mhz": record.state_after.get("sm_clock_mhz", float("nan")),
        "throttled": record.throttled,
        "power_capped": record.power_capped,
        "gpu": record.machine["gpu"],
        "gpu_id": record.machine["gpu_id"],
        "power_limit_w": record.machine.get("power_limit_w", 0),
        "schema": record.schema,
        "num_sms": record.machine.get("num_sms", 0),
        "l2_mib": record.machine.get("l2_mib", 0.0),
        "started_at": record.started_at,
    }


def _heads(case: Case | None) -> str | None:
    decode = case.decode if isinstance(case, StepCase) else case
    return decode.spec.heads if isinstance(decode, DecodeCase | MlaCase | ExtendCase) else None


def _kernel_label(kernel: dict[str, Any]) -> str:
    launches = kernel["launches"]
    return kernel["name"] if launches == 1 else f"{kernel['name']} x{launches:g}"


def _versions_seen(records: list[Record]) -> dict[str, list[str]]:
    seen: dict[str, set[str]] = {}
    for record in records:
        for name, version in record.versions.items():
            seen.setdefault(name, set()).add(version)
    return {name: sorted(versions) for name, versions in sorted(seen.items())}
