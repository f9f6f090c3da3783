"""Records as rows: made, checked, and written as Parquet.

A record is a dict of the columns of `schema`, flat, where a worker makes one; many are an Arrow
table. `validate` is the one check of either: no check, no time. A record has samples only when its
status is `ok`, and one with a case is `ok` only when the oracle's error lies within its budget;
else it is `incorrect`. `refused` is what backend, library or GPU says beforehand that it cannot
run, `error` a Python exception, `crashed` a process that died or lost its CUDA context, `timeout`
no answer in the item's time.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from ..measure.calls.form import Item, item_from_dict
from . import schema
from .schema import BY_NAME, REQUIRED, STATUSES

Row = dict[str, Any]
CASE_PREFIX = "case."
ITEM = ("backend", "timer", "release", "again")
"""Columns that say, beside those of the case, what was measured."""
PYTHON_TYPES: dict[pa.DataType, Any] = {
    schema.TEXT: str,
    schema.COUNT: int,
    schema.NUMBER: (float, int),
    schema.FLAG: bool,
}
CHECKED = (*REQUIRED, "run_us", "plan_us", "oracle_error", "oracle_budget", "machine.cpu")
"""Columns that `what_is_wrong` reads."""
SAMPLES = ("run_us", "plan_us", "kernels")
ZSTD_LEVEL = 19


class RowError(ValueError):
    """A row that is no record: its number in the table, and why."""

    def __init__(self, row: int, words: str) -> None:
        super().__init__(f"row {row} {words}")
        self.row = int(row)
        self.words = words


# ---- one record


def row_of(
    item: Item,
    machine: Mapping[str, Any],
    **found: Any,
) -> Row:
    """The record of an item: `found` are its other columns, or dicts of members (`versions`)."""
    gpu_id = machine["gpu_id"]
    identity = record_id(
        found["study"],
        found["round"],
        item,
        gpu_id,
    )
    form = {
        "id": identity,
        "schema": schema.VERSION,
        "machine": machine,
    }
    return flat_row(form | item.to_dict() | found)


def flat_row(form: Mapping[str, Any]) -> Row:
    """A JSON form as a row: a column for each member of a dict. Earlier versions wrote dicts."""
    row: Row = {}
    for name, value in form.items():
        if isinstance(value, dict):
            row |= {f"{name}.{member}": inner for member, inner in value.items()}
        elif value is not None:
            row[name] = value
    return row


def to_json(row: Row) -> bytes:
    """A record's file: one line, keys sorted, no NaN."""
    text = json.dumps(
        row,
        sort_keys=True,
        allow_nan=False,
        separators=(",", ":"),
    )
    return f"{text}\n".encode()


def members(
    row: Mapping[str, Any],
    group: str,
) -> dict[str, Any]:
    """The columns of a group, such as `machine.gpu`, by their names in it; without nulls."""
    prefix = f"{group}."
    return {
        name.removeprefix(prefix): value
        for name, value in row.items()
        if name.startswith(prefix) and value is not None
    }


def record_id(
    study: str,
    round_: int,
    item: Item,
    gpu_id: str,
) -> str:
    """Sixteen hex digits of SHA-256 over who a measurement is."""
    # As `json.dumps` writes the list of the four, keys sorted.
    identity = f"[{json.dumps(study)}, {round_}, {item.identity}, {json.dumps(gpu_id)}]"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def machine_slug(machine: Mapping[str, Any]) -> str:
    """Folder name of a machine's records: `nvidia-h200-1a2b3c4d`, or `cpu-x86_64`."""
    if not machine["gpu"]:
        return f"cpu-{machine.get('cpu', '')}"
    gpu = machine["gpu"].lower().replace(" ", "-")
    gpu_id = machine["gpu_id"]
    return f"{gpu}-{gpu_id}"


def strip_folders(text: str) -> str:
    """`text` with absolute paths cut to their last part: folders say nothing to a reader."""
    return re.sub(r"(?<![\w.])/[^\s'\"]*/", "", text)


# ---- tables


