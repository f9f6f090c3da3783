"""Into which KV chunks FlashInfer's fa2 cuts a batch. All requests of a call share one chunk size.

FlashInfer takes the shortest chunk whose blocks all run at once, and disables split-KV where there
are more requests than that. Its chunk is kept unless another one is predicted to be clearly faster.

The unit of predicted time is the token: one slot (half an SM, two blocks per SM) that reads one
token of one KV head while all slots are busy. So no constant depends on GPU, head_dim or dtype.

    each    mean tokens of a block, and BLOCK_TOKENS for starting it and merging its output
    longest the same of the longest block
    waves   blocks of all KV heads and query tiles / slots
    time    hypot(waves * each, LONE * longest): all slots share the work, and a call takes no
            less than its longest block, which runs faster the fewer others there are
    drain   after the last full wave, where there is more than one wave. Equal blocks start a last
            wave together, uneven ones end at different times: DRAIN * longest
"""

from dataclasses import dataclass

import numpy as np

from ..gpu import FA2_CTAS
from ..spec import (
    ELEMENT_BYTES,
    INT32_MAX,
    AttnSpec,
    Grouped,
    ceil_div,
    require_int,
    require_page_size,
    require_word,
)
from .library import HEAD_DIMS, MIN_CHUNK, tile_rows

KV_BYTES = (1, 2)
BLOCK_TOKENS = 100.0
LONE = 0.4
DRAIN = 0.05
MARGIN = 0.04
"""FlashInfer's chunk is left for one that saves this share of its predicted time, and BLOCK_TOKENS
besides. These four constants were chosen once, for the least loss over 167 batches that an H200 ran
under up to ten chunks each, with few batches slower than by FlashInfer's plan (LOG, 2026-11-27)."""

