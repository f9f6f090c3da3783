"""The numbers about the decode policy in the notebook on backends are those of the records."""

from functools import partial

import numpy as np
import pytest
from support.published import prose, published, says

from attnlib.core.gpu import FA2_CTAS
from attnlib.kinds.lengths import sample_seq_lens
from attnlib.run import frame as rows
from attnlib.run.frame import CUDA_CORES, FA2, FA3
from attnlib.studies import backend_policy as regret

pytestmark = pytest.mark.usefixtures("published_records")
tells = partial(says, "08")


@pytest.fixture
def studied():
    return published("backend_policy")


@pytest.fixture
def lost(studied):
    return regret.regret_table(studied).set_index(["pool", "rule"])


def test_the_regrets_are_those_of_the_table(lost):
    mean = lost["mean, %"]
    own, sglang, fa2 = (
        mean["FlashInfer", rule] for rule in ("measured", "SGLang with FlashInfer", "always fa2")
    )
    tells(f"loses {own:.2f} % where SGLang's rule loses {sglang:.1f} % and fa2 always")
    tells(f"fa2 always {fa2:.1f} % (measured 2026-11-21)")
    tells(f"measured policy loses {own:.2f} % in the geometric mean")
    tells(f"in 0.6.3 loses {mean['FlashInfer', 'FlashInfer 0.6.3 auto']:.0f} %")
    tells(f"it is {mean['with FA3', 'measured']:.2f} %")
    engines = {mean["with FA3", rule] for rule in ("SGLang 0.5.23 auto", "vLLM 0.33.0 auto")}
    tells(f"and {engines.pop():.0f} % for the engines")
    assert not engines


def test_the_worst_choices_are_told(lost):
    worst = lost.loc[("with FA3", "measured")]
    apart = lost.loc[("FlashInfer", "measured")]
    tells(f"one case, {worst['worst, %']:.1f} %, and none among FlashInfer's")
    tells(f"where the worst is {apart['worst, %']:.1f} %")
    assert apart["worst, %"] < 1 < worst["worst, %"] and not worst["over 5 %"]


def test_plans_and_rates_fit_as_told(studied):
    table = regret.plan_errors(studied)
    off = table["median, %"]
    tells(f"within {off.min()} to {off.max()} % of what plan and rates say")
    assert table.set_index("backend")["median, %"].idxmax() == "CUDA cores"
    times = rows.decode_rows(studied).run_us
    tells(f"from {times.min():.0f} us to {times.max() / 1e3:.0f} ms")


def test_what_fewer_batches_teach_is_told(studied):
    table = regret.learning_table(studied, pool="with FA3").set_index("known")
    ten, bad = table.loc[10], table[table["over 5 %"] > 0]
    tells(f"are enough for {ten['mean, %']:.2f} % and {ten['worst, %']:.1f} % at worst")
    assert len(bad) == 1 and bad["over 5 %"].item() == 1 and len(table) == 5
    tells(f"With {bad.index[0]} one choice loses {bad['worst, %'].item():.1f} %")


def test_where_flashattention_3_wins_is_told(studied):
    won, slots = {True: [], False: []}, FA2_CTAS * int(studied.num_sms.max())
    for case, times in regret.case_times(rows.decode_rows(studied)).items():
        if case.spec.group_size >= 3:
            blocks = case.batch_size * case.spec.num_kv_heads
            won[slots < blocks <= 2 * slots].append(min(times, key=times.get) == regret.FA3_LIBRARY)
    inside, outside = won[True], won[False]
    tells(f"fastest of {sum(inside)} of the {len(inside)} batches with {slots + 1} to {2 * slots}")
    tells(f"and of {sum(outside)} of the other {len(outside)}")


def test_what_known_cases_lose_when_left_out_is_told(studied):
    truths = regret.case_times(rows.decode_rows(studied))
    lost = {pool: [] for pool in regret.POOLS}
    for fold in range(7):
        policy = regret.policy_of(
            studied, [c for i, c in enumerate(regret.KNOWN_CASES) if i % 7 != fold]
        )
        for case in regret.KNOWN_CASES[fold::7]:
            lens = sample_seq_lens(case)
            for pool, backends in regret.POOLS.items():
                chosen = policy.choose(case.spec, lens, backends=backends).backend
                best = min(us for name, us in truths[case].items() if name in backends)
                lost[pool].append(truths[case][chosen] / best - 1)
    ours, all_ = (np.array(lost[pool]) for pool in ("FlashInfer", "with FA3"))
    tells(
        f"Of the {len(ours)} known ones, left out by sevenths, {(ours > 0.05).sum()} lose more "
        f"than 5 % among FlashInfer's kernels and {(all_ > 0.05).sum()} with FlashAttention-3, "
        f"up to {100 * ours.max():.0f} and {100 * all_.max():.0f} %"
    )


def test_the_counts_of_fastest_are_those_of_the_table(studied):
    table = regret.fastest(studied, pool="with FA3")
    total = table[["fa2", "CUDA cores", "FlashAttention-3", "fa3"]].sum()
    tells(
        f"{total.sum()} batches each kernel is the fastest in. fa2 has {total['fa2']}, CUDA cores "
        f"{total['CUDA cores']}, FlashAttention-3 {total['FlashAttention-3']} and FlashInfer's fa3 "
        f"{total['fa3']}"
    )
    few = table[table.group <= 2]
    assert (few["CUDA cores"] > few[["fa2", "fa3", "FlashAttention-3"]].sum(axis=1)).all()


def test_refused_groups_are_told(studied):
    refused = studied[(studied.backend == CUDA_CORES) & (studied.status == "refused")]
    groups = {int(q) // int(k) for q, k in refused.heads.str.split("/")}
    assert groups == {5, 6, 7, 16} and "refuse 5, 6, 7 and 16" in prose("08")
    assert not (studied.status == "error").any()


def test_where_fa3_wins_is_told(studied):
    won = [
        case
        for case, times in regret.case_times(rows.decode_rows(studied)).items()
        if min(times, key=times.get) == FA3
    ]
    requests, longest = max(c.batch_size for c in won), max(c.kv_len for c in won)
    tells(f"up to {requests} requests of up to {longest} tokens")


def test_confidence_is_told_as_counted(studied):
    table = regret.confidence_table(studied, pool="with FA3").set_index("confidence")
    sure, doubtful = table.loc["above"], table.loc["up to 0.9"]
    assert sure.choices == sure.fastest
    said = f"Of {sure.choices} choices above 0.99 all were the fastest, of {doubtful.choices} up to"
    assert said in prose("08") and doubtful.fastest == 8


def test_the_step_of_fa2_lies_where_requests_are_no_longer_split(studied):
    table = regret.one_long_request(studied)
    tiles = table["requests x KV heads"]
    below, above = table[table.splits == "yes"], table[table.splits == "no"]
    tells(f"Up to {tiles[below.index].max()} the ratio to the fastest kernel is ")
    said = f"{below.ratio.min():.2f} to {below.ratio.max():.2f}, from {tiles[above.index].min()} on"
    tells(f"{said} {above.ratio.min():.2f} to {above.ratio.max():.2f}")
    tells(f"two blocks a SM, {FA2_CTAS * studied.num_sms.max():.0f} on")


def test_the_choice_for_an_engine_is_told(studied):
    pick = regret.policy_of(studied).choose(regret.SPECS[3], [8192] * 32)
    assert (pick.backend, pick.inside) == (FA2, True)
    tells(f"predicted at {pick.slowdown[regret.FA3_LIBRARY]:.2f} of its time")
