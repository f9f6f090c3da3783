"""Seeded workloads: a `DecodeCase` becomes lengths, page tables, a query and a paged cache.

The only module that makes random numbers. The same case gives the same lengths and page order on
every machine (NumPy's PCG64); tensor values follow torch's generator of the device they are made
on. Pages are a random permutation of the pool, as an engine's allocator leaves them. Lengths need
no torch (it is imported by the builders), so that reports can count bytes anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .batch import AttnSpec, DecodeBatch, DecodeCase, PagedKV
from .cases import MetadataCase, MlaCase
from .extend_case import ExtendCase

if TYPE_CHECKING:
    import torch

SKEW = 32
"""In a skewed batch the short requests have kv_len / SKEW tokens: one long chat among many new."""

SLOTS = 2**20
"""KV slots that a request pool's tokens point into."""

MODELS = {
    "llama-3.1-8b": (32, 8, 128),
    "llama-3.1-70b-tp8": (8, 1, 128),
    "qwen3-32b-tp4": (16, 2, 128),
    "qwen3-0.6b": (16, 8, 128),
    "llama-2-7b": (32, 32, 128),
}
"""Attention shapes a GPU sees: (num_qo_heads, num_kv_heads, head_dim), after tensor parallelism."""


@dataclass(frozen=True)
class DecodeWorkload:
    """Everything one attention call needs: `batch`, `q` [bs, num_qo_heads, head_dim], `kv`."""

    case: DecodeCase
    batch: DecodeBatch
    q: torch.Tensor
    kv: PagedKV


def model_spec(model: str, *, page_size: int, dtype: str = "bfloat16") -> AttnSpec:
    """The `AttnSpec` of a named model shape; raises ValueError listing the names it knows."""
    if model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {model!r}")
    return AttnSpec(*MODELS[model], page_size=page_size, dtype=dtype)


