"""Into which KV chunks FlashInfer's fa2 should cut a batch: the chunk of the least predicted time.

All requests of a call share one chunk. A shorter one spreads a long request over more blocks and
ends the last wave sooner; each block and each merged row costs time. The prediction, in whole
picoseconds so that the GPU's choice is this one bit for bit:

    rate     blocks share the memory: a token takes `per_token(x)` while x blocks are in flight
    a wave   blocks that fit the slots: the short ones first, then the whole chunks alone
    waves    all tokens at the rate of full slots, then the drain: of equal blocks a last partial
             wave, of uneven ones a share of a block; the more they vary, the more the second
    merge    rows that chunks of a request are put together for

Constants are measured (`attnlib.core.gpu`); how well they choose stands in the study's records.
"""

from dataclasses import dataclass

import numpy as np

from ..gpu import FA2_CTAS, FA2_RATES, Fa2Rates
from ..spec import INT32_MAX

CHUNK_STEP = 64
"""Chunks are multiples of so many tokens."""
MIN_CHUNK = 128
"""The library cuts no shorter chunk either."""
WHOLE = 32
"""The first candidates cut the longest request into 1 to 32 equal chunks; the others are fixed."""
LADDER = tuple(
    round(MIN_CHUNK * 1.17**step / CHUNK_STEP) * CHUNK_STEP for step in range(2, WHOLE + 2)
)
PARTS = 1024
"""Shares are counted in 1/1024."""
TILE_TOKENS = 128
"""Tokens that a block takes at once, at head_dim 128 and 16 bits."""
EXTRA_WAVES = 8
"""Waves of blocks that a grid has room for beside one block per request and query tile."""


