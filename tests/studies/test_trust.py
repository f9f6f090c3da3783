"""Tables of the measurement itself, on frames whose answer is known."""

import pandas as pd
import pytest
from support.frames import frame, timed
from support.published import published

from attnlib.run import frame as rows
from attnlib.studies.measurement_trust import tables as trust


def rounds_of(backend, *times, **more):
    return [timed(backend, number, run_us, **more) for number, run_us in enumerate(times)]


@pytest.mark.parametrize("times", [(100, 101, 200, 198), (100, 101, 200, 198, 7)])
def test_aa_pairs_are_neighbouring_rounds_of_one_backend_less_an_odd_one(times):
    pairs = rows.same_against_same(frame(*rounds_of("a", *times)))
    assert pairs.ratio.tolist() == pytest.approx([1.01, 0.99])


def test_the_aa_table_speaks_in_percent_whichever_round_was_slower():
    table = trust.aa_table(frame(*rounds_of("a", 100, 102, 102, 100), *rounds_of("b", 1, 1)))
    assert table.loc["a", ["pairs", "median %", "largest %"]].tolist() == [2, 2.0, 2.0]
    assert table.loc["b", "largest %"] == 0


def test_timers_lie_side_by_side_and_agree_within_two_percent_over_long_kernels():
    times = {"a": {"profiler": 100.0, "graph": 101.0, "graph-cold": 150.0}}
    times |= {"b": {"profiler": 100.0, "graph": 105.0, "eager": 140.0}}
    times |= {"c": {"profiler": 5.0, "graph": 9.0}}
    each = [(name, timer, us) for name, own in times.items() for timer, us in own.items()]
    records = frame(*(timed(name, n, us, timer=t) for name, t, us in each for n in (0, 1)))
    table = trust.timer_table(records).set_index("backend")
    assert table.loc["a", ["profiler", "graph", "graph-cold"]].tolist() == [100, 101, 150]
    assert table.loc["b", "graph / profiler"] == 1.05 and pd.isna(table.loc["b", "graph-cold"])
    assert trust.agreement(records).T.to_dict("list") == {"a": [1, 1], "b": [1, 0]}
    row = trust.cold_table(records).set_index("backend").loc["a"]
    assert (row["cold / warm"], row["KV, MiB"]) == (1.49, 2 * 2 * 128 * 2 * 4 * 1024 / 2**20)


def test_verdicts_judge_case_by_case_with_the_noise_as_margin():
    both = frame(*rounds_of("a", 2.0, 2.0, 2.0), *rounds_of("b", 1.0, 1.0, 1.0))
    found = trust.verdicts(both, "a", "b", noise=0.03).iloc[0]
    assert (found.verdict, found.margin, found.ratio) == ("slower", 0.03, 2.0)
    with pytest.raises(ValueError, match="rows must hold a case of both 'a' and 'c', none is"):
        trust.verdicts(both, "a", "c", noise=0.0)


def test_a_throttled_record_is_left_out_of_every_comparison():
    both = frame(*rounds_of("a", 2.0, 2.0), timed("a", 2, 9.0, left_out=True))
    assert rows.decode_rows(both)["round"].max() == 1


def test_drifts_are_counted_by_the_time_of_a_call():
    frame = published("layer_policy")
    table, turned = trust.drifts(frame), trust.drifts(frame.assign(drift=-frame.drift))
    ran = frame[(frame.status == "ok") & frame.case.notna()]
    assert table[["records", "drift"]].sum().tolist() == [len(ran), ran.unsettled.sum()]
    long = ran[ran.run_us > 1000]
    assert table.iloc[-1][["records", "drift"]].tolist() == [len(long), long.unsettled.sum()]
    assert (table.slower + turned.slower == table.drift).all() and table.slower.any()
