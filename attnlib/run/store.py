"""The records on disk: what is published, and the journal of what was measured since.

data/README.md lists the files. `read` takes both together; of one id the newest record stands, and
the journal is newer.

`append` writes one whole line under a lock and syncs it before it returns. A writer may be killed
at any instant, so the last line of a journal may be cut short. Its `append` had not returned,
and under the exclusive lock its writer must be dead: the next writer sets the line aside, syncs,
and then cuts the file to whole lines. Readers refuse such a line, since a copy cut short is no
study. A line that ends whole and is no record was not left by a kill: all refuse it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kinds.cases import Case
from ..measure.files import UNFINISHED, write_whole
from . import parquet
from .record import Record, machine_slug

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

PUBLISHED = Path(__file__).resolve().parents[1] / "data"
COMPARABLE = ("gpu_id", "power_limit_w", "timer", "schema")
"""Columns that must not differ within one comparison: each moves times, whatever the backend."""


def data_root() -> Path:
    """The data folder: `ATTNLIB_DATA`, which must be one (ValueError), or `data` beside us."""
    named = os.environ.get("ATTNLIB_DATA")
    if named and not Path(named).is_dir():
        raise ValueError(f"ATTNLIB_DATA must name a folder, got {named!r}")
    return Path(named) if named else PUBLISHED


def published_path(study: str, machine: str) -> Path:
    """The file of a study's published records on a machine."""
    return data_root() / "records" / machine / f"{study}.parquet"


def journal_path(study: str, machine: str) -> Path:
    """The file that a sweep of the study on a machine appends to."""
    return published_path(study, machine).with_suffix(".jsonl")


def machines(study: str, suffixes: Sequence[str] = (".parquet", ".jsonl")) -> list[str]:
    """The machines that have records of `study`, sorted."""
    folder = os.path.join(data_root(), "records")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    files = ((name, _stat(f"{folder}/{name}/{study}{end}")) for name in names for end in suffixes)
    return sorted({name for name, seen in files if seen and seen.st_size})


