"""The fused decode metadata, word for word against the oracle; on a GPU where there is one.

Without a GPU Triton's interpreter runs the same kernel (TRITON_INTERPRET=1, set by conftest).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.metadata_cases import (
    DEVICE,
    MISSED,
    POISON,
    Shape,
    arguments,
    assert_right,
    upstream_shapes,
)

from attnlib.core.metadata import decode
from attnlib.core.metadata.decode import build_decode_metadata
from attnlib.kinds.metadata import eager

SHAPES = {**upstream_shapes(), **MISSED}
VARIED = [10, 50, 100, 200, 300, 450, 500, 512]


@pytest.mark.parametrize("name", SHAPES)
def test_every_word_is_right_and_every_tail_is_untouched(name: str) -> None:
    lens = VARIED if name == "varied_sequence_lengths" else None
    call = arguments(SHAPES[name], lens)
    build_decode_metadata(**call)
    assert_right(call)


@pytest.mark.parametrize("name", SHAPES)
def test_the_op_by_op_code_gives_the_same_live_words(name: str) -> None:
    call = arguments(SHAPES[name])
    eager.build_decode_metadata(**call)
    assert_right(call, all_columns=True)
    assert (call["page_table"][:, : call["max_pages"]] != POISON).all()
    assert (call["page_table"][:, call["max_pages"] :] == POISON).all()


def test_zero_pages_write_lengths_only() -> None:
    call = arguments(Shape(3, 40)) | {"max_pages": 0}
    build_decode_metadata(**call)
    assert_right(call)
    assert (call["page_table"] == POISON).all()


def test_an_empty_batch_writes_the_first_prefix_sum() -> None:
    call = arguments(Shape(0, 16))
    build_decode_metadata(**call)
    assert call["cu_seqlens_k"].tolist() == [0]


def test_requests_of_length_zero_have_no_live_page() -> None:
    call = arguments(Shape(3, 20, 4), [0, 20, 0])
    build_decode_metadata(**call)
    assert_right(call)


def test_lengths_beyond_max_pages_stop_there() -> None:
    call = arguments(Shape(2, 64, 4)) | {"max_pages": 5}
    build_decode_metadata(**call)
    assert_right(call)


def test_a_pool_row_out_of_range_reads_nothing_and_gives_minus_one() -> None:
    call = arguments(Shape(3, 32, 4), [32, 32, 32])
    call["req_pool_indices"][1] = 10_000
    call["req_pool_indices"][2] = -1
    build_decode_metadata(**call)
    assert call["page_table"][1:, :8].unique().tolist() == [-1]


def test_a_slot_beyond_the_window_map_reads_nothing_and_gives_minus_one() -> None:
    call = arguments(Shape(1, 8, 1, swa=True), [8])
    call["req_to_token"].fill_(2_000_000)
    build_decode_metadata(**call)
    assert call["swa_page_table"][0, :8].tolist() == [-1] * 8


@given(data=st.data())
@settings(max_examples=60)
def test_random_shapes_are_right(data: st.DataObject) -> None:
    shape = Shape(
        batch=data.draw(st.integers(0, 40)),
        max_seq_len=data.draw(st.integers(1, 700)),
        page_size=2 ** data.draw(st.integers(0, 8)),
        delta=data.draw(st.integers(0, 70)),
        swa=data.draw(st.booleans()),
        lens_dtype=data.draw(st.sampled_from((torch.int32, torch.int64))),
        rows_dtype=data.draw(st.sampled_from((torch.int32, torch.int64))),
        extra_columns=data.draw(st.integers(0, 9)),
        extra_tokens=data.draw(st.integers(0, 9)),
        holes=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 1000)),
    )
    call = arguments(shape)
    build_decode_metadata(**call)
    assert_right(call)


def test_the_same_buffers_take_new_lengths_and_rows() -> None:
    call = arguments(Shape(6, 200, 4))
    build_decode_metadata(**call)
    call["seq_lens"].copy_(call["seq_lens"].flip(0) - 13)
    call["req_pool_indices"].copy_(call["req_pool_indices"].roll(1))
    call["page_table"].fill_(POISON)
    build_decode_metadata(**call | {"seq_len_delta": 3, "max_pages": 41})
    assert_right(call | {"seq_len_delta": 3, "max_pages": 41})


def test_buffers_off_a_16_byte_address_are_right() -> None:
    call = arguments(Shape(4, 64, 1))
    for name in ("seq_lens", "cache_seqlens"):
        padded = torch.cat([call[name][:1], call[name]])
        call[name] = padded[1:]
    table = torch.full((call["page_table"].numel() + 1,), POISON, dtype=torch.int32, device=DEVICE)
    call["page_table"] = table[1:].view_as(call["page_table"])
    build_decode_metadata(**call)
    build_decode_metadata(**call)
    assert_right(call)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


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
    "too few rows": (
        lambda c: {"req_pool_indices": c["req_pool_indices"][:3]},
        "req_pool_indices must be [4] int32 or int64, got [3]",
    ),
    "slots of int64": (
        lambda c: {"req_to_token": c["req_to_token"].long()},
        "req_to_token must be [any, any] int32, got",
    ),
    "slots with strides": (
        lambda c: {"req_to_token": transposed(c["req_to_token"])},
        "req_to_token must be contiguous",
    ),
    "lengths out in int64": (
        lambda c: {"cache_seqlens": c["cache_seqlens"].long()},
        "cache_seqlens must be [4] int32, got [4] int64",
    ),
    "prefix sums one short": (
        lambda c: {"cu_seqlens_k": c["cu_seqlens_k"][:-1]},
        "cu_seqlens_k must be [5] int32, got [4] int32",
    ),
    "a slice of a wider table": (
        lambda c: {"page_table": c["page_table"][:, :12]},
        "page_table must be contiguous (a copy would not be the caller's buffer)",
    ),
    "a table of another batch": (
        lambda c: {"page_table": c["page_table"][:3].contiguous()},
        "page_table must be [4, any] int32, got [3",
    ),
    "page_size 3": (lambda c: {"page_size": 3}, "page_size must be a power of two, got 3"),
    "page_size 0": (lambda c: {"page_size": 0}, "page_size must be an integer in 1..2147483647"),
    "page_size 4.0": (lambda c: {"page_size": 4.0}, "page_size must be an integer"),
    "max_pages -1": (lambda c: {"max_pages": -1}, "max_pages must be an integer in 0.."),
    "max_pages True": (lambda c: {"max_pages": True}, "max_pages must be an integer in 0.."),
    "max_pages beyond the table": (
        lambda c: {"max_pages": 99},
        "max_pages must be <= 18 (page_table has 26 columns, req_to_token 72 tokens a request, "
        "page_size 4), got 99",
    ),
    "a negative delta": (
        lambda c: {"seq_len_delta": -1},
        "seq_len_delta must be an integer in 0..2147483647, got -1",
    ),
    "a map alone": (
        lambda c: {"swa_page_table": None},
        "swa_page_table must be given where the other one of the SWA pair is",
    ),
    "a window's table alone": (lambda c: {"swa_slot_map": None}, "swa_slot_map must be given"),
    "a narrower window's table": (
        lambda c: {"swa_page_table": c["swa_page_table"][:, :5].contiguous()},
        "swa_page_table must be [4, 26] int32, got [4, 5] int32",
    ),
    "an output on another device": (
        lambda c: {"page_table": c["page_table"].to("meta")},
        "page_table must be on seq_lens's device",
    ),
    "lengths written over themselves": (
        lambda c: {"seq_lens": c["seq_lens"].int(), "cache_seqlens": None},
        "cache_seqlens must not share memory with seq_lens",
    ),
}


@pytest.mark.parametrize("build", [build_decode_metadata, eager.build_decode_metadata])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_before_anything_is_written(
    name: str, build: Callable[..., None]
) -> None:
    call = arguments(Shape(4, 64, 4, swa=True))
    # The second time round the signature of the right call is known.
    build(**call)
    for output in ("cache_seqlens", "cu_seqlens_k", "page_table", "swa_page_table"):
        call[output].fill_(POISON)
    change, message = WRONG[name]
    wrong = call | change(call)
    if wrong["cache_seqlens"] is None:
        wrong["cache_seqlens"] = wrong["seq_lens"]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        build(**wrong)
    assert (call["page_table"] == POISON).all()
    assert (call["cu_seqlens_k"] == POISON).all()


def test_without_a_gpu_and_without_the_interpreter_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attnlib.core.metadata.launch.interpreting", lambda: False)
    decode.LAUNCHER.known.clear()
    call = {k: v.cpu() if torch.is_tensor(v) else v for k, v in arguments(Shape(2, 8)).items()}
    with pytest.raises(ValueError, match="must be on a CUDA device .or set TRITON_INTERPRET=1"):
        build_decode_metadata(**call)


@pytest.mark.gpu
def test_a_graph_replays_with_lengths_and_rows_changed_in_place() -> None:
    call = arguments(Shape(12, 5000, 4, swa=True))
    build_decode_metadata(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build_decode_metadata(**call)
    for shift in (1, 7, 4096):
        call["seq_lens"].copy_((call["seq_lens"] * 3 + shift) % 5000)
        call["req_pool_indices"].copy_(call["req_pool_indices"].roll(shift))
        for name in ("cache_seqlens", "cu_seqlens_k", "page_table", "swa_page_table"):
            call[name].fill_(POISON)
        graph.replay()
        assert_right(call)


@pytest.mark.gpu
def test_calls_in_a_row_each_see_what_the_one_before_wrote() -> None:
    # Overlapping launches: a call must wait for the kernel that changes its input.
    call = arguments(Shape(3, 3000, 1))
    graph = torch.cuda.CUDAGraph()
    build_decode_metadata(**call)
    outputs = []
    with torch.cuda.graph(graph):
        for _ in range(20):
            call["seq_lens"].sub_(1)
            build_decode_metadata(**call)
            outputs.append(call["cache_seqlens"].clone())
    start = call["seq_lens"].clone()
    graph.replay()
    for step, seen in enumerate(outputs, 1):
        assert seen.tolist() == (start - step).tolist()


@pytest.mark.gpu
def test_another_delta_or_max_pages_compiles_nothing() -> None:
    call = arguments(Shape(3, 900, 1))
    build_decode_metadata(**call)

    def compiled() -> int:
        return sum(
            len(caches[0]) for caches in decode.decode_metadata_kernel.device_caches.values()
        )

    before = compiled()
    for delta, max_pages in ((1, 700), (2, 16), (16, 1), (0, 0)):
        build_decode_metadata(**call | {"seq_len_delta": delta, "max_pages": max_pages})
    assert compiled() == before


@pytest.mark.gpu
def test_the_direct_launch_writes_what_tritons_own_launch_writes() -> None:
    first, second = arguments(Shape(50, 4000, 2)), arguments(Shape(50, 4000, 2))
    build_decode_metadata(**first)
    first["page_table"].fill_(POISON)
    build_decode_metadata(**first)
    decode.LAUNCHER.known.clear()
    build_decode_metadata(**second)
    assert torch.equal(first["page_table"], second["page_table"])
    assert_right(first)
