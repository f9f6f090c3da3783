"""What a decode call puts on the SMs: its work items, in the order in which they are taken.

| backend | an item | at a time on an SM | rule |
|---|---|---|---|
| flashinfer-fa2 | a chunk of a request, for a KV head and its group | 2 | PrefillSplitQOKVIndptr |
| flashinfer-fa2-planned | the same | 2 | `core.fa2.choice` |
| flashinfer-cuda-cores | the same | `CUDA_CORE_CTAS` | BatchDecodeWithPagedKVCacheWorkEstimation |
| flashinfer-fa3 | whole requests of single query heads, as planned | 1 | PrefillSM90Plan |
| fa3, flash-attn-3-precomputed | a range of KV blocks of a request's head | 1 | `metadata.splits` |

FlashInfer's rules are those of its scheduler.cuh (0.6.4) for a plan in a CUDA graph, `planned` is
our plan for as many requests, none longer; `tests/core/test_plans.py` holds them to the library.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np

from ..fa2.choice import PlanShape, choose
from ..fa2.library import MIN_CHUNK
from ..gpu import CUDA_CORE_CTAS, FA2_CTAS, SM_SHARED_BYTES
from ..schedule.facts import SchedulerFacts
from ..schedule.splits import plan_splits, split_blocks
from ..spec import ELEMENT_BYTES, AttnSpec, require_word

Lengths: TypeAlias = Sequence[int] | np.ndarray
FA2_ROWS = 16
PerSm = tuple[np.ndarray, np.ndarray]
FA3_TILES = {64: (192, 96), 128: (128, 96), 256: (128, 32)}
"""(query rows, KV tokens) of a tile by head_dim, for a paged cache: prefill_sm90.cuh."""
FA2_ITEM_TOKENS, CUDA_CORE_ITEM_TOKENS = 128, 16
"""What beginning and ending an item costs beside its tokens, in tokens: of the sizes tried, those
with which times of known cases are predicted best."""


@dataclass(frozen=True, eq=False)
class WorkPlan:
    """Work items of one call: `items` [n] is the cost of each in KV tokens, padding included.

    `slots` items run at a time and read `tokens` KV tokens of single heads, each once. `splits` is
    the most parts that a request is cut into; `merged` says whether a second kernel puts partial
    outputs together.
    """

    items: np.ndarray
    slots: int
    tokens: int
    splits: int
    merged: bool


def plan(backend: str, spec: AttnSpec, seq_lens: Lengths, *, num_sms: int) -> WorkPlan:
    """The work plan of `backend` for one query token of each request, lengths in tokens.

    Raises ValueError for a backend without a rule here, listing those that have one, for lengths
    below 1, for a window, for sinks, and for a spec that the backend's kernels do not take.
    """
    require_word("backend", backend, PLANS)
    spec.require_no_window("a work plan")
    if spec.sinks:
        raise ValueError("sinks must be False for a work plan, got True")
    return PLANS[backend](spec, lengths(seq_lens), num_sms)


@cache
def can_plan(backend: str, spec: AttnSpec) -> bool:
    """Whether `plan` has a rule for the backend at such a layer."""
    try:
        return plan(backend, spec, [1], num_sms=FA2_CTAS) is not None
    except ValueError:
        return False


def lengths(seq_lens: Lengths) -> np.ndarray:
    """`seq_lens` as int64 [bs]; ValueError unless they are one or more integers of at least 1."""
    return lengths_of("seq_lens", seq_lens, 1)


def fa3_sm_tokens(seq_lens: tuple[int, ...], spec: AttnSpec, *, num_sms: int) -> PerSm:
    """KV tokens in whole tiles, and items, that FlashInfer's fa3 plan gives each SM: [num_sms].

    PrefillSM90Plan: a heap of SMs by cost, an item costs 2 tile_rows + kv_len; heads are the outer
    loop. Of SMs with equal cost the library's heap has one on top that depends on its history:
    `heapq` moves elements as libstdc++ does, so with elements that compare by cost alone it takes
    the same one. Raises ValueError for a head_dim without a kernel, and for a window.
    """
    spec.require_no_window("a work plan")
    tile_rows, tile_tokens = _fa3_tile(spec)
    heap = [_SmCost() for _ in range(num_sms)]
    for sm, each in enumerate(heap):
        each.sm = sm
    tokens, items = [0] * num_sms, [0] * num_sms
    for length in sorted(seq_lens, reverse=True) * spec.num_qo_heads:
        least = heapq.heappop(heap)
        more = _SmCost(least + 2 * tile_rows + length)
        more.sm = sm = least.sm
        heapq.heappush(heap, more)
        tokens[sm] += -(-length // tile_tokens) * tile_tokens
        items[sm] += 1
    return np.array(tokens), np.array(items)


def _even_sm_tokens(seq_lens: tuple[int, ...], spec: AttnSpec, *, num_sms: int) -> PerSm:
    """The same of equal requests, in some order of the SMs: their items go round."""
    _, tile_tokens = _fa3_tile(spec)
    each, more = divmod(len(seq_lens) * spec.num_qo_heads, num_sms)
    items = each + (np.arange(num_sms) < more)
    return items * (-(-seq_lens[0] // tile_tokens) * tile_tokens), items


def _fa3_tile(spec: AttnSpec) -> tuple[int, int]:
    require_word("head_dim", spec.head_dim, FA3_TILES)
    return FA3_TILES[spec.head_dim]


class _SmCost(int):
    """What an SM has to do; two of equal cost compare as equal, whichever SMs they are."""

    sm: int


def _fa2(spec: AttnSpec, seq_lens: np.ndarray, num_sms: int) -> WorkPlan:
    return _fa2_work(spec, seq_lens, _chunk(spec, seq_lens, FA2_CTAS * num_sms), num_sms)


def _fa2_planned(spec: AttnSpec, seq_lens: np.ndarray, num_sms: int) -> WorkPlan:
    chunk = choose(PlanShape.of(spec, seq_lens, num_sms), seq_lens).chunk
    return _fa2_work(spec, seq_lens, chunk, num_sms)


def _fa2_work(spec: AttnSpec, seq_lens: np.ndarray, chunk: int, num_sms: int) -> WorkPlan:
    parts, splits = _parts(spec, seq_lens, chunk)
    tile = kv_tile(FA2_ROWS, spec.head_dim, ELEMENT_BYTES[spec.kv_dtype])
    items = -(-parts // tile) * tile + FA2_ITEM_TOKENS
    return WorkPlan(items, FA2_CTAS * num_sms, int(parts.sum()), splits, merged=True)


def _cuda_cores(spec: AttnSpec, seq_lens: np.ndarray, num_sms: int) -> WorkPlan:
    kernel = spec.head_dim, ELEMENT_BYTES[spec.kv_dtype]
    groups = CUDA_CORE_CTAS.get(kernel, {})
    if spec.group_size not in groups:
        known = {kernel: (*groups,) for kernel, groups in CUDA_CORE_CTAS.items()}
        raise ValueError(
            "spec must have a head_dim, bytes of a KV element and a group whose CUDA-core kernels "
            f"are known, {known}; got {spec}"
        )
    planned, resident = groups[spec.group_size]
    parts, splits = _parts(spec, seq_lens, _chunk(spec, seq_lens, planned * num_sms))
    items = parts + CUDA_CORE_ITEM_TOKENS
    merged = len(seq_lens) * spec.num_kv_heads < planned * num_sms
    return WorkPlan(items, resident * num_sms, int(parts.sum()), splits, merged)


def _flashinfer_fa3(spec: AttnSpec, seq_lens: np.ndarray, num_sms: int) -> WorkPlan:
    place = fa3_sm_tokens if np.ptp(seq_lens) else _even_sm_tokens
    tokens, items = place(tuple(seq_lens.tolist()), spec, num_sms=num_sms)
    busy = items > 0
    # An item begins and ends in about the time of one more tile.
    cost = tokens[busy] + items[busy] * _fa3_tile(spec)[1]
    return WorkPlan(cost, num_sms, int(seq_lens.sum()) * spec.num_qo_heads, 1, merged=False)


def _fa3(spec: AttnSpec, seq_lens: np.ndarray, num_sms: int) -> WorkPlan:
    pages = int(-(-seq_lens.max() // spec.page_size))
    facts = SchedulerFacts(
        batch_size=len(seq_lens),
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_seqlen_q=1,
        max_seqlen_k=pages * spec.page_size,
        num_sms=num_sms,
        page_size=spec.page_size,
        dtype=spec.dtype,
        causal=True,
    )
    split = plan_splits(facts, seq_lens)
    tile = facts.tile[1]
    items = [
        blocks + 1
        for request in split.batch_order.tolist()
        for blocks in spec.num_kv_heads
        * split_blocks(int(split.num_n_blocks[request]), int(split.num_splits[request]))
    ]
    tokens = int(seq_lens.sum()) * spec.num_kv_heads
    # As above: a tile to begin and end an item.
    merged, splits = facts.split_cap > 1, int(split.num_splits.max())
    return WorkPlan(np.array(items) * tile, num_sms, tokens, splits, merged)


def _chunk(spec: AttnSpec, seq_lens: np.ndarray, ctas: int) -> int:
    """Tokens of FlashInfer's chunks."""
    pages, most = -(-seq_lens // spec.page_size), ctas // spec.num_kv_heads
    return chunk_pages(pages, most=most, page_size=spec.page_size) * spec.page_size


def _parts(spec: AttnSpec, seq_lens: np.ndarray, chunk: int) -> tuple[np.ndarray, int]:
    """Tokens [n] of the chunks, heads outermost, and the most chunks of a request."""
    counts = -(-seq_lens // chunk)
    parts = np.full(counts.sum(), chunk)
    parts[np.cumsum(counts) - 1] = seq_lens - (counts - 1) * chunk
    return np.tile(parts, spec.num_kv_heads), int(counts.max())


PLANS: dict[str, Callable[[AttnSpec, np.ndarray, int], WorkPlan]] = {
    "flashinfer-fa2": _fa2,
    "flashinfer-fa2-planned": _fa2_planned,
    "flashinfer-cuda-cores": _cuda_cores,
    "flashinfer-fa3": _flashinfer_fa3,
    "flash-attn-3": _fa3,
    "flash-attn-3-precomputed": _fa3,
}


def kv_tile(rows: int, head_dim: int, kv_bytes: int) -> int:
    """KV tokens that a block of `rows` query rows, of 16 bits, takes at once: CTA_TILE_KV of
    prefill.cuh, what fits the shared memory beside the queries."""
    warps, q_tiles = (4 if rows == 16 else 1), (2 if rows == 128 else 1)
    room = SM_SHARED_BYTES // FA2_CTAS - rows * head_dim * 2
    fit = min(room // (2 * head_dim * 16 * warps * kv_bytes), 8 // q_tiles)
    return 16 * warps * max(size for size in (1, 2, 4, 8) if size <= max(fit, 1))


def chunk_pages(pages: np.ndarray, *, most: int, page_size: int) -> int:
    """Pages of FlashInfer's KV chunks: the fewest that cut requests of `pages` into `most`."""
    least = max(MIN_CHUNK // page_size, 1)
    sizes = range(least, int(pages.max()))
    fits = bisect_left(sizes, True, key=lambda size: int((-(-pages // size)).sum()) <= most)
    return least + fits


def lengths_of(name: str, lens: Lengths, least: int = 0) -> np.ndarray:
    """`lens` as int64 [bs]; ValueError unless they are one or more integers from `least` on."""
    array = np.asarray(lens)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu" or array.min() < least:
        raise ValueError(f"{name} must hold lengths >= {least}, got {array.tolist()} {array.dtype}")
    return array.astype(np.int64)
