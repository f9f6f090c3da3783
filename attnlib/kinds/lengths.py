"""Seeded lengths, page tables and values: the same case gives the same ones on every machine.

Lengths and pages need no torch, so that reports can count bytes anywhere; values follow torch's
generator of their device. Pages are a random permutation, as an engine's allocator leaves them.

| lengths | of requests of up to L tokens |
|---|---|
| fixed | all L |
| ragged | one L, the others uniform in 1..L |
| skewed | one L, the others L / 32 |
| chat | log-normal, median 1,200 and sigma 1, within 16..L |
| retrieval | one in 16 L, at least one, anywhere; the others uniform in L/64..L/32 |
| agents | log-uniform in L/10..L |
| one_long | one L, the others uniform in L/512..L/128 |

The first request has L tokens, but for chat and agents, whose longest is whatever was drawn. A
case of lengths that are said, `33+1+60`, has those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..core.spec import LENGTHS
from .decode.case import DecodeCase
from .engine.case import EngineCase
from .extend.case import ExtendCase
from .metadata.case import MetadataCase
from .mla.case import MlaCase
from .plan.case import PlanCase

if TYPE_CHECKING:
    import torch

SKEW = 32
"""In a skewed batch the short requests have kv_len / SKEW tokens: one long chat among many new."""
CHAT_MEDIAN, CHAT_SIGMA, CHAT_LEAST = 1200, 1.0, 16
LONG_EVERY = 16
"""Of a retrieval batch one request in so many is long."""


def sample_seq_lens(case: DecodeCase | MetadataCase | MlaCase | EngineCase) -> np.ndarray:
    """Lengths [bs] int32 of a case, as the module's table says."""
    if case.lengths not in LENGTHS:
        return said_lengths(case.lengths)
    longest = case.max_ctx if isinstance(case, MetadataCase) else case.kv_len
    batch, rng = case.batch_size, np.random.default_rng(case.seed)
    if case.lengths in ("chat", "agents"):
        if case.lengths == "chat":
            drawn = np.clip(CHAT_MEDIAN * rng.lognormal(0, CHAT_SIGMA, batch), CHAT_LEAST, None)
        else:
            drawn = longest * 10 ** -rng.random(batch)
        return np.clip(drawn, 1, longest).astype(np.int32)
    low, high = {
        "fixed": (longest, longest),
        "ragged": (1, longest),
        "skewed": (longest // SKEW, longest // SKEW),
        "retrieval": (longest // 64, longest // 32),
        "one_long": (longest // 512, longest // 128),
    }[case.lengths]
    lens = rng.integers(max(1, low), max(1, high) + 1, batch, dtype=np.int32)
    if case.lengths == "retrieval":
        lens[1 + rng.permutation(batch - 1)[: max(0, batch // LONG_EVERY - 1)]] = longest
    lens[0] = longest
    return lens


def said_lengths(text: str) -> np.ndarray:
    """`33+1+60` as int32 [3]."""
    return np.array([int(part) for part in text.split("+")], dtype=np.int32)


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

    The first request has `q_len` queries, unless the case says them all.
    """
    kv_lens = sample_seq_lens(case.cached)
    if case.ragged:
        return kv_lens, kv_lens
    if case.q_lengths:
        return said_lengths(case.q_lengths), kv_lens
    q_lens = np.full(len(kv_lens), case.q_len, dtype=np.int32)
    if case.mode == "draft_extend":
        rng = np.random.default_rng(case.cached.seed + 2)
        q_lens[1:] = rng.integers(1, case.q_len + 1, len(kv_lens) - 1)
    return q_lens, np.maximum(kv_lens, q_lens)


def sample_plan_lens(case: PlanCase) -> np.ndarray:
    """Tokens of each request [bs] int64, at least as many as queries."""
    return np.maximum(sample_seq_lens(case.decode).astype(np.int64), case.q_len)


def sample_drafts(case: ExtendCase) -> np.ndarray:
    """Which drafts each draft sees [bs, q_len, q_len] bool: itself and its ancestors.

    In a chain a draft's parent is the one before it, in a tree any one before it.
    """
    rng = np.random.default_rng(case.cached.seed + 3)
    batch, q_len = case.cached.batch_size, case.q_len
    sees = np.zeros((batch, q_len, q_len), dtype=bool)
    for draft in range(q_len):
        if draft:
            parents = rng.integers(draft - 1 if case.mask == "chain" else 0, draft, batch)
            sees[:, draft] = sees[np.arange(batch), parents]
        sees[:, draft, draft] = True
    return sees


def normal_values(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    """Standard normal values of a torch dtype name, on the generator's device."""
    import torch

    kind = getattr(torch, dtype)
    drawn = torch.bfloat16 if kind.itemsize == 1 else kind
    return torch.randn(shape, dtype=drawn, device=generator.device, generator=generator).to(kind)
