"""Costs and the predictions for fa3: counted by hand."""

from dataclasses import replace

import pytest

from attnlib.core.spec import AttnSpec
from attnlib.kinds.cost import Ceilings
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.metadata.case import MetadataCase
from attnlib.studies.fa3_decode_regression import predict_fa3

# 4,000 bytes and 10,000,000 FLOPs a microsecond and SM: round numbers to divide by.
CEILINGS = Ceilings(copy_gbps=4000.0, matmul_tflops=1000.0, num_sms=100)
MQA = DecodeCase(AttnSpec(8, 1, 128, 16), batch_size=1, kv_len=1000)
FP8 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("dtypes", "sizes", "tokens", "pages", "qo_bytes"),
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
    ("window", "tokens", "pages"),
    [(1, 3, 3), (17, 10 + 17 + 10, 1 + 2 + 1), (320, 340, 22), (999, 340, 22)],
)
def test_a_window_leaves_its_tokens_and_their_pages_to_read_and_all_to_hold(window, tokens, pages):
    plain = DecodeCase(AttnSpec(4, 2, 8, 16), 3, 320, "10+320+10")
    case = replace(plain, spec=replace(plain.spec, window=window))
    cost = case.cost
    assert (cost.kv_bytes, cost.flops) == (tokens * 2 * 8 * 2 * 2, tokens * 4 * 8 * 4)
    assert cost.io_bytes - cost.kv_bytes == 3 * 4 * 8 * (2 + 2) + pages * 4
    assert cost.cache_bytes == plain.cost.kv_bytes


def test_a_head_dim_without_a_tile_is_refused_listing_those_that_have_one():
    with pytest.raises(ValueError, match="head_dim must be one of .*64.*128.*256.*, got 96"):
        predict_fa3(replace(MQA, spec=AttnSpec(8, 1, 96, 16)), CEILINGS)


@pytest.mark.parametrize(
    ("spec", "batch_size", "num_sms", "items", "reads", "padded"),
    [
        # Of 1,000 tokens whole tiles of 96 are 1,056, of 32 they are 1,024; times rows of a tile.
        (AttnSpec(8, 1, 128, 16), 1, 100, 8, 1, 128 * 1056),
        (AttnSpec(8, 1, 64, 16), 1, 100, 8, 1, 192 * 1056),
        (AttnSpec(8, 1, 256, 16), 1, 100, 8, 1, 128 * 1024),
        (AttnSpec(8, 1, 128, 16), 25, 200, 200, 1, 128 * 1056),  # all eight heads at once
        (AttnSpec(8, 1, 128, 16), 25, 199, 200, 2, 2 * 128 * 1056),  # seven, then one
        (AttnSpec(8, 1, 128, 16), 199, 199, 1592, 8, 8 * 128 * 1056),  # one head at a time
        (AttnSpec(8, 4, 128, 16), 398, 199, 3184, 2, 16 * 128 * 1056),  # half of one
    ],
)
def test_a_prediction_is_the_one_computed_by_hand(spec, batch_size, num_sms, items, reads, padded):
    case = replace(MQA, spec=spec, batch_size=batch_size)
    predicted = predict_fa3(case, replace(CEILINGS, num_sms=num_sms))
    tensor_us = 4 * spec.head_dim * padded / (1e9 / num_sms)
    traffic_us = reads * spec.num_kv_heads * batch_size * 1000 * 2 * spec.head_dim * 2 / 4e6
    assert predicted["explained"] == pytest.approx(max(tensor_us, traffic_us))
    assert (predicted["work_items"], predicted["busy_sms"]) == (items, min(items, num_sms))


@pytest.mark.parametrize(("page_size", "fetch"), [(1, 4), (4, 16), (8, 32), (16, 64), (256, 64)])
def test_a_page_word_costs_its_own_memory_fetch_from_page_size_16_on(page_size, fetch):
    words, lengths = 2 * 256, 2 * 24
    case = MetadataCase("decode", 2, page_size, 256 * page_size, "fixed")
    assert case.fetched_bytes == fetch * words + 4 * words + lengths
    assert replace(case, context=2**20).fetched_bytes == case.fetched_bytes
