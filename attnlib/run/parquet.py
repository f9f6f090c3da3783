"""Published records as Parquet: a row per record, typed columns, raw samples as lists.

    table = pandas.read_parquet("data/records/<machine>/<study>.parquet")

is useful without this package; data/README.md lists the columns. What is a dict in a record becomes
a column per member, such as `case.kv_len`; a member that a record lacks is null. Nothing is lost:
`encode` looks whether the records come back as they were. The same records give the same bytes from
the same release of pyarrow. A new field of `Record` needs nothing here, unless its annotation is
new (`arrow_types`).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..kinds.item import Item
from .record import KNOWN, REQUIRED, Record, require_schema

if TYPE_CHECKING:
    import pyarrow as pa

MEMBERS = ("case", "machine", "versions", "state_before", "state_after")
SAMPLES = ("run_us", "plan_us", "kernels")
ZSTD_LEVEL = 19


def encode(records: Sequence[Record]) -> bytes:
    """A Parquet file of `records`, in their order.

    Raises ValueError for no records, and for a record that the columns cannot hold exactly.
    """
    if not records:
        raise ValueError("records must be at least one to be published, got none")
    from pyarrow import parquet

    table, file = table_of(records), io.BytesIO()
    # Samples hardly repeat: a dictionary of them makes the file larger.
    repeated = [name for name in table.column_names if name not in SAMPLES]
    parquet.write_table(
        table, file, compression="zstd", compression_level=ZSTD_LEVEL, use_dictionary=repeated
    )
    data = file.getvalue()
    for wrote, decoded in zip(records, records_of(read_table(data)), strict=True):
        if wrote != decoded:
            raise ValueError(f"record {wrote.id} must survive its columns, a member is None or new")
    return data


def table_of(records: Sequence[Record]) -> pa.Table:
    """The columns of `records`; ValueError for members of several types."""
    import pyarrow as pa

    rows = [record.to_form() for record in records]
    for row in rows:
        for group in MEMBERS:
            members = row.pop(group) or {}
            row |= {f"{group}.{member}": value for member, value in members.items()}
    types = arrow_types()
    others = sorted({name for row in rows for name in row} - set(types))
    columns = {name: [row.get(name) for row in rows] for name in (*types, *others)}
    try:
        return pa.table({n: pa.array(column, types.get(n)) for n, column in columns.items()})
    except pa.ArrowException as error:
        raise ValueError(f"a published column must be of one type: {error}") from error


def read_table(data: bytes) -> pa.Table:
    """The columns of a published file.

    Raises ValueError for bytes that are no whole Parquet file, for no record, and for columns that
    are not those of records of a schema known here.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(pa.BufferReader(data)).read()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"must be a whole Parquet file: {error}") from error
    unknown = {name for name in table.column_names if name.partition(".")[0] not in KNOWN}
    needed = (REQUIRED - {*MEMBERS}) | {"machine.gpu", "machine.gpu_id"}
    wrong = sorted(unknown | (needed - {*table.column_names}))
    if wrong:
        raise ValueError(f"must have the columns of data/README.md; differs in {wrong}")
    if not table.num_rows:
        raise ValueError("must hold a record, it has none")
    require_schema(max(table["schema"].to_pylist()))
    return table


def records_of(table: pa.Table) -> list[Record]:
    """The records of a table; ValueError for the row of one that is not right."""
    records = []
    for row, form in enumerate(_forms(table)):
        try:
            records.append(Record.from_form(form))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"row {row} must be a record: {error}") from error
    return records


def arrow_types() -> dict[str, pa.DataType]:
    """Column -> type, of the fields that are no dict; these columns are in every file."""
    import pyarrow as pa

    double = pa.float64()
    kernel = pa.struct([("name", pa.string()), ("launches", double), ("gpu_us", double)])
    arrow = {
        str: pa.string(),
        int: pa.int64(),
        float: double,
        float | None: double,
        tuple[float, ...]: pa.list_(double),
        tuple[int, ...]: pa.list_(pa.int64()),
        tuple[dict[str, Any], ...]: pa.list_(kernel),
    }
    named: dict[str, Any] = {field.name: field.type for field in (*fields(Record), *fields(Item))}
    ours = {name: arrow[kind] for name, kind in named.items() if name not in ("item", *MEMBERS)}
    return {"id": pa.string(), **ours}


def _forms(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows as `Record.from_form` takes them: a dict again for each group of members."""
    members = [(name, *name.split(".", 1)) for name in table.column_names if "." in name]
    for row in table.to_pylist():
        for group in MEMBERS:
            row[group] = {}
        for name, group, member in members:
            value = row.pop(name)
            if value is not None:
                row[group][member] = value
        yield row
