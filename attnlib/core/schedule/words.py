"""The tensor of a schedule, word by word, in NumPy: the twin of what kernels write.

`splits` has its layout. Two things are open in it: padding, which the library never writes and
which is 0 here, and the order of requests with equal keys, which is theirs here.
"""

import numpy as np

from ..spec import ceil_div, require_type
from .facts import SchedulerFacts
from .splits import (
    BATCHES_PER_CTA,
    SplitPlan,
    blocks_in_l2,
    num_words,
    padded_size,
    plan_splits,
    scheduled_heads,
)


def schedule_words(
    facts: SchedulerFacts,
    seq_lens: np.ndarray,
    q_lens: np.ndarray | None = None,
) -> np.ndarray:
    """The words that FlashAttention-3 writes for one kind of layer of a step.

    Parameters
    ----------
    facts : SchedulerFacts
        The call; not of vLLM's build, whose words are others.
    seq_lens : ndarray
        [batch_size] integers, tokens of KV.
    q_lens : ndarray, optional
        [batch_size] integers, query tokens, with `facts.varlen_q`; see `plan_splits`.

    Returns
    -------
    ndarray
        [num_words] int32. Padding is 0, and equal requests are in their order.

    Raises
    ------
    ValueError
        As `plan_splits`, and for vLLM's build.

    Examples
    --------
    Splits, query tiles, order and heads in L2 of one request and three words of padding, and the
    semaphore:

    >>> import numpy as np
    >>> from attnlib.core import SchedulerFacts
    >>> facts = SchedulerFacts(1, 32, 8, 128, 1, 8192, num_sms=132, page_size=16, causal=True)
    >>> schedule_words(facts, np.array([8192])).tolist()
    [13, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0]
    """
    require_type("facts", facts, SchedulerFacts)
    require_known_words(facts)
    q_given = q_lens
    if facts.varlen_q and q_lens is None:
        q_given = np.full(facts.batch_size, facts.max_seqlen_q)
    return words_of(plan_splits(facts, seq_lens, q_given))


def require_known_words(facts: SchedulerFacts) -> None:
    """ValueError for vLLM's build."""
    if facts.build == "vllm":
        raise ValueError("build must be upstream or sglang, whose words are known, got vllm")


def words_of(plan: SplitPlan) -> np.ndarray:
    """The tensor of a plan, [n] int32."""
    facts = plan.facts
    words = np.zeros(num_words(facts), np.int32)
    order = batch_order(plan)
    parts = words_by_request(plan)
    parts["batch_order"] = np.arange(facts.batch_size)
    for name, at in parts_of(facts).items():
        if name != "semaphore":
            words[at : at + facts.batch_size] = parts[name][order]
    return words


def parts_of(facts: SchedulerFacts) -> dict[str, int]:
    """Offsets of the parts that are there, in order; last the semaphore, one word."""
    names = ["num_splits", "num_m_blocks"]
    if not facts.is_local:
        names.append("batch_order")
    if facts.is_causal or facts.is_local:
        names.append("heads_in_l2")
    names.append("semaphore")
    padded = padded_size(facts.batch_size)
    return {name: at * padded for at, name in enumerate(names)}


def words_by_request(plan: SplitPlan) -> dict[str, np.ndarray]:
    """Splits, query tiles and heads in L2, each [batch_size] by request."""
    return {
        "num_splits": plan.num_splits,
        "num_m_blocks": plan.num_m_blocks,
        "heads_in_l2": heads_in_l2(plan),
    }


def batch_order(plan: SplitPlan) -> np.ndarray:
    """The request at each position, [batch_size]; ties in the order of requests."""
    requests = np.arange(plan.facts.batch_size)
    if plan.facts.is_local:
        return requests
    return np.lexsort((-sort_keys(plan), requests // BATCHES_PER_CTA))


def sort_keys(plan: SplitPlan) -> np.ndarray:
    """Largest first: KV blocks of a split; under a causal mask tokens less query rows."""
    if not plan.facts.is_causal:
        return blocks_per_split(plan)
    block_m, block_n = plan.facts.tile
    return blocks_per_split(plan) * block_n - plan.num_m_blocks * block_m


def blocks_per_split(plan: SplitPlan) -> np.ndarray:
    """KV blocks of one split, [batch_size]."""
    return ceil_div(plan.num_n_blocks, plan.num_splits)


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
