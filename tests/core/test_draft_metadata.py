"""Metadata of speculative decoding, word for word against the oracle; on a GPU where there is one.

Without a GPU Triton's interpreter runs the same kernels (TRITON_INTERPRET=1, set by conftest).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.metadata_cases import DEVICE, POISON, poison

from attnlib.core.metadata import draft
from attnlib.core.metadata.draft import build_draft_metadata, build_verify_metadata
from attnlib.kinds.metadata import eager, oracle

DRAFTS = (build_draft_metadata, eager.build_draft_metadata)
VERIFIES = (build_verify_metadata, eager.build_verify_metadata)
DRAFT_OUTPUTS = ("cache_seqlens", "page_table")
VERIFY_OUTPUTS = ("cache_seqlens", "cu_seqlens_q", "cu_seqlens_k")


@dataclass(frozen=True)
class Draft:
    """One call; `stay` is how often a slot is on the page of the slot before it."""

    batch: int
    topk: int
    decode_length: int
    page_size: int = 1
    extra_slots: int = 1
    extra_columns: int = 1
    slots_dtype: torch.dtype = torch.int64
    lens_dtype: torch.dtype = torch.int32
    stay: float = 0.7
    seed: int = 0


def on_device(call: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in call.items()}


def poisoned(*sizes: int) -> torch.Tensor:
    return torch.full(sizes, POISON, dtype=torch.int32)


def draft_arguments(shape: Draft) -> dict[str, Any]:
    """Keyword arguments of `build_draft_metadata`, seeded, outputs poisoned."""
    rng = np.random.default_rng(shape.seed)
    rows, slots = shape.batch * shape.topk, shape.decode_length + shape.extra_slots
    moves = rng.random((rows, slots)) >= shape.stay
    pages = np.cumsum(moves * rng.integers(-3, 4, (rows, slots)), axis=1) + 5
    cache_loc = pages * shape.page_size + rng.integers(0, shape.page_size, (rows, slots))
    last = rng.integers(0, shape.page_size, shape.batch)
    return on_device(
        {
            "cache_loc": torch.tensor(cache_loc, dtype=shape.slots_dtype),
            "last_page_lens": torch.tensor(last, dtype=shape.lens_dtype),
            "cache_seqlens": poisoned(rows),
            "page_table": poisoned(rows, shape.decode_length + shape.extra_columns),
            "decode_length": shape.decode_length,
            "topk": shape.topk,
            "page_size": shape.page_size,
        }
    )


def assert_draft_right(call: dict[str, Any]) -> None:
    """Every word of the outputs: the oracle's where live, poison everywhere else."""
    cache_seqlens, tables = oracle.draft_metadata(
        call["cache_loc"].cpu().numpy(),
        call["last_page_lens"].cpu().numpy(),
        decode_length=call["decode_length"],
        topk=call["topk"],
        page_size=call["page_size"],
    )
    assert call["cache_seqlens"].tolist() == cache_seqlens.tolist()
    width = call["page_table"].shape[1]
    expected = [pages + [POISON] * (width - len(pages)) for pages in tables]
    assert call["page_table"].tolist() == expected


def verify_arguments(
    lens: list[int], num_draft_tokens: int, dtype: torch.dtype = torch.int64
) -> dict[str, Any]:
    """Keyword arguments of `build_verify_metadata`, outputs poisoned."""
    return on_device(
        {
            "seq_lens": torch.tensor(lens, dtype=dtype),
            "num_draft_tokens": num_draft_tokens,
            "cache_seqlens": poisoned(len(lens)),
            "cu_seqlens_q": poisoned(len(lens) + 1),
            "cu_seqlens_k": poisoned(len(lens) + 1),
        }
    )


def assert_verify_right(call: dict[str, Any]) -> None:
    """Every word of the three outputs is the oracle's."""
    lens = call["seq_lens"].cpu().numpy()
    expected = oracle.verify_metadata(lens, call["num_draft_tokens"])
    for name, words in zip(VERIFY_OUTPUTS, expected, strict=True):
        assert call[name].tolist() == words.tolist(), name


