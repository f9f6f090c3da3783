"""The oracles against second ones, written otherwise, and able to fail: decode, extend and MLA."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name

from attnlib.core.batch import DecodeBatch, PagedKV
from attnlib.core.spec import AttnSpec, MlaSpec
from attnlib.kinds.call import Workload
from attnlib.kinds.check import OracleCheck, worst_row_error
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.decode.measure import Oracle, attend, build_workload, gather_tokens
from attnlib.kinds.extend import measure as extend
from attnlib.kinds.extend.case import MODES, ExtendCase
from attnlib.kinds.extend.measure import ExtendOracle, attend_extend
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.mla.format import dequantize
from attnlib.kinds.mla.measure import MlaOracle, attend_mla, build_mla_workload

CASE = DecodeCase(AttnSpec(4, 2, 64, 16), batch_size=3, kv_len=70, lengths="ragged", seed=1)
CACHED = DecodeCase(AttnSpec(6, 2, 16, 4), 4, 50, "ragged", seed=1)
JUDGES = {
    DecodeCase: (attend, Oracle),
    ExtendCase: (attend_extend, ExtendOracle),
    MlaCase: (attend_mla, MlaOracle),
}
PAIRS = [(mode, mask) for mode, masks in MODES.items() for mask in masks]
FORMATS = [(top_k, kv_format) for top_k in (0, 24) for kv_format in ("bfloat16", "fp8-656")]


def decode(**changes: Any) -> Workload:
    return build_workload(replace(CASE, **changes), device="cpu")


def work_of(page_size: int, group_size: int, head_dim: int, dtype: str = "bfloat16") -> Workload:
    return decode(spec=AttnSpec(2 * group_size, 2, head_dim, page_size, dtype))


def extended(mode: str, mask: str = "") -> Workload:
    ragged = mode == "prefill_ragged"
    sizes = {"page_size": 1} if ragged else {}
    cached = replace(CACHED, spec=replace(CACHED.spec, **sizes))
    case = ExtendCase(cached, mode, 50 if ragged else 7, mask)
    return extend.build_extend_workload(case, device="cpu")


def latent(top_k: int = 24, kv_format: str = "fp8-656") -> Workload:
    case = MlaCase(MlaSpec(3, top_k, 16, kv_format), 4, 100, "ragged")
    return build_mla_workload(case, device="cpu")


def exact(work: Workload, **options: Any) -> torch.Tensor:
    """The oracle's output over `work`, or over another `q`, `kv` or `batch`."""
    given = {name: options.pop(name, getattr(work, name)) for name in ("q", "kv", "batch")}
    return JUDGES[type(work.case)][0](*given.values(), **options)


def rounded(work: Workload, **changed: Any) -> torch.Tensor:
    """The same as a kernel must round it."""
    return exact(work, **changed).bfloat16()


def verdict(work: Workload, out: torch.Tensor) -> OracleCheck:
    return JUDGES[type(work.case)][1](work.q, work.kv, work.batch).check(out)


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


