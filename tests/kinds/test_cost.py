"""Costs: counted by hand, plans against brute force, the fa3 model against its own claims."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlib.core.policy.plans import FA3_TILES, fa3_sm_tokens
from attnlib.core.spec import AttnSpec
from attnlib.kinds.cost import (
    Ceilings,
    decode_cost,
    extend_cost,
    fa2_tile_rows,
    metadata_cost,
    predict_fa3,
)
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import ExtendCase
from attnlib.kinds.lengths import sample_seq_lens
from attnlib.kinds.metadata.case import MetadataCase

# 4,000 bytes and 10,000,000 FLOPs a microsecond and SM: round numbers to divide by.
CEILINGS = Ceilings(copy_gbps=4000.0, matmul_tflops=1000.0, num_sms=100)
MQA = DecodeCase(AttnSpec(8, 1, 128, 16), batch_size=1, kv_len=1000)
LENGTHS = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


def test_bytes_and_flops_are_those_counted_by_hand():
    # Two requests of 33 tokens in pages of 16: 66 tokens, 6 pages.
    cost = decode_cost(DecodeCase(AttnSpec(4, 2, 8, 16, "bfloat16", "float8_e4m3fn"), 2, 33))
    assert cost.kv_bytes == 66 * 2 * 8 * 2 * 1  # K and V, 2 heads of 8 elements, 1 byte each
    assert cost.io_bytes == cost.kv_bytes + 2 * 4 * 8 * (2 + 2) + 6 * 4  # q, out and page numbers
    assert cost.flops == 66 * 4 * 8 * (2 + 2)  # a multiply and an add each in QK^T and in PV


def test_an_fp8_query_still_writes_a_16_bit_output():
    fp8 = AttnSpec(4, 2, 8, 16, "float8_e4m3fn")
    cost = decode_cost(DecodeCase(fp8, 1, 16))
    assert cost.io_bytes - cost.kv_bytes == 4 * 8 * (1 + 2) + 4


def test_a_skewed_batch_costs_its_own_lengths():
    fixed = decode_cost(replace(MQA, batch_size=3, kv_len=320))
    skewed = decode_cost(replace(MQA, batch_size=3, kv_len=320, lengths="skewed"))
    assert skewed.kv_bytes * 960 == fixed.kv_bytes * (320 + 10 + 10)


def test_the_floor_is_the_bytes_at_the_measured_bandwidth():
    cost = decode_cost(MQA)
    assert cost.floor_us(CEILINGS) == pytest.approx(cost.io_bytes / 4_000_000)
    twice = replace(CEILINGS, copy_gbps=8000.0)
    assert cost.floor_us(twice) == pytest.approx(cost.floor_us(CEILINGS) / 2)


@pytest.mark.parametrize(("q_len", "longer"), [(1, "bytes"), (1000, "flops")])
def test_the_roof_is_the_longer_of_bytes_and_flops(q_len, longer):
    cost = extend_cost(ExtendCase(MQA, "dllm_extend", q_len))
    times = {"bytes": cost.floor_us(CEILINGS), "flops": cost.flops / 1e9}
    assert (
        cost.roof_us(CEILINGS) == pytest.approx(times[longer]) == pytest.approx(max(times.values()))
    )


def spec_of(heads, head_dim=128):
    return AttnSpec(heads, 1, head_dim, 16)


def busiest(lens, spec, num_sms):
    return int(fa3_sm_tokens(np.array(lens), spec, num_sms=num_sms)[0].max())


def whole_tiles(length, head_dim=128):
    return math.ceil(length / FA3_TILES[head_dim][1]) * FA3_TILES[head_dim][1]


def simulate(lens, spec, num_sms):
    """The plan by linear search: head by head, longest request first, to the cheapest SM."""
    costs, tokens = [0] * num_sms, [0] * num_sms
    for _ in range(spec.num_qo_heads):
        for length in sorted(lens)[::-1]:
            sm = costs.index(min(costs))
            costs[sm] += 2 * FA3_TILES[spec.head_dim][0] + length
            tokens[sm] += whole_tiles(length, spec.head_dim)
    return max(tokens)


def best(items, workers):
    """The least load of the busiest worker over all schedules."""
    schedules = product(range(workers), repeat=len(items))
    return min(
        max(sum(i for i, w in zip(items, s, strict=True) if w == k) for k in range(workers))
        for s in schedules
    )


@given(
    lens=LENGTHS,
    heads=st.integers(1, 8),
    num_sms=st.integers(1, 24),
    head_dim=st.sampled_from(list(FA3_TILES)),
)
def test_the_busiest_sm_is_that_of_a_plan_followed_step_by_step(lens, heads, num_sms, head_dim):
    spec = spec_of(heads, head_dim)
    assert busiest(lens, spec, num_sms) == simulate(lens, spec, num_sms)


@given(lens=st.lists(st.integers(1, 500), min_size=1, max_size=3), num_sms=st.integers(1, 3))
def test_no_plan_beats_the_best_of_all_schedules(lens, num_sms):
    items = [whole_tiles(length) for length in lens] * 2
    assert best(items, num_sms) <= busiest(lens, spec_of(2), num_sms) <= sum(items)


@given(lens=LENGTHS, heads=st.integers(1, 8))
def test_one_sm_does_everything_and_one_for_each_item_the_longest_alone(lens, heads):
    tokens = [whole_tiles(length) for length in lens]
    assert busiest(lens, spec_of(heads), 1) == heads * sum(tokens)
    assert busiest(lens, spec_of(heads), heads * len(lens)) == max(tokens)


def test_a_long_request_of_the_last_head_lands_on_a_loaded_sm():
    # Three SMs, two heads of one long and two short requests: the second long one finds no SM idle.
    assert busiest([9600, 96, 96], spec_of(2), 3) == 9600 + 96
    assert best([9600, 9600, 96, 96, 96, 96], 3) == 9600


@pytest.mark.parametrize(("length", "tokens"), [(1, 96), (96, 96), (97, 192)])
def test_an_sm_works_in_whole_tiles(length, tokens):
    assert busiest([length], spec_of(1), 1) == tokens


def test_a_head_dim_without_a_tile_is_refused_listing_those_that_have_one():
    with pytest.raises(ValueError, match="head_dim must be one of .*64.*128.*256.*, got 96"):
        predict_fa3(replace(MQA, spec=spec_of(8, 96)), CEILINGS)


def test_a_prediction_is_the_one_computed_by_hand():
    found = predict_fa3(MQA, CEILINGS)
    assert (found.work_items, found.busy_sms) == (8, 8)
    assert found.tensor_us == pytest.approx(4 * 128 * 128 * 1056 / 10_000_000)
    assert found.traffic_us == pytest.approx(8 * (1000 * 2 * 128 * 2) / 4_000_000)
    assert found.run_us == found.tensor_us


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_every_query_head_of_a_group_reads_the_cache_again(num_kv_heads):
    spec = replace(MQA.spec, num_kv_heads=num_kv_heads)
    found = predict_fa3(replace(MQA, spec=spec), CEILINGS)
    assert found.kv_rereads == 8 // num_kv_heads
    # More KV heads read fewer times: the traffic is one read a query head all the same.
    assert found.traffic_us == predict_fa3(MQA, CEILINGS).traffic_us


def test_one_item_more_than_there_are_sms_takes_twice_as_long():
    full = predict_fa3(replace(MQA, batch_size=25), replace(CEILINGS, num_sms=200))
    over = predict_fa3(replace(MQA, batch_size=25), replace(CEILINGS, num_sms=199))
    assert (full.busy_sms, over.busy_sms) == (200, 199)
    assert over.tensor_us == pytest.approx(2 * full.tensor_us * 199 / 200)


def test_the_tile_depends_on_the_head_dim():
    small = predict_fa3(replace(MQA, spec=replace(MQA.spec, head_dim=64)), CEILINGS)
    large = predict_fa3(replace(MQA, spec=replace(MQA.spec, head_dim=256)), CEILINGS)
    assert small.tensor_us == pytest.approx(4 * 64 * 192 * 1056 / 10_000_000)
    assert large.tensor_us == pytest.approx(4 * 256 * 128 * 1024 / 10_000_000)


def test_with_slow_memory_the_rereads_are_what_takes_long():
    found = predict_fa3(MQA, replace(CEILINGS, copy_gbps=100.0))
    assert found.run_us == found.traffic_us > found.tensor_us


@pytest.mark.parametrize(
    ("batch_size", "q_len", "head_dim", "eager", "graph"),
    [
        (1, 4, 128, 16, 16),  # 16 packed rows, whoever has them
        (1, 5, 128, 64, 64),
        (2, 4, 128, 16, 64),  # 8 rows, of which one request could have 7: 28 packed
        (32, 4, 128, 16, 128),
        (32, 8, 128, 64, 128),
        (32, 17, 128, 128, 128),
        (32, 17, 256, 64, 64),  # no wider tile at head_dim 256
    ],
)
def test_fa2_cuts_its_tiles_by_the_mean_request_or_for_a_graph_by_the_largest_there_could_be(
    batch_size, q_len, head_dim, eager, graph
):
    cached = DecodeCase(AttnSpec(8, 2, head_dim, 1), batch_size, kv_len=100)
    case = ExtendCase(cached, "target_verify", q_len)
    assert [fa2_tile_rows(case, cuda_graph=on) for on in (False, True)] == [eager, graph]


@pytest.mark.parametrize(
    ("page_size", "sector", "fetch"),
    [(1, 4, 4), (4, 16, 16), (8, 32, 32), (16, 32, 64), (256, 32, 64)],
)
def test_a_page_word_costs_its_own_sector_from_page_size_8_and_its_own_fetch_from_16(
    page_size, sector, fetch
):
    words, lengths = 512, 24
    cost = metadata_cost(MetadataCase("decode", 1, page_size, words * page_size, "fixed"))
    rest = lengths + 4 * words
    assert cost.words == words
    assert (cost.sector_bytes, cost.fetch_bytes) == (sector * words + rest, fetch * words + rest)


def test_the_metadata_needs_each_live_word_read_and_written_once():
    case = MetadataCase("decode", 7, 4, 1000, seed=3)
    words = int((-(-sample_seq_lens(case) // 4)).sum())
    assert metadata_cost(case).needed_bytes == 8 * words + 7 * 24
