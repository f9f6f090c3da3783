"""Rounds of whole steps: in turns or not. nbval holds the tables to the published records."""

import numpy as np
import pandas as pd
import pytest

from attnlib.kinds.item import Item
from attnlib.run import parquet, store
from attnlib.studies import STUDIES
from attnlib.studies import engine_step as engine
from attnlib.studies.engine_now import RAGGED

CASE = engine.SCHEDULE[0]
RETIRED = [study for study in STUDIES.values() if study.retired]


def steps(base, arm, turns):
    """Rows of one round of two arms with these steps, us."""
    said = "decode=fa2, in turns, outputs a" if turns else "decode=fa2, outputs a"
    rows = pd.DataFrame({"backend": [engine.FA3, engine.FA2], "steps_us": [base, arm]})
    return rows.assign(round=0, driver="steps", reported_backend=said)


def test_a_round_in_turns_pairs_neighbours_and_one_without_takes_medians(monkeypatch):
    monkeypatch.setattr(engine, "require_comparable", lambda rows: None)
    base, arm = (100.0, 101.0, 150.0, 103.0), (90.0, 99.0, 140.0, 93.0)
    asked = CASE, engine.FA2, engine.FA3
    (row,) = engine.rounds_of(steps(base, arm, True), *asked).itertuples()
    assert (row.step_us, row.saved_us) == (102.0, 10.0)
    assert row.own_spread_us == 23.0, "the median of -47 and 1, the larger of both arms"
    (row,) = engine.rounds_of(steps(base, arm, False), *asked).itertuples()
    assert row.saved_us == 102.0 - 96.0 and np.isnan(row.own_spread_us)
    assert engine.rounds_of(steps(base, arm, True)[:1], *asked).empty


def test_processes_with_more_arms_are_compared_while_their_contexts_are_equally_long():
    several, alone = np.arange(64.0), np.arange(100.0, 164.0)
    long, short = engine._of_equal_contexts((several, alone), (3, 1))  # 12, 15, ... and 4, 5, ...
    assert (short[0], short[-1], long.tolist()) == (108.0, 163.0, [*np.arange(19.0)])


def test_releases_are_kept_apart(monkeypatch):
    monkeypatch.setattr(engine, "require_comparable", lambda rows: None)
    same = {name: getattr(CASE, name) for name in engine.SIZES} | {"case": CASE}
    same |= {"timer": "ahead", "status": "ok", "throttled": False, "repeat": False}
    releases = {"0.5.9": (90.0, 99.0, 140.0, 93.0), "0.5.10": (80.0, 89.0, 130.0, 83.0)}
    rows = [
        steps((100.0, 101.0, 150.0, 103.0), arm, True).assign(release=name)
        for name, arm in releases.items()
    ]
    frame = pd.concat([part.assign(round=n, **same) for part in rows for n in range(2)])
    table = engine.savings(frame, ((engine.FA2, engine.FA3, (CASE,)),), "ahead")
    assert [*table.release] == [*releases] and [*table.saved_us] == [10.0, 20.0]
    assert engine.savings(frame, ((engine.FA2, engine.FA3, (CASE,)),)).empty, "no timer host"


@pytest.mark.parametrize(
    ("case", "arm", "together"),
    [
        (CASE, engine.EAGER, (engine.NOW, engine.EAGER, engine.FUSED, engine.ONE_LAUNCH)),
        (CASE, engine.FA2, (engine.FA2, engine.FA3, engine.PLANNED)),
        (RAGGED, engine.FA2, (engine.FA2, engine.PLANNED)),
        (CASE, engine.LAYER, (engine.LAYER,)),
        (engine.GROUPS, engine.NOW, (engine.NOW,)),
    ],
)
def test_arms_of_one_process_are_those_of_one_backend_of_sglang(case, arm, together):
    assert engine.side_by_side(case, arm) == together


def test_a_record_of_an_engine_is_read_with_every_step(make_record):
    record = make_record(item=Item(engine.NOW, "ahead", RAGGED))
    assert parquet.records_of(parquet.read_table(parquet.encode([record]))) == [record]
    (row,) = store.frame([record]).itertuples()
    assert (row.case, row.steps_us, row.model) == (RAGGED, record.run_us, engine.LLAMA)


@pytest.mark.parametrize("study", RETIRED, ids=lambda study: study.name)
def test_published_records_of_engines_are_there(published_records, study):
    rows = store.load(study.name, study.reference_machine)
    assert {case.kind for case in rows.case} == {"engine"}
    assert (rows[rows.status == "ok"].steps_us.map(len) > 0).all()
