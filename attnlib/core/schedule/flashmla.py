"""FlashMLA's schedule, and a guard against its silent reuse for other lengths.

FlashMLA fills a `FlashMLASchedMeta` at the first call and reuses it at every other call, also where
lengths have changed; a captured graph replays whatever words it holds. `require_schedule` reads the
words.

The words of dense decode on Hopper, as sgl-flash-mla 1.0.0 writes them (get_decoding_sched_meta.cu)
and reads them (splitkv_mla.cuh): a row of 8 int32 for each part of the GPU.

| word | |
|---|---|
| 0, 1 | first and last request of the part; the first is batch_size where it has no work |
| 2, 3 | its first block of the first request, and the end of its blocks of the last one |
| 4 | which split of the first request it writes |
| 5, 6 | whether the first and the last request are split |
| 7 | padding |

`num_splits` [batch_size + 1] int32 are the sums of the requests' splits.
"""

import numpy as np
from torch import Tensor

from ..spec import ceil_div, require_all_read

BLOCK = 64
"""Tokens of a block: the dense kernel has no other page size."""


def tokens_read(tiles: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Tokens of each request that the kernel reads by the words [parts, 8], [bs] int64.

    A part reads a request that is not its last to the end, however long it is now.
    """
    lens = np.asarray(seq_lens, np.int64)
    blocks_read = [np.zeros(ceil_div(length, BLOCK), bool) for length in lens]
    for first, last, begin, end, *_ in _working(tiles, lens):
        for request in range(first, last + 1):
            start = begin if request == first else 0
            stop = end if request == last else None
            blocks_read[request][start:stop] = True
    tokens = []
    for length, blocks in zip(lens, blocks_read, strict=True):
        starts = np.flatnonzero(blocks) * BLOCK
        tokens.append(np.minimum(length - starts, BLOCK).sum())
    return np.array(tokens)


def _working(tiles: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """The words of the parts that have work."""
    return tiles[tiles[:, 0] < len(lens)]


def require_schedule(
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    seq_lens: Tensor,
) -> None:
    """RuntimeError unless FlashMLA's dense schedule reads every token of a call.

    Copies words and lengths to the host, so it synchronises; the check then takes about 1 ms for
    100 requests.

    Parameters
    ----------
    tile_scheduler_metadata : Tensor
        [parts, 8] int32, of a call or of a graph.
    num_splits : Tensor
        [bs + 1] int32, of the same.
    seq_lens : Tensor
        [bs] int32, tokens per request of the call.

    Raises
    ------
    RuntimeError
        If a request is cut short; names the first one.
    ValueError
        For words and splits that are not of one batch this large.

    Examples
    --------
    One part of the GPU reads blocks 0 and 1 of request 0, 128 tokens:

    >>> import torch
    >>> tiles = torch.tensor([[0, 0, 0, 2, 0, 0, 0, 0]], dtype=torch.int32)
    >>> sums = torch.tensor([0, 1], dtype=torch.int32)
    >>> require_schedule(tiles, sums, torch.tensor([100]))
    >>> require_schedule(tiles, sums, torch.tensor([200]))
    Traceback (most recent call last):
        ...
    RuntimeError: FlashMLA's schedule must read all 200 tokens of request 0, it reads 128 ...
    """
    tiles = tile_scheduler_metadata.cpu().numpy()
    sums = num_splits.cpu().numpy()
    lens = seq_lens.cpu().numpy()
    requests: list[int] = []  # of each split
    for first, last, *_ in _working(tiles, lens):
        requests += range(first, last + 1)
    splits = np.bincount(np.array(requests, int), minlength=len(lens))
    if not np.array_equal(splits, np.diff(sums)):
        raise ValueError(
            f"num_splits must be the sums of the {len(lens)} requests' splits, "
            f"{splits.tolist()} by tile_scheduler_metadata, got {np.diff(sums).tolist()}"
        )
    require_all_read("FlashMLA's schedule", tokens_read(tiles, lens), lens, "before the replay")
