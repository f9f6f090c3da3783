"""Rounds of whole steps: in turns or not. nbval holds the tables to the published records."""

import numpy as np
import pandas as pd

from attnlib.studies import engine_step as engine


def steps(base, arm, turns):
    """Rows of one round of two arms with these steps, us."""
    said = "decode=fa2, in turns, outputs a" if turns else "decode=fa2, outputs a"
    rows = pd.DataFrame({"backend": [engine.FA3, engine.FA2], "steps_us": [base, arm]})
    return rows.assign(round=0, driver="steps", reported_backend=said)


def test_a_round_in_turns_pairs_neighbours_and_one_without_takes_medians(monkeypatch):
    monkeypatch.setattr(engine, "require_comparable", lambda rows: None)
    base, arm = (100.0, 101.0, 150.0, 103.0), (90.0, 99.0, 140.0, 93.0)
    (row,) = engine.rounds_of(steps(base, arm, True), engine.FA2, engine.FA3).itertuples()
    assert (row.step_us, row.saved_us) == (102.0, 10.0)
    assert row.own_spread_us == 23.0, "the median of -47 and 1, the larger of both arms"
    (row,) = engine.rounds_of(steps(base, arm, False), engine.FA2, engine.FA3).itertuples()
    assert row.saved_us == 102.0 - 96.0 and np.isnan(row.own_spread_us)
    assert engine.rounds_of(steps(base, arm, True)[:1], engine.FA2, engine.FA3).empty


def test_releases_are_kept_apart(monkeypatch):
    monkeypatch.setattr(engine, "require_comparable", lambda rows: None)
    case = engine.METADATA[0]
    same = {name: getattr(case, name) for name in engine.SIZES} | {"case": case}
    same |= {"timer": "ahead", "status": "ok", "throttled": False, "repeat": False}
    releases = {"0.5.9": (90.0, 99.0, 140.0, 93.0), "0.5.10": (80.0, 89.0, 130.0, 83.0)}
    rows = [
        steps((100.0, 101.0, 150.0, 103.0), arm, True).assign(release=name)
        for name, arm in releases.items()
    ]
    frame = pd.concat([part.assign(round=n, **same) for part in rows for n in range(2)])
    table = engine.savings(frame, ((engine.FA2, engine.FA3, (case,)),), "ahead")
    assert [*table.release] == [*releases] and [*table.saved_us] == [10.0, 20.0]
    assert engine.savings(frame, ((engine.FA2, engine.FA3, (case,)),)).empty, "no timer host"
