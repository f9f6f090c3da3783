"""Costs: counted by hand."""

from dataclasses import replace

import pytest

from attnlib.core import AttnSpec
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.studies.metadata.case import MetadataCase

FP8 = "float8_e4m3fn"


@pytest.mark.parametrize(
    "dtypes, sizes, tokens, pages, qo_bytes",
    [
        (("bfloat16", FP8), (2, 33), 66, 6, 2 + 2),
        ((FP8, FP8), (1, 16), 16, 1, 1 + 2),  # an FP8 query still writes a 16-bit output
        (("bfloat16", FP8), (3, 320, "skewed"), 340, 22, 2 + 2),
    ],
)
def test_bytes_and_flops_are_those_counted_by_hand(dtypes, sizes, tokens, pages, qo_bytes):
    cost = DecodeCase(AttnSpec(4, 2, 8, 16, *dtypes), *sizes).cost
    assert cost.kv_bytes == tokens * 2 * 8 * 2 * 1  # K and V, 2 heads of 8 elements, 1 byte each
    assert cost.io_bytes == cost.kv_bytes + sizes[0] * 4 * 8 * qo_bytes + pages * 4
    assert cost.flops == tokens * 4 * 8 * (2 + 2)  # a multiply and an add in QK^T and in PV


@pytest.mark.parametrize(
    "window, tokens, pages",
    [
        (1, 3, 3),
        (17, 10 + 17 + 10, 1 + 2 + 1),
        (320, 340, 22),
        (999, 340, 22),
    ],
)
def test_a_window_leaves_its_tokens_and_their_pages_to_read_and_all_to_hold(window, tokens, pages):
    plain = DecodeCase(AttnSpec(4, 2, 8, 16), 3, 320, "10+320+10")
    case = replace(plain, spec=replace(plain.spec, window=window))
    cost = case.cost
    assert cost.kv_bytes == tokens * 2 * 8 * 2 * 2
    assert cost.flops == tokens * 4 * 8 * 4
    assert cost.io_bytes - cost.kv_bytes == 3 * 4 * 8 * (2 + 2) + pages * 4
    assert cost.cache_bytes == plain.cost.kv_bytes


@pytest.mark.parametrize(
    "page_size, fetch",
    [
        (1, 4),
        (4, 16),
        (8, 32),
        (16, 64),
        (256, 64),
    ],
)
def test_a_page_word_costs_its_own_memory_fetch_from_page_size_16_on(page_size, fetch):
    words = 2 * 256
    lengths = 2 * 24
    case = MetadataCase("decode", 2, page_size, 256 * page_size, "fixed")
    assert case.fetched_bytes == fetch * words + 4 * words + lengths
    assert replace(case, context=2**20).fetched_bytes == case.fetched_bytes
