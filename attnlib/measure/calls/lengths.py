"""Seeded lengths and page tables: the same case gives the same ones on every machine.

They need no torch, so that reports can count bytes anywhere. Pages are a random permutation, as an
engine's allocator leaves them.

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

from typing import Any

import numpy as np

from ...core.spec import LENGTHS, require_type
from .form import NamedCase


def sample_seq_lens(case: Any) -> np.ndarray:
    """Tokens of each request of a case.

    Parameters
    ----------
    case : DecodeCase or another case with such fields
        Its `batch_size`, `kv_len`, `lengths` (a row of the module's table, or explicit) and `seed`
        count.

    Returns
    -------
    ndarray
        [batch_size] int32.

    Raises
    ------
    ValueError
        For what is no case.

    Examples
    --------
    >>> import attnlib
    >>> case = attnlib.DecodeCase(attnlib.AttnSpec(32, 8, 128, 16), 3, 60, "33+1+60")
    >>> attnlib.sample_seq_lens(case).tolist()
    [33, 1, 60]
    """
    require_type("case", case, NamedCase, such_as="a DecodeCase")
    if case.lengths not in LENGTHS:
        return explicit_lengths(case.lengths)
    longest = case.kv_len
    batch = case.batch_size
    rng = np.random.default_rng(case.seed)
    if case.lengths == "chat":
        drawn = 1200 * rng.lognormal(0, 1.0, batch)
        drawn = np.maximum(drawn, 16)
        return np.clip(drawn, 1, longest).astype(np.int32)
    if case.lengths == "agents":
        drawn = longest * 10 ** -rng.random(batch)
        return np.clip(drawn, 1, longest).astype(np.int32)
    ends = {
        "fixed": (longest, longest),
        "ragged": (1, longest),
        "skewed": (longest // 32, longest // 32),
        "retrieval": (longest // 64, longest // 32),
        "one_long": (longest // 512, longest // 128),
    }
    low, high = ends[case.lengths]
    lens = rng.integers(
        low=max(1, low),
        high=max(1, high),
        size=batch,
        dtype=np.int32,
        endpoint=True,
    )
    if case.lengths == "retrieval":
        others = 1 + rng.permutation(batch - 1)
        count = max(0, batch // 16 - 1)  # beside the first
        lens[others[:count]] = longest
    lens[0] = longest
    return lens


def explicit_lengths(text: str) -> np.ndarray:
    """`33+1+60` as int32 [3]."""
    lengths = [int(part) for part in text.split("+")]
    return np.array(lengths, dtype=np.int32)


def shuffled_pages(
    lens: np.ndarray,
    page_size: int,
    seed: int | None,
    context: int = 0,
) -> np.ndarray:
    """Page table [bs, max_pages] int32 for these lengths; without a seed the pages are in order.

    With a `context`, in tokens, it is that wide; columns past a request's pages are 0.
    """
    pages = -(-lens // page_size)
    order = np.arange(pages.sum())
    if seed is not None:
        order = np.random.default_rng(seed).permutation(order)
    columns = max(pages.max(), -(-context // page_size))
    table = np.zeros(
        (len(lens), columns),
        dtype=np.int32,
    )
    is_page = np.arange(columns) < pages[:, None]
    table[is_page] = order.astype(np.int32)
    return table
