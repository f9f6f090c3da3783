"""The tensors of a decode case: batch, query and paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.batch import DecodeBatch, PagedKV
from .case import DecodeCase

if TYPE_CHECKING:
    import torch
from ..lengths import normal_values, sample_page_table, sample_seq_lens


@dataclass(frozen=True)
class DecodeWorkload:
    """Everything one attention call needs: `batch`, `q` [bs, num_qo_heads, head_dim], `kv`."""

    case: DecodeCase
    batch: DecodeBatch
    q: torch.Tensor
    kv: PagedKV


def build_batch(case: DecodeCase, *, device: str) -> DecodeBatch:
    """Lengths and a page table [bs, max_pages] whose live pages are distinct and shuffled."""
    import torch

    lens, table = sample_seq_lens(case), sample_page_table(case)
    return DecodeBatch.build(case.spec, torch.from_numpy(lens), torch.from_numpy(table).to(device))


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