DRAFT_SHAPES = {
    "one_token": Draft(1, 1, 1),
    "one_token_of_a_page": Draft(3, 4, 1, 64),
    "page_size_1": Draft(5, 4, 6),
    "page_size_16": Draft(9, 8, 7, 16),
    "int32_slots_and_int64_lengths": Draft(
        4, 2, 5, 4, slots_dtype=torch.int32, lens_dtype=torch.int64
    ),
    "exact_widths": Draft(4, 3, 8, 4, extra_slots=0, extra_columns=0),
    "wide_buffers": Draft(4, 3, 2, 4, extra_slots=40, extra_columns=70),
    "all_on_one_page": Draft(2, 2, 9, 32, stay=1.0),
    "a_page_each": Draft(2, 2, 9, 32, stay=0.0),
    "several_programs": Draft(150, 8, 3, 4),
    "no_power_of_two": Draft(7, 3, 11, 2),
    "several_turns": Draft(2, 2, 1300, 2),
    "a_turn_exactly": Draft(2, 1, 1024, 2, extra_slots=0),
    "page_size_256": Draft(3, 2, 300, 256),
    "no_tokens": Draft(3, 2, 0, 4),
    "empty_batch": Draft(0, 4, 3),
}


@pytest.mark.parametrize("build", DRAFTS)
@pytest.mark.parametrize("name", DRAFT_SHAPES)
def test_every_word_of_a_draft_is_right_and_every_tail_is_untouched(
    name: str, build: Callable[..., None]
) -> None:
    call = draft_arguments(DRAFT_SHAPES[name])
    build(**call)
    assert_draft_right(call)


