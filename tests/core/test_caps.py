"""The caps of splits: what each passes to the library, and that `bounded` keeps its bytes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import drawn_calls

from attnlib.core import SchedulerFacts
from attnlib.core.schedule.caps import (
    CAPS,
    MOST_QUERY_TOKENS,
    PARTIAL_BYTES,
    num_splits,
    require_cap,
    split_bytes,
)

MLA = SchedulerFacts(
    batch_size=64,
    num_qo_heads=128,
    num_kv_heads=1,
    head_dim=64,
    head_dim_v=512,
    max_seqlen_q=1,
    max_seqlen_k=131_072,
    num_sms=132,
    page_size=1,
    causal=True,
    varlen_q=True,
    build="sglang",
)
"""DeepSeek-V3's attention, all heads on one GPU."""
PREFILL = replace(MLA, batch_size=512, num_qo_heads=32, max_seqlen_q=16, max_seqlen_k=2048)
"""Many short segments, as in sgl-flash-attn #46."""


def drawn(seed):
    facts = next(drawn_calls.draw_calls(seed, num_sms=132, hdim96=True)).facts
    return replace(facts, num_splits=0, build="sglang")


CALLS = st.builds(drawn, st.integers(0, 10_000))


@pytest.mark.parametrize(
    "batch, caps",
    [
        (16, (4, 57, 57)),
        (32, (2, 57, 32)),
        (64, (1, 57, 16)),
        (128, (1, 57, 8)),
    ],
)
def test_a_larger_batch_lowers_sglangs_cap_not_upstreams_and_bytes_lower_the_bounded_one(
    batch, caps
):
    facts = replace(MLA, batch_size=batch)
    assert (facts.split_cap, *(num_splits(facts, cap) for cap in CAPS[1:])) == caps


@pytest.mark.parametrize("batch", [128, 132, 192, 264, 512, 992, 1024])
def test_in_the_largest_batches_too_the_partial_outputs_keep_their_bytes(batch):
    facts = replace(MLA, batch_size=batch)
    assert facts.split_cap == 1
    assert num_splits(facts, "bounded") * split_bytes(facts) <= PARTIAL_BYTES


def test_the_default_is_left_to_the_library_and_a_number_is_that_number():
    assert num_splits(MLA, "default") == 0
    assert num_splits(MLA, "8") == 8


def test_before_0_4_5_every_cap_is_upstreams_within_the_bytes():
    before = replace(MLA, build="sglang-0.4.4")
    assert num_splits(before, "upstream") == num_splits(before, "bounded") == before.split_cap == 57


def test_a_prefill_of_short_segments_keeps_the_default_where_upstreams_cap_takes_gigabytes():
    assert num_splits(PREFILL, "bounded") == 0 and PREFILL.split_cap == 1
    assert num_splits(PREFILL, "upstream") * split_bytes(PREFILL) > 6 * 2**30
    most = replace(PREFILL, max_seqlen_q=MOST_QUERY_TOKENS, batch_size=1)
    assert num_splits(most, "bounded") > 1


@given(CALLS)
def test_the_bounded_cap_lies_between_the_others_and_keeps_its_bytes(facts):
    cap = num_splits(facts, "bounded")
    if facts.max_seqlen_q > MOST_QUERY_TOKENS:
        assert cap == 0
        return
    assert cap <= num_splits(facts, "upstream")
    assert cap >= min(facts.split_cap, num_splits(facts, "upstream"))
    assert cap <= facts.split_cap or cap * split_bytes(facts) <= PARTIAL_BYTES


@pytest.mark.parametrize(
    "cap, words",
    [
        ("all", "cap must be one of default, upstream, bounded, a number of splits, got 'all'"),
        ("0", "cap must be an integer in 1..255, got 0"),
        ("256", "cap must be an integer in 1..255, got 256"),
        ("-1", "cap must be one of default, .* got '-1'"),
        ("", "cap must be one of default, .* got ''"),
    ],
)
def test_another_cap_is_refused_by_name(cap, words):
    with pytest.raises(ValueError, match=words):
        require_cap(cap)


def test_a_call_that_has_a_cap_already_is_refused():
    with pytest.raises(ValueError, match="num_splits of facts must be 0 to be chosen, got 4"):
        num_splits(replace(MLA, num_splits=4), "bounded")
