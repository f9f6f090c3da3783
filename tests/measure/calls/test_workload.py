"""Workloads: the same seed gives the same call anywhere, and its data is worth attending over."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.workloads import MASKS, extend_case, work_of

from attnlib.core.spec import EXTEND_MODES, LENGTHS, AttnSpec, MlaSpec
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.extend.case import (
    sample_drafts,
    sample_extend_lens,
)
from attnlib.measure.calls.lengths import sample_seq_lens
from attnlib.measure.calls.mla import measure as mla
from attnlib.measure.calls.mla.case import MlaCase
from attnlib.measure.calls.mla.format import quantize
from attnlib.measure.calls.mla.measure import sample_chosen

SPEC = AttnSpec(8, 2, 16, 4)
RAGGED = DecodeCase(SPEC, batch_size=17, kv_len=100, lengths="ragged", seed=7)
CACHED = DecodeCase(AttnSpec(4, 2, 16, 4), 20, 60, "ragged", seed=3)
LATENT = MlaCase(MlaSpec(2, 40, 16), 6, 90, "ragged", seed=4)
FP8 = "float8_e4m3fn"


def extended(mode, mask="", seed=3):
    return extend_case(replace(CACHED, seed=seed), mode, mask, 6)


def drawn(case):
    """All that a seed decides: query, values, lengths, pages, chosen tokens."""
    work = work_of(case)
    paged = getattr(work.batch, "paged", work.batch)
    kv = [work.kv] if isinstance(work.kv, torch.Tensor) else [work.kv.k_cache, work.kv.v_cache]
    tensors = [work.q, *kv, paged.seq_lens_cpu, paged.kv_indices, paged.page_table]
    return [*tensors, work.batch.chosen] if isinstance(case, MlaCase) else tensors


@pytest.mark.parametrize(
    "case, other",
    [
        (RAGGED, replace(RAGGED, seed=8)),
        *((extended(mode), extended(mode, seed=4)) for mode in EXTEND_MODES),
        (LATENT, replace(LATENT, seed=5)),
    ],
    ids=lambda case: case.label,
)
def test_the_same_case_gives_the_same_call_and_another_seed_another(case, other):
    one = drawn(case)
    two = drawn(case)
    elsewhere = drawn(other)
    assert all(map(torch.equal, one, two))
    # In a ragged prefill the pages are in order, whatever the seed.
    same = [torch.equal(a, b) for a, b in zip(one, elsewhere, strict=True)]
    assert not any(same[:-1] if getattr(case, "ragged", False) else same)


def test_lengths_and_page_order_are_those_that_the_records_were_measured_with():
    # Literals on purpose: a change of the generator would make old records another workload.
    assert sample_seq_lens(replace(RAGGED, batch_size=5)).tolist() == [100, 63, 69, 90, 58]
    batch = work_of(replace(RAGGED, batch_size=3, kv_len=9)).batch
    assert batch.seq_lens.tolist() == [9, 6, 7]
    assert batch.kv_indices.tolist() == [3, 0, 6, 5, 1, 2, 4]


@pytest.mark.parametrize(
    "case",
    [
        *(extended(mode) for mode in ("prefill_paged", "prefill_ragged")),
        *(replace(RAGGED, lengths=lengths) for lengths in LENGTHS),
        replace(RAGGED, spec=replace(SPEC, page_size=1)),
    ],
    ids=lambda case: case.label,
)
def test_live_pages_are_distinct_fill_the_pool_and_are_shuffled_but_for_a_ragged_prefill(case):
    work = work_of(case)
    pages = getattr(work.batch, "paged", work.batch).kv_indices.tolist()
    assert sorted(pages) == list(range(len(work.kv.k_cache)))
    assert (pages == sorted(pages)) == getattr(case, "ragged", False)


@pytest.mark.parametrize(
    "lengths, longest, median, within",
    [
        ("fixed", 1, 100_000, (100_000, 100_000)),
        ("ragged", 1, 50_000, (1, 100_000)),
        ("skewed", 1, 3_125, (3_125, 3_125)),
        ("chat", 0, 1200, (16, 100_000)),
        ("agents", 0, 31_623, (10_000, 100_000)),
        ("retrieval", 250, 2_344, (1_562, 3_125)),
        ("one_long", 1, 488, (195, 781)),
    ],
)
def test_lengths_are_spread_as_their_name_says(lengths, longest, median, within):
    """The first request and others that have all tokens, then what the rest have."""
    case = replace(RAGGED, batch_size=4000, kv_len=100_000, lengths=lengths)
    lens = sample_seq_lens(case)
    rest = np.sort(lens)[: -longest or None]
    assert lens.dtype == np.int32
    assert lens[0] == 100_000 or not longest
    assert (np.sort(lens)[len(rest) :] == 100_000).all()
    assert within[0] <= rest.min()
    assert rest.max() <= within[1]
    assert np.median(rest) == pytest.approx(median, rel=0.05)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1),
        (2, 9),
        (15, 40),
    ],
)
def test_small_batches_of_short_requests_keep_to_their_longest(lengths, sizes):
    batch, kv_len = sizes
    lens = sample_seq_lens(replace(RAGGED, batch_size=batch, kv_len=kv_len, lengths=lengths))
    assert len(lens) == batch
    assert 1 <= lens.min()
    assert lens.max() <= kv_len
    assert lengths in ("chat", "agents") or lens[0] == kv_len


@pytest.mark.parametrize(
    "dtype, kv_dtype",
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("bfloat16", FP8),
        (FP8, FP8),
    ],
)
def test_values_are_standard_normal_in_the_cases_dtypes_and_never_zeros(dtype, kv_dtype):
    case = replace(
        RAGGED,
        spec=replace(SPEC, dtype=dtype, kv_dtype=kv_dtype),
        lengths="fixed",
    )
    work = work_of(case)
    tensors = (work.q, work.kv.k_cache, work.kv.v_cache)
    assert [str(x.dtype)[6:] for x in tensors] == [
        dtype,
        kv_dtype,
        kv_dtype,
    ]
    floats = [x.float() for x in tensors]
    for values in floats:
        assert (
            values.mean(),
            values.std(),
        ) == pytest.approx((0, 1), abs=0.1)
        assert bool(values.flatten(0, -2).any(-1).all())
    first = {tuple(values.flatten()[:64].tolist()) for values in floats}
    assert len(first) == 3, "drawn apart"


@pytest.mark.parametrize("mode", EXTEND_MODES)
def test_a_request_has_its_queries_among_its_tokens_and_accepted_drafts_are_ragged(mode):
    case = extended(mode)
    q_lens, kv_lens = sample_extend_lens(case)
    assert q_lens.dtype == np.int32
    assert kv_lens.dtype == np.int32
    assert q_lens[0] == case.q_len
    assert kv_lens[0] == 60
    assert (q_lens <= kv_lens).all()
    blocks = {"draft_extend": {1, 2, 3, 4, 5, 6}, "prefill_ragged": set(kv_lens)}
    assert set(q_lens) == blocks.get(mode, {6})


def test_a_draft_sees_itself_and_what_its_parent_sees():
    trees = sample_drafts(extended("target_verify"))
    assert len({tree.tobytes() for tree in trees}) > 5
    for tree in trees:
        assert not np.triu(tree, 1).any()
        assert tree.diagonal().all()
        for draft in range(1, 6):
            ancestors = tree[draft] & (np.arange(6) != draft)
            assert any((ancestors == tree[parent]).all() for parent in range(draft))
    chain = sample_drafts(extended("target_verify", "chain"))
    assert (chain == np.tri(6, dtype=bool)).all()


@pytest.mark.parametrize("mode, mask", MASKS)
def test_the_cost_counts_the_pairs_that_the_mask_lets_through(mode, mask):
    case = extended(mode, mask)
    batch = work_of(case).batch
    pairs = masked_bytes = 0
    for q, n in zip(batch.q_lens_cpu.tolist(), batch.paged.seq_lens_cpu.tolist(), strict=True):
        pairs += q * n if mask == "full" else sum(range(n - q + 1, n + 1))
        masked_bytes += -(-q * n // 8)
    if batch.custom_mask is None:
        masked_bytes = 0
    else:
        pairs = int(batch.custom_mask.sum())
    cost = case.cost
    tokens = int(batch.paged.seq_lens_cpu.sum())
    assert cost.flops == 4 * 16 * 4 * pairs
    assert cost.kv_bytes == 2 * 2 * 16 * 2 * tokens
    pages = 0 if case.ragged else len(batch.paged.kv_indices)
    rest = 2 * 2 * batch.rows * 4 * 16 + 4 * pages + masked_bytes
    assert cost.io_bytes == cost.kv_bytes + rest


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("top_k", [1, 40, 90, 300])
def test_chosen_tokens_are_distinct_live_and_padded_at_the_end(top_k, lengths):
    case = replace(LATENT, spec=replace(LATENT.spec, top_k=top_k), lengths=lengths)
    chosen = sample_chosen(case)
    assert chosen.shape == (6, top_k)
    assert chosen.dtype == np.int32
    for row, length in zip(chosen, sample_seq_lens(case), strict=True):
        count = min(top_k, length)
        assert len(set(row[:count])) == count
        assert row[:count].min() >= 0
        assert row[:count].max() < length
        assert (row[count:] == -1).all()


def test_both_formats_hold_the_same_tokens():
    plain = work_of(LATENT)
    packed = work_of(replace(LATENT, spec=replace(LATENT.spec, kv_format="fp8-656")))
    assert torch.equal(packed.kv, quantize(plain.kv))
    assert torch.equal(packed.q, plain.q)
    assert torch.equal(packed.batch.chosen, plain.batch.chosen)


def test_a_cache_made_in_pieces_is_filled_to_its_end_in_whole_pages(monkeypatch):
    monkeypatch.setattr(mla, "CHUNK_TOKENS", 48)
    cache = work_of(LATENT).kv
    assert cache.shape[1:] == (16, 576)
    assert cache.numel() * 2 == LATENT.cost.cache_bytes
    spread = cache.float().std(dim=(1, 2))
    assert bool((spread > 0.9).all())


@pytest.mark.parametrize(
    "spec, sizes, kv_bytes, index_words, tokens",
    [
        (
            MlaSpec(16, 2048, 64, "fp8-656"),
            (4, 8192),
            4 * 2048 * 656,
            4 * 2048,
            4 * 2048,
        ),
        (
            MlaSpec(16),
            (4, 1000),
            4 * 1000 * 1152,
            4 * 16,
            4 * 1000,
        ),  # dense: a page table
        (
            MlaSpec(16, 2048),
            (2, 100),
            2 * 100 * 1152,
            2 * 2048,
            2 * 100,
        ),  # no more than it has
    ],
)
def test_an_mla_call_costs_its_tokens_once_and_what_finds_them(
    spec, sizes, kv_bytes, index_words, tokens
):
    cost = MlaCase(spec, *sizes).cost
    width = 16 * (576 + 512)
    assert cost.kv_bytes == kv_bytes
    assert cost.flops == 2 * width * tokens
    assert cost.io_bytes == kv_bytes + sizes[0] * width * 2 + 4 * index_words
