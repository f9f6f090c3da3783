"""Into which KV chunks FlashInfer's fa2 should cut a batch: the chunk of the least predicted time.

All requests of a call share one chunk. A shorter one spreads a long request over more blocks and
ends the last wave sooner; each block and each merged row costs time. The prediction, in
float32 without fused steps, so that the GPU's choice is this one bit for bit:

    rate     blocks share the memory, or the L2 if it holds all K and V: a token takes
             hypot(x * shared, alone) while x are in flight
    a wave   blocks that fit the slots: the short ones first, then the whole chunks alone
    waves    all tokens at the rate of full slots, then the drain: of equal blocks a last partial
             wave, of uneven ones a share of a block; the more they vary, the more the second
    merge    rows that chunks of a request are put together for

Constants are measured (`attnlib.core.gpu`); how well they choose stands in the study's records.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..gpu import FA2_CTAS, FA2_RATES, SM_SHARED_BYTES, Fa2Rates
from ..spec import ELEMENT_BYTES, INT32_MAX, AttnSpec, Grouped
from .library import MIN_CHUNK, tile_rows

Key: TypeAlias = int | tuple[int, int, int]
Rates: TypeAlias = Mapping[Key, Fa2Rates]
"""By the keys of `FA2_RATES`."""

CHUNK_STEP = 64
"""Chunks are multiples of so many tokens."""
WHOLE = 32
"""The first candidates cut the longest request into 1 to 32 equal chunks; the others are fixed."""
LADDER = tuple(((4 + rung % 4) << rung // 4) * CHUNK_STEP for rung in range(WHOLE))
"""256 to 57,344 tokens, four chunks an octave."""
ROOM_BYTES = 3 * 2**29
"""K and V of a call, at the most that was captured, for which the grid has room for a wave more.
A block that is not used takes 1.7 ns all the same: room is for calls that last."""
SHORT = 512
"""Chunks below so many tokens only serve to fill a wave."""
MOST_WAVES = 6
"""Of blocks that a grid has room for, at most, beside one per request and query tile."""
LIBRARYS = np.float32(0.97)
"""Of its predicted time counts for the shortest chunk that fits a wave, about the library's own."""


