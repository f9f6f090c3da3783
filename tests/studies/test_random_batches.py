"""Batches drawn at random: where the layers of the last draw come from, and what the table says."""

import random

import numpy as np
import pandas as pd
import pytest

from attnlib.core import AttnSpec
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.run import store
from attnlib.run.frame import COLUMNS
from attnlib.studies import STUDIES, plan_rivals, random_batches

pytestmark = pytest.mark.usefixtures("published_records")
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


JUDGED = (
    (32, 8),
    (8, 1),
    (16, 2),
    (64, 8),
    (28, 4),
)
"""Heads of 70 batches that were drawn for the first judging, with pages of 1, 16 and 64."""


def _earlier_layers():
    """(query heads, KV heads, page size) of all earlier draws and of the cases of the planner."""
    rows = random_batches.load_all()
    layers = set(zip(rows.num_qo_heads, rows.num_kv_heads, rows.page_size, strict=True))
    planner = [store.load("fa2_plan", machine).case for machine in store.machines("fa2_plan")]
    for case in pd.concat(planner).dropna().unique():
        spec = getattr(case, "spec", None) or case.decode.spec
        layers.add((spec.num_qo_heads, spec.num_kv_heads, spec.page_size))
    for heads in JUDGED:
        for page_size in (1, 16, 64):
            layers.add((*heads, page_size))
    return layers


def test_layers_are_drawn_by_the_seed_and_none_is_of_an_earlier_draw():
    draw = random.Random(plan_rivals.SEED)
    earlier = _earlier_layers()
    sizes = []
    while len(sizes) < 20:
        kv_heads = draw.choice((1, 2, 4, 8, 16, 32))
        heads = kv_heads * draw.choice(GROUPS)
        page_size = draw.choice((1, 16, 64))
        size = (heads, kv_heads, 128, page_size)
        is_known = (heads, kv_heads, page_size) in earlier or size in sizes
        if heads <= 128 and not is_known:
            sizes.append(size)
    assert tuple(sizes) == plan_rivals.SIZES
    assert len(set(plan_rivals.CASES)) == 200
    assert {case.spec for case in plan_rivals.CASES} == {AttnSpec(*size) for size in sizes}


@pytest.mark.parametrize("study", [random_batches, plan_rivals])
def test_live_and_repeated_batches_are_the_first_of_their_layers(study):
    layers = dict.fromkeys(case.spec for case in study.CASES)
    assert [case.spec for case in study.AGAIN] == list(layers)
    assert set(study.LIVE) < set(study.AGAIN) < set(study.CASES)


def test_the_summary_is_what_plain_medians_of_the_records_give():
    rows = random_batches.load_all()
    table = random_batches.gain_summary(rows).set_index(["rival", "batches"])
    keyed = rows.assign(key=rows.case.map(lambda case: case.key))
    wide = keyed.pivot_table("run_us", ["machine", "key"], "backend", "median")
    ratio = wide[random_batches.FA2] / wide[random_batches.PLANNED]
    line = table.loc[(random_batches.FA2, "all")]
    assert line["count"] == ratio.notna().sum()
    assert line["median"] == pytest.approx(ratio.median(), abs=0.01)
    mean = np.exp(np.log(ratio).mean())
    assert line["geometric mean"] == pytest.approx(mean, abs=0.005)
    low, high = map(float, line["95 % CI of the mean"].split(" to "))
    assert low < line["geometric mean"] < high < 1.05 * low
    parts = table["count"].unstack()
    assert (parts["all"] == parts["past 264 blocks"] + parts["up to 264 blocks"]).all()


def _measured(times, rounds=4):
    """Rows as `load_all` gives them: (batch size, backend) -> us, with 0.1 % of noise."""
    shape = {"num_kv_heads": 8, "kv_len": 4096, "page_size": 16}
    shared = {"gpu_id": "g", "power_limit_w": 700, "timer": "graph-cold", "schema": 1}
    assert set(shape) <= {*COLUMNS}
    lines = []
    for (batch, backend), us in times.items():
        case = DecodeCase(AttnSpec(32, 8, 128, 16), batch, 4096)
        for round_ in range(rounds):
            line = {
                "case": case,
                "backend": backend,
                "release": "",
                "round": round_,
                "batch_size": batch,
                "machine": "m",
                "run_us": us * (1 + 1e-3 * (round_ % 2)),
            }
            lines.append(line | shape | shared)
    rows = pd.DataFrame(lines)
    return rows.assign(plan_us=5.0, past_slots=rows.batch_size * 8 > 264)


def test_a_gain_a_tie_and_a_loss_are_counted_and_the_loss_is_named():
    ours = random_batches.PLANNED
    rival = plan_rivals.BATCH_ATTENTION
    times = {
        (8, ours): 100.0,
        (8, rival): 100.0,
        (16, ours): 100.0,
        (16, rival): 150.0,
        (64, ours): 125.0,
        (64, rival): 100.0,
    }
    table = random_batches.gain_summary(_measured(times), (rival,)).set_index("batches")
    everything = table.loc["all"]
    assert everything["count"] == 3
    assert everything["median"] == 1.0
    assert everything[["gains > 5 %", "loses > 2 %"]].tolist() == ["33.3%", "33.3%"]
    assert everything[["not slower", "by Holm"]].tolist() == ["66.7%", "66.7%"]
    assert everything["worst"] == 0.8
    assert "lens=4096x64" in everything["worst batch"]
    assert table.loc["past 264 blocks", "count"] == 1


def test_the_rivals_take_turns_over_the_same_case():
    jobs = STUDIES["plan_rivals"].jobs(headline=False)
    assert [job.release for job in jobs] == ["", ""]  # one process a round has all backends
    case = plan_rivals.CASES[1]
    orders = []
    for job in jobs:
        orders.append([item.backend for item in job.items if item.case == case])
    first, second = orders
    assert first == second[::-1] == list(plan_rivals.BACKENDS)
