"""The tensor that FlashAttention-3 writes for a plan, word by word, and why a word is open.

| why | a word that |
|---|---|
| specified | follows from the rules alone |
| padding | is never written |
| tie | depends on which of two equal sort keys comes first |
| rounding | depends on how the GPU rounds one quotient |
"""

import math
from dataclasses import dataclass

import numpy as np

from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.schedule.splits import (
    BATCHES_PER_CTA,
    SplitPlan,
    blocks_in_l2,
    num_words,
    scheduled_heads,
    split_by,
    work_share,
)

ROUNDING_SLACK = 2.0**-21
"""Relative error allowed to the fast division: 4 units in the last place of a float32."""
SPECIFIED, PADDING, TIE, ROUNDING = range(4)
WHY = ("specified", "padding", "tie", "rounding")


@dataclass(frozen=True)
class Words:
    """The tensor: `values` [n] int32, and `why` [n] uint8, an index into `WHY`."""

    values: np.ndarray
    why: np.ndarray

    @property
    def specified(self) -> np.ndarray:
        """[n] bool: whether the word follows from the rules alone."""
        return self.why == SPECIFIED

    def counts(self) -> dict[str, int]:
        """Words per reason, `specified` among them."""
        return {name: int((self.why == code).sum()) for code, name in enumerate(WHY)}


def parts_of(facts: SchedulerFacts) -> dict[str, int]:
    """Offsets of the parts that are there, in order; last the semaphore, one word."""
    padded = -(-facts.batch_size // 4) * 4
    order = () if facts.is_local else ("batch_order",)
    heads = ("heads_in_l2",) if facts.is_causal or facts.is_local else ()
    names = ("num_splits", "num_m_blocks", *order, *heads, "semaphore")
    return {name: at * padded for at, name in enumerate(names)}


def words_of(plan: SplitPlan) -> Words:
    """The tensor that the library would hand out, with the reason of every open word."""
    words = certain_words(plan)
    for other in candidates(plan)[1:]:
        theirs = certain_words(other)
        differs = (words.values != theirs.values) | (words.why != theirs.why)
        words.why[differs & (words.why == SPECIFIED)] = ROUNDING
    return words


def candidates(plan: SplitPlan) -> tuple[SplitPlan, ...]:
    """The plan, then those of other roundings: one of them is right."""
    if plan.blocks_per_sm is None:
        return (plan,)
    share = float(work_share(plan.facts, int((plan.num_m_blocks * plan.num_n_blocks).sum())))
    near = {math.ceil(share * (1 + slack)) for slack in (-ROUNDING_SLACK, ROUNDING_SLACK)}
    others = sorted(near - {plan.blocks_per_sm})
    split = (plan.facts, plan.num_m_blocks, plan.num_n_blocks)
    return (plan, *(split_by(*split, blocks_per_sm) for blocks_per_sm in others))


def heads_in_l2(plan: SplitPlan) -> np.ndarray:
    """Heads whose KV blocks share 8 MiB of L2, [batch_size] by request."""
    facts = plan.facts
    fit = blocks_in_l2(facts)
    blocks = np.maximum(plan.blocks_per_split, 1)
    heads = np.ones_like(blocks)
    for count in (2, 4, 8, 16):
        heads[blocks * count <= fit] = count
    if not facts.packs:
        heads *= facts.group_size
    return np.minimum(heads, scheduled_heads(facts))


def certain_words(plan: SplitPlan) -> Words:
    """The words of a plan whose rounding is not in doubt."""
    batch_size, size = plan.facts.batch_size, num_words(plan.facts)
    values = np.zeros(size, np.int32)
    why = np.full(size, PADDING, np.uint8)
    parts = {
        "num_splits": plan.num_splits,
        "num_m_blocks": plan.num_m_blocks,
        "batch_order": np.arange(batch_size),
        "heads_in_l2": heads_in_l2(plan),
    }
    for name, at in parts_of(plan.facts).items():
        if name in parts:
            end = at + batch_size
            values[at:end] = parts[name][plan.batch_order]
            why[at:end] = np.where(_open_to_ties(plan, parts[name]), TIE, SPECIFIED)
    why[-1] = SPECIFIED
    return Words(values, why)


def _open_to_ties(plan: SplitPlan, part: np.ndarray) -> np.ndarray:
    """Positions [batch_size] whose value depends on the order of equal keys."""
    if plan.facts.is_local:
        return np.zeros(len(part), bool)
    order = plan.batch_order
    runs = np.stack([order // BATCHES_PER_CTA, plan.sort_keys[order]])
    starts = np.append(True, (np.diff(runs) != 0).any(0))
    run = np.cumsum(starts) - 1
    first = part[order][starts]
    varied = np.zeros(len(first), bool)
    np.logical_or.at(varied, run, part[order] != first[run])
    return varied[run]
