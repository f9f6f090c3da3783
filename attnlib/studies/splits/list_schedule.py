"""When the last CTA of a FlashAttention-3 call ends, by a list-scheduling model. No torch.

A tile is a query tile, a head and a split of one request. A multiprocessor runs one tile at a time
and takes the next one of the library's order when it has ended. A tile takes as long as its KV
blocks, and `START_BLOCKS` more to start. The unit is the time of one KV block.

The model knows no bandwidth that tiles share, no merge of partial outputs and no time of launch. It
compares splits of one call; it does not predict microseconds.
"""

import heapq
from dataclasses import dataclass, replace

import numpy as np

from ...core.schedule.facts import SchedulerFacts
from ...core.schedule.splits import SplitPlan, plan_splits, scheduled_heads
from ...core.schedule.words import batch_order
from ...core.spec import ceil_div, require_int

START_BLOCKS = 2
"""What a tile takes to start, in KV blocks: tried on H100s, not fitted."""
TRIED = np.geomspace(0.25, 4, 49)
"""Targets that `best_target` tries, as multiples of an even share of all blocks."""


def end_of_last(plan: SplitPlan) -> int:
    """When the last tile of a plan ends, in KV blocks.

    Examples
    --------
    One request of 8 blocks on 4 multiprocessors, alone and in four splits of two blocks:

    >>> from dataclasses import replace
    >>> import numpy as np
    >>> from attnlib.core import SchedulerFacts, plan_splits
    >>> facts = SchedulerFacts(1, 4, 1, 128, 1, 1024, num_sms=4, page_size=1, num_splits=1)
    >>> plan = plan_splits(facts, np.array([1024]))
    >>> end_of_last(plan), end_of_last(replace(plan, num_splits=np.array([4])))
    (10, 4)
    """
    ends = [0] * plan.facts.usable_sms
    for blocks in _tiles(plan):
        heapq.heapreplace(ends, ends[0] + blocks + START_BLOCKS)
    return max(ends)


def even_share(plan: SplitPlan) -> float:
    """The KV blocks of all tiles over all multiprocessors, and one start: no split ends earlier,
    unless it leaves multiprocessors without a tile."""
    blocks = (plan.num_m_blocks * plan.num_n_blocks).sum() * scheduled_heads(plan.facts)
    return float(blocks / plan.facts.usable_sms + START_BLOCKS)


def split_by_target(plan: SplitPlan, target: int) -> SplitPlan:
    """The plan with splits of at most `target` blocks each, as far as the cap of splits allows."""
    require_int("target", target)
    splits = np.clip(ceil_div(plan.num_n_blocks, target), 1, plan.facts.split_cap)
    return replace(plan, num_splits=splits)


def best_target(plan: SplitPlan) -> SplitPlan:
    """The plan of the common target that ends first; the plan itself where none ends earlier."""
    share = even_share(plan) - START_BLOCKS
    targets = np.unique(np.ceil(share * TRIED).astype(int).clip(1))
    plans = [plan]
    for target in targets.tolist():
        plans.append(split_by_target(plan, target))
    return min(plans, key=end_of_last)


def plan_of(facts: SchedulerFacts, lengths: tuple[int, ...]) -> SplitPlan:
    """The library's plan of a batch of these lengths, all of whose requests have the same number of
    query tokens."""
    q_lens = np.full(len(lengths), facts.max_seqlen_q) if facts.varlen_q else None
    return plan_splits(facts, np.array(lengths), q_lens)


def _tiles(plan: SplitPlan) -> list[int]:
    """KV blocks of each tile, in the order in which they are taken."""
    heads = scheduled_heads(plan.facts)
    tiles: list[int] = []
    for request in batch_order(plan):
        blocks = int(plan.num_n_blocks[request])
        splits = int(plan.num_splits[request])
        most = -(-blocks // splits)
        of_a_head = np.clip(blocks - most * np.arange(splits), 0, most).tolist()
        tiles += of_a_head * (int(plan.num_m_blocks[request]) * heads)
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
    """The tiles of a plan on the multiprocessors, by the model; one ends with `end_of_last`."""
    heads = scheduled_heads(plan.facts)
    order = batch_order(plan)
    tiles_of = plan.num_m_blocks * heads * plan.num_splits
    requests = np.repeat(order, tiles_of[order])
    blocks = np.array(_tiles(plan)) + START_BLOCKS
    _, block_n = plan.facts.tile
    return in_turn(requests, blocks * block_n, plan.facts.usable_sms)


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
    starts = np.array(begins)
    return Work(requests, np.array(taken_by), starts, starts + tokens, workers)