def table_of(rows: Sequence[Row]) -> pa.Table:
    """The rows as a table: every column that is no member, and the members that any row has.

    Raises RowError for a column that records do not have and for a value of another type.
    """
    names = {*schema.PLAIN}
    for number, row in enumerate(rows):
        words = wrong_value(row)
        if words:
            raise RowError(number, words)
        names |= row.keys()
    table = {}
    for name in in_order(names):
        column = BY_NAME[name]
        values = [row.get(name, schema.EMPTY[name]) for row in rows]
        table[name] = pa.array(values, column.type)
    return pa.table(table)


def wrong_value(row: Row) -> str:
    """Why no table can hold a row, or the empty string."""
    unknown = row.keys() - BY_NAME.keys()
    if unknown:
        declared = "the columns of attnlib/run/schema.py, where a new one is declared"
        return f"must have {declared}, not {sorted(unknown)}"
    for name, value in row.items():
        kind = BY_NAME[name].type
        if not _holds(kind, value):
            return f"must have {name} of type {kind}, got {value!r}"
    return ""


def _holds(kind: pa.DataType, value: Any) -> bool:
    """Whether a column of a type may hold a value. Arrow itself takes True for 1.0, 1.5 for 1."""
    if value is None:
        return True
    if pa.types.is_list(kind):
        is_list = isinstance(value, list | tuple)
        return is_list and all(_holds(kind.value_type, each) for each in value)
    if pa.types.is_struct(kind):
        names = {field.name for field in kind}
        if not isinstance(value, dict) or value.keys() != names:
            return False
        return all(_holds(field.type, value[field.name]) for field in kind)
    if isinstance(value, str):
        written = value.encode(errors="replace")
        if value != written.decode():
            return False  # half a surrogate pair, which is no UTF-8
    if isinstance(value, int) and abs(value) >= 2**63:
        return False
    if isinstance(value, bool):  # which Python has as an integer
        return kind == schema.FLAG
    return kind != schema.FLAG and isinstance(value, PYTHON_TYPES[kind])


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of all tables, each with the columns of any."""
    table = pa.concat_tables(tables, promote_options="default")
    whole = table.combine_chunks()
    return whole.select(in_order(whole.column_names))


def in_order(names: Iterable[str]) -> list[str]:
    """Names of columns in the order of the schema."""
    given = {*names}
    return [name for name in BY_NAME if name in given]


def rows_of(table: pa.Table) -> list[Row]:
    """The rows as dicts, without nulls: inverse of `table_of`."""
    return [_without_nulls(row) for row in table.to_pylist()]


def _without_nulls(row: Row) -> Row:
    return {name: value for name, value in row.items() if value is not None}


def encode(table: pa.Table) -> bytes:
    """A Parquet file of the table. The same rows give the same bytes, from one release of pyarrow.

    Its pages have checksums, so that a flipped bit is not read as another time.
    """
    file = io.BytesIO()
    # Samples hardly repeat: a dictionary of them makes the file larger.
    repeated = [name for name in table.column_names if name not in SAMPLES]
    parquet.write_table(
        table,
        file,
        compression="zstd",
        compression_level=ZSTD_LEVEL,
        use_dictionary=repeated,
        write_page_checksum=True,
    )
    return file.getvalue()


def decode(data: bytes) -> pa.Table:
    """The table of a published file, with every column that is no member.

    Raises ValueError for bytes that are no whole Parquet file, and for other columns.
    """
    try:
        file = parquet.ParquetFile(
            pa.BufferReader(data),
            page_checksum_verification=True,
        )
        found = file.read()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"must be a whole Parquet file: {error}") from error
    given = found.column_names
    unknown = set(given) - BY_NAME.keys()
    missing = set(REQUIRED) - set(given)
    doubled = {name for name in given if given.count(name) > 1}
    wrong = unknown | missing | doubled
    if wrong:
        words = f"differs in {sorted(wrong)}"
        raise ValueError(f"must have the columns of attnlib/run/schema.py; {words}")
    table = {}
    for name in in_order(schema.PLAIN.union(given)):
        column = BY_NAME[name]
        if name not in given:
            empty = [schema.EMPTY[name]] * found.num_rows
            table[name] = pa.array(empty, column.type)
            continue
        kind = found[name].type
        if kind not in (column.type, pa.null(), pa.large_string()):
            raise ValueError(f"must have {name} of type {column.type}, got {kind}")
        table[name] = found[name].combine_chunks().cast(column.type)
        if schema.EMPTY[name] is not None and table[name].null_count:
            raise ValueError(f"must have {name} in every row")
    return pa.table(table)


def case_names(table: pa.Table) -> list[str]:
    """The columns of cases that a table has."""
    return [name for name in table.column_names if name.startswith(CASE_PREFIX)]


# ---- the check


def validate(table: pa.Table, machine: str) -> list[Item]:
    """RowError for the first row that is no record of the machine; else the item of every row."""
    if not table.num_rows:
        raise ValueError("must hold a record, it has none")
    items = items_of(table)
    checked = [name for name in CHECKED if name in table.column_names]
    seen = set()
    rows = table.select(checked).to_pylist()
    for number, row in enumerate(rows):
        words = what_is_wrong(row, items[number], machine)
        if words:
            raise RowError(number, words)
        row_id = row["id"]
        if row_id in seen:
            raise RowError(number, f"id must stand once, {row_id} stands in an earlier row too")
        seen.add(row_id)
    return items


def require_record(row: Row) -> None:
    """ValueError unless the row is a record, of whatever machine. Arrow is not asked: its first
    array would import pandas, which a worker need not wait for."""
    words = wrong_value(row) or what_is_wrong(row, _item_in(row))
    if words:
        raise ValueError(f"a record {words}")


def what_is_wrong(
    row: Row,
    item: Item,
    machine: str = "",
) -> str:
    """Why a row is no record of a machine, or the empty string: no check, no time."""
    for name in REQUIRED:
        if row.get(name) is None:
            return f"must have a {name}"
    if not 0 < row["schema"] <= schema.VERSION:
        return f"schema must be 1 to {schema.VERSION}, got {row['schema']}: update attnlib"
    status = row["status"]
    samples = row.get("run_us") or []
    if status not in STATUSES:
        known = ", ".join(STATUSES)
        return f"status must be one of {known}, got {status!r}"
    if (status == "ok") != bool(samples):
        words = f"got {len(samples)} samples with status {status!r}"
        return f"run_us must hold samples exactly when status is ok, {words}"
    for name in ("run_us", "plan_us"):
        for time in row.get(name) or []:
            if time is None or not 0 < time < math.inf:
                return f"{name} must be finite microseconds > 0, got {time}"
    if status == "ok" and item.case is not None:
        error = row.get("oracle_error")
        budget = row.get("oracle_budget")
        is_within = False
        if error is not None and budget is not None:
            is_within = math.isfinite(error) and error <= budget
        if not is_within:
            words = f"got {error} of {budget}"
            return f"oracle_error must be finite and within oracle_budget for status ok, {words}"
    slug = machine_slug(members(row, "machine"))
    if machine and slug != machine:
        return f"must be of {machine!r}, it is of {slug!r}"
    key = record_id(
        row["study"],
        row["round"],
        item,
        row["machine.gpu_id"],
    )
    if row["id"] != key:
        return f"id must be the content key {key}, got {row['id']}"
    return ""


def items_of(table: pa.Table) -> list[Item]:
    """The item of every row; rows of one item share it."""
    names = [*ITEM, *case_names(table)]
    columns = [table[name].to_pylist() for name in names]
    made: dict[tuple[Any, ...], Item] = {}
    items = []
    for number, key in enumerate(zip(*columns, strict=True)):
        if key not in made:
            row = dict(zip(names, key, strict=True))
            try:
                made[key] = _item_in(row)
            except ValueError as error:
                raise RowError(number, f"must be a record: {error}") from error
        items.append(made[key])
    return items


def _item_in(row: Row) -> Item:
    """The item of a row; ValueError for a case that is none."""
    form = {name: row.get(name) for name in ITEM}
    form["release"] = row.get("release") or ""
    form["case"] = members(row, "case")
    return item_from_dict(form)
