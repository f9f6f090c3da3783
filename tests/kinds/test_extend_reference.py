"""The oracle of several queries a request: against the decode oracle, SDPA, and able to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name

from attnlib.core.batch import PagedKV
from attnlib.core.spec import AttnSpec
from attnlib.kinds.call import Workload
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.decode.measure import attend, gather_tokens
from attnlib.kinds.extend import measure as extend_reference
from attnlib.kinds.extend.case import MODES, ExtendCase
from attnlib.kinds.extend.measure import ExtendOracle, attend_extend, build_extend_workload

CACHED = DecodeCase(AttnSpec(6, 2, 16, 4), 4, 50, "ragged", seed=1)
PAIRS = [(mode, mask) for mode, masks in MODES.items() for mask in masks]


def workload(mode: str, mask: str = "", **spec: int) -> Workload:
    ragged = mode == "prefill_ragged"
    sizes = {"page_size": 1} if ragged else {}
    cached = replace(CACHED, spec=replace(CACHED.spec, **spec, **sizes))
    return build_extend_workload(ExtendCase(cached, mode, 50 if ragged else 7, mask), device="cpu")


def sdpa(work: Workload) -> torch.Tensor:
    """torch's own attention in float64, request by request, with a mask made from the mode."""
    batch, out, done = work.batch, [], 0
    for i, q in enumerate(work.q.double().split(batch.q_lens_cpu.tolist())):
        k, v = gather_tokens(work.kv, batch.paged, i)
        rows, n = len(q), len(k)
        mask = torch.ones(rows, n, dtype=torch.bool)
        if batch.custom_mask is not None:
            mask = batch.custom_mask[done : done + rows * n].view(rows, n)
            done += rows * n
        elif batch.mask == "causal":
            mask = mask.tril(n - rows)
        each = F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
        )
        out.append(each.transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("block", [1, 700, 2**28])
@pytest.mark.parametrize(("mode", "mask"), PAIRS)
def test_the_oracle_is_masked_softmax_whatever_its_blocks(mode, mask, block, monkeypatch) -> None:
    monkeypatch.setattr(extend_reference, "BLOCK_SCORES", block)
    work = workload(mode, mask)
    out = attend_extend(work.q, work.kv, work.batch)
    assert (out.shape, out.dtype) == (work.q.shape, torch.float64)
    torch.testing.assert_close(out, sdpa(work), rtol=1e-12, atol=1e-12)


def test_causal_queries_are_decode_steps_in_a_row() -> None:
    work = workload("prefill_paged")
    rows = work.batch.paged.query_rows(7)
    wanted = attend(work.q, work.kv, rows)
    torch.testing.assert_close(
        attend_extend(work.q, work.kv, work.batch), wanted, rtol=1e-12, atol=1e-12
    )


def test_a_chain_is_causal_and_a_tree_is_not() -> None:
    causal, chain, tree = (
        attend_extend(work.q, work.kv, work.batch)
        for work in (workload("target_verify", mask) for mask in ("causal", "chain", "tree"))
    )
    assert torch.equal(causal, chain)
    assert not torch.allclose(causal, tree, rtol=1e-3)


def as_bfloat16(work: Workload, **changes) -> torch.Tensor:
    return attend_extend(work.q, work.kv, replace(work.batch, **changes)).bfloat16()


@pytest.mark.parametrize(("mode", "mask"), PAIRS)
def test_an_output_rounded_as_a_kernel_must_passes(mode: str, mask: str) -> None:
    work = workload(mode, mask)
    assert ExtendOracle(work.q, work.kv, work.batch).check(as_bfloat16(work)).passed


def another_mask(work: Workload) -> torch.Tensor:
    mask = "full" if work.batch.mask != "full" else "causal"
    return as_bfloat16(work, mask=mask, custom_mask=None)


def a_wrong_cache(work: Workload) -> torch.Tensor:
    kv = PagedKV(work.kv.k_cache.flip(0), work.kv.v_cache)
    return attend_extend(work.q, kv, work.batch).bfloat16()


def a_neighbours_row(work: Workload) -> torch.Tensor:
    return as_bfloat16(work).roll(1, 0)


def a_missing_row(work: Workload) -> torch.Tensor:
    out = as_bfloat16(work)
    out[-1] = float("nan")
    return out


@pytest.mark.parametrize("mutate", [another_mask, a_wrong_cache, a_neighbours_row, a_missing_row])
@pytest.mark.parametrize(("mode", "mask"), PAIRS)
def test_a_wrong_output_fails(mode: str, mask: str, mutate: Callable) -> None:
    work = workload(mode, mask)
    assert not ExtendOracle(work.q, work.kv, work.batch).check(mutate(work)).passed
