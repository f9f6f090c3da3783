"""Rates of fa2 learned from chunk sweeps: known constants found again, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from attnlib.core.fa2.choice import PlanShape
from attnlib.core.gpu import FA2_RATES, Fa2Rates
from attnlib.studies.fa2_plan import learn

CHUNKS = np.array([256, 384, 512, 704, 960, 1280, 1792, 2432, 3264, 4480, 6080, 8192])
SLOWER = Fa2Rates(1600, 21, 60, 1.2e-3, 2.5, 6, 0.05, 0.1, 0.2, 40)
"""Of no GPU: a third of an H200's bandwidth, blocks half as fast."""


def a_sweep(draw, heads=(32, 8), kv_bytes=2, q_len=1, rates=SLOWER):
    """A batch of 1 to 64 requests, a few of them long, as `rates` predict it, 1 % of noise."""
    batch = int(np.exp(draw.uniform(0, np.log(64))))
    lens = np.where(draw.random(batch) < 0.2, 40_000, 1200) * draw.uniform(0.5, 1.5, batch)
    lens = lens.astype(np.int64)
    shape = PlanShape(*heads, 128, kv_bytes, batch, int(lens.max()), 108, q_len)
    sweep = learn.ChunkSweep("", shape, lens, CHUNKS, np.ones(len(CHUNKS)))
    noise = np.exp(draw.normal(0, 0.01, len(CHUNKS)))
    return replace(sweep, run_us=sweep.predicted_us(rates) * noise)


@pytest.fixture(scope="module")
def sweeps():
    """Of decode in three layouts, and a few of verification and of an FP8 cache."""
    draw = np.random.default_rng(1)
    layouts = ((32, 8), (28, 4), (8, 1))
    found = [a_sweep(draw, layouts[step % 3]) for step in range(16)]
    found += [a_sweep(draw, (64, 8), q_len=4) for _ in range(4)]
    return found + [a_sweep(draw, kv_bytes=1) for _ in range(4)]


@pytest.fixture(scope="module")
def learned(sweeps):
    return learn.rates(sweeps)


def test_rates_learned_from_noisy_times_choose_as_those_that_made_them(sweeps, learned):
    table = learn.compared(sweeps, learned)
    assert table.key.tolist() == ["16", "64", "(16, 128, 1)"] and set(table.sweeps) == {16, 4}
    assert table["mean"].max() <= 1.01
    assert learned[16].memory_gbps == pytest.approx(SLOWER.memory_gbps, rel=0.1)


def test_a_key_learns_its_own_constants_and_takes_the_others_of_the_first(learned):
    for key, own in ((64, learn.OWN), ((16, 128, 1), (*learn.OWN, *learn.COSTS))):
        kept = {name: getattr(learned[16], name) for name in learn.ALL if name not in own}
        assert kept == {name: getattr(learned[key], name) for name in kept}


def test_the_same_sweeps_give_the_same_rates_and_they_print_as_the_code_of_core(
    sweeps, monkeypatch
):
    monkeypatch.setattr(learn, "GENERATIONS", 5)
    found = learn.rates(sweeps)
    assert found == learn.rates(sweeps)
    assert eval(f"{{{learn.source(found)}}}", {"Fa2Rates": Fa2Rates}) == found


def test_too_few_sweeps_of_a_key_are_refused_by_its_name(sweeps):
    with pytest.raises(ValueError, match=r"4 or more of rates \(16, 128, 1\), it has 3"):
        learn.rates(sweeps[:-1])
    with pytest.raises(ValueError, match="4 or more of rates 16, it has 0"):
        learn.rates(sweeps[16:])


def test_regret_is_of_the_measured_chunks_alone():
    sweep = a_sweep(np.random.default_rng(2))
    us = np.where(CHUNKS == 960, 90.0, 100.0)
    (row,) = learn.regret([replace(sweep, run_us=us, planned_us=91.0)], FA2_RATES).itertuples()
    assert (row.best, row.best_us, row.planned_us) == (960, 90.0, 91.0)
    at = sweep.predicted_us(FA2_RATES[16]).argmin()
    assert (row.chosen, row.chosen_us, row.ratio) == (CHUNKS[at], us[at], us[at] / 90)


def test_halves_judge_each_other_where_both_have_enough(sweeps, monkeypatch):
    monkeypatch.setattr(learn, "GENERATIONS", 5)
    assert learn.cross_validated(sweeps)[["key", "sweeps"]].values.tolist() == [["16", 16]]
