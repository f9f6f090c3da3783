"""Layers that nobody had measured: the set that judges, and what the policy loses there."""

from pathlib import Path

import pandas as pd
import pytest
from support.frames import frame, row
from support.published import live, published

from attnlib.core.policy.plans import can_plan
from attnlib.kinds.cost import decode_cost
from attnlib.measure.timer import MAX_CALLS_PER_SAMPLE, cold_copies
from attnlib.run.frame import CUDA_CORES
from attnlib.select import explain
from attnlib.studies import STUDIES, captured, layer_policy, more_layers, unseen_layers
from attnlib.studies import backend_policy as known
from attnlib.studies.backend_policy.study import KV_BYTES_LIMIT

ROOT = Path(__file__).parents[2]


def test_the_set_that_judges_is_large_and_of_layers_that_are_never_learnt_from():
    learnt = {*layer_policy.study.LAYERS, *more_layers.study.LAYERS}
    unseen = set(unseen_layers.study.LAYERS)
    assert not unseen & (learnt | set(known.SPECS)) and len(set(unseen_layers.study.CASES)) >= 200
    assert {case.spec for case in unseen_layers.study.CASES} == unseen
    studies = [STUDIES[name] for name in (*known.TAUGHT_BY, "unseen_layers")]
    assert len({study.reference_machine for study in studies}) == 3
    sizes = [decode_cost(case).kv_bytes for study in studies for case in study.cases]
    assert max(sizes) <= KV_BYTES_LIMIT
    assert max(cold_copies(size, 60 * 2**20) for size in sizes) <= MAX_CALLS_PER_SAMPLE
    for name in ("head_dim", "page_size", "dtypes"):
        assert {getattr(spec, name) for spec in unseen} <= {getattr(s, name) for s in learnt}


@pytest.fixture(scope="module")
def taught():
    return pd.concat(map(published, known.TAUGHT_BY))


@pytest.fixture(scope="module")
def learnt(taught):
    return known.policy_of(taught)


@pytest.mark.parametrize(
    ("pool", "mean", "high"), [("FlashInfer", 1, 5), ("with FlashAttention-3", 2, 10)]
)
def test_the_policy_loses_in_unseen_layers_what_was_asked_and_twice_that_with_flashattention_3(
    pool, mean, high, learnt
):
    table = unseen_layers.lost_table(published("unseen_layers"), learnt)
    table = table[table.pool == pool].set_index("rule")
    own, rules = table.loc[known.MEASURED], table.drop(known.MEASURED)
    assert {"always fa2", "always fa3", "SGLang with FlashInfer"} <= {*rules.index}
    assert (known.ONCE in rules.index) == (pool != "FlashInfer")
    assert own.cases == 220 and mean - 1 < own["mean, %"] < mean < 9 < rules["mean, %"].min()
    assert high / 2 < own["95th percentile, %"] < high < 60 < rules["95th percentile, %"].min()
    assert (table["95th percentile, %"] <= table["worst, %"]).all()


def test_cuda_cores_have_a_plan_wherever_they_ran_and_two_kinds_of_layers_lose_half(learnt, taught):
    table = unseen_layers.kind_table(published("unseen_layers"), learnt, pool="FlashInfer")
    table = table.sort_values("of all lost, %")
    most = table.tail(2)
    assert {*zip(most.group, most.head_dim, strict=True)} == {(1, 256), (16, 128)}
    assert most["of all lost, %"].sum() > 45
    assert table[:-2]["mean, %"].max() < 1.5 and table.cases.sum() == 220
    cores = taught[(taught.backend == CUDA_CORES) & (taught.status == "ok")]
    ran = {case.spec for case in cores.case}
    assert len(ran) > 10 and all(can_plan(CUDA_CORES, spec) for spec in ran)
    assert all(CUDA_CORES in learnt.rates[spec] for spec in ran)


def test_of_choices_below_090_two_thirds_are_the_fastest_and_all_but_one_above_099(learnt):
    sure = unseen_layers.sure_table(published("unseen_layers"), learnt, pool="FlashInfer")
    share = (sure.fastest / sure.choices).tolist()
    assert sure.choices.sum() == 220 and 0.6 < share[0] < 0.7 < 0.9 < share[1] < 0.95 < share[2]


def test_of_the_kernels_that_both_know_a_policy_learnt_warm_loses_more(learnt):
    warm = known.policy_of(published("backend_policy"))
    pool = {"both": [name for name in layer_policy.FLASHINFER if name in warm.backends]}
    times = known.case_times(known.advising(published("unseen_layers")))
    lost = [known.regrets_of(times, policy, pool, pool) for policy in (learnt, warm)]
    cold, other = (known.regret_table(each).set_index("rule").loc[known.MEASURED] for each in lost)
    assert len(pool["both"]) == 3 and cold.cases == other.cases == 220
    assert cold["mean, %"] < other["mean, %"] and cold["over 5 %"] < other["over 5 %"]


def test_the_few_cases_of_a_live_notebook_are_enough_for_its_tables():
    learnt, few = known.policy_of(pd.concat(map(live, known.TAUGHT_BY))), live("unseen_layers")
    assert set(learnt.points) > set(layer_policy.LAYERS) and len(learnt.backends) == 6
    table = unseen_layers.lost_table(few, learnt).set_index(["pool", "rule"])
    assert table.cases[("FlashInfer", known.MEASURED)] == few.case.nunique() == 8
    pool = {"pool": "FlashInfer"}
    assert unseen_layers.kind_table(few, learnt, **pool).cases.sum() == 8
    assert unseen_layers.sure_table(few, learnt, **pool).choices.sum() == 8
    spec = unseen_layers.LAYERS[0]
    assert known.answers(learnt, {"its": spec}, [300] * 100).choice.item() in known.LABELS.values()


@pytest.mark.parametrize("policy", ["auto", "sglang"])
def test_the_rules_beside_it_choose_as_they_do_in_the_release_that_was_measured(policy):
    for spec in unseen_layers.LAYERS:
        named, measured = (
            explain(spec, mode="decode", gpu="sm90", library=library, policy=policy, env={})
            for library in ("flashinfer==0.6.4", f"flashinfer=={layer_policy.RELEASE}")
        )
        assert named.ours == measured.ours


def test_captured_steps_judge_too(learnt):
    case = captured.study_of(ROOT / "data/captures/engine.jsonl")[0].cases[0]
    names = [name for name in captured.DECODES if name in learnt.backends]
    own = frame(*(row(case, name, 0, 9.0, timer="graph-cold") for name in names))
    table = unseen_layers.lost_table(own, learnt).set_index(["pool", "rule"])
    assert (table["worst, %"].xs(known.MEASURED, level="rule") == 0).all()
