"""The records on disk: what is published, and what was measured since.

`records/<machine>/<study>.parquet` is published, `records/<machine>/<study>/<id>.json` is a record
that a sweep measured since. Every reader takes both together and checks them (`rows.validate`); of
one id the newest record stands, and what is not yet published is newer.

A record's file is written whole and then put in its place, so a writer that is killed leaves no
half of one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ..core.spec import require_type
from ..measure.calls.form import Item, NamedCase
from ..measure.files import remove_unfinished, write_whole
from .missing import NotOnRecordError
from .rows import (
    Row,
    RowError,
    decode,
    encode,
    flat_row,
    joined,
    machine_slug,
    members,
    require_record,
    rows_of,
    table_of,
    to_json,
    validate,
)

if TYPE_CHECKING:
    import pandas as pd

PUBLISHED = Path(__file__).resolve().parents[1] / "data"
Source = tuple[str, str]
"""A study and a machine."""
Checked = tuple[pa.Table, list[Item]]
"""Records that were checked, and the item of each."""


def data_root() -> Path:
    """The data folder: `ATTNLIB_DATA`, which must be one (ValueError), or `data` beside us."""
    named = os.environ.get("ATTNLIB_DATA")
    if named and not Path(named).is_dir():
        raise ValueError(f"ATTNLIB_DATA must name a folder, got {named!r}")
    return Path(named) if named else PUBLISHED


def published_path(study: str, machine: str) -> Path:
    """The file of a study's published records on a machine."""
    return data_root() / "records" / machine / f"{study}.parquet"


def measured_path(study: str, machine: str) -> Path:
    """The folder into which a sweep of the study on a machine writes."""
    return data_root() / "records" / machine / study


def machines(study: str, *, published: bool = True) -> list[str]:
    """The machines that have records of `study`, sorted; else those with some to be published."""
    folder = os.path.join(data_root(), "records")
    if not os.path.isdir(folder):
        return []
    found = []
    for name in sorted(os.listdir(folder)):
        # Asked for every study on every machine, so no Path is made of it.
        place = f"{folder}/{name}/{study}"
        is_published = published and os.path.exists(f"{place}.parquet")
        if is_published or (os.path.isdir(place) and _measured(study, name)):
            found.append(name)
    return found


def on_machine(
    name: str,
    wish: str,
    sources: Iterable[Source],
) -> list[Source]:
    """The (study, machine) pairs with `wish` in the machine; else a ValueError for `name`."""
    pairs = list(sources)
    kept = []
    for pair in pairs:
        if wish.lower() in pair[1]:
            kept.append(pair)
    if pairs and not kept:
        known = dict.fromkeys(machine for _, machine in pairs)
        names = ", ".join(known)
        raise ValueError(f"{name} must be one of {names}, or a part of it, got {wish!r}")
    return kept


def stamp(study: str, machine: str) -> tuple[object, ...]:
    """What changes whenever the records do: key of a cache of anything made of them."""
    files = [published_path(study, machine), *_measured(study, machine)]
    return tuple(_stamp(path) for path in files)


def keep(row: Row) -> Path:
    """Write a record to its file; on return it is on disk, whole.

    Raises ValueError for what is no record. Raises OSError that names the file where it cannot be
    written, as on a full disk; an earlier record of the id is then as it was.
    """
    require_record(row)
    path = _path_of(row)
    text = to_json(row)
    try:
        return _made(path, text)
    except (FileExistsError, FileNotFoundError):  # `publish` has just removed the empty folder
        return _made(path, text)


