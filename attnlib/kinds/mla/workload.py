"""Seeded MLA workloads: an `MlaCase` becomes lengths, pages, chosen tokens, query and cache.

Lengths, page order and chosen tokens are the same on every machine (NumPy's PCG64); tensor values
follow torch's generator of their device. The chosen tokens are uniform over the request and in no
order: an indexer's are clustered, so this is the hardest case for the memory system.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...core.mla import NO_TOKEN, MlaBatch
from ...core.mla_format import quantize
from ...core.spec import MLA_HEAD_DIM
from ..lengths import sample_page_table, sample_seq_lens
from .case import MlaCase

CHUNK_TOKENS = 2**18
"""Tokens drawn and quantised at a time: the float32 copies must not need the cache's room again."""


@dataclass(frozen=True)
class MlaWorkload:
    """Everything one MLA call needs; shapes in `mla`."""

    case: MlaCase
    batch: MlaBatch
    q: torch.Tensor
    cache: torch.Tensor


def sample_chosen(case: MlaCase) -> np.ndarray:
    """Chosen places [bs, top_k] int32: distinct, below the request's length, -1 after the last."""
    rng = np.random.default_rng(case.seed + 2)
    chosen = np.full((case.batch_size, case.spec.top_k), NO_TOKEN, dtype=np.int32)
    for row, length in zip(chosen, sample_seq_lens(case), strict=True):
        count = min(len(row), int(length))
        row[:count] = rng.choice(int(length), count, replace=False)
    return chosen


def build_mla_batch(case: MlaCase, *, device: str) -> MlaBatch:
    """Lengths, page table and chosen tokens of `case` on `device`."""
    lens = torch.from_numpy(sample_seq_lens(case))
    table = torch.from_numpy(sample_page_table(case)).to(device)
    chosen = torch.from_numpy(sample_chosen(case)).to(device) if case.spec.top_k else None
    return MlaBatch.build(case.spec, lens, table, chosen)


def build_mla_workload(case: MlaCase, *, device: str) -> MlaWorkload:
    """Batch, query and cache on `device`; values are standard normal before any quantisation.

    Both cache formats of a shape and seed hold the same tokens, one of them quantised.
    """
    batch = build_mla_batch(case, device=device)
    spec = case.spec
    generator = torch.Generator(device=device).manual_seed(case.seed)
    q = _normal((case.batch_size, spec.num_qo_heads, MLA_HEAD_DIM), generator)
    num_pages = batch.paged.kv_indices.shape[0]
    fp8 = spec.kv_format != "bfloat16"
    cache = torch.empty(
        (num_pages, spec.page_size, spec.token_bytes if fp8 else MLA_HEAD_DIM),
        dtype=torch.uint8 if fp8 else torch.bfloat16,
        device=device,
    )
    for pages in cache.split(max(1, CHUNK_TOKENS // spec.page_size)):
        tokens = _normal((*pages.shape[:2], MLA_HEAD_DIM), generator)
        pages.copy_(quantize(tokens) if fp8 else tokens)
    batch.check_inputs(q, cache)
    return MlaWorkload(case, batch, q, cache)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=generator.device, generator=generator)
