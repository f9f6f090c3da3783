"""Tensors of a call over pages: its batch, query and cache. Values follow torch's generator of
their device; they are standard normal, so that the softmax has real spread."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.batch import DecodeBatch, PagedKV
from ...core.spec import AttnSpec
from .lengths import shuffled_pages


@dataclass(frozen=True)
class Workload:
    """The inputs of one attention call: `batch`, query `q` and cache `kv` (latent for MLA)."""

    case: Any
    batch: Any
    q: torch.Tensor
    kv: Any


def paged_batch(
    spec: AttnSpec,
    lens: np.ndarray,
    seed: int | None,
    *,
    device: str,
    context: int = 0,
) -> DecodeBatch:
    """Requests of `lens` [bs] int32 whose pages are distinct, shuffled by `seed` or in order.

    The page table is `context` tokens wide, or as wide as the longest request.
    """
    pages = shuffled_pages(
        lens=lens,
        page_size=spec.page_size,
        seed=seed,
        context=context,
    )
    table = torch.from_numpy(pages).to(device)
    return DecodeBatch.build(spec, torch.from_numpy(lens), table)


def draw_inputs(
    batch: DecodeBatch,
    *,
    rows: int,
    seed: int,
) -> tuple[torch.Tensor, PagedKV]:
    """A query of `rows` rows, and a cache that the batch's pages fill, where its page table is."""
    spec = batch.spec
    generator = torch.Generator(device=batch.page_table.device)
    generator.manual_seed(seed)
    q_shape = (rows, spec.num_qo_heads, spec.head_dim)
    q = normal_values(q_shape, spec.dtype, generator)
    pages = batch.kv_indices.shape[0]
    kv_shape = (pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
    k_cache = normal_values(kv_shape, spec.kv_dtype, generator)
    v_cache = normal_values(kv_shape, spec.kv_dtype, generator)
    return q, PagedKV(k_cache, v_cache)


def normal_values(
    shape: tuple[int, ...],
    dtype: str,
    generator: torch.Generator,
) -> torch.Tensor:
    """Standard normal values of a torch dtype name, on the generator's device."""
    wanted = getattr(torch, dtype)
    drawn = torch.randn(
        shape,
        dtype=torch.bfloat16 if wanted.itemsize == 1 else wanted,
        device=generator.device,
        generator=generator,
    )
    return drawn.to(wanted)