def _made(path: Path, text: bytes) -> Path:
    """The file of a record, in a folder that is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, text)


def is_kept_ok(row: Row) -> bool:
    """Whether the record of this id that waits to be published is ok."""
    path = _path_of(row)
    if not path.exists():
        return False
    kept = json.loads(path.read_bytes())
    return kept["status"] == "ok"


def load(
    study: str,
    machine: str,
    *,
    case: NamedCase | None = None,
) -> pd.DataFrame:
    """The records of a study on a machine, or those of a case: a row each (`frame.frame_of`).

    Oldest first; of one id the newest stands. data/README.md has every column with its meaning.

    Parameters
    ----------
    study : str
        Its name in `attnlib.STUDIES`.
    machine : str
        The name of a folder of data/records.
    case : NamedCase, optional
        The case whose records are wanted; by default all.

    Returns
    -------
    pandas.DataFrame
        Times are microseconds.

    Raises
    ------
    FileNotFoundError
        Naming the machines that have the study.
    ValueError
        Naming file and row of what is no record of this machine; for names that are no text.

    Examples
    --------
    >>> import attnlib
    >>> study = attnlib.STUDIES["fa3_decode_regression"]
    >>> frame = attnlib.load(study.name, study.reference_machine)
    >>> bool((frame.run_us[frame.status == "ok"] > 0).all())
    True
    """
    require_type("study", study, str)
    require_type("machine", machine, str)
    frame = _frame_of(
        study=study,
        machine=machine,
        stamp=stamp(study, machine),
    )
    if case is None:
        return frame.copy()
    is_case = frame.case == case
    if not is_case.any():
        return frame[:0]  # to filter a wide frame is slow
    return frame[is_case]


def find(study: str, machine: str) -> pd.DataFrame:
    """As `load`; no records at all are an empty frame."""
    if machine in machines(study):
        return load(study, machine)
    from .frame import frame_of

    return frame_of(table_of([]), [])


def read(study: str, machine: str) -> pa.Table:
    """The records as `load` has them, with every column and all samples; errors are its own."""
    table, _ = _read(study, machine)
    return table


def publish(study: str, machine: str = "") -> Path:
    """Move what was measured into the study's published file; returns its path.

    `machine` may be left out where only one has measured the study. Killed at any instant, every
    record is in the published file or in a file of its own. Raises FileNotFoundError where there is
    nothing to publish, ValueError for another machine and for what `load` refuses.
    """
    measured = machines(study, published=False)
    if not measured:
        raise FileNotFoundError(f"study {study!r} has no records to be published")
    if len(measured) == 1 and not machine:
        (machine,) = measured
    if machine not in measured:
        known = ", ".join(measured)
        raise ValueError(f"machine must be one of {known} for study {study!r}, got {machine!r}")
    path = published_path(study, machine)
    with _locked(path.parent):
        taken = {each: _stamp(each) for each in _measured(study, machine)}
        write_whole(path, encode(read(study, machine)))
        for each, seen in taken.items():
            if _stamp(each) == seen:  # else measured once more while we wrote
                each.unlink()
        remove_unfinished(path.parent)
        remove_unfinished(measured_path(study, machine))
        with suppress(OSError):  # it is not there, or a sweep writes into it
            measured_path(study, machine).rmdir()
    return path


def provenance(study: str, machine: str) -> dict[str, Any]:
    """Where a study's numbers come from: file, sha256, machine, versions seen, days.

    While measured records add to the published ones, both places are named, with a comma.
    """
    table = read(study, machine)
    names = []
    hashes = []
    for place in _places(study, machine):
        files = _files_of(place)
        if files:
            name = place.relative_to(data_root().parent)
            names.append(name.as_posix())
            hashes.append(_sha256(files))
    started_at = table["started_at"].to_pylist()
    days = {started[:10] for started in started_at}
    first_day = min(days)
    last_day = max(days)
    (last,) = rows_of(table.slice(table.num_rows - 1))
    return {
        "study": study,
        "file": ", ".join(names),
        "sha256": ", ".join(hashes),
        "records": table.num_rows,
        "machine": members(last, "machine"),
        "versions": _versions(table),
        "measured": first_day if len(days) == 1 else f"{first_day} to {last_day}",
    }


def _places(study: str, machine: str) -> list[Path]:
    """Where records of a study on a machine may lie: a file and a folder."""
    return [published_path(study, machine), measured_path(study, machine)]


def _versions(table: pa.Table) -> dict[str, list[str]]:
    """Every version of each library that a table names."""
    versions = {}
    for name in table.column_names:
        group, _, library = name.partition(".")
        seen = table[name].drop_null()
        if group == "versions" and len(seen):
            versions[library] = sorted(seen.unique().to_pylist())
    return versions


def _sha256(files: Iterable[Path]) -> str:
    """Of the bytes of all files, one after the other."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _files_of(place: Path) -> list[Path]:
    """A file, or the records in a folder by name; none where there is nothing."""
    if place.is_dir():
        return sorted(place.glob("*.json"))
    if place.exists():
        return [place]
    return []


def _path_of(row: Row) -> Path:
    machine = machine_slug(members(row, "machine"))
    return measured_path(row["study"], machine) / f"{row['id']}.json"


def _measured(study: str, machine: str) -> list[Path]:
    """The files of records that are not published."""
    return _files_of(measured_path(study, machine))


@lru_cache(maxsize=64)
def _frame_of(
    study: str,
    machine: str,
    stamp: tuple[object, ...],
) -> pd.DataFrame:
    from .frame import frame_of  # pandas takes a while to import, and a worker needs none

    return frame_of(*_read(study, machine))


def _read(study: str, machine: str) -> Checked:
    """All records and their items."""
    # Before the published file: what is published meanwhile is then in both.
    measured = _checked_measured(study, machine)
    published = _checked_published(study, machine)
    if measured is None:
        if published is None:
            have = ", ".join(machines(study)) or "none"
            words = f"no records of study {study!r} on {machine!r}; machines: {have}"
            raise NotOnRecordError(words)
        return published
    if published is None:
        return measured
    new_table, new_items = measured
    old_table, old_items = published
    newer = set(new_table["id"].to_pylist())
    old_ids = old_table["id"].to_pylist()
    stays = [row_id not in newer for row_id in old_ids]
    old_table = old_table.filter(pa.array(stays))
    table = joined([old_table, new_table])
    items = list(compress(old_items, stays))
    return table, items + new_items


def _checked_published(study: str, machine: str) -> Checked | None:
    path = published_path(study, machine)
    try:
        table = decode(path.read_bytes())
        return table, validate(table, machine)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error


def _checked_measured(study: str, machine: str) -> Checked | None:
    """Records that are not published, oldest first."""
    found: list[tuple[Path, Row]] = []
    for path in _measured(study, machine):
        with suppress(FileNotFoundError):  # published meanwhile
            found.append((path, _row_in(path)))
    if not found:
        return None
    found.sort(key=_started)
    try:
        table = table_of([row for _, row in found])
        return table, validate(table, machine)
    except RowError as error:
        path, _ = found[error.row]
        raise ValueError(f"{path} {error.words}") from error


def _started(record: tuple[Path, Row]) -> str:
    """When the record of a file was begun."""
    _, row = record
    return str(row.get("started_at"))


def _row_in(path: Path) -> Row:
    """The record of a file."""
    try:
        form = json.loads(path.read_bytes())
        if not isinstance(form, dict):
            raise ValueError(f"it is {type(form).__name__}")
        return flat_row(form)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a record: {error}") from error


def _stamp(path: Path) -> tuple[object, ...]:
    try:
        seen = path.stat()
    except FileNotFoundError:
        return path, None
    return path, seen.st_ino, seen.st_mtime_ns, seen.st_size


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One publisher of a machine's records at a time."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
