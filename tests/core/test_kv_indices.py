"""What is special to FlashInfer's page arrays: empty requests, full last pages, and no room."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.metadata_cases import (
    DEVICE,
    DRAWN_SHAPES,
    KV_INDICES,
    POISON,
    Shape,
    kv_arguments,
)

from attnlib.core import build_kv_indices


@pytest.mark.parametrize(
    "page_size, lens, max_pages, last",
    [
        (
            16,
            [0, 1, 15, 16, 17, 32, 0],
            4,
            [0, 1, 15, 16, 1, 16, 0],
        ),
        (
            4,
            [64, 18, 19, 23],
            5,
            [4, 2, 3, 4],
        ),  # beyond max_pages: cut off in a full page
        (4, [-7, 20, -1], 5, [0, 4, 0]),  # below zero: empty
        (4, [40, 1, 7], 0, [0, 0, 0]),  # no page counts
    ],
)
def test_flashinfers_formula_gives_lengths_at_the_edges_back(page_size, lens, max_pages, last):
    call = kv_arguments(Shape(len(lens), 64, page_size), lens) | {"max_pages": max_pages}
    build_kv_indices(**call)
    KV_INDICES.assert_right(call)
    assert call["kv_last_page_len"].tolist() == last
    full_pages = (call["kv_indptr"].diff() - 1).clamp(min=0)
    counted = [min(max(0, n), max_pages * page_size) for n in lens]
    assert (full_pages * page_size + call["kv_last_page_len"]).tolist() == counted


@given(data=st.data())
@settings(max_examples=20)
def test_of_random_capacities_and_widths_what_does_not_fit_is_dropped_and_counted(data):
    shape = data.draw(DRAWN_SHAPES)
    capacity = data.draw(st.integers(0, shape.batch * shape.max_pages + 9))
    call = kv_arguments(shape, capacity=capacity + 40)
    buffer = call["kv_indices"]
    call["kv_indices"] = buffer[:capacity]
    call["max_pages"] = data.draw(st.integers(0, shape.max_pages))
    build_kv_indices(**call)
    KV_INDICES.assert_right(call)
    assert (buffer[capacity:] == POISON).all()


@pytest.mark.parametrize("capacity", [0, 1, 701, 5000])
@pytest.mark.parametrize("name", ["four_rows_per_program", "four_rows_per_program_page_size_1"])
def test_where_programs_have_several_rows_what_does_not_fit_is_dropped(name, capacity):
    call = kv_arguments(KV_INDICES.shapes[name], capacity=capacity)
    build_kv_indices(**call | {"max_pages": call["max_pages"] - 2})
    KV_INDICES.assert_right(call | {"max_pages": call["max_pages"] - 2})


def test_a_sum_of_pages_beyond_int32_is_refused():
    names = ("seq_lens", "req_pool_indices", "kv_last_page_len", "kv_indices")
    shapes = dict.fromkeys(names, 4096) | {"kv_indptr": 4097, "req_to_token": (1, 2**20)}
    call = {n: torch.empty(s, dtype=torch.int32, device="meta") for n, s in shapes.items()}
    with pytest.raises(ValueError, match="max_pages must be <= 524287 .int32 counts the pages of"):
        build_kv_indices(**call, page_size=1, max_pages=2**19)


def test_tokens_outside_a_row_are_not_read_and_give_minus_one():
    call = kv_arguments(Shape(4, 20, 1), [20, 20, 20, 20])
    call["kv_start"] = torch.tensor([20, 8, -1, 2**40], device=DEVICE)
    build_kv_indices(**call)
    assert call["kv_indices"][8:20].tolist() == [-1] * 12
    assert call["kv_indices"][40:80].tolist() == [-1] * 40
    assert (call["kv_indices"][:8] >= 0).all()
    assert (call["kv_indices"][20:40] >= 0).all()


@pytest.mark.parametrize(
    "length, pages, last",
    [
        (2**31 - 1, 1, 16),
        (2**31 - 16, 1, 16),
        (2**40, 1, 16),
        (-(2**32) + 5, 0, 0),
        (-(2**31), 0, 0),
    ],
)
@pytest.mark.parametrize("delta", [0, 3])
def test_a_length_at_or_beyond_the_edge_of_int32_does_not_wrap(length, pages, last, delta):
    call = kv_arguments(Shape(2, 16, 16), [16, 16])
    call["seq_lens"] = torch.tensor([length, 7], device=DEVICE)
    build_kv_indices(**call | {"seq_len_delta": delta, "max_pages": 1})
    assert call["kv_indptr"].tolist() == [0, pages, pages + 1]
    assert call["kv_last_page_len"].tolist() == [last, 7 + delta]


def test_pages_without_room_are_refused_where_a_check_is_asked_for():
    call = kv_arguments(Shape(2, 20, 4), [20, 5], capacity=7)
    build_kv_indices(**call, check=True)
    call["kv_indices"] = call["kv_indices"][:6]
    build_kv_indices(**call)
    with pytest.raises(ValueError, match="kv_indices must have room for 7 pages, got 6"):
        build_kv_indices(**call, check=True)
    empty = kv_arguments(Shape(0, 20, 4))
    build_kv_indices(**empty, check=True)
