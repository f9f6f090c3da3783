"""What a policy loses in layers that it did not learn from, and the tables and figures of it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.frames import frame, row
from support.published import live, pick, published

from attnlib.core.policy.plans import can_plan
from attnlib.core.policy.policy import kernel_of
from attnlib.kinds.cost import decode_cost
from attnlib.measure.timer import MAX_CALLS_PER_SAMPLE, cold_copies
from attnlib.run.frame import CUDA_CORES, FA2, FA3
from attnlib.studies import STUDIES, captured, more_layers, other_kernels, other_layers
from attnlib.studies import layer_policy as policy

ROOT = Path(__file__).parents[2]
OURS, ALL = "FlashInfer", "with FlashAttention-3"


def test_every_layer_is_taught_once_and_fits_the_memory_and_a_cold_replay():
    studies = [STUDIES[name] for name in policy.TAUGHT_BY]
    taught = (policy, more_layers, other_layers, other_kernels)
    layers = [spec for each in taught for spec in each.LAYERS]
    assert len(layers) == len({*layers}) == 73
    assert {case.spec for study in studies for case in study.cases} == {*layers}
    assert len({study.reference_machine for study in studies}) == 4
    sizes = [decode_cost(case).kv_bytes for study in studies for case in study.cases]
    assert max(sizes) <= policy.KV_BYTES_LIMIT
    assert max(cold_copies(size, 60 * 2**20) for size in sizes) <= MAX_CALLS_PER_SAMPLE


@pytest.fixture(scope="module")
def study():
    return pd.concat(map(published, policy.TAUGHT_BY))


@pytest.fixture(scope="module")
def known(study):
    return policy.taught(study)


@pytest.fixture(scope="module")
def learnt(known):
    return policy.policy_from(known)


@pytest.fixture(scope="module")
def some():
    """Of two of the four studies: notebook 08 has all."""
    return policy.taught(pd.concat(map(published, policy.TAUGHT_BY[1:3])))


@pytest.fixture(scope="module")
def lost(some):
    return policy.left_out(some)


def of_rule(lost, rule, pool=OURS):
    return pick(lost, rule=rule, pool=pool).set_index("case")


def test_a_rule_is_judged_in_every_case_where_all_it_chooses_is_in_the_pool(lost):
    assert set(lost.groupby(["pool", "rule"]).case.nunique()) == {430}
    rules = {pool: set(part.rule) for pool, part in lost.groupby("pool")}
    assert rules[ALL] - rules[OURS] == {"always FlashAttention-3"}
    assert set(of_rule(lost, "FlashInfer 0.6.3 auto").chosen) == {FA3}
    for case, chosen in of_rule(lost, "SGLang with FlashInfer").chosen.items():
        tensor_cores = case.spec.group_size >= 4 or case.spec.kv_dtype == "float8_e4m3fn"
        assert chosen == (FA2 if tensor_cores else CUDA_CORES)


def test_a_rule_that_chooses_what_was_not_measured_is_refused(learnt, monkeypatch):
    monkeypatch.setitem(policy.EXPLAINED, "XQA", ("flashinfer==0.7.2", "vllm"))
    with pytest.raises(ValueError, match=r"flashinfer==0\.7\.2 must choose one of .* got 'xqa'"):
        policy.regrets(live("more_layers"), learnt)


def test_no_regret_is_negative_the_fastest_has_none_and_means_are_geometric(some, learnt, lost):
    assert (lost.regret.dropna() >= 0).all()
    level = policy.regrets(live("more_layers").assign(run_us=1.0), learnt, (OURS,))
    assert (level.regret.dropna() == 0).all()
    mean = np.expm1(np.log1p(of_rule(lost, "always fa2").regret).mean())
    told = policy.regret_table(lost).set_index(["pool", "rule"]).loc[(OURS, "always fa2")]
    assert told["mean, %"] == pytest.approx(100 * mean, abs=0.005)
    first = policy.worst_choices(some.times, lost, pool=ALL).iloc[0]
    times = first[["fa2", "fa2 planned", "CUDA cores"]].astype(float)
    regret = 100 * (times[first.chosen] / times.min() - 1)
    assert first["regret, %"] == pytest.approx(regret, abs=0.2)


@pytest.mark.parametrize(("pool", "high"), [(OURS, 5), (ALL, 6)])
def test_in_layers_left_out_the_policy_loses_less_than_one_percent_and_rules_ten_times_that(
    pool, high, lost
):
    table = pick(policy.regret_table(lost), pool=pool).set_index("rule")
    own, rules = table.loc[policy.MEASURED], table.drop(policy.MEASURED)
    assert {"always fa2", "always fa3", "SGLang with FlashInfer"} <= {*rules.index}
    assert own.cases == 430 and 0.5 < own["mean, %"] < 1 < 9 < rules["mean, %"].min()
    assert high - 2 < own["95th percentile, %"] < high < 40 < rules["95th percentile, %"].min()
    assert (table["95th percentile, %"] <= table["worst, %"]).all()


def test_layers_and_a_gpu_that_taught_nothing_judge_the_policy_within_its_bar(learnt):
    judge = published("unseen_layers")
    cases = set(judge.case.dropna())
    assert len(cases) == 220 and len({case.spec for case in cases}) == 22
    assert not {case.spec for case in cases} & set(learnt.points)
    assert judge.gpu_id.iloc[0] not in learnt.gpu_id
    table = policy.regret_table(policy.regrets(judge, learnt)).set_index(["pool", "rule"])
    own = table.xs(policy.MEASURED, level="rule")
    assert list(own.index) == list(policy.POOLS) and own.cases.min() > 217
    assert own["mean, %"].max() < 1 and own["95th percentile, %"].max() < 5
    assert own["worst, %"].max() == pytest.approx(32, abs=0.1)
    assert table.drop(policy.MEASURED, level="rule")["mean, %"].min() > 6


def test_a_layer_left_out_has_neither_points_nor_rates_of_its_own(known, learnt):
    spec = other_layers.LAYERS[0]
    without = policy.policy_from(known, without=spec)
    assert set(learnt.points) - set(without.points) == {spec}
    kernel = kernel_of(FA2, spec)
    assert without.rates[FA2][kernel] != learnt.rates[FA2][kernel]


def test_most_is_lost_where_a_kernel_of_cuda_cores_was_never_measured(lost, some):
    mine = of_rule(lost, policy.MEASURED)
    taken = {case.spec for case, us in some.times.items() if CUDA_CORES in us}
    ran = {spec for spec in taken if can_plan(CUDA_CORES, spec)}
    assert ran == taken
    kernels = Counter(kernel_of(CUDA_CORES, spec) for spec in ran)
    alone = [kernels[kernel_of(CUDA_CORES, case.spec)] == 1 for case in mine.index]
    share = np.log1p(mine.regret)
    assert share[alone].mean() > 3 * share[~np.array(alone)].mean()


@pytest.mark.parametrize("pool", policy.POOLS)
def test_the_surer_a_choice_the_oftener_it_is_the_fastest(lost, pool):
    sure = policy.confidence_table(lost, pool=pool)
    share = (sure.fastest / sure.choices).tolist()
    assert sure.choices.sum() == 430 and sure.choices.min() > 35
    assert 0.55 < share[0] < 0.7 < share[1] < 0.9 < share[2] < 1 and share[3] > 0.94


def test_cuda_cores_win_small_groups_flashattention_3_fp8_queries_and_none_a_third(known):
    times = known.times
    table = policy.fastest(times, pool=ALL)
    wins = table.iloc[:, 3:]
    assert wins.sum().sum() == len(times) == 1030 and wins.sum().max() < 1030 / 3
    small = (table.group <= 2) & (table.head_dim < 256)
    assert (wins[small]["CUDA cores"] > wins[small].sum(axis=1) / 2).all()
    fp8 = table["dtypes"] == "float8_e4m3fn"
    assert (wins[fp8].idxmax(axis=1) == "FlashAttention-3, precomputed").all()


def test_the_few_cases_of_a_live_notebook_are_enough_for_every_table_and_figure():
    rows = pd.concat(map(live, policy.TAUGHT_BY))
    known = policy.taught(rows)
    learnt, lost = policy.policy_from(known), policy.left_out(known)
    assert set(learnt.points) > set(policy.LAYERS) and len(learnt.backends) == 6
    table = policy.regret_table(lost).set_index(["pool", "rule"])
    assert table.cases[(OURS, policy.MEASURED)] > 30
    assert policy.kind_table(lost, pool=OURS).cases.sum() > 30
    told = pick(lost, rule=policy.MEASURED, pool=OURS).regret.count()
    assert policy.confidence_table(lost, pool=OURS).choices.sum() == told > 30
    assert 0 < len(policy.worst_choices(known.times, lost, pool=ALL)) <= 10
    assert policy.plan_errors(learnt).cases.min() > 0
    chart = policy.regret_chart(rows, lost, pool=ALL)
    label = chart.axes[0].get_yticklabels()[0].get_text()
    assert label == f"{policy.MEASURED}  ({table.cases[(ALL, policy.MEASURED)]} batches)"
    own = {"its": other_layers.LAYERS[0]}
    assert policy.answers(learnt, own, [300] * 100).choice.item() in policy.LABELS.values()
    assert len(policy.policy_map(rows, learnt, policy.LAYERS[:2], pool=OURS).axes) == 2
    with pytest.raises(ValueError, match="specs must hold at least one"):
        policy.policy_map(rows, learnt, [], pool=OURS)


def test_a_gpu_without_flashattention_3_has_its_tables_and_map():
    rows = live("layer_policy")
    rows = rows[~rows.backend.astype(str).str.startswith("fa3")]
    learnt = policy.policy_of(rows)
    lost = policy.regrets(rows, learnt)
    ours, both = (pick(lost, pool=pool).drop(columns="pool").values for pool in (OURS, ALL))
    assert len(ours) and pd.DataFrame(ours).equals(pd.DataFrame(both))
    assert len(policy.policy_map(rows, learnt, policy.LAYERS[:2], pool=ALL).axes) == 2


def test_a_batch_without_a_time_in_a_pool_is_not_judged_there(learnt):
    rows = live("more_layers")
    first = rows.case.dropna().iloc[0]
    ours = rows.backend.isin(policy.POOLS[OURS])
    lost = policy.regrets(rows[(rows.case != first) | ~ours], learnt)
    judged = {pool: set(part.case) for pool, part in lost.groupby("pool")}
    assert judged[ALL] - judged[OURS] == {first}


def test_captured_steps_judge_too(learnt):
    case = captured.study_of(ROOT / "data/captures/engine.jsonl")[0].cases[0]
    names = [name for name in captured.DECODES if name in learnt.backends]
    own = frame(*(row(case, name, 0, 9.0, timer="graph-cold") for name in names))
    window = replace(case, spec=replace(case.spec, window=64))
    with pytest.raises(ValueError, match="as released must hold a backend that can run .*w64"):
        policy.regrets(own.assign(case=[window] * len(own)), learnt)
    table = policy.regret_table(policy.regrets(own, learnt)).set_index(["pool", "rule"])
    assert (table["worst, %"].xs(policy.MEASURED, level="rule") == 0).all()
