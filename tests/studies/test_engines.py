"""Tables of whole steps and of modes: rounds in turns, and what the published records give."""

import numpy as np
import pandas as pd
import pytest

from attnlib import load
from attnlib.studies import engine_modes as modes
from attnlib.studies import engine_step as engine

pytestmark = pytest.mark.usefixtures("published_records")


def steps(base, arm, turns):
    """Rows of one round of two arms with these steps, us."""
    said = "decode=fa2, in turns, outputs a" if turns else "decode=fa2, outputs a"
    rows = pd.DataFrame({"backend": [engine.FA3, engine.FA2], "steps_us": [base, arm]})
    same = {"round": 0, "driver": "steps", "reported_backend": said}
    return rows.assign(**same)


def test_a_round_in_turns_pairs_neighbours_and_one_without_takes_medians(monkeypatch):
    monkeypatch.setattr(engine, "require_comparable", lambda rows: None)
    base, arm = (100.0, 101.0, 150.0, 103.0), (90.0, 99.0, 140.0, 93.0)
    (row,) = engine.rounds_of(steps(base, arm, True), engine.FA2, engine.FA3).itertuples()
    assert (row.step_us, row.saved_us) == (102.0, 10.0)
    assert row.own_spread_us == 23.0, "the median of -47 and 1, the larger of both arms"
    (row,) = engine.rounds_of(steps(base, arm, False), engine.FA2, engine.FA3).itertuples()
    assert row.saved_us == 102.0 - 96.0 and np.isnan(row.own_spread_us)
    assert engine.rounds_of(steps(base, arm, True)[:1], engine.FA2, engine.FA3).empty


@pytest.fixture
def frame():
    return load("engine_step", engine.STUDY.reference_machine)


def test_fa2_and_the_plan_reach_a_step_and_the_schedule_is_not_decided(frame):
    table = engine.savings(frame)
    decided = table.arm.isin([engine.FA2, engine.PLANNED])
    assert (table.verdict[decided] == "faster").all() and decided.sum() == 10
    assert "faster" not in set(table.verdict[table.base == engine.LAYER])
    within = table.saved_us.abs() <= table.own_spread_us
    assert (table.verdict[within] == "ambiguous").all()


def test_a_traced_step_prepares_the_schedule_once_or_in_every_layer(frame):
    table = engine.launches_table(frame)
    prepares = table[table.model == engine.QWEN].set_index("backend").prepare
    assert (prepares[engine.NOW], prepares[engine.LAYER], prepares[engine.ONE_LAUNCH]) == (1, 64, 0)


def test_under_dp_attention_one_request_gets_other_tokens_and_the_guard_stops_it(frame):
    table = engine.groups_table(frame).set_index("backend")
    assert table["schedule for"][engine.NOW] == "8/4 heads of 16/8"
    assert table["other tokens"][engine.NOW] == 1 and table["other tokens"][engine.LAYER] == 0
    assert "num_qo_heads must be 8, got 16" in table.reason[engine.GUARDED]
    others = load("engine_step", engine.TWO_GPUS)
    assert engine.groups_table(others).empty and engine.savings(others[:0]).empty


def test_the_pin_is_right_with_few_queries_and_wrong_for_prefill():
    frame = load("engine_modes", modes.STUDY.reference_machine)
    table = modes.over(modes.plain(modes.mode_rows(frame)), modes.FA2, modes.FA3)
    few = table.group.isin(modes.FEW)
    assert (table.verdict[few] == "faster").sum() == few.sum() - 1
    assert (table.verdict[~few] == "slower").mean() > 0.9
    cost = modes.costs(frame)["fa2 everywhere"]
    assert cost["decode"] == 1 and cost["prefill_ragged"] > 1.9
    assert {"graph", "profiler"} == set(modes.mode_rows(frame).timer)


def test_a_promise_of_equal_queries_helps_where_it_narrows_the_tile_and_nowhere_else():
    table = modes.promised(load("engine_modes", modes.PROMISES_ON))
    narrower = table["tile promised"] < table.tile
    assert set(table.verdict[narrower]) == {"faster"} and narrower.sum() == 15
    assert not set(table.verdict[~narrower]) & {"faster", "slower"}


def test_a_mixed_batch_in_one_call_is_compared_with_the_sum_of_its_parts():
    table = modes.one_or_two(load("engine_modes", modes.PROMISES_ON))
    assert table.groupby("kernel").size().to_dict() == {"fa2": 12, "fa3": 12, "library": 12}
    assert set(table.verdict[table.kernel != modes.LIBRARY]) == {"slower"}
