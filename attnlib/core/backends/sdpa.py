"""PyTorch's scaled_dot_product_attention over gathered pages: slow, plain, runs anywhere.

`run` gathers K and V into dense tensors, which doubles the traffic: a baseline, not a contender. It
has a fixed shape for a fixed page table, so it can be captured in a CUDA graph.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name
from torch import Tensor

from ..batch import DecodeBatch, PagedKV
from ..spec import AttnSpec
from .base import Backend, Plan
from .table import Entry


class Sdpa(Backend[DecodeBatch, PagedKV]):
    """torch.nn.functional.scaled_dot_product_attention with enable_gqa.

    A plan's state is `tokens` [bs, max_len] int64 into the flat cache, and `mask`
    [bs, 1, 1, max_len] bool, True where a token is live, and in the window if there is one.
    """

    def prepare(self, batch: DecodeBatch, held: Any) -> Any:
        """Token indices and mask of `batch`."""
        page_size = batch.spec.page_size
        columns = torch.arange(batch.page_table.shape[1] * page_size, device=self.device)
        pages = batch.page_table.long()[:, columns // page_size]
        tokens = pages * page_size + columns % page_size
        mask = columns < batch.seq_lens[:, None]
        if batch.spec.window:
            mask &= columns >= batch.seq_lens[:, None] - batch.spec.window
        # Dead columns gather the row's first token: finite, where an unused page may hold anything.
        tokens = torch.where(mask, tokens, tokens[:, :1])
        mask = mask[:, None, None, :]
        if held is None:
            return tokens, mask
        held[0].copy_(tokens)
        held[1].copy_(mask)
        return held

    def attend(self, q: Tensor, cache: PagedKV, plan: Plan[DecodeBatch]) -> Tensor:
        """Gather, attend, and return [bs, num_qo_heads, head_dim]."""
        cache.require_pages_of(plan.batch.spec)
        tokens, mask = plan.state
        k = cache.k_cache.flatten(0, 1)[tokens].transpose(1, 2)
        v = cache.v_cache.flatten(0, 1)[tokens].transpose(1, 2)
        query = q[:, :, None, :]
        out = F.scaled_dot_product_attention(query, k, v, attn_mask=mask, enable_gqa=True)
        return out[:, :, 0, :]

    @classmethod
    def unavailable(cls, entry: Entry) -> str:
        """Never: PyTorch is a requirement."""
        return ""

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """FP8 tensors have no SDPA kernel."""
        if "float8" in spec.dtypes:
            return f"SDPA takes no FP8 tensors, got {spec.dtype}/{spec.kv_dtype}"
        return ""