def token_rows(cache: np.ndarray, row: np.ndarray, length: int, head: int) -> np.ndarray:
    """Rows [length, head_dim] of one KV head of one request, a page-table look-up each."""
    page_size = cache.shape[1]
    return np.stack([cache[row[t // page_size], t % page_size, head] for t in range(length)])


def dense_attention(work: Workload) -> torch.Tensor:
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
    return torch.from_numpy(out)


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


def masked_softmax(work: Workload) -> torch.Tensor:
    """MLA with every slot of the cache a column, dead ones masked: float64."""
    cache = work.kv.flatten(0, 1)
    keys = (dequantize(cache) if cache.dtype == torch.uint8 else cache).double()
    mask = torch.full((work.batch.batch_size, len(keys)), float("-inf"), dtype=torch.float64)
    for i, length in enumerate(work.batch.paged.seq_lens_cpu.tolist()):
        places = range(length) if work.batch.chosen is None else work.batch.chosen[i].tolist()
        for place in (p for p in places if p >= 0):
            page = int(work.batch.paged.page_table[i, place // 16])
            mask[i, page * 16 + place % 16] = 0
    scores = torch.einsum("bhd,nd->bhn", work.q.double(), keys) / 192**0.5
    return torch.softmax(scores + mask[:, None], -1) @ keys[:, :512]


def assert_matches(work: Workload, second: Callable[[Workload], torch.Tensor]) -> None:
    """assert_close holds shape and dtype, float64, too."""
    torch.testing.assert_close(exact(work), second(work), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("group_size", range(1, 9))
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_oracle_is_dense_attention_for_every_page_and_group_size(page_size, group_size) -> None:
    assert_matches(work_of(page_size, group_size, 64), dense_attention)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_oracle_is_dense_attention_for_every_head_dim_and_dtype(head_dim, dtype) -> None:
    assert_matches(work_of(16, 4, head_dim, dtype), dense_attention)


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_the_oracle_is_dense_attention_at_every_page_boundary(length) -> None:
    assert_matches(decode(kv_len=length), dense_attention)


@pytest.mark.parametrize("block", [1, 700, 2**28])
@pytest.mark.parametrize(("mode", "mask"), PAIRS)
def test_of_several_queries_it_is_masked_softmax_whatever_its_blocks(
    mode, mask, block, monkeypatch
) -> None:
    monkeypatch.setattr(extend, "BLOCK_SCORES", block)
    assert_matches(extended(mode, mask), sdpa)


@pytest.mark.parametrize("kv_format", ["bfloat16", "fp8-656"])
@pytest.mark.parametrize("top_k", [0, 1, 24, 200])
def test_of_mla_it_is_masked_softmax_over_the_whole_cache(top_k: int, kv_format: str) -> None:
    assert_matches(latent(top_k, kv_format), masked_softmax)


def test_where_a_page_lies_does_not_matter() -> None:
    work = decode()
    order = torch.randperm(work.kv.num_pages, generator=torch.Generator().manual_seed(3))
    moved = PagedKV(work.kv.k_cache[order], work.kv.v_cache[order])
    table = torch.argsort(order)[work.batch.page_table.long()].int()
    batch = DecodeBatch.build(CASE.spec, work.batch.seq_lens_cpu, table)
    assert not torch.equal(batch.kv_indices, work.batch.kv_indices)
    assert torch.equal(exact(work, kv=moved, batch=batch), exact(work))


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
    work = decode()
    kv, batch = poisoned(work)
    assert int(kv.v_cache[:, :, 0, 0].isnan().sum()) > CASE.spec.page_size
    assert torch.equal(exact(work, kv=kv, batch=batch), exact(work))


def test_tokens_that_nobody_attends_to_may_hold_anything() -> None:
    work = latent(24, "bfloat16")
    read = torch.zeros(work.kv.shape[:2], dtype=torch.bool).flatten()
    slots = work.batch.slots()
    read[slots[slots >= 0].long()] = True
    cache = work.kv.clone()
    cache.flatten(0, 1)[~read] = float("nan")
    assert torch.equal(exact(work, kv=cache), exact(work))


def test_large_scores_do_not_overflow() -> None:
    work = work_of(16, 1, 64)
    assert bool(torch.isfinite(exact(work, q=work.q * 1e4)).all())


def test_gathered_tokens_come_in_order_and_no_further_than_the_length() -> None:
    work = decode()
    for i, length in enumerate(work.batch.seq_lens.tolist()):
        k, v = gather_tokens(work.kv, work.batch, i)
        row = work.batch.page_table[i].numpy()
        assert k.shape == v.shape == (length, 2, 64)
        assert np.array_equal(k[:, 1].numpy(), token_rows(wide(work.kv.k_cache), row, length, 1))
        assert np.array_equal(v[:, 0].numpy(), token_rows(wide(work.kv.v_cache), row, length, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_rounded_probabilities_cost_what_their_format_does(dtype) -> None:
    work = work_of(16, 4, 64)
    error = worst_row_error(exact(work, probs_dtype=dtype), exact(work))
    assert 0.05 * torch.finfo(dtype).eps < error < torch.finfo(dtype).eps


def test_only_the_weights_are_rounded_and_not_their_sum() -> None:
    work = work_of(16, 4, 64)
    work.kv.v_cache.fill_(1.0)
    assert float((exact(work) - 1).abs().max()) < 1e-12
    assert float((exact(work, probs_dtype=torch.bfloat16) - 1).abs().max()) > 1e-6


def test_inputs_that_do_not_fit_are_refused_before_any_work() -> None:
    work = decode()
    with pytest.raises(ValueError, match="q must be"):
        exact(work, q=work.q[:, :2])


@pytest.mark.parametrize(("mode", "mask"), PAIRS)
def test_an_output_rounded_as_a_kernel_must_passes(mode: str, mask: str) -> None:
    work = extended(mode, mask)
    assert verdict(work, rounded(work)).passed


@pytest.mark.parametrize(("top_k", "kv_format"), FORMATS)
def test_an_mla_output_rounded_as_a_kernel_must_passes(top_k: int, kv_format: str) -> None:
    work = latent(top_k, kv_format)
    found = verdict(work, rounded(work))
    assert found.passed and found.rows == 12
    assert 0.002 < found.budget < 0.02


def filled(work: Workload, place: Any, value: float) -> torch.Tensor:
    out = rounded(work)
    out[place] = value
    return out


def another_mask(work: Workload) -> torch.Tensor:
    mask = "full" if work.batch.mask != "full" else "causal"
    return rounded(work, batch=replace(work.batch, mask=mask, custom_mask=None))


PLANTED = {
    "another mask": another_mask,
    "a wrong cache": lambda work: rounded(
        work, kv=PagedKV(work.kv.k_cache.flip(0), work.kv.v_cache)
    ),
    "a neighbour's row": lambda work: rounded(work).roll(1, 0),
    "a missing row": lambda work: filled(work, -1, float("nan")),
}


@pytest.mark.parametrize("mistake", PLANTED)
@pytest.mark.parametrize(("mode", "mask"), PAIRS)
def test_a_wrong_output_fails(mode: str, mask: str, mistake: str) -> None:
    work = extended(mode, mask)
    assert not verdict(work, PLANTED[mistake](work)).passed


def choosing(work: Workload, place: int) -> torch.Tensor:
    chosen = work.batch.chosen.clone()
    chosen[0, 0] = place
    return rounded(work, batch=replace(work.batch, chosen=chosen))


def with_a_neighbour(work: Workload) -> torch.Tensor:
    length = int(work.batch.paged.seq_lens_cpu[0])
    return choosing(work, min(set(range(length)) - set(work.batch.chosen[0].tolist())))


def without_rotary(work: Workload) -> torch.Tensor:
    q = work.q.clone()
    q[..., 512:] = 0
    return rounded(work, q=q)


def with_scales_swapped(work: Workload) -> torch.Tensor:
    cache = work.kv.clone()
    cache[..., 512:516], cache[..., 516:520] = work.kv[..., 516:520], work.kv[..., 512:516]
    return rounded(work, kv=cache)


PLANTED_MLA = {
    "without a token": lambda work: choosing(work, -1),
    "with a neighbour": with_a_neighbour,
    "scale of 576": lambda work: rounded(work, q=(work.q.double() * (192 / 576) ** 0.5).bfloat16()),
    "without rotary": without_rotary,
    "scales swapped": with_scales_swapped,
    "the unquantised cache": lambda _: rounded(latent(kv_format="bfloat16")),
    "heads swapped": lambda work: rounded(work).flip(1),
    "an unwritten row": lambda work: filled(work, (2, 1), 0),
    "a NaN": lambda work: filled(work, (3, 2, 511), float("nan")),
}


@pytest.mark.parametrize("mistake", PLANTED_MLA)
def test_a_wrong_mla_output_is_over_budget(mistake: str) -> None:
    work = latent()
    assert not verdict(work, PLANTED_MLA[mistake](work)).passed
