"""The list-scheduling model: ends by hand, bounds, and the choice of a target."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlib.core import SchedulerFacts
from attnlib.core.schedule.caps import num_splits
from attnlib.core.schedule.words import batch_order
from attnlib.studies.splits import list_schedule as model
from attnlib.studies.splits.traffic import batches

MLA = SchedulerFacts(
    batch_size=3,
    num_qo_heads=128,
    num_kv_heads=1,
    head_dim=64,
    head_dim_v=512,
    max_seqlen_q=1,
    max_seqlen_k=2**17,
    num_sms=132,
    page_size=1,
    causal=True,
    num_splits=57,
)


@pytest.mark.parametrize(
    "lengths, splits, end",
    [
        # Two tiles of 64 query rows each, of 64 tokens a block and two blocks of start.
        ((640, 64, 64), (1, 1, 1), 12),
        ((640, 64, 64), (10, 1, 1), 3),
        ((640, 64, 64), (3, 1, 1), 6),
        ((0, 0, 64), (1, 1, 1), 3),
    ],
)
def test_the_last_tile_ends_where_it_does_by_hand(lengths, splits, end):
    plan = replace(model.plan_of(MLA, lengths), num_splits=np.array(splits))
    assert model.end_of_last(plan) == end


def test_multiprocessors_take_tiles_in_the_librarys_order_as_they_become_free():
    plan = model.plan_of(
        replace(
            MLA,
            num_sms=4,
            num_splits=1,
        ),
        (64, 640, 320),
    )
    assert batch_order(plan).tolist() == [1, 2, 0]
    # 12 and 7 on two each; the tiles of 3 follow those of 7.
    assert model.end_of_last(plan) == 12
    shorter = replace(plan, facts=replace(plan.facts, num_sms=3))
    # 12, 12, 7; then 7 after the 7 and 3 after the 12s.
    assert model.end_of_last(shorter) == 15


def test_one_multiprocessor_takes_the_blocks_of_all_heads_and_a_start_for_each_tile():
    plan = model.plan_of(replace(MLA, num_sms=1), (640, 64, 64))
    split = replace(plan, num_splits=np.array([3, 1, 1]))  # of 4, 4 and 2 blocks
    assert model.end_of_last(split) == 2 * (10 + 1 + 1) + 2 * 5 * model.START_BLOCKS
    grouped = replace(
        MLA,
        num_sms=1,
        num_qo_heads=8,
        num_kv_heads=4,
        head_dim_v=64,
        num_splits=1,
    )
    tokens = 10 * grouped.tile[1]
    assert model.end_of_last(model.plan_of(grouped, (tokens,) * 3)) == 4 * 3 * (10 + 2)


@given(
    st.lists(
        st.integers(1, 2**14),
        min_size=3,
        max_size=3,
    ),
    st.integers(1, 200),
)
def test_an_end_lies_between_the_even_share_and_all_tiles_in_a_row(lengths, target):
    plan = model.split_by_target(model.plan_of(MLA, tuple(lengths)), target)
    end = model.end_of_last(plan)
    tiles = 2 * plan.num_splits.sum()
    blocks = 2 * plan.num_n_blocks.sum()
    assert end >= model.even_share(plan) - 1e-9 or tiles < MLA.num_sms
    assert end <= blocks + model.START_BLOCKS * tiles
    assert plan.num_splits.max() <= MLA.split_cap


def test_a_target_that_ends_no_earlier_leaves_the_librarys_plan():
    alike = model.plan_of(
        replace(
            MLA,
            batch_size=66,
            num_splits=1,
        ),
        (64,) * 66,
    )
    assert model.best_target(alike) is alike
    step = batches()[28]
    facts = replace(MLA, batch_size=step.in_flight, num_splits=0, build="sglang")
    upstream = model.plan_of(replace(facts, num_splits=num_splits(facts, "upstream")), step.tokens)
    best = model.best_target(upstream)
    ends = []
    for target in range(1, 200):
        ends.append(model.end_of_last(model.split_by_target(upstream, target)))
    assert model.end_of_last(best) <= 1.05 * min(ends)
    assert model.even_share(best) <= model.end_of_last(best) < model.end_of_last(upstream)


def test_a_target_is_at_least_one_block():
    with pytest.raises(ValueError, match="target must be an integer >= 1, got 0"):
        model.split_by_target(model.plan_of(MLA, (64, 64, 64)), 0)
