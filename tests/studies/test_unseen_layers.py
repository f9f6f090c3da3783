"""Layers that nobody had measured: the set that judges, and what the policy loses there."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.frames import frame, row
from support.published import live, pick, published

from attnlib.core.policy.plans import can_plan
from attnlib.kinds.cost import decode_cost
from attnlib.measure.timer import MAX_CALLS_PER_SAMPLE, cold_copies
from attnlib.run.frame import CUDA_CORES, FA2, FA3
from attnlib.studies import STUDIES, captured, more_layers, unseen_layers
from attnlib.studies import layer_policy as policy

ROOT = Path(__file__).parents[2]
OURS, ALL = "FlashInfer", "with FlashAttention-3"


def test_the_set_that_judges_is_large_and_of_layers_that_are_never_learnt_from():
    learnt = {*policy.LAYERS, *more_layers.LAYERS}
    unseen = set(unseen_layers.study.LAYERS)
    assert not unseen & unseen_layers.SEEN and learnt < unseen_layers.SEEN
    assert len(set(unseen_layers.study.CASES)) >= 200
    assert {case.spec for case in unseen_layers.study.CASES} == unseen
    studies = [STUDIES[name] for name in (*policy.TAUGHT_BY, "unseen_layers")]
    assert len({study.reference_machine for study in studies}) == 3
    sizes = [decode_cost(case).kv_bytes for study in studies for case in study.cases]
    assert max(sizes) <= policy.KV_BYTES_LIMIT
    assert max(cold_copies(size, 60 * 2**20) for size in sizes) <= MAX_CALLS_PER_SAMPLE
    for name in ("head_dim", "page_size", "dtypes"):
        assert {getattr(spec, name) for spec in unseen} <= {getattr(s, name) for s in learnt}


@pytest.fixture(scope="module")
def study():
    return pd.concat(map(published, policy.TAUGHT_BY))


@pytest.fixture(scope="module")
def learnt(study):
    return policy.policy_of(study)


@pytest.fixture(scope="module")
def judge():
    return published("unseen_layers")


@pytest.fixture(scope="module")
def lost(judge, learnt):
    return policy.regrets(judge, learnt)


def of_rule(lost, rule, pool=OURS):
    return pick(lost, rule=rule, pool=pool).set_index("case")


def test_a_rule_is_judged_in_every_case_where_all_it_chooses_is_in_the_pool(lost):
    assert set(lost.groupby(["pool", "rule"]).case.nunique()) == {len(unseen_layers.CASES)}
    rules = {pool: set(part.rule) for pool, part in lost.groupby("pool")}
    assert rules[ALL] - rules[OURS] == {"always FlashAttention-3"}
    assert set(of_rule(lost, "FlashInfer 0.6.3 auto").chosen) == {FA3}
    for case, chosen in of_rule(lost, "SGLang with FlashInfer").chosen.items():
        tensor_cores = case.spec.group_size >= 4 or case.spec.kv_dtype == "float8_e4m3fn"
        assert chosen == (FA2 if tensor_cores else CUDA_CORES)


def test_a_rule_that_chooses_what_was_not_measured_is_refused(judge, learnt, monkeypatch):
    monkeypatch.setitem(policy.EXPLAINED, "XQA", ("flashinfer==0.7.2", "vllm"))
    with pytest.raises(ValueError, match=r"flashinfer==0\.7\.2 must choose one of .* got 'xqa'"):
        policy.regrets(judge, learnt)


def test_no_regret_is_negative_the_fastest_has_none_and_means_are_geometric(judge, learnt, lost):
    assert (lost.regret.dropna() >= 0).all()
    level = policy.regrets(judge.assign(run_us=1.0), learnt, (OURS,))
    assert (level.regret.dropna() == 0).all()
    mean = np.expm1(np.log1p(of_rule(lost, "always fa2").regret).mean())
    told = policy.regret_table(lost).set_index(["pool", "rule"]).loc[(OURS, "always fa2")]
    assert told["mean, %"] == pytest.approx(100 * mean, abs=0.005)
    first = policy.worst_choices(judge, lost, pool=ALL).iloc[0]
    times = first[["fa2", "fa2 planned", "fa3", "CUDA cores"]].astype(float)
    assert first["regret, %"] == pytest.approx(
        100 * (times[first.chosen] / times.min() - 1), abs=0.2
    )


@pytest.mark.parametrize(("pool", "mean", "high"), [(OURS, 1, 5), (ALL, 2, 10)])
def test_the_policy_loses_in_unseen_layers_what_was_asked_and_twice_that_with_flashattention_3(
    pool, mean, high, lost
):
    table = pick(policy.regret_table(lost), pool=pool).set_index("rule")
    own, rules = table.loc[policy.MEASURED], table.drop(policy.MEASURED)
    assert {"always fa2", "always fa3", "SGLang with FlashInfer"} <= {*rules.index}
    assert own.cases == 220 and mean - 1 < own["mean, %"] < mean < 9 < rules["mean, %"].min()
    assert high / 2 < own["95th percentile, %"] < high < 60 < rules["95th percentile, %"].min()
    assert (table["95th percentile, %"] <= table["worst, %"]).all()


def test_layers_left_out_one_by_one_lose_little_less(study, learnt):
    left_out = policy.left_out(study)
    table = pick(policy.regret_table(left_out), rule=policy.MEASURED).set_index("pool")
    assert (table.cases > 680).all() and set(left_out.case) == set(policy.taught(study).times)
    assert table["mean, %"].between(0.5, 1.5).all() and table["worst, %"].max() < 50
    without = policy.policy_from(policy.taught(study), without=policy.LAYERS[5])
    assert set(learnt.points) - set(without.points) == {policy.LAYERS[5]}
    assert without.choose(policy.LAYERS[5], [100]).apart > 0


def test_cuda_cores_have_a_plan_wherever_they_ran_and_two_kinds_of_layers_lose_half(
    learnt, study, lost
):
    table = policy.kind_table(lost, pool=OURS).sort_values("of all lost, %")
    most = table.tail(2)
    assert {*zip(most.group, most.head_dim, strict=True)} == {(1, 256), (16, 128)}
    assert most["of all lost, %"].sum() > 45
    assert table[:-2]["mean, %"].max() < 1.5 and table.cases.sum() == 220
    ran = {case.spec for case in pick(study, backend=CUDA_CORES, status="ok").case}
    assert len(ran) > 10 and all(can_plan(CUDA_CORES, spec) for spec in ran)
    assert all(CUDA_CORES in learnt.rates[spec] for spec in ran)


def test_of_choices_below_090_two_thirds_are_the_fastest_and_all_but_one_above_099(judge, learnt):
    sure = policy.confidence_table(judge, learnt, pool=OURS)
    share = (sure.fastest / sure.choices).tolist()
    assert sure.choices.sum() == 220 and 0.6 < share[0] < 0.7 < 0.9 < share[1] < 0.95 < share[2]


def test_cuda_cores_win_small_groups_flashattention_3_fp8_queries_and_no_kernel_a_third(
    judge, study
):
    times = policy.taught(study).times | policy.taught(judge).times
    table = policy.fastest(times, pool=ALL)
    wins = table.iloc[:, 3:]
    assert wins.sum().sum() == len(times) == 910 and wins.sum().max() < 910 / 3
    small = (table.group <= 2) & (table.head_dim < 256)
    assert (wins[small]["CUDA cores"] > wins[small].sum(axis=1) / 2).all()
    fp8 = table["dtypes"] == "float8_e4m3fn"
    assert (wins[fp8].idxmax(axis=1) == "FlashAttention-3, precomputed").all()


def test_the_few_cases_of_a_live_notebook_are_enough_for_every_table_and_figure():
    rows, few = pd.concat(map(live, policy.TAUGHT_BY)), live("unseen_layers")
    learnt = policy.policy_of(rows)
    assert set(learnt.points) > set(policy.LAYERS) and len(learnt.backends) == 6
    lost = policy.regrets(few, learnt)
    table = policy.regret_table(lost).set_index(["pool", "rule"])
    assert table.cases[(OURS, policy.MEASURED)] == few.case.nunique() == 8
    assert policy.kind_table(lost, pool=OURS).cases.sum() == 8
    assert policy.confidence_table(few, learnt, pool=OURS).choices.sum() == 8
    assert policy.left_out(rows).case.nunique() == len(policy.taught(rows).times)
    assert policy.plan_errors(learnt).cases.min() > 0
    chart = policy.regret_chart(few, lost, pool=ALL)
    assert chart.axes[0].get_yticklabels()[0].get_text() == policy.MEASURED
    own = {"its": unseen_layers.LAYERS[0]}
    assert policy.answers(learnt, own, [300] * 100).choice.item() in policy.LABELS.values()
    assert len(policy.policy_map(rows, learnt, policy.LAYERS[:2], pool=OURS).axes) == 2
    with pytest.raises(ValueError, match="specs must hold at least one"):
        policy.policy_map(rows, learnt, [], pool=OURS)


def test_captured_steps_judge_too(learnt):
    case = captured.study_of(ROOT / "data/captures/engine.jsonl")[0].cases[0]
    names = [name for name in captured.DECODES if name in learnt.backends]
    own = frame(*(row(case, name, 0, 9.0, timer="graph-cold") for name in names))
    table = policy.regret_table(policy.regrets(own, learnt)).set_index(["pool", "rule"])
    assert (table["worst, %"].xs(policy.MEASURED, level="rule") == 0).all()
