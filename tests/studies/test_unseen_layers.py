"""Layers that nobody measured: the set that judges, and what a policy learnt cold loses there."""

from pathlib import Path

import pytest
from support.frames import frame, row
from support.published import published

from attnlib.core.spec import AttnSpec
from attnlib.kinds.cost import decode_cost
from attnlib.measure.timer import MAX_CALLS_PER_SAMPLE, cold_copies
from attnlib.studies import captured, layer_policy, unseen_layers
from attnlib.studies.backend_policy import SPECS, policy_of
from attnlib.studies.backend_policy.study import KV_BYTES_LIMIT
from attnlib.studies.backend_policy.tables import EVERY_CALL, MEASURED
from attnlib.studies.unseen_layers.tables import lost_table, sure_table

ROOT = Path(__file__).parents[2]


def test_the_set_that_judges_is_large_and_of_layers_that_are_never_learnt_from():
    learnt, unseen = set(layer_policy.study.LAYERS), set(unseen_layers.study.LAYERS)
    assert not unseen & (learnt | set(SPECS)) and len(set(unseen_layers.study.CASES)) >= 200
    assert {case.spec for case in unseen_layers.study.CASES} == unseen
    both = layer_policy.study.CASES + unseen_layers.study.CASES
    sizes = [decode_cost(case).kv_bytes for case in both]
    assert max(sizes) <= KV_BYTES_LIMIT
    assert max(cold_copies(size, 60 * 2**20) for size in sizes) <= MAX_CALLS_PER_SAMPLE
    for name in ("head_dim", "page_size", "dtypes"):
        assert {getattr(spec, name) for spec in unseen} <= {getattr(s, name) for s in learnt}


@pytest.fixture(scope="module")
def cold():
    """Published records as if they had been timed cold."""
    return published("backend_policy").assign(timer="graph-cold")


def test_a_policy_learnt_cold_says_so_and_is_judged_beside_rules_in_layers_it_never_saw(cold):
    left_out = AttnSpec(8, 1, 128, 16)
    policy = policy_of(cold[[case is not None and case.spec != left_out for case in cold.case]])
    assert (policy.timer, policy.l2_mib) == ("graph-cold", 0.0) and left_out not in policy.points
    batches = [case is not None and case.spec == left_out for case in cold.case]
    table = lost_table(cold[batches], policy).set_index(["pool", "rule"])
    assert {rule for _, rule in table.index} >= {MEASURED, "always fa2", EVERY_CALL}
    assert table.loc[("FlashInfer", MEASURED), "mean, %"] < 1
    ran = table.dropna()
    assert (ran["95th percentile, %"] <= ran["worst, %"] + 0.1).all()
    case = captured.study_of(ROOT / "data/captures/engine.jsonl")[0].cases[0]
    names = [name for name in captured.DECODES if name in policy.backends]
    assert len(names) == 4
    own = frame(*(row(case, name, 0, 9.0, timer="graph-cold") for name in names))
    judged = lost_table(own, policy).set_index(["pool", "rule"])
    assert (judged["worst, %"].xs(MEASURED, level="rule") == 0).all(), "captured steps judge too"
    sure = sure_table(cold[batches], policy, pool="with FlashAttention-3")
    assert sure.choices.sum() == 148 and (sure.fastest <= sure.choices).all()
