"""Decode metadata op by op, a launch per op, as engines had it before they fused it. No checks."""

import torch
from torch import Tensor

from .require import DecodeTensors


def write_decode_metadata(
    t: DecodeTensors, first_tokens: Tensor, page_size: int, seq_len_delta: int
) -> None:
    """SGLang's `normal_decode_set_metadata` up to 0.5.9, op for op.

    `first_tokens` [max_pages] int64 are the pages' first tokens. As there, `cu_seqlens_k[0]` is
    left as it is, and columns past a row's live pages get whatever `req_to_token` holds there. Slot
    -1 indexes `swa_slot_map` from its end, where engines keep -1.
    """
    t.cache_seqlens.copy_(t.seq_lens + seq_len_delta)
    sums = torch.cumsum(t.cache_seqlens, dim=0, dtype=torch.int32)
    t.cu_seqlens_k[1:].copy_(sums)
    slots = t.req_to_token[t.req_pool_indices[:, None], first_tokens[None, :]]
    t.page_table[:, : len(first_tokens)].copy_(slots // page_size)
    if t.swa_slot_map is not None and t.swa_page_table is not None:
        moved = t.swa_slot_map[slots.long()]
        t.swa_page_table[:, : len(first_tokens)].copy_(moved // page_size)
