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

The first request has L tokens, except in chat and agents. Explicit lengths, `33+1+60`, are taken
as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..core.spec import LENGTHS

if TYPE_CHECKING:
    import torch

SKEW = 32
"""In a skewed batch the short requests have kv_len / SKEW tokens."""
CHAT_MEDIAN, CHAT_SIGMA, CHAT_LEAST = 1200, 1.0, 16
LONG_EVERY = 16
"""In a retrieval batch one request in 16 is long."""


class Batch(Protocol):
    """A case whose requests have up to `kv_len` tokens."""

    @property
    def batch_size(self) -> int:
        """Requests."""

    @property
    def kv_len(self) -> int:
        """Tokens of the longest request."""

    @property
    def lengths(self) -> str:
        """A row of the module's table, or explicit lengths."""

    @property
    def seed(self) -> int:
        """Seed of lengths and pages."""


def sample_seq_lens(case: Batch) -> np.ndarray:
    """Lengths [bs] int32 of a case, as the module's table says."""
    if case.lengths not in LENGTHS:
        return explicit_lengths(case.lengths)
    longest, batch, rng = case.kv_len, case.batch_size, np.random.default_rng(case.seed)
    if case.lengths == "chat":
        drawn = np.clip(CHAT_MEDIAN * rng.lognormal(0, CHAT_SIGMA, batch), CHAT_LEAST, None)
        return np.clip(drawn, 1, longest).astype(np.int32)
    if case.lengths == "agents":
        return np.clip(longest * 10 ** -rng.random(batch), 1, longest).astype(np.int32)
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


def explicit_lengths(text: str) -> np.ndarray:
    """`33+1+60` as int32 [3]."""
    return np.array([int(part) for part in text.split("+")], dtype=np.int32)


def shuffled_pages(lens: np.ndarray, page_size: int, seed: int | None) -> np.ndarray:
    """Page table [bs, max_pages] int32 for these lengths; without a seed the pages are in order."""
    pages = -(-lens // page_size)
    total = pages.sum()
    order = np.arange(total) if seed is None else np.random.default_rng(seed).permutation(total)
    table = np.zeros((len(lens), pages.max()), dtype=np.int32)
    table[np.arange(pages.max()) < pages[:, None]] = order.astype(np.int32)
    return table


def normal_values(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    """Standard normal values of a torch dtype name, on the generator's device."""
    import torch

    wanted = getattr(torch, dtype)
    drawn = torch.bfloat16 if wanted.itemsize == 1 else wanted
    return torch.randn(shape, dtype=drawn, device=generator.device, generator=generator).to(wanted)
