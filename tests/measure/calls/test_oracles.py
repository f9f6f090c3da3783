"""The oracles against second ones, written otherwise: decode, extend and MLA."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name
from support.workloads import MASKS, exact, extend_case, work_of

from attnlib.core import MlaBatch
from attnlib.core.spec import MLA_TOKEN_BYTES, AttnSpec, MlaSpec
from attnlib.measure.calls.check import worst_row_error
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.decode.measure import gather_tokens
from attnlib.measure.calls.extend import measure as extend
from attnlib.measure.calls.mla.case import MlaCase
from attnlib.measure.calls.mla.format import dequantize

CASE = DecodeCase(
    AttnSpec(4, 2, 64, 16),
    batch_size=3,
    kv_len=70,
    lengths="ragged",
    seed=1,
)
FP8 = "float8_e4m3fn"
CACHED = DecodeCase(AttnSpec(6, 2, 16, 4), 4, 50, "ragged", seed=1)


def latent(top_k, kv_format):
    return work_of(MlaCase(MlaSpec(3, top_k, 16, kv_format), 4, 100, "ragged"))


def token_rows(cache, row, length, head):
    """Rows [length, head_dim] of one KV head of one request, a page-table look-up each."""
    page_size = cache.shape[1]
    cache = cache.double().numpy()
    return np.stack([cache[row[t // page_size], t % page_size, head] for t in range(length)])


def dense_attention(work):
    """softmax(q K^T / sqrt(d)) V for every request and query head, in float64."""
    q = work.q.double().numpy()
    caches = (work.kv.k_cache, work.kv.v_cache)
    table = work.batch.page_table.numpy()
    lens = work.batch.seq_lens.tolist()
    group_size = q.shape[1] // caches[0].shape[2]
    out = np.empty_like(q)
    for i, j in np.ndindex(*q.shape[:2]):
        head = j // group_size
        k, v = (token_rows(cache, table[i], lens[i], head) for cache in caches)
        scores = np.exp(k @ q[i, j] / np.sqrt(q.shape[2]))
        window = work.case.spec.window or lens[i]
        scores *= np.arange(lens[i]) >= lens[i] - window
        out[i, j] = scores / scores.sum() @ v
    return torch.from_numpy(out)


def sdpa(work):
    """torch's own attention in float64, request by request, with a mask made from the mode."""
    batch = work.batch
    out = []
    done = 0
    queries = work.q.double().split(batch.q_lens_cpu.tolist())
    for i, q in enumerate(queries):
        k, v = gather_tokens(work.kv, batch.paged, i)
        rows = len(q)
        n = len(k)
        mask = torch.ones(rows, n, dtype=torch.bool)
        if batch.custom_mask is not None:
            mask = batch.custom_mask[done : done + rows * n].view(rows, n)
            done += rows * n
        elif batch.mask == "causal":
            mask = mask.tril(n - rows)
        rows_out = F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
        )
        out.append(rows_out.transpose(0, 1))
    return torch.cat(out)


