"""The oracle against a second one: a dense softmax in NumPy that walks the tokens one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnlib.core.batch import DecodeBatch, PagedKV
from attnlib.core.spec import AttnSpec
from attnlib.kinds.call import Workload
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.decode.measure import attend, build_workload, gather_tokens

CASE = DecodeCase(AttnSpec(4, 2, 64, 16), batch_size=3, kv_len=70, lengths="ragged", seed=1)


def work_of(page_size: int, group_size: int, head_dim: int, dtype: str = "bfloat16"):
    spec = AttnSpec(2 * group_size, 2, head_dim, page_size, dtype)
    return build_workload(replace(CASE, spec=spec), device="cpu")


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


def token_rows(cache: np.ndarray, row: np.ndarray, length: int, head: int) -> np.ndarray:
    """Rows [length, head_dim] of one KV head of one request, a page-table look-up each."""
    page_size = cache.shape[1]
    return np.stack([cache[row[t // page_size], t % page_size, head] for t in range(length)])


def dense_attention(work: Workload) -> np.ndarray:
    """softmax(q K^T / sqrt(d)) V for every request and query head, in float64."""
    q, k_cache, v_cache = wide(work.q), wide(work.kv.k_cache), wide(work.kv.v_cache)
    table, lens = work.batch.page_table.numpy(), work.batch.seq_lens.tolist()
    group_size = q.shape[1] // k_cache.shape[2]
    out = np.empty_like(q)
    for i, j in np.ndindex(*q.shape[:2]):
        k = token_rows(k_cache, table[i], lens[i], j // group_size)
        v = token_rows(v_cache, table[i], lens[i], j // group_size)
        scores = np.exp(k @ q[i, j] / np.sqrt(q.shape[2]))
        out[i, j] = scores / scores.sum() @ v
    return out


def assert_matches_dense(work: Workload) -> None:
    out = attend(work.q, work.kv, work.batch)
    assert out.dtype == torch.float64
    np.testing.assert_allclose(out.numpy(), dense_attention(work), rtol=0, atol=1e-12)


@pytest.mark.parametrize("group_size", range(1, 9))
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_oracle_is_dense_attention_for_every_page_and_group_size(page_size, group_size) -> None:
    assert_matches_dense(work_of(page_size, group_size, 64))


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_oracle_is_dense_attention_for_every_head_dim_and_dtype(head_dim, dtype) -> None:
    assert_matches_dense(work_of(16, 4, head_dim, dtype))


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_the_oracle_is_dense_attention_at_every_page_boundary(length) -> None:
    assert_matches_dense(build_workload(replace(CASE, kv_len=length), device="cpu"))


def test_where_a_page_lies_does_not_matter() -> None:
    work = build_workload(CASE, device="cpu")
    order = torch.randperm(work.kv.num_pages, generator=torch.Generator().manual_seed(3))
    moved = PagedKV(work.kv.k_cache[order], work.kv.v_cache[order])
    table = torch.argsort(order)[work.batch.page_table.long()].int()
    batch = DecodeBatch.build(CASE.spec, work.batch.seq_lens_cpu, table)
    assert not torch.equal(batch.kv_indices, work.batch.kv_indices)
    assert torch.equal(attend(work.q, moved, batch), attend(work.q, work.kv, work.batch))


def poisoned(work: Workload) -> tuple[PagedKV, DecodeBatch]:
    """NaN in every slot that holds no live token, a page that nobody uses in front of the pool."""
    spec = work.batch.spec
    live = torch.zeros(work.kv.num_pages, spec.page_size, dtype=torch.bool)
    for row, length in zip(work.batch.page_table.tolist(), work.batch.seq_lens, strict=True):
        for token in range(int(length)):
            live[row[token // spec.page_size], token % spec.page_size] = True
    caches = (c.clone() for c in (work.kv.k_cache, work.kv.v_cache))
    dirty = (c.masked_fill(~live[:, :, None, None], float("nan")) for c in caches)
    kv = PagedKV(*(torch.cat([torch.full_like(c[:1], float("nan")), c]) for c in dirty))
    return kv, DecodeBatch.build(spec, work.batch.seq_lens_cpu, work.batch.page_table + 1)


def test_dead_slots_and_unused_pages_may_hold_anything() -> None:
    work = build_workload(CASE, device="cpu")
    kv, batch = poisoned(work)
    assert int(kv.v_cache[:, :, 0, 0].isnan().sum()) > CASE.spec.page_size
    assert torch.equal(attend(work.q, kv, batch), attend(work.q, work.kv, work.batch))


def test_large_scores_do_not_overflow() -> None:
    work = work_of(16, 1, 64, "bfloat16")
    loud = replace(work, q=work.q * 1e4)
    assert bool(torch.isfinite(attend(loud.q, loud.kv, loud.batch)).all())


def test_gathered_tokens_come_in_order_and_no_further_than_the_length() -> None:
    work = build_workload(CASE, device="cpu")
    for i, length in enumerate(work.batch.seq_lens.tolist()):
        k, v = gather_tokens(work.kv, work.batch, i)
        row = work.batch.page_table[i].numpy()
        assert k.shape == v.shape == (length, 2, 64)
        assert np.array_equal(k[:, 1].numpy(), token_rows(wide(work.kv.k_cache), row, length, 1))
        assert np.array_equal(v[:, 0].numpy(), token_rows(wide(work.kv.v_cache), row, length, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_rounded_probabilities_cost_what_their_format_does(dtype) -> None:
    work = work_of(16, 4, 64)
    exact = attend(work.q, work.kv, work.batch)
    rounded = attend(work.q, work.kv, work.batch, probs_dtype=dtype)
    error = float(((rounded - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
    assert 0.05 * torch.finfo(dtype).eps < error < torch.finfo(dtype).eps


def test_only_the_weights_are_rounded_and_not_their_sum() -> None:
    work = work_of(16, 4, 64)
    work.kv.v_cache.fill_(1.0)
    assert float((attend(work.q, work.kv, work.batch) - 1).abs().max()) < 1e-12
    rounded = attend(work.q, work.kv, work.batch, probs_dtype=torch.bfloat16)
    assert float((rounded - 1).abs().max()) > 1e-6


def test_inputs_that_do_not_fit_are_refused_before_any_work() -> None:
    work = build_workload(CASE, device="cpu")
    with pytest.raises(ValueError, match="q must be"):
        attend(work.q[:, :2], work.kv, work.batch)