def on_machine(name: str, wish: str, sources: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The (study, machine) pairs with `wish` in the machine; else a ValueError for `name`."""
    pairs = list(sources)
    kept = [pair for pair in pairs if wish.lower() in pair[1]]
    if pairs and not kept:
        names = ", ".join(dict.fromkeys(machine for _, machine in pairs))
        raise ValueError(f"{name} must be one of {names}, or a part of it, got {wish!r}")
    return kept


def stamp(study: str, machine: str) -> tuple[object, ...]:
    """What changes whenever the records do: key of a cache of anything made of them."""
    return _stamp(published_path(study, machine)), _stamp(journal_path(study, machine))


def torn_path(study: str, machine: str) -> Path:
    """Where the torn last lines of killed writers are kept; missing if there never was one."""
    path = journal_path(study, machine)
    return path.with_name(f"{path.name}.torn")


def append(record: Record) -> Path:
    """Add `record` to its journal; on return it is on disk, whole.

    Raises OSError that names the file where it cannot be written, as on a full disk; the journal is
    then as it was.
    """
    path = journal_path(record.study, record.machine_slug)
    path.parent.mkdir(parents=True, exist_ok=True)
    left = (record.to_json() + "\n").encode()
    with _locked(path) as file:
        _set_torn_line_aside(file, torn_path(record.study, record.machine_slug))
        end = file.seek(0, os.SEEK_END)
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(end)
            raise OSError(error.errno, error.strerror, str(path)) from error
    return path


def read(study: str, machine: str) -> list[Record]:
    """Records of a study on a machine, oldest first; of one id the newest stands.

    Raises FileNotFoundError naming the machines that have the study, and ValueError naming file
    and line of what is no whole record of this machine.
    """
    path = journal_path(study, machine)
    # Before the published file: a journal that is published meanwhile is then in both.
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            lines = file.readlines()
    except FileNotFoundError:
        lines = []
    records = _newest(_published(study, machine), _parsed(path, machine, lines))
    if not records:
        have = ", ".join(machines(study)) or "none"
        raise FileNotFoundError(f"no records of study {study!r} on {machine!r}; machines: {have}")
    return records


def find(study: str, machine: str) -> list[Record]:
    """As `read`; no records at all are an empty list."""
    return read(study, machine) if machine in machines(study) else []


def recover(study: str, machine: str) -> list[Record]:
    """As `find`, after a killed writer's torn line was set aside: what a new sweep starts from."""
    path = journal_path(study, machine)
    if path.exists():
        with _locked(path) as file:
            _set_torn_line_aside(file, torn_path(study, machine))
    return find(study, machine)


def publish(study: str, machine: str = "") -> Path:
    """Move the journal's records into the study's published file; returns its path.

    `machine` may be left out where only one has a journal of the study. Killed at any instant,
    every record is in the published file or in the journal. Raises FileNotFoundError without a
    journal, ValueError for another machine and for what `read` and `parquet.encode` refuse.
    """
    with_journal = machines(study, [".jsonl"])
    if not with_journal:
        raise FileNotFoundError(f"study {study!r} has no journal to be published")
    if len(with_journal) == 1 and not machine:
        (machine,) = with_journal
    if machine not in with_journal:
        known = ", ".join(with_journal)
        raise ValueError(f"machine must be one of {known} for study {study!r}, got {machine!r}")
    journal, path = journal_path(study, machine), published_path(study, machine)
    with _locked(journal) as file:
        _set_torn_line_aside(file, torn_path(study, machine))
        file.seek(0)
        late = _parsed(journal, machine, file.read().splitlines(keepends=True))
        for unfinished in path.parent.glob(f"{path.name}.*{UNFINISHED}"):
            unfinished.unlink()  # of a publish that was killed
        write_whole(path, parquet.encode(_newest(_published(study, machine), late)))
        journal.unlink()
    return path


def load(study: str, machine: str, *, case: Case | None = None) -> pd.DataFrame:
    """The records of a study on a machine, or those of a case: a row each (`columns.frame_of`).

    Raises FileNotFoundError naming the machines that have the study.
    """
    frame = _frame_of(study, machine, stamp(study, machine))
    if case is None:
        return frame.copy()
    is_case = frame.case == case
    return frame[is_case] if is_case.any() else frame[:0]  # to filter a wide frame is slow


def frame(records: Iterable[Record]) -> pd.DataFrame:
    """The records as `load` has them."""
    from .columns import frame_of  # pandas takes a while to import, and a worker needs none

    return frame_of(parquet.table_of(list(records)))


def require_comparable(rows: pd.DataFrame) -> None:
    """ValueError, naming column and values, unless all rows share what `COMPARABLE` names."""
    for name in COMPARABLE:
        seen = rows[name].unique().tolist()
        if len(seen) > 1:
            raise ValueError(
                f"{name} must be the same in all rows of a comparison, "
                f"got {seen[0]!r} and {seen[1]!r}"
            )


def provenance(study: str, machine: str) -> dict[str, Any]:
    """Where a study's numbers come from: file, sha256, machine, versions seen, days.

    While a journal adds to the published file, both are named, with a comma.
    """
    table = _table(study, machine)
    paths = published_path(study, machine), journal_path(study, machine)
    files = [path for path in paths if path.exists() and path.stat().st_size]
    values = {
        name: table[name].unique().drop_null().to_pylist()
        for name in table.column_names
        if name in ("started_at", "command") or name.startswith("versions.")
    }
    days = sorted({started[:10] for started in values["started_at"]})
    last = table.slice(table.num_rows - 1).to_pylist()[0]
    return {
        "study": study,
        "file": ", ".join(path.relative_to(data_root().parent).as_posix() for path in files),
        "sha256": ", ".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files),
        "records": table.num_rows,
        "machine": _members(last, "machine"),
        "versions": {name: sorted(seen) for name, seen in _members(values, "versions").items()},
        "measured": days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}",
        "commands": sorted(values["command"]),
    }


