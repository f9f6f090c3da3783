"""Costs: counted by hand, schedules against brute force, the fa3 model against its own claims."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlib.batch import AttnSpec, DecodeCase
from attnlib.cost import Ceilings, decode_cost, longest_first_makespan, predict_fa3

# 4,000 bytes and 10,000,000 FLOPs a microsecond and SM: round numbers to divide by.
CEILINGS = Ceilings(copy_gbps=4000.0, matmul_tflops=1000.0, num_sms=100)
MQA = DecodeCase(AttnSpec(8, 1, 128, 16), batch_size=1, kv_len=1000)
ITEMS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


def test_bytes_and_flops_are_those_counted_by_hand() -> None:
    # Two requests of 33 tokens in pages of 16: 66 tokens, 6 pages.
    cost = decode_cost(DecodeCase(AttnSpec(4, 2, 8, 16, "bfloat16", "float8_e4m3fn"), 2, 33))
    assert cost.kv_bytes == 66 * 2 * 8 * 2 * 1  # K and V, 2 heads of 8 elements, 1 byte each
    assert cost.io_bytes == cost.kv_bytes + 2 * 4 * 8 * (2 + 2) + 6 * 4  # q, out and page numbers
    assert cost.flops == 66 * 4 * 8 * (2 + 2)  # a multiply and an add each in QK^T and in PV


def test_an_fp8_query_still_writes_a_16_bit_output() -> None:
    fp8 = AttnSpec(4, 2, 8, 16, "float8_e4m3fn")
    cost = decode_cost(DecodeCase(fp8, 1, 16))
    assert cost.io_bytes - cost.kv_bytes == 4 * 8 * (1 + 2) + 4


def test_a_skewed_batch_costs_its_own_lengths() -> None:
    fixed = decode_cost(replace(MQA, batch_size=3, kv_len=320))
    skewed = decode_cost(replace(MQA, batch_size=3, kv_len=320, lengths="skewed"))
    assert skewed.kv_bytes * 960 == fixed.kv_bytes * (320 + 10 + 10)


def test_the_floor_is_the_bytes_at_the_measured_bandwidth() -> None:
    cost = decode_cost(MQA)
    assert cost.floor_us(CEILINGS) == pytest.approx(cost.io_bytes / 4_000_000)
    twice = replace(CEILINGS, copy_gbps=8000.0)
    assert cost.floor_us(twice) == pytest.approx(cost.floor_us(CEILINGS) / 2)


def greedy(items: list[int], workers: int) -> int:
    """Longest item first, to the least loaded worker, by linear search."""
    loads = [0] * workers
    for item in sorted(items)[::-1]:
        loads[loads.index(min(loads))] += item
    return max(loads)


def best(items: list[int], workers: int) -> int:
    """The shortest makespan of all schedules."""
    schedules = product(range(workers), repeat=len(items))
    return min(
        max(sum(i for i, w in zip(items, s, strict=True) if w == k) for k in range(workers))
        for s in schedules
    )


@given(items=st.lists(st.integers(1, 1000), min_size=1, max_size=40), workers=st.integers(1, 12))
def test_longest_first_is_the_greedy_schedule(items, workers) -> None:
    assert longest_first_makespan(np.array(items), workers) == greedy(items, workers)


@given(items=ITEMS, workers=st.integers(1, 3))
def test_longest_first_stays_within_grahams_bound_of_the_best_schedule(items, workers) -> None:
    makespan, optimum = longest_first_makespan(np.array(items), workers), best(items, workers)
    assert optimum <= makespan <= (4 / 3 - 1 / (3 * workers)) * optimum + 1e-9


@given(items=ITEMS)
def test_one_worker_does_everything_and_one_for_each_item_waits_for_the_longest(items) -> None:
    assert longest_first_makespan(np.array(items), 1) == sum(items)
    assert longest_first_makespan(np.array(items), len(items)) == max(items)


def test_longest_first_is_not_the_best_schedule_where_it_is_known_not_to_be() -> None:
    assert longest_first_makespan(np.array([2, 3, 2, 3, 2]), 2) == 7
    assert best([3, 3, 2, 2, 2], 2) == 6


@pytest.mark.parametrize("kv_len", [1, 1000, 131072])
def test_one_request_of_eight_heads_occupies_eight_sms_whatever_its_length(kv_len) -> None:
    found = predict_fa3(replace(MQA, kv_len=kv_len), CEILINGS)
    assert (found.work_items, found.busy_sms) == (8, 8)


def test_a_prediction_is_the_one_computed_by_hand() -> None:
    found = predict_fa3(MQA, CEILINGS)
    assert found.tensor_us == pytest.approx(4 * 128 * 128 * 1000 / 10_000_000)
    assert found.traffic_us == pytest.approx(8 * (1000 * 2 * 128 * 2) / 4_000_000)
    assert found.run_us == found.tensor_us


def test_a_prediction_doubles_with_the_length() -> None:
    one, two = (predict_fa3(replace(MQA, kv_len=n), CEILINGS) for n in (1000, 2000))
    assert two.tensor_us == pytest.approx(2 * one.tensor_us)
    assert two.traffic_us == pytest.approx(2 * one.traffic_us)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_every_query_head_of_a_group_reads_the_cache_again(num_kv_heads) -> None:
    spec = replace(MQA.spec, num_kv_heads=num_kv_heads)
    found = predict_fa3(replace(MQA, spec=spec), CEILINGS)
    assert found.kv_rereads == 8 // num_kv_heads
    # More KV heads read fewer times: the traffic is one read a query head all the same.
    assert found.traffic_us == predict_fa3(MQA, CEILINGS).traffic_us


def test_one_item_more_than_there_are_sms_takes_twice_as_long() -> None:
    full = predict_fa3(replace(MQA, batch_size=25), replace(CEILINGS, num_sms=200))
    over = predict_fa3(replace(MQA, batch_size=25), replace(CEILINGS, num_sms=199))
    assert (full.busy_sms, over.busy_sms) == (200, 199)
    assert over.tensor_us == pytest.approx(2 * full.tensor_us * 199 / 200)


def test_the_longest_request_alone_decides_where_sms_are_idle() -> None:
    skewed = replace(MQA, batch_size=4, kv_len=3200, lengths="skewed")
    alone = predict_fa3(replace(MQA, kv_len=3200), CEILINGS)
    assert predict_fa3(skewed, CEILINGS).tensor_us == alone.tensor_us


def test_the_tile_is_taller_at_head_dim_64() -> None:
    small = predict_fa3(replace(MQA, spec=replace(MQA.spec, head_dim=64)), CEILINGS)
    large = predict_fa3(replace(MQA, spec=replace(MQA.spec, head_dim=256)), CEILINGS)
    assert small.tensor_us == pytest.approx(4 * 64 * 192 * 1000 / 10_000_000)
    assert large.tensor_us == pytest.approx(4 * 256 * 128 * 1000 / 10_000_000)


def test_with_slow_memory_the_rereads_are_what_takes_long() -> None:
    found = predict_fa3(MQA, replace(CEILINGS, copy_gbps=100.0))
    assert found.run_us == found.traffic_us > found.tensor_us
