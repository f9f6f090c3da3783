"""PyTorch's scaled_dot_product_attention over gathered pages: slow, plain, runs anywhere.

`plan` turns the page table into token indices [bs, max_len] and a mask; `run` gathers K and V into
dense tensors (which doubles the traffic: this is the baseline, not a contender) and calls SDPA.
Gathering has a fixed shape for a fixed page table, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name

from ..batch import DecodeBatch, PagedKV
from ..spec import AttnSpec
from .base import Backend, Plan
from .table import Entry


@dataclass(frozen=True)
class _Gather:
    """`tokens` [bs, max_len] int64 into the flat cache; `mask` [bs, 1, 1, max_len], True = live."""

    tokens: torch.Tensor
    mask: torch.Tensor


class Sdpa(Backend[DecodeBatch, PagedKV]):
    """torch.nn.functional.scaled_dot_product_attention with enable_gqa."""

    def plan(self, batch: DecodeBatch, out: Plan[DecodeBatch] | None = None) -> Plan[DecodeBatch]:
        """Token indices and mask of `batch`; `out` must have the same page-table width."""
        gather = _build_gather(batch, self.device)
        if out is None:
            return Plan(batch, self.entry.name, gather)
        if out.state.tokens.shape != gather.tokens.shape:
            raise ValueError(
                f"out must be a plan over {list(gather.tokens.shape)} tokens, "
                f"got {list(out.state.tokens.shape)}"
            )
        out.state.tokens.copy_(gather.tokens)
        out.state.mask.copy_(gather.mask)
        return Plan(batch, self.entry.name, out.state)

    def run(self, q: torch.Tensor, cache: PagedKV, plan: Plan[DecodeBatch]) -> torch.Tensor:
        """Gather, attend, and return [bs, num_qo_heads, head_dim]."""
        k, v = (
            half.flatten(0, 1)[plan.state.tokens].transpose(1, 2)
            for half in (cache.k_cache, cache.v_cache)
        )
        out = F.scaled_dot_product_attention(
            q[:, :, None, :], k, v, attn_mask=plan.state.mask, enable_gqa=True
        )
        return out[:, :, 0, :]

    @classmethod
    def unavailable(cls, entry: Entry) -> str:
        """Never: PyTorch is a requirement."""
        return ""

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """FP8 tensors have no SDPA kernel."""
        fp8 = "float8" in spec.dtype or "float8" in spec.kv_dtype
        return f"SDPA takes no FP8 tensors, got {spec.dtype}/{spec.kv_dtype}" if fp8 else ""


def _build_gather(batch: DecodeBatch, device: torch.device) -> _Gather:
    page_size = batch.spec.page_size
    columns = torch.arange(batch.page_table.shape[1] * page_size, device=device)
    tokens = batch.page_table.long()[:, columns // page_size] * page_size + columns % page_size
    mask = columns < batch.seq_lens[:, None]
    # Dead columns gather the row's first token: finite, where an unused page may hold anything.
    return _Gather(torch.where(mask, tokens, tokens[:, :1]), mask[:, None, None, :])
