"""Seeded inputs of a metadata builder: a pool of requests, or the slots of drafts."""

import numpy as np
import torch

from ..lengths import sample_seq_lens
from .case import MetadataCase

SLOTS = 2**20
"""KV slots that a request pool's tokens point into."""


def build_request_pool(case: MetadataCase, *, device: str) -> dict[str, torch.Tensor]:
    """What a step's metadata is computed from, on `device`.

    `seq_lens` [bs] int64, `req_pool_indices` [bs] int64, a shuffled choice of the pool's rows, and
    `req_to_token` [pool, max_ctx] int32, random KV slots.
    """
    rows = max(case.batch_size, case.pool_size)
    chosen = np.random.default_rng(case.seed + 1).permutation(rows)[: case.batch_size]
    seeded = {"generator": torch.Generator(device=device).manual_seed(case.seed), "device": device}
    lens = torch.from_numpy(sample_seq_lens(case).astype(np.int64) - case.seq_len_delta)
    return {
        "seq_lens": lens.clamp_(min=1).to(device),
        "req_pool_indices": torch.from_numpy(chosen).to(device),
        "req_to_token": torch.randint(SLOTS, (rows, case.max_ctx), dtype=torch.int32, **seeded),
    }


def build_draft_slots(case: MetadataCase, *, device: str) -> dict[str, torch.Tensor]:
    """KV slots of drafted tokens: each branch goes on in the page where its request ends.

    `cache_loc` [bs * topk, draft_tokens] int64 and `last_page_lens` [bs] int32, tokens in the last
    page. Branches start in pages of their own, as a copied last page makes them.
    """
    last = sample_seq_lens(case) % case.page_size
    branches = case.batch_size * case.topk
    pages_each = case.draft_tokens // case.page_size + 2
    firsts = np.random.default_rng(case.seed).permutation(branches) * pages_each * case.page_size
    starts = firsts + np.repeat(last, case.topk)
    slots = starts[:, None] + np.arange(case.draft_tokens)
    found = {"cache_loc": slots, "last_page_lens": last}
    return {name: torch.from_numpy(words).to(device) for name, words in found.items()}
