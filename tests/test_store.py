"""The records on disk: what was appended is read, what is broken is named, nothing is lost."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attnlib import store
from attnlib.record import SCHEMA, Item, Record

ROOT = Path(__file__).resolve().parents[1]
MACHINE = "test-gpu-0badcafe"
WRITERS, RECORDS_EACH = 4, 25


def append_rounds(make_record, count: int) -> list[Record]:
    records = [make_record(round=round_) for round_ in range(count)]
    for record in records:
        store.append(record)
    return records


def demo_path() -> Path:
    return store.record_path("demo", MACHINE)


def test_records_are_read_as_they_were_appended(make_record) -> None:
    records = append_rounds(make_record, 3)
    assert store.read("demo", MACHINE) == records


def test_append_says_where_the_record_went(make_record, data) -> None:
    path = store.append(make_record())
    assert path == demo_path() == data / "records" / MACHINE / "demo.jsonl"
    assert path.read_text() == make_record().to_json() + "\n"


def test_of_one_id_the_newest_stands_in_the_place_of_its_time(make_record) -> None:
    old, other, new = make_record(), make_record(round=1), make_record(run_us=(99.0,))
    for record in (old, other, new):
        store.append(record)
    assert store.read("demo", MACHINE) == [other, new]
    assert len(demo_path().read_text().splitlines()) == 3


def test_without_a_named_folder_records_lie_beside_the_package(monkeypatch) -> None:
    monkeypatch.delenv("ATTNLIB_DATA")
    assert store.data_root() == ROOT / "data"


@pytest.mark.parametrize("cut", [1, 40], ids=["the newline", "half a line"])
def test_a_file_cut_short_is_neither_read_nor_written(make_record, cut) -> None:
    append_rounds(make_record, 3)
    torn = demo_path().read_bytes()[:-cut]
    demo_path().write_bytes(torn)
    with pytest.raises(ValueError, match=r"demo\.jsonl line 3 .*cut short"):
        store.read("demo", MACHINE)
    with pytest.raises(ValueError, match=r"demo\.jsonl .*last is cut short"):
        store.append(make_record(round=7))
    assert demo_path().read_bytes() == torn


def broken_lines(record: Record) -> dict[str, str]:
    flat = json.loads(record.to_json())
    return {
        "update attnlib": json.dumps({**flat, "schema": SCHEMA + 1}),
        "content key": json.dumps({**flat, "round": 9}),
        "page_size must be a power of two": json.dumps(
            {**flat, "case": {**flat["case"], "page_size": 12}}
        ),
        "Expecting": "not json",
        "a record": "[1, 2]",
        "must be a record": "null",
    }


def test_a_line_that_is_no_record_is_named_with_its_file(make_record) -> None:
    append_rounds(make_record, 3)
    first, second, third = demo_path().read_text().splitlines()
    for words, line in broken_lines(Record.from_json(second)).items():
        demo_path().write_text("\n".join([first, line, third, ""]))
        with pytest.raises(ValueError, match=rf"demo\.jsonl line 2 .*{words}") as caught:
            store.read("demo", MACHINE)
        assert str(demo_path()) in str(caught.value)


def test_a_study_nobody_measured_is_missing_with_the_machines_that_have_it(make_record) -> None:
    with pytest.raises(FileNotFoundError, match="'demo' on 'nowhere'; machines: none"):
        store.read("demo", "nowhere")
    store.append(make_record())
    store.append(make_record(machine={"gpu": "Other", "gpu_id": "1"}))
    assert store.machines("demo") == ["other-1", MACHINE]
    assert store.machines("another") == []
    with pytest.raises(FileNotFoundError, match=f"machines: other-1, {MACHINE}"):
        store.load("demo", "nowhere")


def test_two_machines_never_share_a_table(make_record) -> None:
    mine = make_record()
    store.append(mine)
    store.append(make_record(machine={"gpu": "Other", "gpu_id": "1"}))
    assert store.read("demo", MACHINE) == [mine]


def test_a_loaded_row_holds_case_medians_kernels_and_oracle(make_record) -> None:
    record = make_record()
    store.append(record)
    row = store.load("demo", MACHINE).iloc[0].to_dict()
    expected = {
        **record.item.case.to_dict(),
        "id": record.id,
        "study": "demo",
        "round": 0,
        "backend": "flashinfer-fa2",
        "release": "0.6.3",
        "timer": "graph",
        "heads": "8/2",
        "status": "ok",
        "reported_backend": "fa2",
        "kernel_family": "fa2",
        "kernels": "AttendKernel, MergeKernel x2",
        "kernel_us": 9.75,
        "run_us": 11.0,
        "plan_us": 45.0,
        "samples": 3,
        "oracle_error": 0.002,
        "oracle_budget": 0.008,
        "gpu": "Test GPU",
        "num_sms": 4,
    }
    assert {name: row[name] for name in expected} == expected


def test_failures_and_ceilings_load_beside_times_without_one(make_record) -> None:
    store.append(make_record())
    store.append(make_record(round=1, status="crashed", reason="signal SIGSEGV"))
    ceiling = make_record(item=Item("copy", "graph"), oracle_error=None, oracle_budget=None)
    store.append(replace(ceiling, plan_us=()))
    table = store.load("demo", MACHINE)
    assert table["status"].tolist() == ["ok", "crashed", "ok"]
    assert [math.isnan(us) for us in table["run_us"]] == [False, True, False]
    assert [math.isnan(us) for us in table["plan_us"]] == [False, True, True]
    assert table["kv_len"].isna().tolist() == [False, False, True]
    assert table["reason"][1] == "signal SIGSEGV"


def test_provenance_names_file_hash_machine_versions_and_days(make_record) -> None:
    days = ("2026-01-04", "2026-01-02")
    for round_, day in enumerate(days):
        versions = {"torch": f"2.13.{round_}"}
        store.append(make_record(round=round_, started_at=f"{day}T09:00:00", versions=versions))
    found = store.provenance("demo", MACHINE)
    assert found["file"] == f"data/records/{MACHINE}/demo.jsonl"
    assert found["sha256"] == hashlib.sha256(demo_path().read_bytes()).hexdigest()
    assert found["records"] == 2
    assert found["machine"] == make_record().machine
    assert found["versions"] == {"torch": ["2.13.0", "2.13.1"]}
    assert found["measured"] == "2026-01-02 to 2026-01-04"
    assert found["commands"] == ["python -m attnlib measure demo"]


def test_provenance_of_one_day_names_it_once(make_record) -> None:
    append_rounds(make_record, 2)
    assert store.provenance("demo", MACHINE)["measured"] == "2026-01-02"


WRITER = """
import sys
from dataclasses import replace
from attnlib import store
from attnlib.record import Record
record, first, count = Record.from_json(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for round_ in range(first, first + count):
    store.append(replace(record, round=round_))
"""


def start_writer(record: Record, first: int) -> subprocess.Popen[str]:
    arguments = [record.to_json(), str(first), str(RECORDS_EACH)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", WRITER, *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def test_writers_at_the_same_time_lose_nothing(make_record) -> None:
    # Lines longer than a page, so that a write that is not whole would show.
    record = make_record(reason="x" * 10_000, status="error")
    writers = [start_writer(record, n * RECORDS_EACH) for n in range(WRITERS)]
    assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * WRITERS
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
    assert [writer.returncode for writer in writers] == [0] * WRITERS
    rounds = sorted(found.round for found in store.read("demo", MACHINE))
    assert rounds == list(range(WRITERS * RECORDS_EACH))