def kv_tile(rows: int, head_dim: int, kv_bytes: int) -> int:
    """KV tokens that a block of `rows` query rows, of 16 bits, takes at once: CTA_TILE_KV of
    prefill.cuh, what fits the shared memory beside the queries."""
    warps, q_tiles = (4 if rows == 16 else 1), (2 if rows == 128 else 1)
    room = SM_SHARED_BYTES // FA2_CTAS - rows * head_dim * 2
    fit = min(room // (2 * head_dim * 16 * warps * kv_bytes), 8 // q_tiles)
    return 16 * warps * max(size for size in (1, 2, 4, 8) if size <= max(fit, 1))


@dataclass(frozen=True)
class PlanShape(Grouped):
    """What is fixed when a step is captured.

    `q_len` queries per request, `window` the tokens that a query sees before itself (-1: all).
    `max_batch_size` requests of at most `max_seq_len` tokens; GPUs of `num_sms` SMs. `given_rates`
    take the place of those in `core.gpu.FA2_RATES`.
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
    given_rates: Fa2Rates | None = None

    @classmethod
    def of(cls, spec: AttnSpec, lens: np.ndarray, num_sms: int, q_len: int = 1) -> "PlanShape":
        """What is captured for requests of `lens` [bs] tokens, in whole pages."""
        layer = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, ELEMENT_BYTES[spec.kv_dtype])
        tokens = -(-int(lens.max()) // spec.page_size) * spec.page_size
        return cls(*layer, len(lens), tokens, num_sms, q_len, spec.window - 1)

    @property
    def tile(self) -> int:
        """Query rows of a block."""
        return tile_rows(self.q_len * self.group_size, self.head_dim)

    @property
    def tile_tokens(self) -> int:
        """KV tokens that a block takes at once."""
        return kv_tile(self.tile, self.head_dim, self.kv_bytes)

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
        """Blocks of the grid per KV head: two per request or a wave, and waves for long calls."""
        wave, batch = -(-self.slots // self.copies), self.max_batch_size
        longest = min(self.max_seq_len, self.seen)
        waves = batch * longest * self.token_bytes // ROOM_BYTES
        extra = min(max(batch, wave - batch) + waves * wave, MOST_WAVES * wave)
        shortest = min(batch * -(-longest // MIN_CHUNK), wave)
        return min(batch + extra, max(batch * -(-longest // SHORT), shortest)) * self.q_tiles

    @property
    def seen(self) -> int:
        """Tokens of a request that its blocks look at, at most: the window's end in a tile."""
        return INT32_MAX if self.window < 0 else self.window + self.tile

    @property
    def rates(self) -> Fa2Rates:
        """Constants of the kernels that run this shape."""
        return self.given_rates or self.rates_in(FA2_RATES)

    def rates_in(self, rates: Rates) -> Fa2Rates:
        """Those of `rates` for these kernels; ValueError where it has none."""
        key = (self.tile, self.head_dim, self.kv_bytes)
        found = rates.get(key, rates.get(self.tile))
        if found is None:
            raise ValueError(f"rates must have {self.tile} or {key}, got {list(rates)}")
        return found

    @property
    def copies(self) -> int:
        """Blocks of the GPU's grid per block of a KV head and query tile."""
        return self.num_kv_heads * self.q_tiles

    @property
    def token_bytes(self) -> int:
        """K and V of a token, of all heads."""
        return 2 * self.head_dim * self.kv_bytes * self.num_kv_heads

    @property
    def cached_tokens(self) -> int:
        """Tokens of a batch whose K and V the L2 holds, at most; int32 counts one more per row."""
        held = int(self.rates.cached_mib * 2**20) // self.token_bytes
        return min(held, INT32_MAX // self.max_batch_size - 1)

    def us_at(self, gbps: float) -> float:
        """Microseconds per token of a block, at so many bytes per nanosecond."""
        return 2 * self.head_dim * self.kv_bytes / (gbps * 1e3)

    def shared_us(self, cached: bool) -> float:
        """Microseconds per token and block in flight, of memory or the L2, which all share."""
        return self.us_at(self.rates.memory_gbps * (self.rates.cached_times if cached else 1))

    def us_per_token(self, blocks: np.ndarray, cached: bool = False) -> np.ndarray:
        """Microseconds per token while so many blocks are in flight, float32."""
        shared = np.clip(blocks, f32(1), f32(self.slots)) * f32(self.shared_us(cached))
        return np.sqrt(shared * shared + f32(self.us_at(self.rates.block_gbps) ** 2))

    @property
    def coarse(self) -> int:
        """Squares are counted in `tile_tokens` << coarse tokens, so that int32 holds their sum."""
        shift, rows = 0, self.max_batch_size
        while (self.max_seq_len // (self.tile_tokens << shift) + 1) ** 2 * rows >= INT32_MAX:
            shift += 1
        return shift


@dataclass(frozen=True, eq=False)
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

    Lengths beyond the shape's limits count as those. ValueError for more than `max_batch_size`.
    """
    lens = counted(shape, seq_lens)
    chunks = candidates(lens)
    blocks = -(-lens // chunks[:, None])
    per_head = blocks.sum(1) * shape.q_tiles
    us = np.where(per_head <= shape.max_blocks, predicted_us(shape, lens, chunks), np.inf)
    fitting = chunks[per_head * shape.num_kv_heads <= shape.slots]
    score = np.where(chunks == fitting.min(initial=INT32_MAX), us * LIBRARYS, us)
    return Choice(chunks, per_head, us, int(score.argmin()))


def counted(shape: PlanShape, seq_lens: np.ndarray) -> np.ndarray:
    """Tokens that blocks look at, int64 [bs]."""
    lens, most = np.asarray(seq_lens), shape.max_batch_size
    whole = lens.dtype.kind in "iu" or not lens.size
    if lens.ndim != 1 or len(lens) > most or not whole:
        got = f"{lens.shape} {lens.dtype}"
        raise ValueError(f"seq_lens must be [bs] integers of at most {most} requests, got {got}")
    return np.clip(lens.astype(np.int64), 0, min(shape.max_seq_len, shape.seen))


def candidates(lens: np.ndarray) -> np.ndarray:
    """Chunks to choose from, int64 [64]."""
    longest = lens.max(initial=1)
    equal = -(-longest // np.arange(1, WHOLE + 1))
    equal = -(-equal // CHUNK_STEP) * CHUNK_STEP
    return np.maximum(np.concatenate([equal, np.array(LADDER)]), MIN_CHUNK)


def predicted_us(shape: PlanShape, lens: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Predicted microseconds of a call for `chunks` [n], float32 [n]; see the module."""
    return us_of(cuts_of(shape, lens, chunks), shape.rates)


def cuts_of(shape: PlanShape, lens: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """All that the prediction takes of requests of `lens` [bs] tokens under `chunks`: [14, n]."""
    tile, longest, held = shape.tile_tokens, lens.max(initial=0), shape.cached_tokens
    unit = tile << shape.coarse
    parts = -(-lens // chunks[:, None])
    last = np.where(lens > 0, lens - (parts - 1) * chunks[:, None], 0)
    squares = f32(((-(-last // unit)) ** 2).sum(1)) * f32(unit * unit)
    whole_tiles = (-(-each // tile) * tile for each in (chunks, np.minimum(chunks, longest)))
    sums = parts.sum(1), (-(-last // tile)).sum(1), squares, -(-longest // chunks)
    known = max((lens > 0).sum(), 1), tile, shape.copies, shape.slots
    cached = np.minimum(lens, held + 1).sum() <= held
    words = cached, 2 * shape.head_dim * shape.kv_bytes, shape.q_len, shape.num_qo_heads
    return np.array(np.broadcast_arrays(*whole_tiles, *sums, *known, *words), float)


def us_of(cuts: np.ndarray, rates: Fa2Rates) -> np.ndarray:
    """Predicted microseconds [n]; [m, n] of rates whose constants are arrays [m, 1].

    Every step rounds to float32, in this order: the kernel takes the same steps.
    """
    chunk, longest, n, ends, squares, deepest, some, tile, copies, slots = f32(cuts[:10])
    cached, element_bytes, q_len, heads = cuts[10:]
    gbps = rates.memory_gbps * np.where(cached, rates.cached_times, 1)
    shared, alone = (element_bytes / (each * 1e3) for each in (gbps, rates.block_gbps))
    shared, alone, own = f32(shared), f32(alone**2), f32(rates.block_tokens)

    def at(blocks: np.ndarray) -> np.ndarray:
        us = np.clip(blocks, f32(1), slots) * shared
        return np.sqrt(us * us + alone)

    # Of one KV head and query tile: tokens that blocks stand for, what starting them costs included
    chunk, longest_block = chunk + own, longest + own
    whole = n - some
    rest = ends * tile + some * own
    work = whole * chunk + rest
    power = squares + ends * (2 * own * tile)
    power = whole * (chunk * chunk) + (power + some * (own * own))

    blocks = n * copies
    mean = rest / some
    short = np.minimum(mean, chunk)
    at_all, at_one = at(blocks), at(f32(1))
    one = short * at_all + (chunk - short) * at(whole * copies)
    even = mean * at_all + (longest_block - mean) * at(blocks * f32(0.5))
    one = np.where(whole > 0, one, even)
    waves = np.floor(blocks / slots)
    left = blocks - waves * slots
    per_slot = at(slots) / slots
    ending = work / np.maximum(n, f32(1)) * (at(left) - left * per_slot)
    ending = np.where(left > 0, ending, f32(0))
    uneven = (power / work) * f32(rates.mean_share) + longest_block * f32(rates.longest_share)
    uneven = uneven * at_one
    spread = np.maximum(power * n / (work * work) - f32(1), f32(0))
    weight = waves * f32(rates.mixing) * spread
    many = work * copies * per_slot + (ending + weight * uneven) / (f32(1) + weight)
    many = np.maximum(many, longest_block * at_one)
    cut = np.where(deepest > 1, f32(rates.cut_us), f32(0))
    merge = whole * f32(rates.merge_us * q_len * heads) + deepest * f32(rates.deep_us)
    return np.where(blocks <= slots, one, many) + (merge + (cut + f32(rates.start_us)))


def f32(value: object) -> np.ndarray:
    """`value` as float32."""
    return np.asarray(value, np.float32)
