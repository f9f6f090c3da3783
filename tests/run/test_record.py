"""A record: exact in JSON, known by its content, and no time without a check."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.studies import CPU

from attnlib.kinds.item import Item
from attnlib.run.record import SCHEMA, STATUSES, Record

CEILING = Item("copy", "graph")


def edited(record, **fields):
    return json.dumps({**json.loads(record.to_json()), **fields})


SAMPLES = st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=5)


@given(samples=SAMPLES, reason=st.text())
def test_samples_and_words_survive_json_to_the_last_bit(samples, reason):
    times = {"run_us": tuple(samples), "reason": reason}
    record = Record("demo", 0, CEILING, "ok", CPU, {}, "", "", **times)
    line = record.to_json()
    assert len(line.splitlines()) == 1
    assert Record.from_form(json.loads(line)) == record


@pytest.mark.parametrize("schema", [SCHEMA + 1, 0, True, "1", None])
def test_a_newer_schema_is_refused_with_what_to_do(make_record, schema):
    line = edited(make_record(), schema=schema, field_of_the_future=1)
    with pytest.raises(ValueError, match=rf"schema must .* to {SCHEMA}, got .*update attnlib"):
        Record.from_form(json.loads(line))


REQUIRED = {"study", "round", "backend", "timer", "status", "machine", "versions", "command"}
REQUIRED |= {"started_at", "id", "schema"}


def without(record, *names):
    return json.dumps({n: v for n, v in json.loads(record.to_json()).items() if n not in names})


def test_a_missing_or_unknown_field_is_named(make_record):
    lines = {name: without(make_record(), name) for name in REQUIRED}
    for name, line in {**lines, "speedup": edited(make_record(), speedup=2.0)}.items():
        with pytest.raises(ValueError, match=name):
            Record.from_form(json.loads(line))


def test_a_line_older_than_a_field_with_a_default_loads_with_it(make_record):
    plain = make_record(status="error", oracle_error=None, oracle_budget=None, oracle_rows=0)
    plain = replace(plain, item=CEILING, reported_backend="", kernel_family="", work_per_call=0.0)
    plain = replace(plain, state_before={}, state_after={})
    younger = set(plain.to_form()) - REQUIRED
    assert {"run_us", "kernels", "reason", "case", "release", "state_after"} <= younger
    assert Record.from_form(json.loads(without(plain, *younger))) == plain


@pytest.mark.parametrize("time", [math.nan, math.inf, -1.0, 0.0, "12", None])
@pytest.mark.parametrize("field", ["run_us", "plan_us"])
def test_a_time_that_is_no_time_is_refused(make_record, field, time):
    with pytest.raises(ValueError, match=f"{field} must be finite microseconds > 0, got"):
        make_record(**{field: (10.0, time)})


@pytest.mark.parametrize("status", STATUSES)
def test_there_are_samples_exactly_with_ok(make_record, status):
    samples = () if status == "ok" else (10.0,)
    words = f"run_us must .* {len(samples)} samples with status '{status}'"
    with pytest.raises(ValueError, match=words):
        replace(make_record(status=status), run_us=samples)


@pytest.mark.parametrize(
    ("error", "budget"),
    [(None, 1.0), (0.1, None), (0.9, 0.8), (math.nan, 1.0), (0.1, math.nan), (math.inf, math.inf)],
)
def test_ok_without_an_oracle_that_passed_is_refused(make_record, error, budget):
    with pytest.raises(ValueError, match="oracle_error must be finite and within oracle_budget"):
        make_record(oracle_error=error, oracle_budget=budget)


def test_an_unknown_status_lists_the_known_ones(make_record):
    with pytest.raises(ValueError, match="status must be one of ok, incorrect, .*, got 'slow'"):
        make_record(status="slow")


OTHER_CASE = {
    **{"num_qo_heads": 4, "num_kv_heads": 1, "head_dim": 128, "page_size": 32},
    **{"dtype": "float16", "kv_dtype": "float8_e4m3fn"},
    **{"batch_size": 4, "kv_len": 41, "lengths": "fixed", "seed": 6},
}
IDENTITY = {
    **{"study": "other", "round": 1, "backend": "flashinfer-fa3"},
    **{"timer": "eager", "release": "0.6.4", "case": None},
}


def test_the_id_changes_with_every_field_of_the_identity_and_an_edited_one_is_refused(make_record):
    form = make_record().to_form()
    assert set(OTHER_CASE) == set(form["case"])
    changes = [{name: value} for name, value in IDENTITY.items()]
    changes += [{"case": form["case"] | {name: value}} for name, value in OTHER_CASE.items()]
    changes += [{"machine": form["machine"] | {"gpu_id": "deadbeef"}}, {"id": "0" * 16}]
    seen = set()
    for change in changes:
        with pytest.raises(ValueError, match="id must be the content key [0-9a-f]{16}") as caught:
            Record.from_form(form | change)
        seen.add(str(caught.value).removesuffix(form["id"]))
    assert len(seen) == len(changes) == 18


def test_the_id_does_not_change_with_what_was_found(make_record):
    machine = {**make_record().machine, "driver": "600.1"}
    found = {"run_us": (99.0,), "started_at": "2026-02-03T00:00:00+00:00", "machine": machine}
    others = make_record(**found), make_record(status="timeout", versions={"torch": "3.0"})
    assert {other.id for other in others} == {make_record().id}


def test_a_thermal_slowdown_before_or_after_a_measurement_marks_it(make_record):
    hot = {"throttle_reasons": 0x4 | 0x40}
    assert make_record(state_before=hot).throttled and make_record(state_after=hot).throttled
    assert not make_record(state_after={"throttle_reasons": 0x4}).throttled, "the power cap"