WHOLE = 32
"""The first candidates cut the longest request into 1 to 32 equal chunks ..."""
CHUNK_STEP = 64
"""... of a multiple of these tokens;"""
RUNGS = np.arange(32)
LADDER = ((4 + RUNGS % 4) << (RUNGS // 4)) * 32
"""the others are 128 to 28,672 tokens, four chunks per octave."""
BETWEEN = 64
"""FlashInfer's chunk is searched among as many between two neighbouring candidates."""

ROOM_BYTES = 3 * 2**29
"""The grid reserves one more wave of blocks for each 1.6 GB of K and V that a call may read. An
unused block takes 1.7 ns, which only long calls can afford."""
SHORT = 512
"""Chunks shorter than these tokens only serve to fill a wave."""
MOST_WAVES = 6
"""Waves of blocks in the grid at most, beside one block per request and query tile."""
MAX_TOKENS = 2**21
"""Of a request: the kernel divides in float32."""


@dataclass(frozen=True)
class PlanShape(Grouped):
    """What is fixed when a step is captured: the layer, and the grid of fa2.

    The grid is reserved for requests of up to `max_seq_len` tokens; longer ones are split less.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        Heads of one GPU.
    head_dim : int
        64, 128 or 256.
    kv_bytes : int
        Bytes of an element of the cache: 2, or 1 of an FP8 cache.
    max_batch_size : int
        Requests of the captured step.
    max_seq_len : int
        Tokens of the longest usual request.
    num_sms : int
        SMs of the GPU.
    q_len : int
        Queries per request.
    window : int
        Tokens that a query sees before itself; -1: all.
    page_size : int
        Tokens of a KV page; chunks are whole pages, as FlashInfer's.

    Raises
    ------
    ValueError
        Naming the argument, what it must be and what it was.

    Examples
    --------
    Llama-3.1-8B on an H100, 16 requests:

    >>> shape = PlanShape(32, 8, 128, kv_bytes=2, max_batch_size=16, max_seq_len=8192, num_sms=132)
    >>> shape.tile, shape.wave, shape.max_blocks
    (16, 33, 33)
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
    page_size: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require_int(name, value, least=-1 if name == "window" else 1)
        require_word("head_dim", self.head_dim, HEAD_DIMS)
        require_word("kv_bytes", self.kv_bytes, KV_BYTES)
        self.require_groups()
        require_page_size(self.page_size)

    @classmethod
    def of(
        cls,
        spec: AttnSpec,
        lens: np.ndarray,
        num_sms: int,
        q_len: int = 1,
    ) -> "PlanShape":
        """The shape captured for requests of `lens` [bs] tokens, in whole pages."""
        return cls(
            num_qo_heads=spec.num_qo_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            kv_bytes=ELEMENT_BYTES[spec.kv_dtype],
            max_batch_size=len(lens),
            max_seq_len=int(in_pages(lens.max(), spec.page_size)),
            num_sms=num_sms,
            q_len=q_len,
            window=spec.window - 1,
            page_size=spec.page_size,
        )

    @property
    def tile(self) -> int:
        """Query rows of a block."""
        return tile_rows(self.q_len * self.group_size, self.head_dim)

    @property
    def q_tiles(self) -> int:
        """Tiles of query rows per request."""
        return ceil_div(self.q_len * self.group_size, self.tile)

    @property
    def copies(self) -> int:
        """Blocks in the grid per KV chunk: one for each KV head and query tile."""
        return self.num_kv_heads * self.q_tiles

    @property
    def slots(self) -> int:
        """Blocks that the GPU runs at a time."""
        return FA2_CTAS * self.num_sms

    @property
    def wave(self) -> int:
        """KV chunks whose blocks run at once."""
        return self.slots // self.copies

    @property
    def most_seen(self) -> int:
        """Tokens of a request that its blocks read at most: of a window, to the end of its tile."""
        if self.window < 0:
            return INT32_MAX
        return self.window + self.tile

    @property
    def max_blocks(self) -> int:
        """Blocks of the grid per KV head: two per request or a wave, and more for long calls."""
        wave = ceil_div(self.slots, self.copies)
        batch = self.max_batch_size
        longest = min(self.max_seq_len, self.most_seen)
        kv_bytes = 2 * self.head_dim * self.kv_bytes * self.num_kv_heads * batch * longest
        extra = max(batch, wave - batch) + kv_bytes // ROOM_BYTES * wave
        room = batch + min(extra, MOST_WAVES * wave)
        fills_a_wave = min(batch * ceil_div(longest, MIN_CHUNK), wave)
        useful = max(batch * ceil_div(longest, SHORT), fills_a_wave)
        return min(room, useful) * self.q_tiles


@dataclass(frozen=True, eq=False)
class ChunkChoice:
    """What was chosen for a batch: `chunk` tokens.

    `chunks` [65] are the candidates, the last FlashInfer's own; `times` [65] are predicted, in
    tokens (see the module), infinite where the blocks exceed the grid.
    """

    chunk: int
    chunks: np.ndarray
    times: np.ndarray


def choose(shape: PlanShape, seq_lens: np.ndarray) -> ChunkChoice:
    """The chunk for requests of `seq_lens` [bs] tokens; 0 is an empty row of a padded batch.

    A request of more than MAX_TOKENS counts as empty. ValueError for more than `max_batch_size`.
    """
    lens = counted(shape, seq_lens)
    chunks = candidates(lens, shape.page_size)
    library = library_chunk(shape, lens, chunks)
    chunks = np.append(chunks, library)
    room = blocks_per_head(lens, chunks) * shape.q_tiles <= shape.max_blocks
    times = np.where(room, predicted_time(shape, lens, chunks), np.inf)
    best = int(times.argmin())
    leaves = times[best] + BLOCK_TOKENS < (1 - MARGIN) * times[-1]
    chunk = int(chunks[best]) if leaves else library
    return ChunkChoice(chunk, chunks, times)


def counted(shape: PlanShape, seq_lens: np.ndarray) -> np.ndarray:
    """Tokens that blocks read of each request, int64 [bs]."""
    lens = np.asarray(seq_lens)
    most = shape.max_batch_size
    whole = lens.dtype.kind in "iu" or not lens.size
    if lens.ndim != 1 or len(lens) > most or not whole:
        got = f"{lens.shape} {lens.dtype}"
        raise ValueError(f"seq_lens must be [bs] integers of at most {most} requests, got {got}")
    planned = np.where(lens > MAX_TOKENS, 0, lens.astype(np.int64))
    return np.clip(planned, 0, shape.most_seen)


def candidates(lens: np.ndarray, page_size: int) -> np.ndarray:
    """Chunks to choose from beside FlashInfer's, int64 [64]; the first cuts no request."""
    longest = lens.max(initial=1)
    equal = ceil_div(longest, np.arange(1, WHOLE + 1))
    equal = in_pages(equal, CHUNK_STEP)
    chunks = np.concatenate([equal, LADDER])
    return in_pages(np.maximum(chunks, MIN_CHUNK), page_size)


def in_pages(chunks: np.ndarray, page_size: int) -> np.ndarray:
    """The least whole pages that hold `chunks`, in tokens."""
    return ceil_div(chunks, page_size) * page_size


def library_chunk(shape: PlanShape, lens: np.ndarray, chunks: np.ndarray) -> int:
    """FlashInfer's chunk: the shortest whose blocks all run at once, or one that cuts nothing.

    Exact to a page, or to 1/64 of the distance of two of `chunks` where that is more.
    """
    fits = blocks_per_head(lens, chunks) <= shape.wave
    high = chunks[fits].min(initial=chunks[0])
    low = chunks[~fits & (chunks < high)].max(initial=MIN_CHUNK - 1)
    steps = (high - low) * np.arange(1, BETWEEN + 1)
    between = in_pages(low + ceil_div(steps, BETWEEN), shape.page_size)
    fits = blocks_per_head(lens, between) <= shape.wave
    return int(between[fits].min(initial=high))


def blocks_per_head(lens: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """KV chunks of all requests for each of `chunks` [n]."""
    parts = ceil_div(lens, chunks[:, None])
    return parts.sum(1)


def predicted_time(shape: PlanShape, lens: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Predicted time of a call for each of `chunks` [n], in tokens; see the module."""
    blocks = np.maximum(blocks_per_head(lens, chunks), 1)
    mean_block = lens.sum() / blocks + BLOCK_TOKENS
    longest = np.minimum(chunks, lens.max(initial=0)) + BLOCK_TOKENS
    waves = blocks * shape.copies / shape.slots
    rest = waves - np.floor(waves)
    lone_wave = np.hypot(rest, LONE) - rest
    last_wave = np.where(rest > 0, lone_wave * mean_block, 0)
    even = (mean_block / longest) ** 4  # 1: all blocks are equal
    drain = even * last_wave + (1 - even) * DRAIN * longest
    busy = np.hypot(waves * mean_block, LONE * longest)
    return busy + np.where(waves > 1, drain, 0)
