"""The cap of splits that a call of FlashAttention-3 is given: the library's, or another.

FlashAttention-3 splits the KV of a request over several SMs, at most `num_splits` times. An
argument of 0 leaves the cap to the library, whose rule depends on the build:

| cap | the rule |
|---|---|
| `default` | the library's: SGLang's, since sglang-kernel 0.4.5 (sgl-flash-attn #46), counts the |
| | query rows of all requests, so that a larger batch splits each request less |
| `upstream` | Dao-AILab's (hopper/flash_api.cpp, `get_num_splits`): query rows of one request |
| `bounded` | upstream's, while the partial outputs fit in `PARTIAL_BYTES`; at least the default |
| a number | that number |

The cap by all rows came because a prefill of many short segments allocated 14.5 GiB of partial
outputs. `bounded` keeps that promise by bytes: a prefill keeps the default.
"""

from dataclasses import replace

import numpy as np

from ..spec import require_int, require_word
from .facts import MAX_NUM_SPLITS, SchedulerFacts
from .splits import plan_splits

DEFAULT, UPSTREAM, BOUNDED = "default", "upstream", "bounded"
CAPS = (DEFAULT, UPSTREAM, BOUNDED)
PARTIAL_BYTES = 256 * 2**20
"""Bytes that the partial outputs of a `bounded` call may take, unless the default takes more."""
MOST_QUERY_TOKENS = 8
"""Query tokens of a request in decode and in verification of drafts; more are a prefill."""
FLOAT32_BYTES = 4


def require_cap(cap: str) -> None:
    """ValueError unless `cap` is one of `CAPS` or a number of splits, as text."""
    if cap.isdecimal():
        require_int("cap", int(cap), most=MAX_NUM_SPLITS)
    else:
        require_word("cap", cap, (*CAPS, "a number of splits"))


def num_splits(facts: SchedulerFacts, cap: str) -> int:
    """The argument `num_splits` of a call with these facts under `cap`; 0 for the library's own.

    Parameters
    ----------
    facts : SchedulerFacts
        The call. Its `num_splits` must be 0, and its `build` is the one that runs.
    cap : str
        `default`, `upstream`, `bounded`, or a number such as `"8"`.

    Raises
    ------
    ValueError
        If `cap` is none of these, or `facts` has a cap already.

    Examples
    --------
    DeepSeek-V3's attention with all 128 heads on one GPU, 64 requests, a context of 131,072:

    >>> mla = SchedulerFacts(64, 128, 1, 64, 1, 131_072, 132, page_size=1, head_dim_v=512,
    ...                      causal=True, varlen_q=True, build="sglang")
    >>> mla.split_cap, num_splits(mla, "upstream"), num_splits(mla, "bounded")
    (1, 57, 16)
    """
    require_cap(cap)
    if facts.num_splits:
        raise ValueError(f"num_splits of facts must be 0 to be chosen, got {facts.num_splits}")
    if cap == DEFAULT:
        return 0
    if cap.isdecimal():
        return int(cap)
    upstream = replace(facts, build="sglang-0.4.4").split_cap
    if cap == UPSTREAM:
        return upstream
    if facts.max_seqlen_q > MOST_QUERY_TOKENS:
        return 0
    fits = PARTIAL_BYTES // split_bytes(facts)
    return min(upstream, max(facts.split_cap, fits))


def split_bytes(facts: SchedulerFacts) -> int:
    """Bytes of the partial outputs of one split of all requests: float32, one per output value."""
    rows = facts.batch_size * facts.max_seqlen_q * facts.num_qo_heads
    return rows * facts.head_dim_v * FLOAT32_BYTES


def splits_under(
    facts: SchedulerFacts,
    seq_lens: np.ndarray,
    q_lens: np.ndarray,
    cap: str,
) -> np.ndarray:
    """Splits of each request [bs] int64 under a cap of `num_splits`, by the model.

    `seq_lens` and `q_lens` are [bs] integers: tokens and query tokens of each request.
    """
    chosen = num_splits(facts, cap) or facts.split_cap
    capped = replace(facts, num_splits=chosen)
    return plan_splits(capped, seq_lens, q_lens).num_splits
