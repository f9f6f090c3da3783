"""The schema: every column has a meaning, and what is written is declared."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
from support.records import right_row

from attnlib.measure.calls.form import Item, class_of, flat_fields, kinds
from attnlib.measure.timer import RUN_TIMERS
from attnlib.run.schema import BY_NAME, COLUMNS, NULLABLE, REQUIRED, STATUSES

ROOT = Path(__file__).resolve().parents[2]
ARROW = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
}


def test_every_column_has_a_meaning_and_a_name_of_its_own():
    assert all(column.meaning for column in COLUMNS)
    assert len(BY_NAME) == len(COLUMNS)
    assert {*REQUIRED, *NULLABLE} <= set(BY_NAME)
    assert not {*REQUIRED} & {*NULLABLE}


def test_whatever_a_case_an_item_or_a_worker_writes_is_declared():
    for kind in ("", *kinds()):
        for field in flat_fields(class_of(kind)):
            assert BY_NAME[f"case.{field.name}"].type == ARROW[field.type], field.name
    assert {field.name for field in fields(Item)} - {"case"} <= set(BY_NAME)
    assert right_row().keys() <= set(BY_NAME), "declare it in attnlib/run/schema.py"


def test_meanings_name_what_there_is():
    named = {"timer": RUN_TIMERS, "status": STATUSES}
    named["case.kind"] = kinds()
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