def masked_softmax(work):
    """MLA with every slot of the cache a column, dead ones masked: float64."""
    cache = work.kv.flatten(0, 1)
    if cache.dtype == torch.float8_e4m3fn:
        cache = cache.float() / 64
    keys = (dequantize(cache) if cache.dtype == torch.uint8 else cache).double()
    mask = torch.full(
        (work.batch.batch_size, len(keys)),
        float("-inf"),
        dtype=torch.float64,
    )
    for i, length in enumerate(work.batch.paged.seq_lens_cpu.tolist()):
        places = range(length) if work.batch.chosen is None else work.batch.chosen[i].tolist()
        for place in (p for p in places if p >= 0):
            page = int(work.batch.paged.page_table[i, place // 16])
            mask[i, page * 16 + place % 16] = 0
    scores = torch.einsum("bhd,nd->bhn", work.q.double(), keys) / 192**0.5
    return torch.softmax(scores + mask[:, None], -1) @ keys[:, :512]


def assert_matches(work, second):
    """assert_close holds shape and dtype, float64, too."""
    torch.testing.assert_close(exact(work), second(work), rtol=1e-12, atol=1e-12)


GROUPS = product((1, 16, 64), range(1, 9))
KINDS = product((64, 128, 256), ("float16", FP8))
LAYERS = [AttnSpec(2 * group, 2, 64, page) for page, group in GROUPS]
LAYERS += [AttnSpec(8, 2, head_dim, 16, dtype) for head_dim, dtype in KINDS]
WINDOWS = [replace(CASE.spec, window=window) for window in (1, 16, 23, 70, 1000)]


@pytest.mark.parametrize("spec", [*LAYERS, *WINDOWS], ids=str)
def test_the_oracle_is_dense_attention_for_every_layer(spec):
    assert_matches(work_of(replace(CASE, spec=spec)), dense_attention)


@pytest.mark.parametrize("block", [1, 700, 2**28])
@pytest.mark.parametrize("mode, mask", MASKS)
def test_of_several_queries_it_is_masked_softmax_whatever_its_blocks(
    mode, mask, block, monkeypatch
):
    monkeypatch.setattr(extend, "BLOCK_SCORES", block)
    assert_matches(work_of(extend_case(CACHED, mode, mask)), sdpa)


@pytest.mark.parametrize("kv_format", MLA_TOKEN_BYTES)
@pytest.mark.parametrize("top_k", [0, 1, 24, 200])
def test_of_mla_it_is_masked_softmax_over_the_whole_cache(top_k, kv_format):
    assert_matches(latent(top_k, kv_format), masked_softmax)


def test_of_mla_a_query_sees_its_own_token_and_all_before_it():
    case = MlaCase(MlaSpec(4, page_size=16), 3, 90, "90+4+37", q_len=4)
    work = work_of(case)
    out = exact(work).view(3, 4, 4, 512)
    q = work.q.view(3, 4, 4, 576)
    for back in range(4):
        # One query of its own, over requests that end with its token.
        paged = work.batch.paged
        earlier = MlaBatch.build(case.spec, paged.seq_lens_cpu - back, paged.page_table)
        one = replace(
            work,
            batch=earlier,
            q=q[:, 3 - back].contiguous(),
        )
        torch.testing.assert_close(
            out[:, 3 - back],
            exact(one),
            rtol=1e-12,
            atol=1e-12,
        )


def test_slots_that_nobody_attends_to_may_hold_anything():
    work = work_of(CASE)
    sparse = latent(24, "bfloat16")
    table = work.batch.page_table.tolist()
    live = []
    for row, length in zip(table, work.batch.seq_lens.tolist(), strict=True):
        live += [row[token // 16] * 16 + token % 16 for token in range(length)]
    chosen = sparse.batch.slots().flatten()
    caches = (work.kv.k_cache, work.kv.v_cache)
    for call, kept, read in (
        (work, caches, live),
        (
            sparse,
            [sparse.kv],
            chosen[chosen >= 0],
        ),
    ):
        right = exact(call)
        for slots in (cache.flatten(0, 1) for cache in kept):
            dead = torch.ones(len(slots), dtype=torch.bool)
            dead[read] = False
            assert dead.any()
            slots[dead] = float("nan")
        assert torch.equal(exact(call), right)


def test_large_scores_do_not_overflow():
    work = work_of(CASE)
    large = replace(work, q=work.q * 1e4)
    assert bool(torch.isfinite(exact(large)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_rounded_probabilities_cost_what_their_format_does(dtype):
    work = work_of(CASE)
    error = worst_row_error(exact(work, dtype), exact(work))
    assert 0.05 * torch.finfo(dtype).eps < error < torch.finfo(dtype).eps


def test_only_the_weights_are_rounded_and_not_their_sum():
    work = work_of(CASE)
    work.kv.v_cache.fill_(1.0)
    assert float((exact(work) - 1).abs().max()) < 1e-12
    rounded_sum = exact(work, torch.bfloat16)
    assert float((rounded_sum - 1).abs().max()) > 1e-6
