"""What is wrong with a tensor that FlashAttention-3 wrote for a plan.

Three things are open: padding, which is never written; the order of requests with equal sort keys;
and the splits of all requests where one quotient is an integer but for the GPU's rounding.
"""

import math
from dataclasses import replace

import numpy as np

from attnlib.core import SchedulerFacts
from attnlib.core.schedule.splits import BATCHES_PER_CTA, SplitPlan, num_words, work_share
from attnlib.core.schedule.words import batch_order, parts_of, sort_keys, words_by_request

ROUNDING_SLACK = 2.0**-21
"""Relative error allowed to the fast division: 4 units in the last place of a float32."""


def is_written(facts: SchedulerFacts) -> np.ndarray:
    """Which words the library writes, [n] bool; it leaves padding as it was."""
    written = np.zeros(num_words(facts), bool)
    for at in parts_of(facts).values():
        written[at : at + facts.batch_size] = True
    return written


def wrong_parts(plan: SplitPlan, words: np.ndarray) -> set[str]:
    """Parts of the library's `words` [n] int32 that do not follow from the plan."""
    if len(words) != num_words(plan.facts):
        return {"size"}
    requests = np.arange(plan.facts.batch_size)
    parts = {name: words[at:][: len(requests)] for name, at in parts_of(plan.facts).items()}
    order = parts.pop("batch_order", requests)
    if not np.array_equal(np.sort(order), requests):
        return {"batch_order"}
    wanted = {name: words[order] for name, words in words_by_request(plan).items()}
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
