"""Times of decode calls: schedules and the law, both by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlib.core.policy.plans import WorkPlan
from attnlib.core.policy.times import KNOTS, Gpu, Rates, load_of, predict
from attnlib.core.spec import AttnSpec

SPEC = AttnSpec(16, 8, 128, 16)
SMS = 132
H200 = Gpu(num_sms=SMS, l2_mib=60.0)


def load(items, slots, *, splits=1, merged=False, read=1):
    tokens = round(sum(items) * read)
    made = WorkPlan(np.array(items), slots, tokens, splits, merged)
    return load_of(made, SPEC, [tokens // SPEC.num_kv_heads], H200)


def test_an_item_waits_for_the_first_free_slot():
    one = load([10, 30, 10, 10], slots=2)
    # slot 0: 0-10, 10-20, 20-30; slot 1: 0-30
    assert one.tokens.sum() == 30 and one.busy[one.tokens > 0] * SMS == pytest.approx([2.0])
    two = load([10, 30, 10], slots=2)
    assert two.tokens[two.tokens > 0].tolist() == [10, 20]
    assert two.busy[two.tokens > 0] * SMS == pytest.approx([1.0, 2.0])


@given(st.lists(st.integers(1, 500), min_size=1, max_size=400), st.integers(1, 300))
def test_what_runs_is_what_was_planned(items, slots):
    found = load(items, slots)
    assert (found.tokens * found.busy).sum() * SMS == pytest.approx(sum(items))
    assert found.tokens.sum() >= max(items) - 1e-9
    assert found.busy[found.tokens > 0].max() * SMS <= min(slots, len(items)) + 1e-9


def test_a_call_takes_what_the_law_says():
    rates = Rates(5.0, 2.0, 0.1, 0.5, 1000.0, (10.0, 10.0))
    # 0.1 MB of cache: all of it in the L2, so latency alone counts, 10 ns for each of 30 tokens
    small = [load([30] * 3, 3, splits=3, merged=merged) for merged in (False, True)]
    alone = 5.0 + 30 * 0.010 + 3 * 0.1 + 2 * 0.5
    assert predict(rates, small) == pytest.approx([alone, alone + 2.0], rel=1e-6)
    # 512 bytes a token and head at 1000 GB/s are 0.512 ns, from memory once the L2 is far too small
    (us,) = predict(rates, [load([100_000] * 264, 264)])
    assert us == pytest.approx(31.4 + 100 * np.hypot(10, 264 * 0.512), rel=1e-4)
    # padding costs latency and no traffic
    (us,) = predict(rates, [load([100_000] * 264, 264, read=0.5)])
    assert us == pytest.approx(31.4 + 100 * np.hypot(10, 132 * 0.512), rel=1e-4)


@pytest.mark.parametrize(("share", "missed"), [(0.5, 0.0), (0.8, 0.5), (0.95, 1.0)])
def test_a_cache_that_fits_the_l2_costs_no_memory_traffic(share, missed):
    tokens = round(share * H200.l2_mib * 2**20 / (2 * 128 * 2))
    moved = load([tokens // 264] * 264, 264).moved.max()
    assert moved == pytest.approx(264 * 512 * missed, rel=0.03, abs=264 * 512 * 0.03)


def test_items_that_differ_and_follow_each_other_hide_latency():
    equal, mixed = [100_000] * 2640, [50_000, 150_000] * 1320
    same, apart, single = load(equal, 264), load(mixed, 264), load(mixed, 132)
    assert (same.overlap, single.overlap) == (0.0, 0.0)
    assert apart.overlap == pytest.approx(0.9 * 0.5)
    rates = Rates(5.0, 1.0, 1e-9, 1e-9, 4000.0, (30.0, 30.0))
    none, found, all_ = predict(rates, [replace(apart, overlap=x) for x in (0, apart.overlap, 1)])
    assert found == pytest.approx(0.55 * none + 0.45 * all_, rel=1e-6)
    # of 30 ns of latency and 33.8 ns of traffic the larger remains while every slot is taken
    assert 33.8 / np.hypot(30, 33.8) <= all_ / none < 0.8


def test_latency_is_interpolated_between_knots():
    rates = Rates(1e-9, 1e-9, 1e-9, 1e-9, 1e9, (10.0, 10.0, 10.0, 10.0, 10.0, 40.0))
    assert KNOTS[4:6] == (1.0, 2.0)
    both = [load([1000] * n, 264) for n in (132, 187, 264)]
    assert predict(rates, both) == pytest.approx([10.0, 20.0, 40.0], rel=0.01)
