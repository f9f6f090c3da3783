"""Rates of fa2 learned from chunk sweeps: known constants found again, refusals, the command."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.frames import frame, row
from support.published import published

from attnlib import cli
from attnlib.core.fa2.choice import PlanShape
from attnlib.core.gpu import FA2_RATES, Fa2Rates
from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.plan.case import PlanCase
from attnlib.studies.fa2_chunks import learn
from attnlib.studies.fa2_chunks.study import STUDY

CHUNKS = np.array([256, 384, 512, 704, 960, 1280, 1792, 2432, 3264, 4480, 6080, 8192])
SPEC = AttnSpec(32, 8, 128, 16)
ANY = PlanCase(DecodeCase(SPEC, 1, 1))
SLOWER = Fa2Rates(1600, 21, 60, 1.2e-3, 2.5, 6, 0.05, 0.1, 0.2, 40, 1.5, 50)
"""Of no GPU: a third of an H200's bandwidth, blocks half as fast."""


def a_sweep(draw, heads=(32, 8), kv_bytes=2, q_len=1, rates=SLOWER):
    """A batch of 1 to 64 requests, a few of them long, as `rates` predict it, 1 % of noise."""
    batch = int(np.exp(draw.uniform(0, np.log(64))))
    lens = np.where(draw.random(batch) < 0.2, 40_000, 1200) * draw.uniform(0.5, 1.5, batch)
    lens = lens.astype(np.int64)
    shape = PlanShape(*heads, 128, kv_bytes, batch, int(lens.max()), 108, q_len)
    sweep = learn.ChunkSweep(ANY, shape, lens, CHUNKS, np.ones(len(CHUNKS)))
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
    kept = [name for name in learn.ALL if name not in learn.OWN]
    for name in kept:
        assert len({getattr(rates, name) for rates in learned.values()}) == 1


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
    (row,) = learn.regret([replace(sweep, run_us=us)], FA2_RATES).itertuples()
    assert (row.best, row.best_us) == (960, 90.0)
    at = sweep.predicted_us(FA2_RATES[16]).argmin()
    assert (row.chosen, row.chosen_us, row.ratio) == (CHUNKS[at], us[at], us[at] / 90)


def test_halves_judge_each_other_where_both_have_enough(sweeps, monkeypatch):
    monkeypatch.setattr(learn, "GENERATIONS", 5)
    assert learn.cross_validated(sweeps).key.tolist() == [16] * 16
    assert learn.cross_validated(sweeps[:7]).empty


def rows_of(decode, us_of=lambda chunk: 50.0 + chunk / 100, q_len=1, **told):
    """A sweep's rows: chunk 0 took 60 us."""
    times = {0: 60.0} | {chunk: us_of(chunk) for chunk in (512, 1024, 256, 2048)}
    made = [(PlanCase(decode, q_len, chunk), us) for chunk, us in times.items()]
    return [row(case, learn.SWEPT, 0, us, **told) for case, us in made]


def test_sweeps_are_read_from_rows_of_one_backend_that_ran_ok():
    decode = DecodeCase(SPEC, 3, 4000, "ragged", seed=5)
    rows = [*rows_of(decode), *rows_of(decode, q_len=8), *rows_of(decode, status="refused")]
    rows += [row(PlanCase(decode, 1, 512), learn.SWEPT, 1, 57.12)]
    one, several = learn.sweeps(frame(*rows, row(decode, "flash-attn-3-precomputed", 0, 9.0)))
    assert one.chunks.tolist() == [256, 512, 1024, 2048]
    assert one.run_us.tolist() == pytest.approx([52.56, 56.12, 60.24, 70.48])
    assert (one.case, several.case) == (PlanCase(decode), PlanCase(decode, 8))
    assert (one.key, several.key, one.shape.num_sms) == (16, 64, 132)
    assert one.lens.max() == 4000 and several.lens.min() >= 8
    with pytest.raises(ValueError, match="records of fa2-chunk that ran ok, it has none"):
        learn.sweeps(frame(row(decode, "flash-attn-3-precomputed", 0, 9.0)))


def test_the_study_sweeps_every_key_often_enough_to_learn_it_from_either_half():
    found = learn.sweeps(frame(*(row(case, learn.SWEPT, 0, 50.0) for case in STUDY.cases)))
    keys = Counter(sweep.key for sweep in found)
    assert set(keys) == set(FA2_RATES) and min(keys.values()) >= 2 * learn.LEAST_SWEEPS
    several = Counter(sweep.shape.tile for sweep in found if sweep.shape.q_len > 1)
    assert set(several) == {16, 64, 128} and min(several.values()) >= 2 * learn.LEAST_SWEEPS


def test_the_command_says_of_which_gpu_the_rates_are_and_the_lines_for_core(monkeypatch, capsys):
    rows = [each for n in (1, 2, 9, 33) for each in rows_of(DecodeCase(SPEC, n, 9000, "ragged"))]
    monkeypatch.setattr(learn, "records", lambda progress: frame(*rows))
    monkeypatch.setattr(learn, "GENERATIONS", 5)
    assert cli.main(["rates"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("rates of fa2 on Test GPU, of 4 sweeps of 16 chunks\n")
    assert "holds others; give" in told and "\n    16: Fa2Rates(" in told
    monkeypatch.setitem(FA2_RATES, 16, learn.rates(learn.sweeps(frame(*rows)))[16])
    assert cli.main(["rates"]) == 0
    assert "holds the same; give" in capsys.readouterr().out


def test_core_loses_little_beside_rates_learned_from_the_published_records():
    sweeps = learn.sweeps(published("fa2_chunks"))
    table = learn.compared(sweeps, learn.rates(sweeps))
    assert (table.core_mean <= 1.01 * table["mean"]).all()