# Slots, tables, decode_length, last pages and lengths of SGLang's own tests, all of page size 4 and
# topk 2. They pass a column more than decode_length, as its allocator did, and tabulate that too.
SGLANG: dict[str, tuple[list[list[int]], list[list[int]], int, list[int], list[int]]] = {
    "one_step": ([[23, 24], [31, 32]], [[5, 6], [7, 8]], 1, [3], [4, 4]),
    "several_pages": (
        [[27, 28, 29, 30, 31, 32], [35, 36, 37, 38, 39, 40]],
        [[6, 7, 8, 0, 0, 0], [8, 9, 10, 0, 0, 0]],
        5,
        [3],
        [8, 8],
    ),
    "several_requests": (
        [[1, 2, 3, 4], [6, 7, 8, 9], [3, 8, 9, 10], [14, 15, 16, 17], [0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 1, 0, 0], [1, 2, 0, 0], [0, 2, 0, 0], [3, 4, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
        3,
        [1, 3, 0],
        [4, 4, 6, 6, 3, 3],
    ),
}


def sglang_call(name: str) -> dict[str, Any]:
    slots, tables, decode_length, last, _ = SGLANG[name]
    return on_device(
        {
            "cache_loc": torch.tensor(slots, dtype=torch.int32),
            "last_page_lens": torch.tensor(last, dtype=torch.int32),
            "cache_seqlens": poisoned(len(slots)),
            "page_table": torch.zeros_like(torch.tensor(tables, dtype=torch.int32)),
            "decode_length": decode_length,
            "topk": 2,
            "page_size": 4,
        }
    )


@pytest.mark.parametrize("build", DRAFTS)
@pytest.mark.parametrize("name", SGLANG)
def test_the_cases_of_sglangs_tests_give_their_lengths_and_all_pages_within(
    name: str, build: Callable[..., None]
) -> None:
    call, (_, tables, _, _, lens) = sglang_call(name), SGLANG[name]
    build(**call)
    assert call["cache_seqlens"].tolist() == lens
    for have, want, length in zip(call["page_table"].tolist(), tables, lens, strict=True):
        within = -(-length // 4)
        assert have[:within] == want[:within]


@pytest.mark.parametrize("build", DRAFTS)
@pytest.mark.parametrize("name", SGLANG)
def test_all_slots_of_sglangs_tests_give_their_tables(
    name: str, build: Callable[..., None]
) -> None:
    call = sglang_call(name)
    build(**call | {"decode_length": call["cache_loc"].shape[1]})
    assert call["page_table"].tolist() == SGLANG[name][1]


@pytest.mark.parametrize("build", DRAFTS)
def test_slots_beyond_decode_length_never_reach_the_table(build: Callable[..., None]) -> None:
    # SGLang scattered all of a wider cache_loc, past the end of the row, into the next request's.
    call = draft_arguments(Draft(2, 2, 3, 1, extra_slots=5, extra_columns=0, stay=0.0))
    call["cache_loc"].copy_(torch.arange(32).view(4, 8))
    build(**call)
    assert call["page_table"].tolist() == [[0, 1, 2], [8, 9, 10], [16, 17, 18], [24, 25, 26]]


@pytest.mark.parametrize("build", DRAFTS)
def test_a_page_that_comes_again_is_written_again(build: Callable[..., None]) -> None:
    call = draft_arguments(Draft(1, 1, 6, 4))
    call["cache_loc"][0, :6] = torch.tensor([9, 8, 20, 11, 10, -1])
    build(**call)
    assert call["page_table"][0].tolist() == [2, 5, 2, -1, POISON, POISON, POISON]


@given(data=st.data())
@settings(max_examples=60)
def test_random_drafts_are_right(data: st.DataObject) -> None:
    shape = Draft(
        batch=data.draw(st.integers(0, 40)),
        topk=data.draw(st.integers(1, 9)),
        decode_length=data.draw(st.integers(0, 20)),
        page_size=2 ** data.draw(st.integers(0, 8)),
        extra_slots=data.draw(st.integers(0, 9)),
        extra_columns=data.draw(st.integers(0, 9)),
        slots_dtype=data.draw(st.sampled_from((torch.int32, torch.int64))),
        lens_dtype=data.draw(st.sampled_from((torch.int32, torch.int64))),
        stay=data.draw(st.sampled_from((0.0, 0.5, 0.9))),
        seed=data.draw(st.integers(0, 1000)),
    )
    call = draft_arguments(shape)
    for build in DRAFTS:
        poison(call, DRAFT_OUTPUTS)
        build(**call)
        assert_draft_right(call)


@pytest.mark.parametrize("build", VERIFIES)
@pytest.mark.parametrize("batch", [0, 1, 2, 31, 32, 33, 127, 4095, 4096, 5000])
def test_every_word_of_a_verification_is_right(batch: int, build: Callable[..., None]) -> None:
    call = verify_arguments([(37 * row) % 1000 for row in range(batch)], 4)
    build(**call)
    assert_verify_right(call)


@given(
    lens=st.lists(st.integers(0, 100_000), max_size=70),
    num_draft_tokens=st.integers(1, 64),
    dtype=st.sampled_from((torch.int32, torch.int64)),
)
def test_random_verifications_are_right(
    lens: list[int], num_draft_tokens: int, dtype: torch.dtype
) -> None:
    call = verify_arguments(lens, num_draft_tokens, dtype)
    for build in VERIFIES:
        poison(call, VERIFY_OUTPUTS)
        build(**call)
        assert_verify_right(call)


def test_the_same_buffers_take_another_step() -> None:
    call = draft_arguments(Draft(6, 4, 7, 4))
    build_draft_metadata(**call)
    call["cache_loc"].add_(13)
    call["last_page_lens"].add_(1)
    poison(call, DRAFT_OUTPUTS)
    build_draft_metadata(**call | {"decode_length": 3})
    assert_draft_right(call | {"decode_length": 3})
    check = verify_arguments([3, 5], 4)
    build_verify_metadata(**check)
    build_verify_metadata(**check | {"num_draft_tokens": 7})
    assert_verify_right(check | {"num_draft_tokens": 7})


def test_buffers_off_a_16_byte_address_are_right() -> None:
    call = draft_arguments(Draft(3, 2, 5, 4))
    for name, tensor in call.items():
        if torch.is_tensor(tensor):
            flat = tensor.flatten()
            call[name] = torch.cat([flat[:1], flat])[1:].view_as(tensor)
    build_draft_metadata(**call)
    build_draft_metadata(**call)
    assert_draft_right(call)


WRONG_DRAFTS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "slots of floats": (
        lambda c: {"cache_loc": c["cache_loc"].float()},
        "cache_loc must be [8, any] int32 or int64, got [8, 6] float32",
    ),
    "slots flat": (
        lambda c: {"cache_loc": c["cache_loc"].flatten()},
        "cache_loc must be [8, any] int32 or int64, got [48] int64",
    ),
    "a slice of wider slots": (
        lambda c: {"cache_loc": c["cache_loc"][:, :5]},
        "cache_loc must be contiguous",
    ),
    "slots of another batch": (
        lambda c: {"cache_loc": c["cache_loc"][:6]},
        "cache_loc must be [8, any] int32 or int64, got [6, 6] int64",
    ),
    "a list": (
        lambda c: {"last_page_lens": [1, 2]},
        "last_page_lens must be a tensor, got list",
    ),
    "last pages in two dimensions": (
        lambda c: {"last_page_lens": c["last_page_lens"][None]},
        "last_page_lens must be [any] int32 or int64, got [1, 4] int32",
    ),
    "lengths out in int64": (
        lambda c: {"cache_seqlens": c["cache_seqlens"].long()},
        "cache_seqlens must be [8] int32, got [8] int64",
    ),
    "lengths out a request each": (
        lambda c: {"cache_seqlens": c["cache_seqlens"][:4]},
        "cache_seqlens must be [8] int32, got [4] int32",
    ),
    "a table of int64": (
        lambda c: {"page_table": c["page_table"].long()},
        "page_table must be [8, any] int32, got [8, 6] int64",
    ),
    "a slice of a wider table": (
        lambda c: {"page_table": c["page_table"][:, :5]},
        "page_table must be contiguous (a copy would not be the caller's buffer)",
    ),
    "a table too narrow": (
        lambda c: {"page_table": c["page_table"][:, :4].contiguous()},
        "decode_length must be <= 4 (cache_loc has 6 columns, page_table 4, and each token may "
        "start a page), got 5",
    ),
    "too few slots": (
        lambda c: {"cache_loc": c["cache_loc"][:, :3].contiguous()},
        "decode_length must be <= 3 (cache_loc has 3 columns, page_table 6",
    ),
    "decode_length 7": (lambda c: {"decode_length": 7}, "decode_length must be <= 6"),
    "decode_length -1": (lambda c: {"decode_length": -1}, "decode_length must be an integer in 0"),
    "decode_length 2.0": (lambda c: {"decode_length": 2.0}, "decode_length must be an integer"),
    "topk 0": (lambda c: {"topk": 0}, "topk must be an integer in 1.."),
    "topk 4": (lambda c: {"topk": 4}, "cache_loc must be [16, any] int32 or int64, got [8, 6]"),
    "topk True": (lambda c: {"topk": True}, "topk must be an integer in 1.."),
    "page_size 3": (lambda c: {"page_size": 3}, "page_size must be a power of two, got 3"),
    "page_size 4.0": (lambda c: {"page_size": 4.0}, "page_size must be an integer"),
    "an output on another device": (
        lambda c: {"page_table": c["page_table"].to("meta")},
        "page_table must be on cache_loc's device",
    ),
    "pages over the slots": (
        lambda c: dict.fromkeys(("cache_loc", "page_table"), c["page_table"]),
        "page_table must not share memory with cache_loc",
    ),
    "lengths over the last pages": (
        lambda c: {"last_page_lens": c["cache_seqlens"][:4]},
        "cache_seqlens must not share memory with last_page_lens",
    ),
}


@pytest.mark.parametrize("build", DRAFTS)
@pytest.mark.parametrize("name", WRONG_DRAFTS)
def test_a_wrong_argument_of_a_draft_is_named_before_anything_is_written(
    name: str, build: Callable[..., None]
) -> None:
    call = draft_arguments(Draft(4, 2, 5, 4))
    # The second time round the signature of the right call is known.
    build(**call)
    poison(call, DRAFT_OUTPUTS)
    change, message = WRONG_DRAFTS[name]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        build(**call | change(call))
    for output in DRAFT_OUTPUTS:
        assert (call[output] == POISON).all()


WRONG_VERIFIES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "lengths of floats": (
        lambda c: {"seq_lens": c["seq_lens"].float()},
        "seq_lens must be [any] int32 or int64, got [3] float32",
    ),
    "nothing": (lambda c: {"seq_lens": None}, "seq_lens must be a tensor, got NoneType"),
    "lengths with strides": (
        lambda c: {"seq_lens": c["seq_lens"].repeat_interleave(2)[::2]},
        "seq_lens must be contiguous",
    ),
    "lengths out in int64": (
        lambda c: {"cache_seqlens": c["cache_seqlens"].long()},
        "cache_seqlens must be [3] int32, got [3] int64",
    ),
    "query sums one short": (
        lambda c: {"cu_seqlens_q": c["cu_seqlens_q"][:-1]},
        "cu_seqlens_q must be [4] int32, got [3] int32",
    ),
    "sums one short": (
        lambda c: {"cu_seqlens_k": c["cu_seqlens_k"][:-1]},
        "cu_seqlens_k must be [4] int32, got [3] int32",
    ),
    "no drafted tokens": (
        lambda c: {"num_draft_tokens": 0},
        "num_draft_tokens must be an integer in 1..715827882, got 0",
    ),
    "queries beyond int32": (
        lambda c: {"num_draft_tokens": 2**30},
        "num_draft_tokens must be an integer in 1..715827882, got 1073741824",
    ),
    "tokens of a tensor": (
        lambda c: {"num_draft_tokens": c["seq_lens"]},
        "num_draft_tokens must be an integer in 1..",
    ),
    "an output on another device": (
        lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].to("meta")},
        "cu_seqlens_q must be on seq_lens's device",
    ),
    "lengths over themselves": (
        lambda c: dict.fromkeys(("seq_lens", "cache_seqlens"), c["cache_seqlens"]),
        "cache_seqlens must not share memory with seq_lens",
    ),
}


