"""Rounds of whole steps: in turns or not. nbval holds the tables to the published records."""

import numpy as np
import pandas as pd
import pytest

from attnlib.measure.calls.form import Item
from attnlib.run import store
from attnlib.studies import STUDIES
from attnlib.studies.engine import engine_offline, engine_width
from attnlib.studies.engine import engine_step as engine
from attnlib.studies.engine.engine_now import RAGGED
from attnlib.studies.engine.engine_step import FA2, FA3

CASE = engine.SCHEDULE[0]


def test_an_unknown_study_lists_those_there_are():
    with pytest.raises(KeyError, match="a study must be one of fa3_decode_regression, .*'nope'"):
        STUDIES["nope"]


RETIRED = [study for name, study in STUDIES.items() if name.startswith("engine_") and study.retired]


def steps(base, arm, turns):
    """Rows of one round of two arms with these steps, us."""
    said = "decode=fa2, in turns, outputs a" if turns else "decode=fa2, outputs a"
    rows = pd.DataFrame({"backend": [FA3, FA2], "steps_us": [base, arm]})
    return rows.assign(round=0, driver="steps", reported_backend=said)


def round_of(rows):
    """The row of `rounds_of` for fa2 in place of fa3."""
    (row,) = engine.rounds_of(rows, CASE, FA2, FA3).itertuples()
    return row


def test_a_round_in_turns_pairs_neighbours_and_one_without_takes_medians(monkeypatch):
    monkeypatch.setattr(engine, "require_comparable", lambda rows: None)
    base = (100.0, 101.0, 150.0, 103.0)
    arm = (90.0, 99.0, 140.0, 93.0)
    row = round_of(steps(base, arm, True))
    assert row.step_us == 102.0
    assert row.saved_us == 10.0
    assert row.own_spread_us == 23.0, "the median of -47 and 1, the larger of both arms"
    row = round_of(steps(base, arm, False))
    assert row.saved_us == 102.0 - 96.0 and np.isnan(row.own_spread_us)
    alone = steps(base, arm, True)[:1]
    assert engine.rounds_of(alone, CASE, FA2, FA3).empty


def test_processes_with_more_arms_are_compared_while_their_contexts_are_equally_long():
    several = np.arange(64.0)
    alone = np.arange(100.0, 164.0)
    # Contexts of the one grow 12, 15, ... and of the other 4, 5, ...
    long, short = engine._of_equal_contexts((several, alone), (3, 1))
    assert short[0] == 108.0
    assert short[-1] == 163.0
    assert long.tolist() == [*range(19)]


def test_processes_that_never_had_equal_contexts_are_refused():
    with pytest.raises(ValueError, match="must have steps at equal contexts"):
        engine._of_equal_contexts(
            (
                np.arange(3.0),
                np.arange(3.0),
            ),
            (9, 1),
        )


def test_releases_are_kept_apart(monkeypatch):
    monkeypatch.setattr(engine, "require_comparable", lambda rows: None)
    base = (100.0, 101.0, 150.0, 103.0)
    releases = {
        "0.5.9": (90.0, 99.0, 140.0, 93.0),
        "0.5.10": (80.0, 89.0, 130.0, 83.0),
    }
    same = {name: getattr(CASE, name) for name in engine.SIZES}
    same |= {"case": CASE, "timer": "ahead", "status": "ok", "throttled": False, "repeat": False}
    parts = []
    for release, arm in releases.items():
        for number in range(2):
            rows = steps(base, arm, True)
            parts.append(rows.assign(release=release, round=number, **same))
    frame = pd.concat(parts)
    compared = ((FA2, FA3, (CASE,)),)
    table = engine.savings(frame, compared, "ahead")
    assert table.release.tolist() == [*releases]
    assert table.saved_us.tolist() == [10.0, 20.0]
    assert engine.savings(frame, compared).empty, "no timer host"


@pytest.mark.parametrize(
    "case, arm, together",
    [
        (CASE, "sglang-eager", ("sglang", "sglang-eager", "sglang-fused", "sglang-one-launch")),
        (CASE, FA2, (FA2, FA3, "sglang-planned")),
        (RAGGED, FA2, (FA2, "sglang-planned")),
        (CASE, "sglang-layer", ("sglang-layer",)),
        (engine.GROUPS, "sglang", ("sglang",)),
    ],
)
def test_arms_of_one_process_are_those_of_one_backend_of_sglang(case, arm, together):
    assert engine.side_by_side(case, arm) == together


def test_a_record_of_an_engine_is_read_with_every_step(make_record):
    record = make_record(item=Item(engine.NOW, "ahead", RAGGED))
    path = store.keep(record)
    (row,) = store.load(path.parent.name, path.parents[1].name).itertuples()
    assert row.case == RAGGED
    assert row.steps_us == tuple(record["run_us"])
    assert row.model == "llama-3.1-8b"


@pytest.mark.parametrize("study", RETIRED, ids=lambda study: study.name)
def test_published_records_of_engines_are_there(published_records, study):
    rows = store.load(study.name, study.reference_machine)
    assert {case.kind for case in rows.case} == {"engine"}
    assert (rows[rows.status == "ok"].steps_us.map(len) > 0).all()


def test_the_steps_of_a_wide_table_have_one_size_and_one_base(published_records):
    assert {case.batch_size for _, _, cases in engine_width.COMPARED for case in cases} == {128}
    assert {base for _, base, _ in engine_width.COMPARED} == {engine.NOW}
    table = engine_width.width_table()
    assert len(table) == 8
    assert not {"against", "requests"} & {*table.columns}, "said by the page"
    assert "step before, us" in table.columns


def test_each_mark_of_the_offline_chart_has_its_number(published_records):
    axes = engine_offline.served_chart().axes
    assert len({axis.get_xlim() for axis in axes}) == 1, "shares of all lengths can be compared"
    for axis in axes:
        numbers = [text.get_text() for text in axis.texts]
        assert len(numbers) == len(engine_offline.COMPARED) - 1
    assert numbers == ["-1 %", "-4 %", "-3 %", "5 %"]
