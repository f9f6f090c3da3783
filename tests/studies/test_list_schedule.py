"""The list-scheduling model: ends by hand, and bounds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlib.core import SchedulerFacts
from attnlib.core.schedule.splits import plan_splits, scheduled_heads
from attnlib.core.schedule.words import batch_order
from attnlib.studies.splits import list_schedule as model

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


def plan_of(facts, lengths):
    return plan_splits(facts, np.array(lengths))


def end_of_last(plan):
    """When the last tile ends, in KV blocks."""
    return model.tiles_in_time(plan).last / plan.facts.tile[1]


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
    plan = replace(plan_of(MLA, lengths), num_splits=np.array(splits))
    assert end_of_last(plan) == end


def test_multiprocessors_take_tiles_in_the_librarys_order_as_they_become_free():
    plan = plan_of(
        replace(
            MLA,
            num_sms=4,
            num_splits=1,
        ),
        (64, 640, 320),
    )
    assert batch_order(plan).tolist() == [1, 2, 0]
    # 12 and 7 on two each; the tiles of 3 follow those of 7.
    assert end_of_last(plan) == 12
    shorter = replace(plan, facts=replace(plan.facts, num_sms=3))
    # 12, 12, 7; then 7 after the 7 and 3 after the 12s.
    assert end_of_last(shorter) == 15


def test_one_multiprocessor_takes_the_blocks_of_all_heads_and_a_start_for_each_tile():
    plan = plan_of(replace(MLA, num_sms=1), (640, 64, 64))
    split = replace(plan, num_splits=np.array([3, 1, 1]))  # of 4, 4 and 2 blocks
    assert end_of_last(split) == 2 * (10 + 1 + 1) + 2 * 5 * model.START_BLOCKS
    grouped = replace(
        MLA,
        num_sms=1,
        num_qo_heads=8,
        num_kv_heads=4,
        head_dim_v=64,
        num_splits=1,
    )
    tokens = 10 * grouped.tile[1]
    assert end_of_last(plan_of(grouped, (tokens,) * 3)) == 4 * 3 * (10 + 2)


@given(
    st.lists(
        st.integers(1, 2**14),
        min_size=3,
        max_size=3,
    ),
    st.integers(1, 200),
)
def test_an_end_lies_between_an_even_share_and_all_tiles_in_a_row(lengths, target):
    whole = plan_of(MLA, lengths)
    splits = np.clip(-(-whole.num_n_blocks // target), 1, MLA.split_cap)
    plan = replace(whole, num_splits=splits)
    tiles = 2 * splits.sum()
    assert scheduled_heads(MLA) * whole.num_m_blocks[0] == 2
    in_a_row = 2 * plan.num_n_blocks.sum() + model.START_BLOCKS * tiles
    assert in_a_row / MLA.usable_sms <= end_of_last(plan) <= in_a_row
