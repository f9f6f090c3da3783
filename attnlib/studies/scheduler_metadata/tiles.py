"""Which SM works on which tile: FA3's persistent scheduler over a plan, as list scheduling.

The attention kernel has one CTA per SM; a CTA that is done takes the next tile off a counter. Tiles
come in the plan's batch order; within a request block by block of query rows inside a split, splits
inside a head (hopper/tile_scheduler.hpp, VarlenDynamicPersistentTileScheduler). A tile's cost is
counted in KV blocks, so times are a model.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from ...core.schedule.splits import SplitPlan, scheduled_heads, split_blocks


@dataclass(frozen=True)
class Tile:
    """One work tile: KV blocks [`first`, `first` + `blocks`) of a request's head, on an SM.

    `start` is when it begins, in KV blocks; `blocks` is also how long it takes.
    """

    request: int
    head: int
    split: int
    first: int
    blocks: int
    sm: int
    start: int

    @property
    def end(self) -> int:
        """When it is done, in KV blocks."""
        return self.start + self.blocks


def assign_tiles(plan: SplitPlan, seq_lens: np.ndarray | None = None) -> list[Tile]:
    """The tiles in the order in which they are taken, each with its SM and start.

    `seq_lens` [batch_size] are the lengths of the call, where they are not those of the plan: the
    ranges of KV come from them. Splits left without a block are tiles of no length.
    """
    n_blocks = plan.num_n_blocks
    if seq_lens is not None:
        n_blocks = -(-np.asarray(seq_lens, np.int64) // plan.facts.tile[1])
    free = [(0, sm) for sm in range(plan.facts.usable_sms)]
    tiles = []
    for request in plan.batch_order.tolist():
        parts = split_blocks(int(n_blocks[request]), int(plan.num_splits[request]))
        rows = range(int(plan.num_m_blocks[request]))
        for head in range(scheduled_heads(plan.facts)):
            for split, blocks in enumerate(parts):
                first = sum(parts[:split])
                for _ in rows:
                    start, sm = heapq.heappop(free)
                    heapq.heappush(free, (start + blocks, sm))
                    tiles.append(Tile(request, head, split, first, blocks, sm, start))
    return tiles


def balance(tiles: list[Tile], *, num_sms: int) -> float:
    """Work over the room for it, 0 to 1: one where all SMs are busy until the last tile ends."""
    finish = max(tile.end for tile in tiles)
    return sum(tile.blocks for tile in tiles) / (num_sms * finish) if finish else 0.0
