"""FlashInfer's page arrays, word for word against the oracle; on a GPU where there is one.

Without a GPU Triton's interpreter runs the same kernel (TRITON_INTERPRET=1, set by conftest).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.metadata_cases import (
    DEVICE,
    MISSED,
    POISON,
    Shape,
    assert_kv_right,
    kv_arguments,
    poison,
    upstream_shapes,
)

from attnlib.core.metadata import kv_indices
from attnlib.core.metadata.kv_indices import build_kv_indices
from attnlib.kinds.metadata import eager, oracle

BUILDERS = (build_kv_indices, eager.build_kv_indices)
OUTPUTS = ("kv_indptr", "kv_indices", "kv_last_page_len")
ROWS_A_PROGRAM = {
    "two_rows_a_program": Shape(515, 90, 1),
    "four_rows_a_program": Shape(1037, 40, 2, holes=True),
    "eight_rows_a_program_page_size_1": Shape(2051, 9, 1),
    "eight_rows_a_program_several_turns": Shape(2049, 500, 1),
    "eight_rows_a_program_page_size_16": Shape(2050, 130, 16),
}
SHAPES = {
    **{name: shape for name, shape in upstream_shapes().items() if not shape.swa},
    **{name: replace(shape, swa=False) for name, shape in MISSED.items()},
    **ROWS_A_PROGRAM,
}


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_word_is_right_and_the_rest_is_untouched(
    name: str, build: Callable[..., None]
) -> None:
    call = kv_arguments(SHAPES[name])
    build(**call)
    assert_kv_right(call)


def test_the_oracle_gives_flashinfers_own_example() -> None:
    kv_indptr, pages, last_page_len = oracle.kv_indices(
        np.array([17, 0, 4]),
        np.array([2, 0, 1]),
        np.arange(60).reshape(3, 20) * 8,
        page_size=8,
        max_pages=3,
    )
    assert kv_indptr.tolist() == [0, 3, 3, 4]
    assert pages.tolist() == [40, 48, 56, 20]
    assert last_page_len.tolist() == [1, 0, 4]


@pytest.mark.parametrize("build", BUILDERS)
def test_flashinfers_formula_gives_the_lengths_back(build: Callable[..., None]) -> None:
    lens = [0, 1, 15, 16, 17, 32, 0]
    call = kv_arguments(Shape(7, 32, 16), lens)
    build(**call)
    full_pages = (call["kv_indptr"].diff() - 1).clamp(min=0)
    assert (full_pages * 16 + call["kv_last_page_len"]).tolist() == lens
    assert call["kv_last_page_len"].tolist() == [0, 1, 15, 16, 1, 16, 0]


@pytest.mark.parametrize("build", BUILDERS)
def test_zero_pages_give_empty_requests(build: Callable[..., None]) -> None:
    call = kv_arguments(Shape(3, 40)) | {"max_pages": 0}
    build(**call)
    assert_kv_right(call)
    assert call["kv_indptr"].tolist() == [0] * 4
    assert call["kv_last_page_len"].tolist() == [0] * 3


@pytest.mark.parametrize("build", BUILDERS)
def test_an_empty_batch_writes_the_first_prefix_sum(build: Callable[..., None]) -> None:
    call = kv_arguments(Shape(0, 16))
    build(**call)
    assert_kv_right(call)


@pytest.mark.parametrize("build", BUILDERS)
def test_lengths_beyond_max_pages_end_in_a_full_page(build: Callable[..., None]) -> None:
    call = kv_arguments(Shape(4, 64, 4), [64, 18, 19, 23]) | {"max_pages": 5}
    build(**call)
    assert_kv_right(call)
    assert call["kv_last_page_len"].tolist() == [4, 2, 3, 4]


@pytest.mark.parametrize("build", BUILDERS)
def test_negative_lengths_are_empty_requests(build: Callable[..., None]) -> None:
    call = kv_arguments(Shape(3, 20, 4), [-7, 20, -1])
    build(**call)
    assert_kv_right(call)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("capacity", [0, 1, 39, 57])
def test_pages_that_do_not_fit_are_dropped_and_counted(
    capacity: int, build: Callable[..., None]
) -> None:
    call = kv_arguments(Shape(4, 20, 1), [20, 20, 3, 20])
    buffer = torch.full((100,), POISON, dtype=torch.int32, device=DEVICE)
    call["kv_indices"] = buffer[:capacity]
    build(**call)
    assert_kv_right(call)
    assert call["kv_indptr"][-1] == 63
    assert (buffer[capacity:] == POISON).all()


def test_a_pool_row_out_of_range_reads_nothing_and_gives_minus_one() -> None:
    call = kv_arguments(Shape(3, 32, 4), [32, 32, 32])
    call["req_pool_indices"][1] = 10_000
    call["req_pool_indices"][2] = -1
    build_kv_indices(**call)
    assert call["kv_indices"][8:24].unique().tolist() == [-1]


@given(data=st.data())
@settings(max_examples=40)
def test_random_shapes_are_right(data: st.DataObject) -> None:
    shape = Shape(
        batch=data.draw(st.integers(0, 24)),
        max_seq_len=data.draw(st.integers(1, 700)),
        page_size=2 ** data.draw(st.integers(0, 8)),
        delta=data.draw(st.integers(0, 70)),
        lens_dtype=data.draw(st.sampled_from((torch.int32, torch.int64))),
        rows_dtype=data.draw(st.sampled_from((torch.int32, torch.int64))),
        extra_tokens=data.draw(st.integers(0, 9)),
        holes=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 1000)),
    )
    most = shape.batch * shape.max_pages
    call = kv_arguments(shape, capacity=data.draw(st.integers(0, most + 9)))
    call["max_pages"] = data.draw(st.integers(0, shape.max_pages))
    for build in BUILDERS:
        poison(call, OUTPUTS)
        build(**call)
        assert_kv_right(call)


def test_the_same_buffers_take_new_lengths_and_rows() -> None:
    call = kv_arguments(Shape(6, 200, 4))
    build_kv_indices(**call)
    call["seq_lens"].copy_(call["seq_lens"].flip(0) - 13)
    call["req_pool_indices"].copy_(call["req_pool_indices"].roll(1))
    poison(call, OUTPUTS)
    build_kv_indices(**call | {"seq_len_delta": 3, "max_pages": 41})
    assert_kv_right(call | {"seq_len_delta": 3, "max_pages": 41})


def test_buffers_off_a_16_byte_address_are_right() -> None:
    call = kv_arguments(Shape(4, 64, 1))
    for name in ("seq_lens", "req_pool_indices", *OUTPUTS):
        call[name] = torch.cat([call[name][:1], call[name]])[1:]
    build_kv_indices(**call)
    build_kv_indices(**call)
    assert_kv_right(call)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "lengths of floats": (
        lambda c: {"seq_lens": c["seq_lens"].float()},
        "seq_lens must be [any] int32 or int64, got [4] float32",
    ),
    "lengths in two dimensions": (
        lambda c: {"seq_lens": c["seq_lens"][None]},
        "seq_lens must be [any] int32 or int64, got [1, 4] int64",
    ),
    "a list": (lambda c: {"seq_lens": [1, 2]}, "seq_lens must be a tensor, got list"),
    "nothing": (lambda c: {"kv_indices": None}, "kv_indices must be a tensor, got NoneType"),
    "lengths with strides": (
        lambda c: {"seq_lens": c["seq_lens"].repeat_interleave(2)[::2]},
        "seq_lens must be contiguous",
    ),
    "too few rows": (
        lambda c: {"req_pool_indices": c["req_pool_indices"][:3]},
        "req_pool_indices must be [4] int32 or int64, got [3]",
    ),
    "rows of int16": (
        lambda c: {"req_pool_indices": c["req_pool_indices"].short()},
        "req_pool_indices must be [4] int32 or int64, got [4] int16",
    ),
    "slots of int64": (
        lambda c: {"req_to_token": c["req_to_token"].long()},
        "req_to_token must be [any, any] int32, got",
    ),
    "a slice of a wider pool": (
        lambda c: {"req_to_token": c["req_to_token"][:, :70]},
        "req_to_token must be contiguous",
    ),
    "prefix sums one short": (
        lambda c: {"kv_indptr": c["kv_indptr"][:-1]},
        "kv_indptr must be [5] int32, got [4] int32",
    ),
    "prefix sums of int64": (
        lambda c: {"kv_indptr": c["kv_indptr"].long()},
        "kv_indptr must be [5] int32, got [5] int64",
    ),
    "pages of int64": (
        lambda c: {"kv_indices": c["kv_indices"].long()},
        "kv_indices must be [any] int32, got [74] int64",
    ),
    "pages as a table": (
        lambda c: {"kv_indices": c["kv_indices"].view(2, -1)},
        "kv_indices must be [any] int32, got [2, 37] int32",
    ),
    "every other page": (
        lambda c: {"kv_indices": c["kv_indices"][::2]},
        "kv_indices must be contiguous (a copy would not be the caller's buffer)",
    ),
    "last pages of another batch": (
        lambda c: {"kv_last_page_len": c["kv_last_page_len"][:3]},
        "kv_last_page_len must be [4] int32, got [3] int32",
    ),
    "page_size 3": (lambda c: {"page_size": 3}, "page_size must be a power of two, got 3"),
    "page_size 0": (lambda c: {"page_size": 0}, "page_size must be an integer in 1..2147483647"),
    "page_size 4.0": (lambda c: {"page_size": 4.0}, "page_size must be an integer"),
    "max_pages -1": (lambda c: {"max_pages": -1}, "max_pages must be an integer in 0.."),
    "max_pages True": (lambda c: {"max_pages": True}, "max_pages must be an integer in 0.."),
    "max_pages beyond the pool": (
        lambda c: {"max_pages": 19},
        "max_pages must be <= 18 (int32 counts the pages of 4 requests, req_to_token 72 tokens a "
        "request, page_size 4), got 19",
    ),
    "a negative delta": (
        lambda c: {"seq_len_delta": -1},
        "seq_len_delta must be an integer in 0..2147483647, got -1",
    ),
    "an output on another device": (
        lambda c: {"kv_indices": c["kv_indices"].to("meta")},
        "kv_indices must be on seq_lens's device",
    ),
    "last pages over the lengths": (
        lambda c: dict.fromkeys(("seq_lens", "kv_last_page_len"), c["seq_lens"].int()),
        "kv_last_page_len must not share memory with seq_lens",
    ),
    "prefix sums over the lengths": (
        lambda c: {"seq_lens": c["kv_indptr"][:4]},
        "kv_indptr must not share memory with seq_lens",
    ),
}


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_before_anything_is_written(
    name: str, build: Callable[..., None]
) -> None:
    call = kv_arguments(Shape(4, 64, 4))
    # The second time round the signature of the right call is known.
    build(**call)
    poison(call, OUTPUTS)
    change, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        build(**call | change(call))
    for output in OUTPUTS:
        assert (call[output] == POISON).all()


def test_a_sum_of_pages_beyond_int32_is_refused() -> None:
    def requests(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device="meta")

    pool = torch.empty((1, 2**20), dtype=torch.int32, device="meta")
    names = ("seq_lens", "req_pool_indices", "kv_last_page_len", "kv_indices")
    call = {name: requests(4096) for name in names}
    call |= {"kv_indptr": requests(4097), "req_to_token": pool}
    with pytest.raises(ValueError, match="max_pages must be <= 524287 .int32 counts the pages of"):
        build_kv_indices(**call, page_size=1, max_pages=2**19)


def test_without_a_gpu_and_without_the_interpreter_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attnlib.core.metadata.launch.interpreting", lambda: False)
    kv_indices.LAUNCHER.known.clear()
    call = {k: v.cpu() if torch.is_tensor(v) else v for k, v in kv_arguments(Shape(2, 8)).items()}
    with pytest.raises(ValueError, match="must be on a CUDA device .or set TRITON_INTERPRET=1"):
        build_kv_indices(**call)


@pytest.mark.gpu
@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("batch", [12, 2500])
def test_a_graph_replays_with_lengths_and_rows_changed_in_place(
    batch: int, build: Callable[..., None]
) -> None:
    call = kv_arguments(Shape(batch, 3000, 4))
    build(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build(**call)
    for shift in (1, 7, 4096):
        call["seq_lens"].copy_((call["seq_lens"] * 3 + shift) % 3000)
        call["req_pool_indices"].copy_(call["req_pool_indices"].roll(shift))
        poison(call, OUTPUTS)
        graph.replay()
        assert_kv_right(call)


@pytest.mark.gpu
def test_calls_in_a_row_each_see_what_the_one_before_wrote() -> None:
    # Overlapping launches: a call must wait for the kernel that changes its input.
    call = kv_arguments(Shape(3, 3000, 1))
    graph = torch.cuda.CUDAGraph()
    build_kv_indices(**call)
    outputs = []
    with torch.cuda.graph(graph):
        for _ in range(20):
            call["seq_lens"].sub_(1)
            build_kv_indices(**call)
            outputs.append(call["kv_indptr"].clone())
    start = call["seq_lens"].clone()
    graph.replay()
    for step, seen in enumerate(outputs, 1):
        assert seen.tolist() == [0, *(start - step).cumsum(0).tolist()]


@pytest.mark.gpu
def test_another_size_compiles_nothing() -> None:
    build_kv_indices(**kv_arguments(Shape(3, 900, 1)))

    def compiled() -> int:
        caches = kv_indices.kv_indices_kernel.device_caches.values()
        return sum(len(cache[0]) for cache in caches)

    before = compiled()
    for delta, max_pages in ((1, 700), (2, 16), (16, 1), (0, 0)):
        sizes = {"seq_len_delta": delta, "max_pages": max_pages}
        build_kv_indices(**kv_arguments(Shape(9, 1600, 1)) | sizes)
    assert compiled() == before


@pytest.mark.gpu
def test_the_direct_launch_writes_what_tritons_own_launch_writes() -> None:
    call = kv_arguments(Shape(50, 4000, 2))
    build_kv_indices(**call)
    poison(call, OUTPUTS)
    build_kv_indices(**call)
    assert_kv_right(call)
    kv_indices.LAUNCHER.known.clear()
    poison(call, OUTPUTS)
    build_kv_indices(**call)
    assert_kv_right(call)
