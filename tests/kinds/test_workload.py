"""Workloads: the same seed gives the same call anywhere, and its data is worth attending over."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attnlib.core.spec import AttnSpec, MlaSpec
from attnlib.kinds.call import Workload
from attnlib.kinds.cost import extend_cost, mla_cache_bytes, mla_cost
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.decode.measure import build_batch, build_workload
from attnlib.kinds.extend.case import MODES, ExtendCase
from attnlib.kinds.extend.measure import build_extend_batch, build_extend_workload
from attnlib.kinds.lengths import SKEW, sample_drafts, sample_extend_lens, sample_seq_lens
from attnlib.kinds.mla import measure as mla
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.mla.format import quantize
from attnlib.kinds.mla.measure import build_mla_workload, sample_chosen

SPEC = AttnSpec(8, 2, 16, 4)
RAGGED = DecodeCase(SPEC, batch_size=17, kv_len=100, lengths="ragged", seed=7)
CACHED = DecodeCase(AttnSpec(4, 2, 16, 4), 20, 60, "ragged", seed=3)
ONE_TOKEN = replace(CACHED, spec=replace(CACHED.spec, page_size=1))
LATENT = MlaCase(MlaSpec(2, 40, 16), 6, 90, "ragged", seed=4)
LENGTHS = ("fixed", "ragged", "skewed")
FP8 = "float8_e4m3fn"


def extended(mode: str, mask: str = "", seed: int = 3) -> ExtendCase:
    ragged = mode == "prefill_ragged"
    cached = replace(ONE_TOKEN if ragged else CACHED, seed=seed)
    return ExtendCase(cached, mode, 60 if ragged else 6, mask)


def workload(case: Any) -> Workload:
    builds: dict[type, Callable[..., Workload]] = {
        DecodeCase: build_workload,
        ExtendCase: build_extend_workload,
        MlaCase: build_mla_workload,
    }
    return builds[type(case)](case, device="cpu")


def drawn(case: Any) -> list[torch.Tensor]:
    """All that a seed decides: query, values, lengths, pages, chosen tokens."""
    work = workload(case)
    paged = getattr(work.batch, "paged", work.batch)
    kv = [work.kv] if isinstance(work.kv, torch.Tensor) else [work.kv.k_cache, work.kv.v_cache]
    chosen = getattr(work.batch, "chosen", None)
    rest = [] if chosen is None else [chosen]
    return [work.q, *kv, paged.seq_lens_cpu, paged.kv_indices, paged.page_table, *rest]


@pytest.mark.parametrize(
    ("case", "other"),
    [
        (RAGGED, replace(RAGGED, seed=8)),
        *((extended(mode), extended(mode, seed=4)) for mode in MODES),
        (LATENT, replace(LATENT, seed=5)),
    ],
    ids=lambda case: case.label,
)
def test_the_same_case_gives_the_same_call_and_another_seed_another(case, other) -> None:
    one, two, elsewhere = drawn(case), drawn(case), drawn(other)
    assert all(map(torch.equal, one, two))
    # In a ragged prefill the pages are in order, whatever the seed.
    same = [torch.equal(a, b) for a, b in zip(one, elsewhere, strict=True)]
    assert not any(same[:-1] if getattr(case, "ragged", False) else same)


def test_lengths_and_page_order_are_those_that_the_records_were_measured_with() -> None:
    # Literals on purpose: a change of the generator would make old records another workload.
    assert sample_seq_lens(replace(RAGGED, batch_size=5)).tolist() == [100, 63, 69, 90, 58]
    batch = build_batch(replace(RAGGED, batch_size=3, kv_len=9), device="cpu")
    assert batch.seq_lens.tolist() == [9, 6, 7]
    assert batch.kv_indices.tolist() == [3, 0, 6, 5, 1, 2, 4]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_live_pages_are_distinct_shuffled_and_fill_the_pool(page_size, lengths) -> None:
    case = replace(RAGGED, spec=replace(SPEC, page_size=page_size), lengths=lengths)
    work = workload(case)
    pages = work.batch.kv_indices.tolist()
    assert sorted(pages) == list(range(work.kv.num_pages))
    assert pages != sorted(pages)


def test_pages_are_shuffled_but_for_a_ragged_prefill() -> None:
    pages = build_extend_batch(extended("prefill_paged"), device="cpu").paged.kv_indices
    assert sorted(pages.tolist()) == list(range(len(pages)))
    assert pages.tolist() != list(range(len(pages)))
    ragged = build_extend_batch(extended("prefill_ragged"), device="cpu")
    assert ragged.ragged and ragged.paged.kv_indices.tolist() == list(range(ragged.rows))


def test_ragged_lengths_span_one_to_the_longest_and_hold_it() -> None:
    lens = sample_seq_lens(replace(RAGGED, batch_size=4000))
    assert (lens[0], lens.min(), lens.max(), lens.dtype) == (100, 1, 100, np.int32)
    assert lens[1:].mean() == pytest.approx(50.5, abs=2)


@pytest.mark.parametrize(
    ("lengths", "kv_len", "short"),
    [("skewed", 3200, 100), ("skewed", SKEW - 1, 1), ("skewed", 1, 1), ("fixed", 100, 100)],
)
def test_skewed_lengths_are_one_long_request_and_fixed_ones_are_all(lengths, kv_len, short) -> None:
    lens = sample_seq_lens(replace(RAGGED, kv_len=kv_len, lengths=lengths))
    assert (lens.tolist(), lens.dtype) == ([kv_len] + [short] * 16, np.int32)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", FP8), (FP8, FP8)],
)
def test_values_are_standard_normal_in_the_cases_dtypes_and_never_zeros(dtype, kv_dtype) -> None:
    case = replace(RAGGED, spec=replace(SPEC, dtype=dtype, kv_dtype=kv_dtype), lengths="fixed")
    work = workload(case)
    assert str(work.q.dtype) == f"torch.{dtype}"
    assert str(work.kv.k_cache.dtype) == str(work.kv.v_cache.dtype) == f"torch.{kv_dtype}"
    for values in (work.q.float(), work.kv.k_cache.float(), work.kv.v_cache.float()):
        assert values.mean().item() == pytest.approx(0, abs=0.1)
        assert values.std().item() == pytest.approx(1, abs=0.1)
        assert bool(values.flatten(0, -2).any(-1).all())


@pytest.mark.parametrize("case", [RAGGED, extended("prefill_ragged")], ids=lambda case: case.label)
def test_keys_values_and_queries_are_drawn_apart(case) -> None:
    work = workload(case)
    q, k, v = work.q.flatten(), work.kv.k_cache.flatten(), work.kv.v_cache.flatten()
    count = min(len(q), len(k))
    assert not torch.equal(k, v) and not torch.equal(q[:count], k[:count])


@pytest.mark.parametrize("mode", MODES)
def test_a_request_has_its_queries_among_its_tokens(mode: str) -> None:
    q_lens, kv_lens = sample_extend_lens(extended(mode))
    assert (q_lens.dtype, kv_lens.dtype) == (np.int32, np.int32)
    assert (q_lens >= 1).all() and (q_lens <= kv_lens).all()
    assert q_lens[0] == extended(mode).q_len and kv_lens[0] == 60


def test_accepted_drafts_are_ragged_blocks_and_prompts_are_not() -> None:
    assert set(sample_extend_lens(extended("draft_extend"))[0]) == {1, 2, 3, 4, 5, 6}
    for mode in ("prefill_paged", "target_verify", "dllm_extend"):
        assert set(sample_extend_lens(extended(mode))[0]) == {6}


def test_in_a_tree_a_draft_sees_itself_and_what_its_parent_sees() -> None:
    trees = sample_drafts(extended("target_verify"))
    assert len({tree.tobytes() for tree in trees}) > 5
    for tree in trees:
        assert not np.triu(tree, 1).any() and tree.diagonal().all()
        for draft in range(1, 6):
            ancestors = tree[draft].copy()
            ancestors[draft] = False
            assert any((ancestors == tree[parent]).all() for parent in range(draft))


def test_in_a_chain_a_draft_sees_all_before_it() -> None:
    chains = sample_drafts(extended("target_verify", "chain"))
    assert (chains == np.tri(6, dtype=bool)).all()


@pytest.mark.parametrize(
    ("mode", "mask"), [(m, mask) for m, masks in MODES.items() for mask in masks]
)
def test_the_cost_counts_the_pairs_that_the_mask_lets_through(mode: str, mask: str) -> None:
    case = extended(mode, mask)
    batch = build_extend_batch(case, device="cpu")
    pairs = masked_bytes = 0
    for q, n in zip(batch.q_lens_cpu.tolist(), batch.paged.seq_lens_cpu.tolist(), strict=True):
        pairs += {"causal": sum(range(n - q + 1, n + 1)), "full": q * n}.get(mask, 0)
        masked_bytes += -(-q * n // 8)
    if batch.custom_mask is not None:
        pairs = int(batch.custom_mask.sum())
    cost, tokens = extend_cost(case), int(batch.paged.seq_lens_cpu.sum())
    assert cost.flops == 4 * 16 * 4 * pairs
    assert cost.kv_bytes == 2 * 2 * 16 * 2 * tokens
    pages = 0 if case.ragged else len(batch.paged.kv_indices)
    rest = 2 * 2 * batch.rows * 4 * 16 + 4 * pages
    rest += masked_bytes if batch.custom_mask is not None else 0
    assert cost.io_bytes == cost.kv_bytes + rest


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("top_k", [1, 40, 90, 300])
def test_chosen_tokens_are_distinct_live_and_padded_at_the_end(top_k: int, lengths: str) -> None:
    case = replace(LATENT, spec=replace(LATENT.spec, top_k=top_k), lengths=lengths)
    chosen = sample_chosen(case)
    assert (chosen.shape, chosen.dtype) == ((6, top_k), np.int32)
    for row, length in zip(chosen, sample_seq_lens(case), strict=True):
        count = min(top_k, length)
        assert len(set(row[:count])) == count
        assert row[:count].min() >= 0 and row[:count].max() < length
        assert (row[count:] == -1).all()


def test_both_formats_hold_the_same_tokens() -> None:
    plain = workload(LATENT)
    packed = workload(replace(LATENT, spec=replace(LATENT.spec, kv_format="fp8-656")))
    assert torch.equal(packed.kv, quantize(plain.kv))
    assert torch.equal(packed.q, plain.q)
    assert torch.equal(packed.batch.chosen, plain.batch.chosen)
    dense = replace(LATENT, spec=replace(LATENT.spec, top_k=0))
    assert workload(dense).batch.chosen is None


def test_a_cache_made_in_pieces_is_filled_to_its_end_in_whole_pages(monkeypatch) -> None:
    monkeypatch.setattr(mla, "CHUNK_TOKENS", 48)
    cache = workload(LATENT).kv
    assert (cache.shape[1:], cache.numel() * 2) == ((16, 576), mla_cache_bytes(LATENT))
    assert bool((cache.float().std(dim=(1, 2)) > 0.9).all())


@pytest.mark.parametrize(
    ("spec", "sizes", "kv_bytes", "index_words", "tokens"),
    [
        (MlaSpec(16, 2048, 64, "fp8-656"), (4, 8192), 4 * 2048 * 656, 4 * 2048, 4 * 2048),
        (MlaSpec(16), (4, 1000), 4 * 1000 * 1152, 4 * 16, 4 * 1000),  # dense: a page table
        (MlaSpec(16, 2048), (2, 100), 2 * 100 * 1152, 2 * 2048, 2 * 100),  # no more than it has
    ],
)
def test_an_mla_call_costs_its_tokens_once_and_what_finds_them(
    spec, sizes, kv_bytes, index_words, tokens
) -> None:
    cost = mla_cost(MlaCase(spec, *sizes))
    width = 16 * (576 + 512)
    assert (cost.kv_bytes, cost.flops) == (kv_bytes, 2 * width * tokens)
    assert cost.io_bytes == kv_bytes + sizes[0] * width * 2 + 4 * index_words
