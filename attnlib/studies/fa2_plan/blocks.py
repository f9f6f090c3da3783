"""Which slot of a GPU runs which block of a plan of fa2, and when: by the model of the choice.

The grid is (blocks, 1, KV heads), and the GPU starts blocks in that order, each in the first slot
that is free; a slot is half an SM. While so many blocks are in flight, a token takes each of them
`PlanShape.us_per_token`. Merging is left out. Nothing here is measured.
"""

import heapq
from dataclasses import replace

import numpy as np
import pandas as pd

from ...core.fa2.choice import PlanShape
from ...core.fa2.library import LibraryCall, Words, plan_fa2
from ...core.fa2.words import plan_words
from ...core.gpu import FA2_CTAS
from ...core.spec import AttnSpec
from ...kinds.decode.case import DecodeCase
from ...kinds.lengths import sample_seq_lens

BY_LIBRARY, BY_US = "FlashInfer's plan", "our plan"
RELEASE = "0.7.2.post1"
"""Of FlashInfer, whose planner is modelled; other releases make the same blocks of a decode."""


def both_plans(case: DecodeCase, num_sms: int) -> dict[str, Words]:
    """The library's plan of a graph for the case's lengths, and ours."""
    spec, lens = case.spec, sample_seq_lens(case)
    call = LibraryCall(
        spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.page_size, True, num_sms, RELEASE
    )
    ours = plan_words(PlanShape.of(spec, lens, num_sms), lens)
    return {BY_LIBRARY: plan_fa2(call, lens), BY_US: ours}


def blocks_of(plan: Words, lens: np.ndarray) -> pd.DataFrame:
    """A row per block in use, in the grid's order: `request`, `part` and `tokens` of it."""
    mask = plan.block_valid_mask
    used = len(plan.request_indices) if mask is None else int(mask.sum())
    request, part = plan.request_indices[:used], plan.kv_tile_indices[:used]
    chunk = plan.kv_chunk_size
    left = np.asarray(lens, np.int64)[request] - part * chunk
    return pd.DataFrame({"request": request, "part": part, "tokens": np.minimum(left, chunk)})


def both_schedules(case: DecodeCase, num_sms: int) -> dict[str, pd.DataFrame]:
    """`schedule` of both plans for the case's lengths."""
    lens = sample_seq_lens(case)
    shape = PlanShape.of(case.spec, lens, num_sms)
    plans = both_plans(case, num_sms)
    return {name: schedule(shape, blocks_of(plan, lens)) for name, plan in plans.items()}


def schedule(shape: PlanShape, blocks: pd.DataFrame) -> pd.DataFrame:
    """`blocks` of each KV head in turn, with the `slot` of each, its `start` and `end` in us."""
    work = pd.concat([blocks.assign(head=h) for h in range(shape.num_kv_heads)], ignore_index=True)
    tiles = -(-work.tokens.to_numpy() // shape.tile_tokens)
    needs = (tiles * shape.tile_tokens + shape.rates.block_tokens).tolist()
    per_token = shape.us_per_token(np.arange(shape.slots + 1, dtype=np.float32)).tolist()
    free, flight = list(range(shape.slots)), list[tuple[float, int, int]]()
    slot = [0] * len(needs)
    start, end = ([0.0] * len(needs) for _ in range(2))
    read = now = 0.0  # tokens that a block in flight since the beginning has read; microseconds
    waiting = 0
    while waiting < len(needs) or flight:
        if free and waiting < len(needs):
            slot[waiting], start[waiting] = heapq.heappop(free), now
            heapq.heappush(flight, (read + needs[waiting], waiting, slot[waiting]))
            waiting += 1
            continue
        ends_at, place, freed = heapq.heappop(flight)
        now += (ends_at - read) * per_token[len(flight) + 1]
        read, end[place] = ends_at, now
        heapq.heappush(free, freed)
    return work.assign(slot=np.array(slot, int), start=start, end=end)


def busy(work: pd.DataFrame, num_sms: int) -> float:
    """The share of the slots' time that a schedule uses."""
    return (work.end - work.start).sum() / (FA2_CTAS * num_sms * work.end.max())


def small_example() -> tuple[PlanShape, np.ndarray]:
    """Five requests on a GPU of two SMs, whose plan can be read word by word."""
    lens = np.array([300, 2000, 0, 1100, 150])
    spec = AttnSpec(8, 2, head_dim=128, page_size=16)
    return replace(PlanShape.of(spec, lens, num_sms=2), max_seq_len=4096), lens
