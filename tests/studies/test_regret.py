"""What rules lose: each rule chooses as its library does, and regret is time over the best."""

import math

import numpy as np
import pytest
from support.published import live, published

from attnlib.run.frame import CUDA_CORES, FA2, FA3
from attnlib.studies import backend_policy as regret


@pytest.fixture(scope="module")
def frame():
    return published("backend_policy")


@pytest.fixture(scope="module")
def lost(frame):
    return regret.regrets(frame)


def of_rule(lost, rule, pool="FlashInfer"):
    return lost[(lost.rule == rule) & (lost.pool == pool)].set_index("case")


def test_a_rule_is_judged_in_every_held_out_case_where_all_it_chooses_is_in_the_pool(lost):
    counts = lost.groupby(["pool", "rule"]).case.nunique()
    assert set(counts) == {len(regret.HELD_OUT_CASES)}
    rules = {pool: set(part.rule) for pool, part in lost.groupby("pool")}
    assert rules["with FA3"] - rules["FlashInfer"] == {regret.EVERY_CALL}


def test_auto_is_fa3_before_the_fix_and_sglang_takes_tensor_cores_from_group_size_four_up(lost):
    assert set(of_rule(lost, "FlashInfer 0.6.3 auto").chosen) == {FA3}
    assert set(of_rule(lost, "FlashInfer 0.6.4 auto").chosen) == {FA2}
    for case, row in of_rule(lost, "SGLang with FlashInfer").iterrows():
        assert row.chosen == (FA2 if case.spec.group_size >= 4 else CUDA_CORES)


def test_a_rule_that_chooses_what_was_not_measured_is_refused(frame, monkeypatch):
    monkeypatch.setitem(regret.EXPLAINED, "XQA", ("flashinfer==0.6.4", "vllm"))
    with pytest.raises(ValueError, match=r"flashinfer==0\.6\.4 must choose one of .* got 'xqa'"):
        regret.regrets(frame, ("FlashInfer",))


def test_no_regret_is_negative_the_fastest_has_none_and_a_pool_alone_has_its_own(frame, lost):
    assert (lost.regret.dropna() >= 0).all()
    assert (regret.regrets(frame.assign(run_us=1.0)).regret == 0).all()
    both = lost[lost.pool == "with FA3"].reset_index(drop=True)
    assert regret.regrets(frame, ("with FA3",)).equals(both)


def test_a_map_of_no_layer_is_refused(frame):
    with pytest.raises(ValueError, match="specs must hold at least one"):
        regret.policy_map(frame, [], pool="FlashInfer")


def test_measuring_loses_less_than_every_rule_in_batches_that_were_left_out(frame, lost):
    table = regret.regret_table(regret.left_out(frame))
    assert set(table.cases) == {len(regret.KNOWN_CASES)}
    for _, part in table.groupby("pool"):
        assert part.iloc[0].rule == regret.MEASURED
        assert part["mean, %"].is_monotonic_increasing
        assert part["mean, %"].iloc[0] <= 0.4 < part["mean, %"].iloc[1]
    table = regret.regret_table(lost)
    mean = math.expm1(np.log1p(of_rule(lost, "always fa2").regret).mean())
    told = table.set_index(["pool", "rule"]).loc[("FlashInfer", "always fa2"), "mean, %"]
    assert told == pytest.approx(100 * mean, abs=0.005)


def test_the_worst_choices_show_all_times_and_the_loss_follows(frame):
    table = regret.worst_choices(frame, pool="FlashInfer", rule="SGLang with FlashInfer")
    first = table.iloc[0]
    times = first[["fa2", "fa3", "CUDA cores"]].astype(float)
    lost = 100 * (times[first.chosen] / times.min() - 1)
    assert first["regret, %"] == pytest.approx(lost, abs=0.2)


@pytest.mark.parametrize("pool", regret.POOLS)
def test_confident_choices_are_right_and_doubtful_ones_less_often(frame, pool):
    table = regret.confidence_table(frame, pool=pool)
    assert table.choices.iloc[-1] >= 40
    share = (table.fastest / table.choices).tolist()
    assert table.choices.sum() == len(regret.HELD_OUT_CASES)
    assert share == sorted(share) and share[-1] == 1 and share[0] < 1


def test_the_few_cases_of_a_live_notebook_are_enough_for_every_table(frame):
    few = live("backend_policy")
    assert set(regret.regrets(few).rule) == set(regret.regrets(frame).rule)
    assert regret.confidence_table(few, pool="with FA3").choices.sum() == len(regret.SPECS)
    assert regret.fastest(few, pool="FlashInfer")[["fa2", "fa3", "CUDA cores"]].sum().sum() == 110
    assert regret.left_out(few).case.nunique() == 10 * len(regret.SPECS)
    chart = regret.regret_chart(frame, pool="with FA3")
    assert chart.axes[0].get_yticklabels()[0].get_text() == regret.MEASURED
    assert len(regret.policy_map(few, regret.SPECS[:2], pool="FlashInfer").axes) == 2