def sample_seq_lens(case: DecodeCase | MetadataCase | MlaCase) -> np.ndarray:
    """Lengths [bs] int32 of a case; a ragged batch always holds one of the longest."""
    longest = case.max_ctx if isinstance(case, MetadataCase) else case.kv_len
    if case.lengths == "fixed":
        return np.full(case.batch_size, longest, dtype=np.int32)
    if case.lengths == "skewed":
        lens = np.full(case.batch_size, max(1, longest // SKEW), dtype=np.int32)
    else:
        rng = np.random.default_rng(case.seed)
        lens = rng.integers(1, longest + 1, case.batch_size, dtype=np.int32)
    lens[0] = longest
    return lens


def build_batch(case: DecodeCase, *, device: str) -> DecodeBatch:
    """Lengths and a page table [bs, max_pages] whose live pages are distinct and shuffled."""
    import torch

    lens, table = sample_seq_lens(case), sample_page_table(case)
    return DecodeBatch.build(case.spec, torch.from_numpy(lens), torch.from_numpy(table).to(device))


def sample_page_table(case: DecodeCase | MlaCase) -> np.ndarray:
    """Page table [bs, max_pages] int32 of a case: live pages shuffled, 0 past a row's pages."""
    return shuffled_pages(sample_seq_lens(case), case.spec.page_size, case.seed + 1)


def shuffled_pages(lens: np.ndarray, page_size: int, seed: int | None) -> np.ndarray:
    """Page table [bs, max_pages] int32 for these lengths; without a seed the pages are in order."""
    pages = -(-lens // page_size)
    total = pages.sum()
    order = np.arange(total) if seed is None else np.random.default_rng(seed).permutation(total)
    table = np.zeros((len(lens), pages.max()), dtype=np.int32)
    table[np.arange(pages.max()) < pages[:, None]] = order.astype(np.int32)
    return table


def sample_extend_lens(case: ExtendCase) -> tuple[np.ndarray, np.ndarray]:
    """Queries and tokens of each request, both [bs] int32, tokens at least as many as queries.

    The first request always has `q_len` queries.
    """
    kv_lens = sample_seq_lens(case.cached)
    if case.ragged:
        return kv_lens, kv_lens
    q_lens = np.full(len(kv_lens), case.q_len, dtype=np.int32)
    if case.mode == "draft_extend":
        rng = np.random.default_rng(case.cached.seed + 2)
        q_lens[1:] = rng.integers(1, case.q_len + 1, len(kv_lens) - 1)
    return q_lens, np.maximum(kv_lens, q_lens)


def sample_drafts(case: ExtendCase) -> np.ndarray:
    """Which drafts each draft sees [bs, q_len, q_len] bool: itself and its ancestors.

    In a chain a draft's parent is the one before it, in a tree any one before it.
    """
    rng = np.random.default_rng(case.cached.seed + 3)
    batch, q_len = case.cached.batch_size, case.q_len
    sees = np.zeros((batch, q_len, q_len), dtype=bool)
    for draft in range(q_len):
        if draft:
            first = draft - 1 if case.mask == "chain" else 0
            parents = rng.integers(first, draft, batch)
            sees[:, draft] = sees[np.arange(batch), parents]
        sees[:, draft, draft] = True
    return sees


def build_workload(case: DecodeCase, *, device: str) -> DecodeWorkload:
    """Batch, query and cache on `device`; values are standard normal, so softmax has real spread.

    Zeros would hide unwritten outputs and run the tensor cores cooler than an engine does.
    """
    import torch

    batch = build_batch(case, device=device)
    spec = case.spec
    generator = torch.Generator(device=device).manual_seed(case.seed)
    q = normal_values((case.batch_size, spec.num_qo_heads, spec.head_dim), spec.dtype, generator)
    shape = (batch.kv_indices.shape[0], spec.page_size, spec.num_kv_heads, spec.head_dim)
    kv = PagedKV(
        normal_values(shape, spec.kv_dtype, generator),
        normal_values(shape, spec.kv_dtype, generator),
    )
    batch.check_inputs(q, kv)
    return DecodeWorkload(case, batch, q, kv)


def build_request_pool(case: MetadataCase, *, device: str) -> dict[str, torch.Tensor]:
    """What a step's metadata is computed from, on `device`.

    `seq_lens` [bs] int64, `req_pool_indices` [bs] int64, a shuffled choice of the pool's rows, and
    `req_to_token` [pool, max_ctx] int32, random KV slots.
    """
    import torch

    rows = max(case.batch_size, case.pool_size)
    chosen = np.random.default_rng(case.seed + 1).permutation(rows)[: case.batch_size]
    generator = torch.Generator(device=device).manual_seed(case.seed)
    slots = torch.randint(
        SLOTS, (rows, case.max_ctx), dtype=torch.int32, device=device, generator=generator
    )
    lens = torch.from_numpy(sample_seq_lens(case).astype(np.int64) - case.seq_len_delta)
    return {
        "seq_lens": lens.clamp_(min=1).to(device),
        "req_pool_indices": torch.from_numpy(chosen).to(device),
        "req_to_token": slots,
    }


def build_draft_slots(case: MetadataCase, *, device: str) -> dict[str, torch.Tensor]:
    """KV slots of drafted tokens: each branch goes on in the page where its request ends.

    `cache_loc` [bs * topk, draft_tokens] int64 and `last_page_lens` [bs] int32, tokens in the last
    page. Branches start in pages of their own, as a copied last page makes them.
    """
    import torch

    last = sample_seq_lens(case) % case.page_size
    branches = case.batch_size * case.topk
    pages_each = case.draft_tokens // case.page_size + 2
    firsts = np.random.default_rng(case.seed).permutation(branches) * pages_each * case.page_size
    starts = firsts + np.repeat(last, case.topk)
    slots = starts[:, None] + np.arange(case.draft_tokens)
    return {
        "cache_loc": torch.from_numpy(slots).to(device),
        "last_page_lens": torch.from_numpy(last).to(device),
    }


def normal_values(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    """Standard normal values of a torch dtype name, on the generator's device."""
    import torch

    kind = getattr(torch, dtype)
    drawn = torch.bfloat16 if dtype.startswith("float8") else kind
    values = torch.randn(shape, dtype=drawn, device=generator.device, generator=generator)
    return values.to(kind)
