"""An exact model of FlashAttention-3's splits, in NumPy: `plan_splits`.

What the host decides is in `facts`; here is what `prepare_varlen_num_blocks_kernel` decides
(hopper/flash_prepare_scheduler.cu, since 2025-08), and the tensor that it writes, int32:

| words | written when | indexed by |
|---|---|---|
| splits [B4] | always | position in the order |
| m_blocks [B4] | always | position in the order |
| batch order [B4] | attention is not local | position in the order |
| heads in L2 [B4] | causal or local | position in the order |
| semaphore [1] | always, 0 | |

The order is by KV blocks of a split, largest first; under a causal mask by tokens of a split less
query rows. vLLM's build (0.33.0) has no order: packed query rows, then splits where the cap is
above 1, then heads in L2 by a rule of its own, all by request.

B4 is the batch size rounded up to 4. A block of 992 requests is scheduled by one CTA; with more
than one CTA (batch over 992) every request gets one split and each CTA sorts its own requests.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..spec import INT32_MAX, ceil_div, require_between, require_int, require_type
from .facts import SchedulerFacts

BATCHES_PER_CTA = 992
"""31 requests per warp (lane 31 only looks ahead), 32 warps."""
MARGIN = np.float32(1.1)
SWIZZLE_L2_BYTES = 8 * 2**20


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """What one prepare kernel decides; arrays are [batch_size] int64, by request."""

    facts: SchedulerFacts
    num_m_blocks: np.ndarray
    num_n_blocks: np.ndarray
    num_splits: np.ndarray


def plan_splits(
    facts: SchedulerFacts,
    seq_lens: np.ndarray,
    q_lens: np.ndarray | None = None,
) -> SplitPlan:
    """The splits that FlashAttention-3's prepare kernel gives each request.

    Parameters
    ----------
    facts : SchedulerFacts
        The call.
    seq_lens : ndarray
        [batch_size] integers, tokens of KV.
    q_lens : ndarray, optional
        [batch_size] integers, query tokens; with `facts.varlen_q`. Without, every request has
        `max_seqlen_q`.

    Returns
    -------
    SplitPlan
        Query tiles, KV blocks and splits, by request.

    Raises
    ------
    ValueError
        For a wrong shape, a length outside 0..max_seqlen_k or 0..max_seqlen_q, and sums of blocks
        that the kernel cannot divide by: zero, or past int32.

    Examples
    --------
    One long request beside three short ones gets most of the splits:

    >>> import numpy as np
    >>> from attnlib.core import SchedulerFacts
    >>> facts = SchedulerFacts(4, 32, 8, 128, 1, 8192, num_sms=132, page_size=16, causal=True)
    >>> plan_splits(facts, np.array([8192, 512, 512, 512])).num_splits.tolist()
    [11, 1, 1, 1]
    """
    require_type("facts", facts, SchedulerFacts)
    kv = _lengths("seq_lens", seq_lens, facts.batch_size, facts.max_seqlen_k)
    facts.require_q("q_lens", q_lens)
    if q_lens is None:
        q_lens = np.full(facts.batch_size, facts.max_seqlen_q)
    rows = _lengths("q_lens", q_lens, facts.batch_size, facts.max_seqlen_q)
    if facts.packs:
        rows *= facts.group_size
    block_m, block_n = facts.tile
    m_blocks = ceil_div(rows, block_m)
    n_blocks = ceil_div(kv, block_n)
    if facts.batch_size > BATCHES_PER_CTA or facts.split_cap == 1:
        return SplitPlan(facts, m_blocks, n_blocks, np.ones_like(n_blocks))
    blocks_per_sm = math.ceil(work_share(facts, int((m_blocks * n_blocks).sum())))
    splits = np.clip(ceil_div(n_blocks, blocks_per_sm), 1, facts.split_cap)
    return SplitPlan(facts, m_blocks, n_blocks, splits)


def num_words(facts: SchedulerFacts) -> int:
    """Words of the tensor of `facts`; the attention call refuses any other length."""
    parts = 2  # splits and m_blocks
    if not facts.is_local:
        parts += 1  # batch order
    if facts.is_causal or facts.is_local:
        parts += 1  # heads in L2
    return parts * padded_size(facts.batch_size) + 1


def padded_size(batch_size: int) -> int:
    """The next multiple of 4."""
    return ceil_div(batch_size, 4) * 4


def max_words(max_batch_size: int) -> int:
    """Words that hold the metadata of any call with at most `max_batch_size` requests."""
    require_int("max_batch_size", max_batch_size)
    return 4 * padded_size(max_batch_size) + 1


def blocks_in_l2(facts: SchedulerFacts) -> int:
    """KV blocks of one head that fit in the 8 MiB of L2 that the schedule counts on."""
    per_block = facts.tile[1] * (facts.head_dim + facts.head_dim_v) * facts.element_bytes
    return SWIZZLE_L2_BYTES // per_block


def scheduled_heads(facts: SchedulerFacts) -> int:
    """Heads of a request's tiles: KV heads where a group's query heads are packed."""
    return facts.num_kv_heads if facts.packs else facts.num_qo_heads


def work_share(facts: SchedulerFacts, total_blocks: int) -> np.float32:
    """The KV blocks that one SM should get, before it is rounded up; float32 as in the library."""
    if total_blocks == 0:
        raise ValueError(
            "seq_lens must hold a length above zero: FA3 divides by the sum of blocks, got zeros"
        )
    if total_blocks > INT32_MAX:
        raise ValueError(
            f"q_lens x seq_lens must make at most {INT32_MAX} tiles in all, where FA3's int32 sum "
            f"overflows, got {total_blocks}"
        )
    work = np.float32(total_blocks) * MARGIN * np.float32(scheduled_heads(facts))
    return np.float32(work / np.float32(facts.usable_sms))


def _lengths(
    name: str,
    values: np.ndarray,
    batch_size: int,
    most: int,
) -> np.ndarray:
    """Lengths as int64; ValueError for another shape, dtype or range."""
    lens = np.asarray(values)
    if lens.shape != (batch_size,) or lens.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be [{batch_size}] integers, got {list(lens.shape)} {lens.dtype}"
        )
    require_between(name, lens, 0, most)
    return lens.astype(np.int64)
