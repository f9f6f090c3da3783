"""A record as a row: exact in JSON and Parquet, known by its content, no time without a check."""

import json
import math
import multiprocessing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.records import CASE, CEILING, GPU, ITEM, MACHINE, right_row, whole
from support.studies import CPU

from attnlib.measure.calls.extend.case import ExtendCase
from attnlib.measure.calls.form import Item
from attnlib.run import rows
from attnlib.run.frame import frame_of
from attnlib.run.schema import STATUSES, VERSION

EXTEND = Item("flashinfer-prefill-fa2", "graph", ExtendCase(CASE, "dllm_extend", 4))
WINDOWED = replace(ITEM, case=replace(CASE, spec=replace(CASE.spec, window=24)))


def some_rows():
    """Cases of two kinds, a ceiling, a failure, and what a CPU leaves empty."""
    return [
        right_row(oracle_error=1e-17 / 3),
        right_row(item=EXTEND),
        right_row(item=WINDOWED),
        right_row(**CEILING),
        right_row(round=1, status="crashed", reason='signal SIGKILL; "last\nwords" é'),
        right_row(
            round=2,
            versions={},
            state_before={},
            kernels=(),
            plan_us=(),
        ),
        right_row(item=replace(ITEM, again=1)),
    ]


def check(*made, machine=MACHINE):
    return rows.validate(rows.table_of(made), machine)


def test_rows_survive_parquet_exactly_and_in_order_and_give_the_same_bytes_in_any_process():
    table = rows.table_of(some_rows())
    data = rows.encode(table)
    assert rows.decode(data).equals(table)
    assert rows.rows_of(rows.decode(data)) == whole(*some_rows())
    assert rows.encode(rows.decode(data)) == data
    with multiprocessing.get_context("spawn").Pool(1) as other:
        assert other.apply(rows.encode, [table]) == data


SAMPLES = st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=5)


@given(samples=SAMPLES, reason=st.text())
def test_samples_and_words_survive_json_to_the_last_bit(samples, reason):
    row = right_row(**CEILING, machine=CPU, run_us=samples, reason=reason)
    line = rows.to_json(row)
    assert line.count(b"\n") == 1
    assert rows.flat_row(json.loads(line)) == json.loads(json.dumps(row))


def test_a_json_form_of_earlier_versions_is_the_same_row():
    """Members were dicts, and a line lacks the fields that came after it."""
    row = right_row(**CEILING, status="error", run_us=(), plan_us=())
    members = {name: rows.members(row, name) for name in ("machine", "versions")}
    names = ("id", "schema", "study", "round", "backend", "timer", "status", "command")
    old = {name: row[name] for name in (*names, "started_at")} | members | {"case": None}
    (read,) = whole(rows.flat_row(old))
    assert read["reason"] == ""
    assert read["run_us"] == []
    assert read["release"] == ""
    assert read["settle_us"] == 0.0
    assert "again" not in read and check(read) == [CEILING["item"]]


def test_the_items_of_rows_are_those_that_were_measured():
    made = some_rows()
    expected = [
        ITEM,
        EXTEND,
        WINDOWED,
        CEILING["item"],
        ITEM,
        ITEM,
        replace(ITEM, again=1),
    ]
    assert check(*made) == expected


IDENTITY = {
    "study": "other",
    "round": 1,
    "backend": "flashinfer-fa3",
    "timer": "eager",
    "release": "0.6.4",
    "machine.gpu_id": "deadbeef",
    "case.num_qo_heads": 4,
    "case.num_kv_heads": 1,
    "case.head_dim": 128,
    "case.page_size": 32,
    "case.dtype": "float16",
    "case.kv_dtype": "float8_e4m3fn",
    "case.batch_size": 4,
    "case.kv_len": 41,
    "case.lengths": "fixed",
    "case.seed": 6,
    "id": "0" * 16,
}


def test_the_id_changes_with_every_column_of_the_identity_and_an_edited_one_is_refused():
    row = right_row()
    assert {name for name in row if name.startswith("case.")} < set(IDENTITY)
    seen = set()
    for name, value in IDENTITY.items():
        edited = row | {name: value}
        machine = rows.machine_slug(rows.members(edited, "machine"))
        with pytest.raises(ValueError, match="id must be the content key [0-9a-f]{16}") as caught:
            check(edited, machine=machine)
        seen.add(str(caught.value).removesuffix(edited["id"]))
    assert len(seen) == len(IDENTITY)


def test_the_id_is_that_of_records_since_the_first_and_does_not_change_with_what_was_found():
    assert right_row()["id"] == "1dca2dc2b52e3e21"
    found = {"run_us": (99.0,), "started_at": "2026-02-03", "machine": GPU | {"driver": "600.1"}}
    others = right_row(**found), right_row(status="timeout", versions={"torch": "3.0"})
    assert {other["id"] for other in others} == {right_row()["id"]}


def without(name):
    return {key: value for key, value in right_row().items() if key != name}


