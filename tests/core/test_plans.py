"""Work plans of decode calls: nothing is lost, rules at their edges, and the library agrees."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import backend_calls as calls
from support.cuda_core_plan import plan_cuda_cores
from support.library_plan import LibraryCall, chunk_pages, plan_fa2

from attnlib.core.backends import create, unsupported
from attnlib.core.fa2.choice import PlanShape
from attnlib.core.fa2.words import plan_words
from attnlib.core.policy.plans import (
    CUDA_CORE_CTAS,
    CUDA_CORE_ITEM_TOKENS,
    FA2_ITEM_TOKENS,
    FA3_TILES,
    PLANS,
    fa3_sm_tokens,
    plan,
)
from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.decode.measure import build_batch
from attnlib.kinds.lengths import sample_seq_lens

SPEC = AttnSpec(16, 8, 128, 16)
SMS = 132
CUDA_CORES, WRONG = "flashinfer-cuda-cores", ([], [5, 0], [[5]], [1.5], ["12"])
LENS = st.lists(st.integers(1, 30_000), min_size=1, max_size=64)
READ = {"flashinfer-fa3": SPEC.num_qo_heads}
"""Heads whose KV is read, where they are not the KV heads."""


@given(st.sampled_from(list(PLANS)), LENS)
def test_all_tokens_are_read_and_items_hold_them(backend, lens):
    made = plan(backend, SPEC, lens, num_sms=SMS)
    assert made.tokens == sum(lens) * READ.get(backend, SPEC.num_kv_heads) <= made.items.sum()
    assert 1 <= made.splits <= len(made.items) and (made.items > 0).all()


def test_a_window_has_no_work_plan():
    for make in (
        partial(plan, "flash-attn-3"),
        lambda spec, lens, **gpu: fa3_sm_tokens(lens, spec, **gpu),
    ):
        with pytest.raises(ValueError, match="window must be 0 for a work plan, got 64"):
            make(replace(SPEC, window=64), (100,), num_sms=SMS)


@given(LENS, st.sampled_from([1, 16, 64]), st.integers(1, 64))
def test_a_chunk_is_the_smallest_that_fits(lens, page_size, most):
    pages = -(-np.array(lens) // page_size)
    size = chunk_pages(pages, most=most, page_size=page_size)
    fits = [n for n in range(size - 3, size + 1) if n > 0 and (-(-pages // n)).sum() <= most]
    least = max(128 // page_size, 1)
    if size > least:
        assert fits == [size] or (size == pages.max() and len(lens) > most)
    else:
        assert size == least


# 264 CTAs over 8 KV heads are 33 chunks: 32 requests leave one to split into two, 33 none
@pytest.mark.parametrize(("requests", "splits"), [(1, 33), (16, 2), (32, 1), (33, 1), (200, 1)])
def test_fa2_splits_until_its_two_ctas_an_sm_are_taken(requests, splits):
    made = plan("flashinfer-fa2", SPEC, [33 * 128] * requests, num_sms=SMS)
    assert made.splits == splits
    assert len(made.items) == requests * splits * SPEC.num_kv_heads


@pytest.mark.parametrize("requests", [33, 300])
def test_our_plan_cuts_one_long_request_among_many_into_shorter_items(requests):
    lens = [100_000] + [500] * requests
    ours, theirs = (
        plan(f"flashinfer-fa2{suffix}", SPEC, lens, num_sms=SMS) for suffix in ("-planned", "")
    )
    assert ours.items.max() < theirs.items.max() and ours.tokens == theirs.tokens


def test_fa2_pads_a_chunk_to_tiles_of_what_its_shared_memory_holds():
    for head_dim, tile in ((64, 256), (128, 128), (256, 64)):
        made = plan("flashinfer-fa2", AttnSpec(8, 8, head_dim, 1), [tile + 1] * 300, num_sms=SMS)
        assert made.items[0] == 2 * tile + FA2_ITEM_TOKENS


def test_fa3_reads_the_cache_once_a_query_head_and_gives_it_to_one_sm():
    made = plan("flashinfer-fa3", AttnSpec(32, 8, 128, 16), [1000], num_sms=SMS)
    assert len(made.items) == 32 and made.splits == 1
    assert set(made.items.tolist()) == {(11 + 1) * 96}


# Tokens and items of each SM, in these SMs' order, that FlashInfer's heap.h (0.7.2) compiled with
# libstdc++ gives; in each of these calls SMs of equal load decide which one is the most loaded.
HEAPS = [
    (
        AttnSpec(8, 8, 64, 16),
        [1000, 700, 4000, 1000, 700, 100, 1000, 700, 700, 100],
        [12192, 9408, 8160, 9600, 9408, 9408, 8160, 10368, 8544],
        [7, 8, 11, 9, 8, 8, 11, 8, 10],
    ),
    (
        AttnSpec(6, 1, 128, 16),
        [700, 4000, 100, 700, 1000, 100, 1000, 100, 1000, 700, 100, 700, 100, 700],
        [10080, 9696, 12672, 10656, 9504, 9888, 9504],
        [13, 13, 8, 8, 15, 12, 15],
    ),
    (
        AttnSpec(4, 4, 256, 16),
        [4000, 4000, 700, 1000, 1000, 4000, 1000, 100, 700, 700],
        [9728, 9856, 9728, 10240, 10176, 10560, 8960],
        [4, 5, 4, 6, 5, 6, 10],
    ),
]


@pytest.mark.parametrize(("spec", "lens", "tokens", "items"), HEAPS)
def test_fa3_places_work_as_the_librarys_heap_does(spec, lens, tokens, items):
    found = fa3_sm_tokens(tuple(lens), spec, num_sms=len(tokens))
    assert [each.tolist() for each in found] == [tokens, items]


@pytest.mark.parametrize(("batch", "kv_len"), [(1, 5), (7, 4000), (33, 129), (64, 8192)])
def test_fa3_gives_equal_requests_what_the_heap_gives_them(batch, kv_len):
    lens = np.full(batch, kv_len)
    tokens, items = fa3_sm_tokens((kv_len,) * batch, SPEC, num_sms=132)
    wanted = (tokens + items * FA3_TILES[SPEC.head_dim][1])[items > 0]
    assert sorted(plan("flashinfer-fa3", SPEC, lens, num_sms=132).items) == sorted(wanted)


@pytest.mark.parametrize(
    ("backend", "spec", "lens", "message"),
    [
        ("sdpa", SPEC, [100], "backend must be one of flashinfer-fa2, .* got 'sdpa'"),
        (CUDA_CORES, AttnSpec(40, 8, 128, 16), [100], r"\(128, 2\): \(1, 2, 3, 4, 6, 8,"),
        (CUDA_CORES, AttnSpec(8, 8, 96, 16), [100], "must have a head_dim, bytes of a"),
        ("flashinfer-fa3", AttnSpec(8, 8, 96, 16), [100], "one of 64, 128, 256, got 96"),
        *(("flash-attn-3", SPEC, lens, "seq_lens must hold lengths >= 1, got") for lens in WRONG),
    ],
)
def test_what_has_no_known_plan_raises(backend, spec, lens, message):
    with pytest.raises(ValueError, match=message):
        plan(backend, spec, lens, num_sms=SMS)


CALLS = [
    DecodeCase(AttnSpec(qo, kv, 128, page), batch, kv_len, lengths)
    for qo, kv, page in ((32, 32, 16), (16, 8, 1), (24, 8, 16), (32, 8, 1), (8, 1, 16), (12, 2, 64))
    for batch, kv_len in ((1, 130), (3, 9000), (20, 900), (70, 3000), (150, 200))
    for lengths in ("ragged", "skewed")
]


def words_of(backend, case):
    """A plan for the case in a CUDA graph: of the library, or ours."""
    spec, lens = case.spec, sample_seq_lens(case)
    if backend == "flashinfer-fa2-planned":
        return plan_words(PlanShape.of(spec, lens, SMS), lens)
    heads = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim)
    make = plan_cuda_cores if "cuda" in backend else plan_fa2
    return make(LibraryCall(*heads, spec.page_size, True, SMS, "0.6.4"), lens)


def block_tokens(words, lens):
    """Tokens of each block in use."""
    mask = words.block_valid_mask
    used = len(words.request_indices) if mask is None else int(mask.sum())
    before = words.kv_tile_indices[:used] * words.kv_chunk_size
    return np.minimum(lens[words.request_indices[:used]] - before, words.kv_chunk_size)


@pytest.mark.parametrize("backend", [name for name in PLANS if "fa3" not in name])
def test_items_are_the_blocks_of_the_words(backend):
    cuda_cores = "cuda" in backend
    cases = [c for c in CALLS if not cuda_cores or c.spec.group_size in CUDA_CORE_CTAS[128, 2]]
    assert len(cases) >= 40
    for case in cases:
        tokens = block_tokens(words_of(backend, case), sample_seq_lens(case))
        items = tokens + CUDA_CORE_ITEM_TOKENS if cuda_cores else -(-tokens // 128) * 128
        items = items if cuda_cores else items + FA2_ITEM_TOKENS
        found = plan(backend, case.spec, sample_seq_lens(case), num_sms=SMS).items
        assert sorted(found) == sorted(items.tolist() * case.spec.num_kv_heads), case.key


@pytest.mark.gpu
def test_flashinfers_own_plan_for_fa3_has_these_items():
    backend, sms = "flashinfer-fa3", torch.cuda.get_device_properties(0).multi_processor_count
    calls.able(backend, CALLS[0])
    for case in (case for case in CALLS if not unsupported(backend, case.spec)):
        batch = build_batch(case, device="cuda")
        wrapper, *_ = create(backend, case.spec, cuda_graph=True).plan(batch).state
        # PrefillPlanSM90Info: 4 kv_len, 6 work_indptr
        words = wrapper._int_workspace_buffer.view(torch.int32)
        lens_at, ends_at = (int(wrapper._plan_info[at]) // 4 for at in (4, 6))
        ends = words[ends_at : ends_at + sms + 1].tolist()
        lens = words[lens_at : lens_at + ends[-1]].tolist()
        each = (lens[begin:end] for begin, end in pairwise(ends))
        items = [sum(-(-n // 96) * 96 + 96 for n in part) for part in each if part]
        expected = plan(backend, case.spec, sample_seq_lens(case), num_sms=sms)
        assert sorted(items) == sorted(expected.items.tolist()), case.key
