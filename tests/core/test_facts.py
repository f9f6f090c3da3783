"""What the host of FlashAttention-3 makes of a call: mask, tile, packing, split cap."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import drawn_calls

from attnlib.core import SchedulerFacts
from attnlib.core.schedule import guard

DECODE = SchedulerFacts(4, 32, 8, 128, 1, 4096, 132, page_size=16, causal=True)
FP8 = {"dtype": "float8_e4m3fn"}


def drawn(seed, num_sms, hdim96):
    return next(drawn_calls.draw_calls(seed, num_sms=num_sms, hdim96=hdim96)).facts


SIZES = st.sampled_from([78, 114, 132, 144])
CALLS = st.builds(
    drawn,
    st.integers(0, 10_000),
    SIZES,
    st.booleans(),
)


# The answers of the library in test_splits hold the other tiles, masks and packings.
@pytest.mark.parametrize(
    "changes, tile",
    [
        ({"head_dim": 96}, (192, 128)),
        ({"head_dim": 80, "page_size": None, "causal": False}, (192, 144)),
        (FP8 | {"head_dim": 96}, (192, 128)),
        (
            FP8
            | {
                "has_softcap": True,
                "window": (9, 0),
                "page_size": None,
            },
            (128, 192),
        ),
        (FP8 | {"head_dim": 192, "window": (9, 0)}, (128, 128)),
        (
            FP8
            | {
                "head_dim": 192,
                "window": (9, 0),
                "page_size": None,
            },
            (128, 160),
        ),
    ],
)
def test_the_tile_follows_head_dim_dtype_mask_and_how_pages_are_read(changes, tile):
    assert replace(DECODE, **{"head_dim_v": 0, **changes}).tile == tile


QWEN = SchedulerFacts(4, 14, 2, 64, 9, 4096, 132, page_size=16, causal=True)


@pytest.mark.parametrize(
    "build, changes, tile",
    [
        ("vllm", {}, (64, 192)),
        ("sglang", {"window": (99, 0)}, (64, 192)),
        ("sglang", {"max_seqlen_q": 10}, (192, 128)),
        ("sglang", {"head_dim": 128}, (64, 128)),
        ("upstream", {}, (192, 128)),
        ("upstream", {"head_dim": 128}, (128, 128)),
    ],
)
def test_the_engines_builds_have_a_tile_of_64_rows_for_up_to_64_packed_rows(build, changes, tile):
    assert replace(QWEN, **{"head_dim_v": 0, "build": build, **changes}).tile == tile


def test_vllms_build_gathers_the_pages_of_windows():
    long = replace(QWEN, max_seqlen_q=100, window=(99, 0), page_size=160)
    assert replace(long, build="vllm").paged_gather
    assert not replace(long, page_size=128).paged_gather


@pytest.mark.parametrize(
    "window, mask",
    [
        ((1023, -1), (False, (1023, 3))),
        ((4094, 0), (False, (4094, 0))),
        ((4095, 0), (True, None)),
        ((-1, 2), (False, (4095, 2))),
        ((-1, 3), (False, None)),
    ],
)
def test_a_window_that_hides_nothing_is_dropped_side_by_side(window, mask):
    assert replace(DECODE, max_seqlen_q=4, causal=False, window=window).mask == mask


@pytest.mark.parametrize(
    "page_size, q_len",
    [
        (128, 33),
        (128, 32),
        (64, 64),
    ],
)
def test_pages_go_through_tma_if_they_hold_whole_tiles_and_queries_fill_more_than_one(
    page_size, q_len
):
    facts = replace(DECODE, page_size=page_size, max_seqlen_q=q_len)
    assert facts.paged_gather == ((page_size, q_len) != (128, 33))


def test_enough_tiles_are_never_split_unless_one_heads_kv_overflows_l2():
    prefill = replace(DECODE, num_qo_heads=1, num_kv_heads=1, max_seqlen_q=40_000, causal=False)
    assert replace(prefill, max_seqlen_k=100_000).split_cap == 1
    assert replace(prefill, max_seqlen_k=300_000).split_cap == 3
    assert replace(prefill, max_seqlen_k=300_000, causal=True).split_cap == 1


@given(CALLS)
def test_settling_twice_changes_nothing_and_decides_the_same(call):
    settled = call.settled
    assert settled.settled == settled
    assert settled.mask == call.mask
    assert settled.tile == call.tile
    assert settled.packs == call.packs
    assert settled.split_cap == call.split_cap
    assert call.differences(settled) == {}


def test_differences_name_the_fields_and_both_values_but_of_flags_that_the_library_drops():
    other = replace(DECODE, num_qo_heads=8, num_kv_heads=2)
    heads = {"num_qo_heads": (32, 8), "num_kv_heads": (8, 2)}
    assert DECODE.differences(other) == heads | {"num_splits": (14, 28)}
    narrow = replace(DECODE, head_dim=64, head_dim_v=64)
    assert narrow.differences(replace(narrow, causal=False)) == {}
    assert list(DECODE.differences(replace(DECODE, causal=False))) == ["causal"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"batch_size": 0}, r"batch_size must be an integer >= 1, got 0"),
        ({"num_kv_heads": 5}, r"num_qo_heads must be a multiple of num_kv_heads \(5\), got 32"),
        ({"head_dim": 264}, r"head_dim must be an integer in 1..256, got 264"),
        ({"num_splits": 256}, r"num_splits must be an integer in 0..255, got 256"),
        ({"page_size": 0}, r"page_size must be an integer >= 1, got 0"),
        ({"max_seqlen_q": True}, r"max_seqlen_q must be an integer >= 1, got True"),
        ({"sm_margin": 132}, r"sm_margin must be an integer in 0..131, got 132"),
        ({"batch_size": 2**31}, r"batch_size must be an integer in 1..2147483647, got 2147483648"),
        ({"dtype": "float32"}, r"dtype must be one of bfloat16, .*got 'float32'"),
        ({"dtype": []}, r"dtype must be one of bfloat16, .*got \[\]"),
        ({"window": (1, 2, 3)}, r"window must be \(left, right\), got \(1, 2, 3\)"),
        ({"window": (-2, 0)}, r"window must be an integer >= -1, got -2"),
        ({"max_seqlen_k": 2**22}, r"max_seqlen_k must be at most 4194303, .*got 4194304"),
    ],
)
def test_a_field_out_of_range_is_named_with_what_it_must_be(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(DECODE, **changes)


@pytest.mark.parametrize("dtype, fits", [("bfloat16", True), ("float8_e4m3fn", False)])
def test_a_softcap_that_the_words_were_not_made_for_counts_for_fp8_alone(dtype, fits):
    made = replace(DECODE, dtype=dtype)
    call = replace(made, has_softcap=True)
    assert (guard._differing(made, call) == "") is fits