@pytest.mark.parametrize("build", VERIFIES)
@pytest.mark.parametrize("name", WRONG_VERIFIES)
def test_a_wrong_argument_of_a_verification_is_named_before_anything_is_written(
    name: str, build: Callable[..., None]
) -> None:
    call = verify_arguments([5, 6, 7], 4)
    build(**call)
    poison(call, VERIFY_OUTPUTS)
    change, message = WRONG_VERIFIES[name]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        build(**call | change(call))
    for output in VERIFY_OUTPUTS:
        assert (call[output] == POISON).all()


@pytest.mark.parametrize("build", [build_draft_metadata, build_verify_metadata])
def test_without_a_gpu_and_without_the_interpreter_it_says_so(
    build: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlib.core.metadata.launch.interpreting", lambda: False)
    draft.DRAFTS.known.clear()
    draft.VERIFIES.known.clear()
    is_draft = build is build_draft_metadata
    call = draft_arguments(Draft(2, 2, 3)) if is_draft else verify_arguments([4], 2)
    call = {k: v.cpu() if torch.is_tensor(v) else v for k, v in call.items()}
    with pytest.raises(ValueError, match="must be on a CUDA device .or set TRITON_INTERPRET=1"):
        build(**call)


@pytest.mark.gpu
@pytest.mark.parametrize("build", DRAFTS)
def test_a_graph_of_a_draft_replays_with_slots_changed_in_place(
    build: Callable[..., None],
) -> None:
    call = draft_arguments(Draft(40, 8, 5, 4))
    build(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build(**call)
    for seed in (1, 2, 3):
        other = draft_arguments(Draft(40, 8, 5, 4, seed=seed))
        for name in ("cache_loc", "last_page_lens"):
            call[name].copy_(other[name])
        poison(call, DRAFT_OUTPUTS)
        graph.replay()
        assert_draft_right(call)


@pytest.mark.gpu
@pytest.mark.parametrize("build", VERIFIES)
def test_a_graph_of_a_verification_replays_with_lengths_changed_in_place(
    build: Callable[..., None],
) -> None:
    call = verify_arguments(list(range(300)), 4)
    build(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build(**call)
    for shift in (1, 7, 4096):
        call["seq_lens"].copy_((call["seq_lens"] * 3 + shift) % 5000)
        poison(call, VERIFY_OUTPUTS)
        graph.replay()
        assert_verify_right(call)


@pytest.mark.gpu
def test_calls_in_a_row_each_see_what_the_one_before_wrote() -> None:
    # Overlapping launches: a call must wait for the kernel that changes its input.
    call, check = draft_arguments(Draft(3, 2, 4)), verify_arguments([9, 8], 4)
    build_draft_metadata(**call)
    build_verify_metadata(**check)
    lens, totals = [], []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call["last_page_lens"].add_(1)
            build_draft_metadata(**call)
            lens.append(call["cache_seqlens"].clone())
            check["seq_lens"].add_(1)
            build_verify_metadata(**check)
            totals.append(check["cu_seqlens_k"].clone())
    first, total = call["last_page_lens"].repeat_interleave(2) + 4, 9 + 8 + 2 * 4
    graph.replay()
    for step, (have, sums) in enumerate(zip(lens, totals, strict=True), 1):
        assert have.tolist() == (first + step).tolist()
        assert sums[-1] == total + 2 * step


@pytest.mark.gpu
def test_another_number_of_tokens_compiles_nothing() -> None:
    call, check = draft_arguments(Draft(3, 2, 4)), verify_arguments([9, 8], 4)
    build_draft_metadata(**call)
    build_verify_metadata(**check)

    def compiled() -> int:
        kernels = (draft.draft_metadata_kernel, draft.verify_metadata_kernel)
        caches = [cache for kernel in kernels for cache in kernel.device_caches.values()]
        return sum(len(cache[0]) for cache in caches)

    before = compiled()
    for tokens in (1, 2, 3):
        build_draft_metadata(**call | {"decode_length": tokens})
        build_verify_metadata(**check | {"num_draft_tokens": 16 * tokens})
    assert compiled() == before
