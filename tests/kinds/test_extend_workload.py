"""Seeded calls with several queries a request: the same everywhere, and what each mode promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnlib.core.spec import AttnSpec
from attnlib.kinds.cost import extend_cost
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import MODES, ExtendCase
from attnlib.kinds.extend.measure import build_extend_batch, build_extend_workload
from attnlib.kinds.lengths import sample_drafts, sample_extend_lens

CACHED = DecodeCase(AttnSpec(4, 2, 16, 4), 20, 60, "ragged", seed=3)
ONE_TOKEN = replace(CACHED, spec=replace(CACHED.spec, page_size=1))


def case_of(mode: str, mask: str = "", q_len: int = 6) -> ExtendCase:
    if mode == "prefill_ragged":
        return ExtendCase(ONE_TOKEN, mode, 60)
    return ExtendCase(CACHED, mode, q_len, mask)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_has_its_queries_among_its_tokens(mode: str) -> None:
    q_lens, kv_lens = sample_extend_lens(case_of(mode))
    assert (q_lens.dtype, kv_lens.dtype) == (np.int32, np.int32)
    assert (q_lens >= 1).all() and (q_lens <= kv_lens).all()
    assert q_lens[0] == case_of(mode).q_len and kv_lens[0] == 60


def test_accepted_drafts_are_ragged_blocks_and_prompts_are_not() -> None:
    assert set(sample_extend_lens(case_of("draft_extend"))[0]) == {1, 2, 3, 4, 5, 6}
    for mode in ("prefill_paged", "target_verify", "dllm_extend"):
        assert set(sample_extend_lens(case_of(mode))[0]) == {6}


def test_in_a_tree_a_draft_sees_itself_and_what_its_parent_sees() -> None:
    trees = sample_drafts(case_of("target_verify"))
    assert len({tree.tobytes() for tree in trees}) > 5
    for tree in trees:
        assert not np.triu(tree, 1).any() and tree.diagonal().all()
        for draft in range(1, 6):
            ancestors = tree[draft].copy()
            ancestors[draft] = False
            assert any((ancestors == tree[parent]).all() for parent in range(draft))


def test_in_a_chain_a_draft_sees_all_before_it() -> None:
    chains = sample_drafts(case_of("target_verify", "chain"))
    assert (chains == np.tri(6, dtype=bool)).all()


def test_pages_are_shuffled_but_for_a_ragged_prefill() -> None:
    pages = build_extend_batch(case_of("prefill_paged"), device="cpu").paged.kv_indices
    assert sorted(pages.tolist()) == list(range(len(pages)))
    assert pages.tolist() != list(range(len(pages)))
    ragged = build_extend_batch(case_of("prefill_ragged"), device="cpu")
    assert ragged.ragged and ragged.paged.kv_indices.tolist() == list(range(ragged.rows))


@pytest.mark.parametrize("mode", MODES)
def test_the_same_case_gives_the_same_call_and_another_seed_another(mode: str) -> None:
    case = case_of(mode)
    one, two = (build_extend_workload(case, device="cpu") for _ in range(2))
    assert torch.equal(one.q, two.q) and torch.equal(one.kv.v_cache, two.kv.v_cache)
    assert torch.equal(one.batch.paged.kv_indices, two.batch.paged.kv_indices)
    seeded = replace(case, cached=replace(case.cached, seed=4))
    other = build_extend_batch(seeded, device="cpu")
    assert other.paged.seq_lens_cpu.tolist() != one.batch.paged.seq_lens_cpu.tolist()


def test_queries_keys_and_values_differ() -> None:
    work = build_extend_workload(case_of("prefill_ragged"), device="cpu")
    k, v = work.kv.k_cache[:, 0], work.kv.v_cache[:, 0]
    assert work.q.shape == (work.batch.rows, 4, 16) and k.shape == (work.batch.rows, 2, 16)
    assert not torch.equal(k, v) and not torch.equal(work.q[:, :2], k)


@pytest.mark.parametrize(
    ("mode", "mask"), [(m, mask) for m, masks in MODES.items() for mask in masks]
)
def test_the_cost_counts_the_pairs_that_the_mask_lets_through(mode: str, mask: str) -> None:
    case = case_of(mode, mask)
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
