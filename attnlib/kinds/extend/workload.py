"""Seeded calls with several queries a request: an `ExtendCase` becomes batch, query and cache.

Lengths, page order and draft trees are the same on every machine, as in `workload`, which draws
them; tensor values follow torch's generator of their device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.batch import DecodeBatch, PagedKV
from ...core.extend import ExtendBatch
from ...core.spec import CUSTOM_MASKS
from ..lengths import normal_values, sample_drafts, sample_extend_lens, shuffled_pages
from .case import ExtendCase


@dataclass(frozen=True)
class ExtendWorkload:
    """Everything one call needs; shapes in `extend`."""

    case: ExtendCase
    batch: ExtendBatch
    q: torch.Tensor
    kv: PagedKV


def build_extend_batch(case: ExtendCase, *, device: str) -> ExtendBatch:
    """Lengths, page table and mask of `case` on `device`; pages of a ragged call are in order."""
    q_lens, kv_lens = sample_extend_lens(case)
    seed = None if case.ragged else case.cached.seed + 1
    table = shuffled_pages(kv_lens, case.spec.page_size, seed)
    lens = torch.from_numpy(kv_lens)
    paged = DecodeBatch.build(case.spec, lens, torch.from_numpy(table).to(device))
    drafts = torch.from_numpy(sample_drafts(case)) if case.mask in CUSTOM_MASKS else None
    return ExtendBatch.build(
        paged, torch.from_numpy(q_lens), mask=case.mask, drafts=drafts, ragged=case.ragged
    )


def build_extend_workload(case: ExtendCase, *, device: str) -> ExtendWorkload:
    """Batch, query and cache on `device`; values are standard normal, as in `build_workload`."""
    batch = build_extend_batch(case, device=device)
    spec = case.spec
    generator = torch.Generator(device=device).manual_seed(case.cached.seed)
    q = normal_values((batch.rows, spec.num_qo_heads, spec.head_dim), spec.dtype, generator)
    pages = batch.paged.kv_indices.shape[0]
    shape = (pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
    kv = PagedKV(*(normal_values(shape, spec.kv_dtype, generator) for _ in range(2)))
    batch.check_inputs(q, kv)
    return ExtendWorkload(case, batch, q, kv)
