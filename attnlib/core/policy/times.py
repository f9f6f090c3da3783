"""How long a decode call takes by its work plan, with rates fitted to measured calls.

Items of a `plans.WorkPlan` start in order, each in the slot that is free first. While `busy`
of them run, each passes a token in

    us_per_token = hypot(latency(busy), busy x token_bytes x read x missed / memory_gbps)

with `latency` what one item needs by itself beside so many others, `read` the share of its tokens
that are not padding, and `missed` that of KV bytes which the L2 does not hold. Where items of
different lengths follow each other on an SM that runs several, one computes while another loads:
for `overlap` of them the larger of both counts instead of `hypot`. A call takes

    run_us = start_us + sum(tokens x us_per_token) + merging
    merging = merge_us + item_us items + split_us (splits - 1)

with `merge_us` only where a second kernel merges partial outputs. Rates are of one kernel of a
backend (`policy.kernel_of`).
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..gpu import L2_SHARE, L2_SLOPE
from ..spec import ELEMENT_BYTES, AttnSpec
from .plans import Lengths, WorkPlan, plan

KNOTS = (1 / 128, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 12.0)
"""Running items over SMs at which latency is fitted; between them it is interpolated over logs."""
BINS = 48
"""Levels of `busy`, evenly over its logarithm, that moments of a call are gathered in."""
START = {"start_us": 5.0, "merge_us": 1.0, "item_us": 5e-3, "split_us": 0.02, "memory_gbps": 4200.0}
"""Rates beside latency: where a fit begins, and what it stays near for lack of evidence."""


@dataclass(frozen=True)
class Gpu:
    """What the law needs of a GPU: SMs, and the MiB of its L2, 0 if calls find it cold."""

    num_sms: int
    l2_mib: float


@dataclass(frozen=True)
class Rates:
    """Fitted rates of a backend and spec; `token_ns` has the latency at the first of `KNOTS`."""

    start_us: float
    merge_us: float
    item_us: float
    split_us: float
    memory_gbps: float
    token_ns: tuple[float, ...]

    @cached_property
    def logs(self) -> np.ndarray:
        """Logs of the rates in `START`, then of latency in us: what `Calls` takes."""
        told = [getattr(self, name) for name in START]
        return np.log([*told, *np.array(self.token_ns) / 1e3])


@dataclass(frozen=True, eq=False)
class Load:
    """A call's work over time, in `BINS` levels: `tokens` that each running item passes in it.

    `busy` is the items that run, over SMs; `moved` the bytes that all of them read from memory for
    a token of each. `overlap` is the share of items that hide each other's latency. Other fields
    as in `WorkPlan`.
    """

    busy: np.ndarray
    tokens: np.ndarray
    moved: np.ndarray
    overlap: float
    items: int
    splits: int
    merged: bool


# A policy is learnt from the lengths that it then chooses for.
@lru_cache(maxsize=2**13)
def planned_load(backend: str, spec: AttnSpec, seq_lens: bytes, gpu: Gpu) -> Load:
    """The load of a backend's plan for the bytes of int64 lengths [bs]; ValueError as `plan`."""
    lens = np.frombuffer(seq_lens, np.int64)
    return load_of(plan(backend, spec, lens, num_sms=gpu.num_sms), spec, lens, gpu)


def load_of(plan: WorkPlan, spec: AttnSpec, seq_lens: Lengths, gpu: Gpu) -> Load:
    """The load of `plan`, made for requests of `seq_lens` tokens on `gpu`."""
    begin, end = _schedule(plan.items, plan.slots)
    moments, place = np.unique(np.concatenate([begin, end]), return_inverse=True)
    change = np.zeros(len(moments))
    np.add.at(change, place, np.repeat([1.0, -1.0], len(begin)))
    running, passed = np.cumsum(change)[:-1], np.diff(moments)
    level = (np.log(running) / math.log(plan.slots + 1) * BINS).astype(int)
    tokens, weighed = (np.bincount(level, w, BINS) for w in (passed, passed * running))
    busy = np.where(tokens > 0, weighed / np.maximum(tokens, 1e-9), 1.0)
    token_bytes = 2 * spec.head_dim * ELEMENT_BYTES[spec.kv_dtype]
    cache = float(np.sum(seq_lens)) * spec.num_kv_heads * token_bytes
    read = plan.tokens / float(plan.items.sum())
    # When the same call is replayed back to back. Of a cache twice the L2 nothing is left when it
    # is read again; more would overflow.
    fill = min(2.0, cache / (L2_SHARE * gpu.l2_mib * 2**20)) if gpu.l2_mib else 2.0
    missed = 1 - 1 / (1 + fill**L2_SLOPE)
    return Load(
        busy=busy / gpu.num_sms,
        tokens=tokens,
        moved=busy * read * token_bytes * missed,
        overlap=_overlap(plan) if plan.slots > gpu.num_sms else 0.0,
        items=len(plan.items),
        splits=plan.splits,
        merged=plan.merged,
    )


def predict(rates: Rates, loads: Sequence[Load]) -> np.ndarray:
    """Microseconds [len(loads)] of calls."""
    return Calls(loads, len(rates.token_ns)).run_us(rates.logs)


class Calls:
    """The levels of several loads, call by call, with latency at the first `knots` of `KNOTS`.

    Rates are one vector here: the logs of those in `START`, then those of latency in us.
    """

    def __init__(self, loads: Sequence[Load], knots: int) -> None:
        counts = np.array([(x.items, x.splits, x.merged, x.overlap) for x in loads], float)
        self.items, self.splits, self.merged, overlap = counts.T
        levels = np.array([(load.tokens, load.moved, load.busy) for load in loads])
        # Few levels of a call have any tokens.
        self.call, at = np.nonzero(levels[:, 0])
        self.tokens, self.moved, busy = levels[self.call, :, at].T
        self.overlap = overlap[self.call]
        place = np.interp(np.log(busy), np.log(KNOTS[:knots]), np.arange(knots))
        self.between = np.maximum(1 - np.abs(place[:, None] - np.arange(knots)), 0)

    def run_us(self, x: np.ndarray) -> np.ndarray:
        """Microseconds [calls] by rates `x`."""
        start, merge, item, split, gbps = np.exp(x[: len(START)])
        latency = np.exp(self.between @ x[len(START) :])
        # GB/s are 1e3 bytes per microsecond.
        traffic = self.moved / (gbps * 1e3)
        alone, hidden = np.hypot(latency, traffic), np.maximum(latency, traffic)
        spent = self.tokens * (alone + self.overlap * (hidden - alone))
        spent = np.bincount(self.call, spent, len(self.items))
        merging = merge * self.merged + item * self.items + split * (self.splits - 1)
        return start + spent + merging


def _schedule(items: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end [n] of items that start in order, each in the first slot to be free."""
    if len(items) <= slots or items.min() == items.max():
        waves = np.arange(len(items)) // slots * float(items[0])
        return waves, waves + items
    free, begin = [0.0] * slots, []
    for cost in items.tolist():
        begin.append(free[0])
        heapq.heapreplace(free, free[0] + cost)
    return np.array(begin), np.array(begin) + items


def _overlap(plan: WorkPlan) -> float:
    """Share of items that start behind another, times the chance that two differ in length."""
    _, counts = np.unique(plan.items, return_counts=True)
    behind = max(0.0, 1 - plan.slots / len(plan.items))
    return behind * (1 - float(((counts / counts.sum()) ** 2).sum()))
