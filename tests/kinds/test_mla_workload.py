"""Seeded MLA workloads: the same everywhere, distinct tokens, both formats of one cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnlib.core.spec import MlaSpec
from attnlib.kinds.cost import mla_cache_bytes, mla_cost
from attnlib.kinds.lengths import sample_seq_lens
from attnlib.kinds.mla import measure as mla_workload
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.mla.format import quantize
from attnlib.kinds.mla.measure import build_mla_workload, sample_chosen

CASE = MlaCase(MlaSpec(2, 40, 16), 6, 90, "ragged", seed=4)


@pytest.mark.parametrize("lengths", ["fixed", "ragged", "skewed"])
@pytest.mark.parametrize("top_k", [1, 40, 90, 300])
def test_chosen_tokens_are_distinct_live_and_padded_at_the_end(top_k: int, lengths: str) -> None:
    case = replace(CASE, spec=replace(CASE.spec, top_k=top_k), lengths=lengths)
    chosen = sample_chosen(case)
    assert (chosen.shape, chosen.dtype) == ((6, top_k), np.int32)
    for row, length in zip(chosen, sample_seq_lens(case), strict=True):
        count = min(top_k, length)
        assert len(set(row[:count])) == count
        assert row[:count].min() >= 0 and row[:count].max() < length
        assert (row[count:] == -1).all()


def test_the_same_case_gives_the_same_tokens_and_another_seed_others() -> None:
    assert (sample_chosen(CASE) == sample_chosen(CASE)).all()
    assert (sample_chosen(CASE) != sample_chosen(replace(CASE, seed=5))).any()
    one, two = (build_mla_workload(CASE, device="cpu") for _ in range(2))
    assert torch.equal(one.q, two.q) and torch.equal(one.kv, two.kv)


def test_both_formats_hold_the_same_tokens() -> None:
    plain = build_mla_workload(CASE, device="cpu")
    packed = build_mla_workload(
        replace(CASE, spec=replace(CASE.spec, kv_format="fp8-656")), device="cpu"
    )
    assert torch.equal(packed.kv, quantize(plain.kv))
    assert torch.equal(packed.q, plain.q)
    assert torch.equal(packed.batch.chosen, plain.batch.chosen)


def test_a_cache_made_in_pieces_is_filled_to_its_end(monkeypatch) -> None:
    monkeypatch.setattr(mla_workload, "CHUNK_TOKENS", 48)
    cache = build_mla_workload(CASE, device="cpu").kv
    assert cache.shape[1:] == (16, 576)
    assert bool((cache.float().std(dim=(1, 2)) > 0.9).all())


def test_a_dense_case_chooses_nothing() -> None:
    case = replace(CASE, spec=replace(CASE.spec, top_k=0))
    assert build_mla_workload(case, device="cpu").batch.chosen is None


def test_the_cost_of_a_sparse_call_is_its_chosen_tokens_once() -> None:
    cost = mla_cost(MlaCase(MlaSpec(16, 2048, 64, "fp8-656"), 4, 8192))
    assert cost.kv_bytes == 4 * 2048 * 656
    assert cost.io_bytes == cost.kv_bytes + 4 * 16 * (576 + 512) * 2 + 4 * 2048 * 4
    assert cost.flops == 2 * 16 * (576 + 512) * 4 * 2048


def test_the_cost_of_a_dense_call_is_every_token_and_a_page_table() -> None:
    cost = mla_cost(MlaCase(MlaSpec(16), 4, 1000))
    assert cost.kv_bytes == 4 * 1000 * 1152
    assert cost.io_bytes == cost.kv_bytes + 4 * 16 * (576 + 512) * 2 + 4 * 16 * 4


def test_a_short_request_costs_no_more_than_it_has() -> None:
    assert mla_cost(MlaCase(MlaSpec(16, 2048), 2, 100)).kv_bytes == 2 * 100 * 1152


def test_the_cache_of_a_case_is_whole_pages() -> None:
    work = build_mla_workload(CASE, device="cpu")
    assert mla_cache_bytes(CASE) == work.kv.numel() * 2