def _members(row: dict[str, Any], group: str) -> dict[str, Any]:
    """The columns of a group, such as `machine.gpu`, by their names in it; without nulls."""
    prefix = f"{group}."
    columns = {name: value for name, value in row.items() if value not in (None, [])}
    return {
        name.removeprefix(prefix): value
        for name, value in columns.items()
        if name.startswith(prefix)
    }


def _newest(published: Iterable[Record], late: Iterable[Record]) -> list[Record]:
    """Both in their order, less each record that has a later one of its id."""
    newest: dict[str, Record] = {}
    for record in (*published, *late):
        newest.pop(record.id, None)
        newest[record.id] = record
    return list(newest.values())


def _published(study: str, machine: str) -> tuple[Record, ...]:
    path = published_path(study, machine)
    return _decoded(path, machine, _stamp(path)) if path.exists() else ()


@lru_cache(maxsize=64)
def _frame_of(study: str, machine: str, stamp: tuple[object, ...]) -> pd.DataFrame:
    from .columns import frame_of

    table = _table(study, machine)
    try:
        return frame_of(table)
    except ValueError as error:
        path = published_path(study, machine)
        raise ValueError(f"{path} must hold cases that are known here: {error}") from error


def _table(study: str, machine: str) -> pa.Table:
    """The columns of all records: as they are on disk, unless some were measured since or a field
    of records is newer than the file."""
    path = published_path(study, machine)
    if path.exists() and not journal_path(study, machine).exists():
        table = _published_table(path, machine)
        if parquet.arrow_types().keys() <= {*table.column_names}:
            return table
    return parquet.table_of(read(study, machine))


def _published_table(path: Path, machine: str) -> pa.Table:
    """The columns of a published file; ValueError, naming it, for one of another machine too."""
    data = path.read_bytes()
    try:
        table = parquet.read_table(data)
        named = {"machine.gpu", "machine.gpu_id", "machine.cpu"} & {*table.column_names}
        measured_on = table.group_by(sorted(named)).aggregate([]).to_pylist()
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
    for form in measured_on:
        _require_machine(machine_slug(_members(form, "machine")), machine, str(path))
    return table


def _stamp(path: Path) -> tuple[object, ...]:
    seen = _stat(path)
    return path, seen and (seen.st_ino, seen.st_mtime_ns, seen.st_size)


def _stat(path: Path | str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


@lru_cache(maxsize=64)
def _decoded(path: Path, machine: str, stamp: tuple[object, ...]) -> tuple[Record, ...]:
    # Parsed once per process; a later file has another stamp.
    table = _published_table(path, machine)
    try:
        return tuple(parquet.records_of(table))
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[FileIO]:
    # Unbuffered: a line that did not fit on the disk is not written later, when the file is closed.
    while True:
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Published while we waited? Then what we hold is no longer the journal: open it anew.
            if os.fstat(file.fileno()).st_nlink:
                yield file
                return


def _set_torn_line_aside(file: FileIO, aside: Path) -> None:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
    if file.read() in (b"", b"\n"):
        return
    file.seek(0)
    data = file.read()
    whole = data.rfind(b"\n") + 1
    with aside.open("ab") as kept:
        kept.write(data[whole:] + b"\n")
        kept.flush()
        os.fsync(kept.fileno())
    file.truncate(whole)
    os.fsync(file.fileno())


# Kept, since a sweep reads its journal after every job.
_record_of = lru_cache(maxsize=4096)(lambda line: Record.from_form(json.loads(line)))


def _parsed(path: Path, machine: str, lines: list[bytes]) -> list[Record]:
    records = []
    for number, line in enumerate(lines, 1):
        where = f"{path} line {number}"
        if not line.endswith(b"\n"):
            raise ValueError(f"{where} must be a whole record, it is cut short: remove it")
        try:
            records.append(_record_of(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{where} must be a record: {error}") from error
        _require_machine(records[-1].machine_slug, machine, where)
    return records


def _require_machine(measured_on: str, machine: str, where: str) -> None:
    if measured_on != machine:
        raise ValueError(f"{where} must be of {machine!r}, it is of {measured_on!r}")