@dataclass(frozen=True)
class PlanShape:
    """What is fixed when a step is captured.

    `q_len` queries per request, `window` the tokens that a query sees before itself (-1: all).
    `max_batch_size` requests of at most `max_seq_len` tokens; GPUs of `num_sms` SMs.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    kv_bytes: int
    max_batch_size: int
    max_seq_len: int
    num_sms: int
    q_len: int = 1
    window: int = -1

    @property
    def tile(self) -> int:
        """Query rows of a block: FA2DetermineCtaTileQ of a request's rows."""
        rows = self.q_len * self.group_size
        if rows > 64 and self.head_dim < 256:
            return 128
        return 64 if rows > 16 else 16

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def q_tiles(self) -> int:
        """Tiles of query rows per request."""
        return -(-self.q_len * self.group_size // self.tile)

    @property
    def slots(self) -> int:
        """Blocks that the GPU runs at a time."""
        return FA2_CTAS * self.num_sms

    @property
    def max_blocks(self) -> int:
        """Blocks of the grid per KV head."""
        extra = -(-EXTRA_WAVES * self.slots // (self.num_kv_heads * self.q_tiles))
        return (self.max_batch_size + extra) * self.q_tiles

    @property
    def seen(self) -> int:
        """Tokens of a request that its blocks look at, at most: the window's end in a tile."""
        return INT32_MAX if self.window < 0 else self.window + self.tile

    @property
    def rates(self) -> Fa2Rates:
        """Constants of the kernels that run this shape."""
        return FA2_RATES[self.tile]


@dataclass(frozen=True)
class Choice:
    """The candidates of a batch: `chunks` [64] tokens, `blocks` [64] per KV head, `us` [64]
    predicted, infinite where the grid has no room; `best` is the index of the one to take."""

    chunks: np.ndarray
    blocks: np.ndarray
    us: np.ndarray
    best: int

    @property
    def chunk(self) -> int:
        """The chunk to take, in tokens."""
        return int(self.chunks[self.best])


def choose(shape: PlanShape, seq_lens: np.ndarray) -> Choice:
    """The chunk for requests of `seq_lens` [bs] tokens; 0 is an empty row of a padded batch.

    Lengths beyond the shape's limits count as the limit. Raises ValueError for more requests than
    `max_batch_size`.
    """
    lens = counted(shape, seq_lens)
    chunks = candidates(lens)
    blocks = -(-lens // chunks[:, None])
    per_head = blocks.sum(1) * shape.q_tiles
    ps = predicted_ps(shape, lens, chunks)
    us = np.where(per_head <= shape.max_blocks, ps / 1e6, np.inf)
    return Choice(chunks, per_head, us, int(us.argmin()))


def counted(shape: PlanShape, seq_lens: np.ndarray) -> np.ndarray:
    """Tokens that blocks look at, int64 [bs]."""
    lens = np.asarray(seq_lens, np.int64)
    if lens.ndim != 1 or len(lens) > shape.max_batch_size:
        raise ValueError(
            f"seq_lens must be [bs] of at most {shape.max_batch_size} requests, got {lens.shape}"
        )
    return np.clip(lens, 0, min(shape.max_seq_len, shape.seen))


def candidates(lens: np.ndarray) -> np.ndarray:
    """Chunks to choose from, int64 [64]."""
    longest = lens.max(initial=1)
    equal = -(-longest // np.arange(1, WHOLE + 1))
    equal = -(-equal // CHUNK_STEP) * CHUNK_STEP
    return np.maximum(np.concatenate([equal, np.array(LADDER)]), MIN_CHUNK)


def per_token(shape: PlanShape) -> np.ndarray:
    """Picoseconds per token and block while x blocks are in flight, int64 [slots + 1]; x = 0 is as
    1. Alone a block waits for its own loads, together blocks share the memory."""
    rates, x = shape.rates, np.maximum(np.arange(shape.slots + 1), 1)
    token_bytes = 2 * shape.head_dim * shape.kv_bytes
    shared = token_bytes * x / (rates.memory_gbps * 1e-3)
    alone = token_bytes / (rates.block_gbps * 1e-3)
    return np.rint(np.hypot(shared, alone)).astype(np.int64)


def predicted_ps(shape: PlanShape, lens: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Predicted picoseconds of a call, int64 [n] for `chunks` [n]; see the module."""
    rates, table, slots = shape.rates, per_token(shape), shape.slots
    copies = shape.num_kv_heads * shape.q_tiles
    live, longest = max((lens > 0).sum(), 1), lens.max(initial=0)
    parts = -(-lens // chunks[:, None])
    last = lens - (parts - 1) * chunks[:, None]
    tiles = np.where(lens > 0, -(-last // TILE_TOKENS), 0)
    n, uncut = parts.sum(1), ((parts == 1) & (lens > 0)).sum(1)
    ends, squares = tiles.sum(1), (tiles * tiles).sum(1)
    # Of one KV head and query tile: tokens that blocks stand for, what starting them costs included
    own = rates.block_tokens
    chunk = -(-chunks // TILE_TOKENS) * TILE_TOKENS + own
    whole = n - live
    rest = ends * TILE_TOKENS + own * live
    work = np.maximum(whole * chunk + rest, 1)
    power = whole * chunk * chunk + squares * TILE_TOKENS**2
    power = power + 2 * own * TILE_TOKENS * ends + own * own * live
    longest_block = -(-np.minimum(chunks, longest) // TILE_TOKENS) * TILE_TOKENS + own

    def at(blocks: np.ndarray) -> np.ndarray:
        return table[np.clip(blocks, 1, slots)]

    blocks = n * copies
    mean = rest // live
    short = np.minimum(mean, chunk)
    one = short * at(blocks) + (chunk - short) * at(whole * copies)
    even = mean * at(blocks) + (longest_block - mean) * at(blocks // 2)
    one = np.where(whole > 0, one, even)
    waves, left = blocks // slots, blocks % slots
    full = work * copies * table[slots] // slots
    partial = work // np.maximum(n, 1) * (at(left) - left * table[slots] // slots)
    partial = np.where(left > 0, partial, 0)
    uneven = (rates.mean_share * (power // work) + rates.longest_share * longest_block) * table[1]
    uneven = uneven // PARTS
    spread = np.maximum(power * n - work * work, 0) // (work * work // PARTS + 1)
    weight = np.minimum(rates.mixing * waves * spread, 2**20)
    drain = (partial * PARTS + weight * uneven) // (PARTS + weight)
    body = np.where(blocks <= slots, one, full + drain)
    merged = (n - uncut) * shape.q_len * shape.num_qo_heads * rates.merge_ps
    deepest = -(-longest // chunks)
    cut = np.where(deepest > 1, rates.cut_ps, 0)
    return rates.start_ps + body + merged + deepest * rates.deep_ps + cut
