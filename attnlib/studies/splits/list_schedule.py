"""When each tile of a FlashAttention-3 call runs, by a list-scheduling model. No torch.

A tile is a query tile, a head and a split of one request. A multiprocessor runs one tile at a time
and takes the next one of the library's order when it has ended. A tile takes as long as its KV
blocks, and `START_BLOCKS` more to start. The unit is the time of one KV block.

The model knows no bandwidth that tiles share, no merge of partial outputs and no time of launch. It
compares splits of one call; it does not predict microseconds.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from ...core.schedule.splits import SplitPlan, scheduled_heads
from ...core.schedule.words import batch_order

START_BLOCKS = 2
"""What a tile takes to start, in KV blocks: tried on H100s, not fitted."""


def _tiles(plan: SplitPlan) -> list[int]:
    """KV blocks of each tile, in the order in which they are taken."""
    heads = scheduled_heads(plan.facts)
    tiles: list[int] = []
    for request in batch_order(plan):
        blocks = int(plan.num_n_blocks[request])
        splits = int(plan.num_splits[request])
        query_tiles = int(plan.num_m_blocks[request])
        most = -(-blocks // splits)
        left = blocks - most * np.arange(splits)
        of_a_head = np.clip(left, 0, most)
        tiles += of_a_head.tolist() * (query_tiles * heads)
    return tiles


@dataclass(frozen=True, eq=False)
class Work:
    """What each worker does when, a row per tile or block in the order in which they are taken.

    Arrays are int64 [n]: the `request`, the `worker` (an SM, or a slot of fa2), and when the work
    begins and ends. All of it is in tokens that a worker reads.
    """

    request: np.ndarray
    worker: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    workers: int

    @property
    def last(self) -> int:
        """When the last one ends."""
        return int(self.end.max())

    @property
    def idle(self) -> float:
        """Share of the workers' time, until the last one ends, in which they do nothing."""
        busy = (self.end - self.begin).sum()
        return 1 - float(busy) / (self.workers * self.last)


def tiles_in_time(plan: SplitPlan) -> Work:
    """The tiles of a plan on the multiprocessors, by the model.

    Examples
    --------
    One request of 8 blocks of 128 tokens on 4 multiprocessors, alone and in four splits of two:

    >>> from dataclasses import replace
    >>> import numpy as np
    >>> from attnlib.core import SchedulerFacts, plan_splits
    >>> facts = SchedulerFacts(1, 4, 1, 128, 1, 1024, num_sms=4, page_size=1, num_splits=1)
    >>> plan = plan_splits(facts, np.array([1024]))
    >>> tiles_in_time(plan).last, tiles_in_time(replace(plan, num_splits=np.array([4]))).last
    (1280, 512)
    """
    heads = scheduled_heads(plan.facts)
    order = batch_order(plan)
    tiles_of = plan.num_m_blocks * heads * plan.num_splits
    requests = np.repeat(order, tiles_of[order])
    blocks = np.array(_tiles(plan)) + START_BLOCKS
    _, block_n = plan.facts.tile
    return in_turn(
        requests=requests,
        tokens=blocks * block_n,
        workers=plan.facts.usable_sms,
    )


def in_turn(requests: np.ndarray, tokens: np.ndarray, workers: int) -> Work:
    """Work of `tokens` [n] each, taken in this order by the worker that is free first."""
    free = [(0, worker) for worker in range(workers)]
    begins = []
    taken_by = []
    for each in tokens.tolist():
        begin, worker = free[0]
        heapq.heapreplace(free, (begin + each, worker))
        begins.append(begin)
        taken_by.append(worker)
    begin_at = np.array(begins)
    return Work(
        request=requests,
        worker=np.array(taken_by),
        begin=begin_at,
        end=begin_at + tokens,
        workers=workers,
    )
