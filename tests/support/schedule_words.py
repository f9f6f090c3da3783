"""The tensor that FlashAttention-3 writes for a plan, and what is wrong with one that it wrote.

Three things are open: padding, which is never written; the order of requests with equal sort keys;
and the splits of all requests where one quotient is an integer but for the GPU's rounding.
"""

import math
from dataclasses import replace

import numpy as np

from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.schedule.splits import (
    BATCHES_PER_CTA,
    SplitPlan,
    blocks_in_l2,
    num_words,
    scheduled_heads,
    work_share,
)

ROUNDING_SLACK = 2.0**-21
"""Relative error allowed to the fast division: 4 units in the last place of a float32."""


def parts_of(facts: SchedulerFacts) -> dict[str, int]:
    """Offsets of the parts that are there, in order; last the semaphore, one word."""
    padded = -(-facts.batch_size // 4) * 4
    order = () if facts.is_local else ("batch_order",)
    heads = ("heads_in_l2",) if facts.is_causal or facts.is_local else ()
    names = ("num_splits", "num_m_blocks", *order, *heads, "semaphore")
    return {name: at * padded for at, name in enumerate(names)}


def is_written(facts: SchedulerFacts) -> np.ndarray:
    """Which words the library writes, [n] bool; it leaves padding as it was."""
    written = np.zeros(num_words(facts), bool)
    for at in parts_of(facts).values():
        written[at : at + facts.batch_size] = True
    return written


def blocks_per_split(plan: SplitPlan) -> np.ndarray:
    """KV blocks of one split, [batch_size]."""
    return -(-plan.num_n_blocks // plan.num_splits)


def sort_keys(plan: SplitPlan) -> np.ndarray:
    """Largest first: KV blocks of a split; under a causal mask tokens less query rows."""
    if not plan.facts.is_causal:
        return blocks_per_split(plan)
    block_m, block_n = plan.facts.tile
    return blocks_per_split(plan) * block_n - plan.num_m_blocks * block_m


def batch_order(plan: SplitPlan) -> np.ndarray:
    """The request at each position, [batch_size]; ties in the order of requests."""
    requests = np.arange(plan.facts.batch_size)
    if plan.facts.is_local:
        return requests
    return np.lexsort((-sort_keys(plan), requests // BATCHES_PER_CTA))


def words_of(plan: SplitPlan) -> np.ndarray:
    """The tensor with zeros for padding and equal requests in their order, [n] int32."""
    words = np.zeros(num_words(plan.facts), np.int32)
    parts = _by_request(plan) | {"batch_order": np.arange(plan.facts.batch_size)}
    for name, at in parts_of(plan.facts).items():
        if name != "semaphore":
            words[at : at + plan.facts.batch_size] = parts[name][batch_order(plan)]
    return words


def wrong_parts(plan: SplitPlan, words: np.ndarray) -> set[str]:
    """Parts of the library's `words` [n] int32 that do not follow from the plan."""
    if len(words) != num_words(plan.facts):
        return {"size"}
    requests = np.arange(plan.facts.batch_size)
    parts = {name: words[at:][: len(requests)] for name, at in parts_of(plan.facts).items()}
    order = parts.pop("batch_order", requests)
    if not np.array_equal(np.sort(order), requests):
        return {"batch_order"}
    wanted = {name: words[order] for name, words in _by_request(plan).items()}
    wanted["semaphore"] = np.zeros(1, np.int32)
    wrong = {name for name, part in parts.items() if not np.array_equal(part, wanted[name])}
    same_key = sort_keys(plan)[order] == sort_keys(plan)[batch_order(plan)]
    same_cta = order // BATCHES_PER_CTA == requests // BATCHES_PER_CTA
    if not plan.facts.is_local and not (same_key & same_cta).all():
        wrong.add("batch_order")
    return wrong


def candidates(plan: SplitPlan) -> tuple[SplitPlan, ...]:
    """The plan, then those of other roundings: one of them is right."""
    facts = plan.facts
    if facts.batch_size > BATCHES_PER_CTA or facts.split_cap == 1:
        return (plan,)
    share = float(work_share(facts, int((plan.num_m_blocks * plan.num_n_blocks).sum())))
    near = {math.ceil(share * (1 + slack)) for slack in (-ROUNDING_SLACK, ROUNDING_SLACK)}
    parts = [-(-plan.num_n_blocks // blocks) for blocks in sorted(near - {math.ceil(share)})]
    splits = [np.clip(part, 1, facts.split_cap) for part in parts]
    return (plan, *(replace(plan, num_splits=num_splits) for num_splits in splits))


def heads_in_l2(plan: SplitPlan) -> np.ndarray:
    """Heads whose KV blocks share 8 MiB of L2, [batch_size] by request."""
    facts = plan.facts
    fit = blocks_in_l2(facts)
    blocks = np.maximum(blocks_per_split(plan), 1)
    heads = np.ones_like(blocks)
    for count in (2, 4, 8, 16):
        heads[blocks * count <= fit] = count
    if not facts.packs:
        heads *= facts.group_size
    return np.minimum(heads, scheduled_heads(facts))


def _by_request(plan: SplitPlan) -> dict[str, np.ndarray]:
    return {
        "num_splits": plan.num_splits,
        "num_m_blocks": plan.num_m_blocks,
        "heads_in_l2": heads_in_l2(plan),
    }
