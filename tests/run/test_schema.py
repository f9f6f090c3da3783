"""The schema: every column has a meaning, and what is written is declared."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pytest
from support.records import right_row

from attnlib.measure.calls.form import Item, class_of, flat_fields, kinds
from attnlib.measure.timer import RUN_TIMERS
from attnlib.run import frame as frames
from attnlib.run import rows
from attnlib.run.schema import (
    BY_NAME,
    COLUMNS,
    NULLABLE,
    NUMBER,
    PLAIN,
    REQUIRED,
    STATUSES,
    Column,
)

ROOT = Path(__file__).resolve().parents[2]
ARROW = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
}
IN_SCHEMA = "declare it in attnlib/run/schema.py, the one place of columns"
OF_FRAMES = {"case", "heads", "repeat", "plan_samples", "drift", "throttled"}
"""Columns that a frame makes of others; `steps_us` too, where a case keeps its samples."""


def test_every_column_has_a_meaning_and_a_name_of_its_own():
    assert all(column.meaning for column in COLUMNS)
    assert len(BY_NAME) == len(COLUMNS)
    assert {*REQUIRED, *NULLABLE} <= set(BY_NAME)
    assert not {*REQUIRED} & {*NULLABLE}


def test_whatever_a_case_an_item_or_a_worker_writes_is_declared():
    for kind in ("", *kinds()):
        for field in flat_fields(class_of(kind)):
            name = f"case.{field.name}"
            assert name in BY_NAME, f"{name}: {IN_SCHEMA}"
            assert BY_NAME[name].type == ARROW[field.type], name
    assert {field.name for field in fields(Item)} - {"case"} <= set(BY_NAME)
    assert right_row().keys() <= set(BY_NAME), IN_SCHEMA


def made_frame(*records):
    table = rows.table_of(records)
    return frames.frame_of(table, rows.items_of(table))


def test_no_column_of_a_frame_has_the_name_of_another():
    shown = [*PLAIN]
    for column in COLUMNS:
        group, _, member = column.name.partition(".")
        if member and (column.in_frame or group in ("case", "served")):
            shown.append(member)
    assert {*made_frame(right_row())} - {*shown} == OF_FRAMES
    counts = Counter([*shown, *OF_FRAMES, "steps_us"])
    twice = [name for name in counts if counts[name] > 1]
    assert twice == [], "rename it: the columns of a frame have no groups"


def test_a_column_that_would_replace_another_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(frames, "MEMBERS", [Column("host.drift", NUMBER, "of the host")])
    with pytest.raises(ValueError, match="host.drift must have a name of its own.*has drift"):
        made_frame(right_row())


def test_a_number_that_records_lack_is_nan_in_a_frame_and_never_0():
    """Of all records, and of some: older ones have no column, or null in it."""
    gpu = {"gpu": "Test GPU", "gpu_id": "0badcafe"}
    lacks = right_row(machine=gpu)
    has = right_row(machine={**gpu, "num_sms": 4, "l2_mib": 0.5})
    for frame in (made_frame(lacks), made_frame(lacks, has)):
        assert frame[["num_sms", "l2_mib", "power_limit_w"]].iloc[0].isna().all()
    assert frame.num_sms[1] == 4 and frame.l2_mib[1] == 0.5
    assert made_frame(has).num_sms.dtype == int


def test_meanings_name_what_there_is():
    named = {"timer": RUN_TIMERS, "status": STATUSES}
    for name, words in named.items():
        unsaid = [word for word in words if f"`{word}`" not in BY_NAME[name].meaning]
        assert unsaid == [], f"name it in the meaning of {name}: attnlib/run/schema.py"


def test_the_example_of_the_readme_runs_with_pandas_alone():
    (code,) = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "data" / "README.md").read_text(),
        re.S,
    )
    command = [sys.executable, "-c", f"{code}import sys\nassert 'attnlib' not in sys.modules"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("backend"), done.stderr