TIMES = "must be finite microseconds > 0, got"
ORACLE = "oracle_error must be finite and within oracle_budget for status ok, got"
INVALID = {
    "a negative time": (right_row(run_us=(10.0, -1.0)), f"run_us {TIMES} -1.0"),
    "a time of zero": (right_row(run_us=(0.0,)), f"run_us {TIMES} 0.0"),
    "no number": (right_row(run_us=(10.0, math.nan)), f"run_us {TIMES} nan"),
    "an endless plan": (right_row(plan_us=(math.inf,)), f"plan_us {TIMES} inf"),
    "a null among times": (right_row(run_us=(10.0, None)), f"run_us {TIMES} None"),
    "ok without samples": (right_row(run_us=()), "run_us must hold .* got 0 samples with .* 'ok'"),
    "samples of a failure": (
        right_row(status="error", run_us=(9.0,)),
        "run_us must hold .* got 1 samples with status 'error'",
    ),
    "an error over budget": (right_row(oracle_error=9.0), f"{ORACLE} 9.0 of 0.008"),
    "no error": (right_row(oracle_error=None), f"{ORACLE} None of 0.008"),
    "no budget": (right_row(oracle_budget=None), f"{ORACLE} 0.002 of None"),
    "endless both": (
        right_row(oracle_error=math.inf, oracle_budget=math.inf),
        f"{ORACLE} inf of inf",
    ),
    "an unknown status": (right_row(status="great", run_us=()), "status must be .* got 'great'"),
    "another id": (right_row() | {"id": "0" * 16}, "id must be the content key"),
    "another round": (right_row() | {"round": 9}, "id must be the content key"),
    "another backend": (right_row() | {"backend": "flashinfer-fa3"}, "id must be the content"),
    "another release": (right_row() | {"release": "0.6.9"}, "id must be the content key"),
    "another length": (right_row() | {"case.kv_len": 41}, "id must be the content key"),
    "no such case": (right_row() | {"case.page_size": 12}, "must be a record: page_size"),
    "no such kind": (right_row() | {"case.kind": "new"}, "kind of a case must be one of .* 'new'"),
    "a newer schema": (right_row() | {"schema": VERSION + 1}, "schema must be 1 to 1, got 2: upd"),
    "schema 0": (right_row() | {"schema": 0}, "schema must be 1 to 1, got 0"),
    "another machine": (right_row(machine=GPU | {"gpu": "A"}), f"must be of '{MACHINE}', it is of"),
    "no GPU": (without("machine.gpu"), "machine.gpu"),
}
"""What every reader refuses: what is wrong -> the row, and how the refusal goes on."""
UNTYPED = {
    "a word as a time": (right_row(run_us=("12",)), "must have run_us of type"),
    "a truth as a time": (right_row(run_us=[True]), "must have run_us of type"),
    "a time as long as a book": (right_row(run_us=[10**400]), "must have run_us of type"),
    "half a round": (right_row() | {"round": 1.5}, "must have round of type int64, got 1.5"),
    "a truth as a schema": (right_row() | {"schema": True}, "must have schema of type int64"),
    "a kernel with more": (
        right_row(
            kernels=[
                {
                    "name": "a",
                    "launches": 1.0,
                    "gpu_us": 1.0,
                    "more": 1,
                }
            ]
        ),
        "must have kernels of type",
    ),
    "an unknown column": (right_row() | {"speedup": 2.0}, "must have the columns .* not .'speedup"),
    "an unknown library": (right_row(versions={"x": "1"}), "must have .* not .'versions.x'"),
    "no UTF-8": (right_row(reason="\ud800"), "must have reason of type string"),
    "no study": (without("study"), "must have a study"),
}
"""What no table can hold, or only a table that says so."""


@pytest.mark.parametrize("wrong", [*INVALID, *UNTYPED])
def test_what_is_no_record_is_refused_with_its_row_and_why(wrong):
    row, words = {**INVALID, **UNTYPED}[wrong]
    for before in ([], [right_row(round=7), right_row(round=8)]):
        with pytest.raises(ValueError, match=rf"^row {len(before)} .*{words}"):
            check(*before, row, right_row(round=9))


def test_a_doubled_row_is_refused():
    with pytest.raises(ValueError, match=r"^row 2 id must stand once"):
        check(right_row(), right_row(round=1), right_row())


@pytest.mark.parametrize("status", STATUSES)
def test_a_ceiling_needs_no_oracle_and_a_failure_no_times(status):
    assert check(right_row(status=status)) == [ITEM]
    assert check(right_row(**CEILING, status=status)) == [CEILING["item"]]


@pytest.mark.parametrize("bit", [0x8, 0x20, 0x40, 0x80])
def test_a_slowdown_before_or_after_a_measurement_marks_it(bit):
    slow = {"throttle_reasons": 0x4 | bit}
    capped = {"throttle_reasons": 0x4}
    told = ({"state_before": slow}, {"state_after": slow}, {"state_after": capped}, {})
    table = rows.table_of([right_row(**states) for states in told])
    assert frame_of(table, rows.items_of(table)).throttled.tolist() == [True, True, False, False]
