"""FlashInfer's `auto` for MLA (BatchMLAPagedAttentionWrapper), by release and, from 0.7.1, work.

Until 0.7.0 the GPU decides. From 0.7.1 a policy orders all candidates and the first one whose
preflight accepts the plan runs (`flashinfer_limits` has the part of the preflights that depends on
GPU, dtypes, heads, page size and mode). On Blackwell the order follows the lengths: `work` is heads
x the sum of q x kv tokens, `output_work` heads x query tokens, `q_tile` heads x the longest query.
Read in mla.py, mla/_core.py and mla/_batch_mla/_auto_policy.py.
"""

from __future__ import annotations

from .rules import (
    Condition,
    Group,
    Rule,
    above,
    at_least,
    at_most,
    before,
    below,
    both,
    either,
    no,
    one_of,
    since,
    yes,
)

MONOLITHIC, MODULAR, TRTLLM = "cute-dsl-monolithic", "cute-dsl-modular", "trtllm-gen"
CANDIDATES_0_7_1 = (MONOLITHIC, TRTLLM, "fa2", MODULAR, "cutile", "cutlass")
CANDIDATES = ("fa2", "fa3", TRTLLM, MONOLITHIC, MODULAR, "cutlass", "xqa", "cutile")
MI = 2**20

SMALL = both(at_most("work", 2 * MI), at_most("output_work", 32768))
SHORT_OUTPUT = at_most("output_work", 32768)
FEW_KV = below("total_kv", 5 * 2**14)
BIG = either(at_least("work", 5 * MI), at_least("total_kv", 5 * 2**14))
_NOT_FOUR = either(
    before("0.7.2"),
    above("heads", 16),
    below("max_q", 4),
    above("max_q", 4),
    below("min_q", 4),
    yes("causal"),
)
MODULAR_WINS = (above("max_q", 1), _NOT_FOUR, BIG)

_Preference = tuple[tuple[Condition | Group, ...], tuple[str, ...], str]

EAGER: tuple[_Preference, ...] = (
    ((SMALL, at_most("max_kv", 4096)), ("fa2", TRTLLM), "small work over a short cache"),
    (
        (
            at_least("heads", 128),
            either(above("max_q", 1), at_most("output_work", 2048), at_most("max_kv", 2048)),
            below("work", 5 * MI),
            SHORT_OUTPUT,
            below("max_kv", 32768),
            FEW_KV,
        ),
        ("fa2", TRTLLM),
        "small work: launching costs more than computing",
    ),
    (
        (
            either(
                below("heads", 128),
                both(one_of("max_q", 1), above("output_work", 2048), above("max_kv", 2048)),
            ),
            at_most("work", 4 * MI),
            SHORT_OUTPUT,
            below("max_kv", 32768),
            FEW_KV,
        ),
        ("fa2", TRTLLM),
        "small work: launching costs more than computing",
    ),
    (
        (
            one_of("max_q", 1),
            below("work", 5 * MI),
            at_most("max_kv", 4096),
            at_most("output_work", 2048),
            below("batch_size", 32),
            FEW_KV,
        ),
        ("fa2", TRTLLM),
        "a small decode batch over a short cache",
    ),
)
WITH_LSE: tuple[_Preference, ...] = (
    (
        (
            yes("base2_lse"),
            at_most("work", 8 * MI),
            SHORT_OUTPUT,
            above("max_q", 1),
            at_most("max_kv", 1024),
            yes("near_prefill"),
        ),
        ("fa2", TRTLLM),
        "a base-2 LSE over a short prefix",
    ),
)
LONG_KV_LIMIT = either(
    both(above("max_q", 1), at_most("max_q", 8), above("min_kv", 4096), at_most("work", 8 * MI)),
    both(at_most("max_kv", 4096), at_most("work", 6 * MI)),
    at_most("work", 4 * MI),
)
IN_GRAPH: tuple[_Preference, ...] = (
    (
        (at_least("heads", 64), at_least("max_q", 128), at_least("output_work", 65536))
        + (at_most("max_kv", 512),),
        (TRTLLM, MONOLITHIC),
        "long prefill over a short context",
    ),
    (
        (at_least("heads", 64), at_least("output_work", 24576), at_least("max_q", 16))
        + (at_most("max_q", 32), at_most("max_kv", 32)),
        (TRTLLM, MONOLITHIC),
        "many short prompts",
    ),
    (
        (at_most("work", MI), at_most("max_kv", 512), at_most("q_tile", 576))
        + (either(at_most("q_tile", 128), at_most("max_q", 16)),),
        (TRTLLM, MONOLITHIC),
        "a small query tile over a short context",
    ),
    (
        (at_most("work", MI), at_most("max_kv", 512), at_most("max_q", 16)),
        (MONOLITHIC, TRTLLM),
        "a larger query tile over a short context",
    ),
    (
        (one_of("max_q", 1), at_least("heads", 64), at_least("total_q", 96))
        + (at_most("max_kv", 512),),
        (TRTLLM, MONOLITHIC),
        "a large decode batch over a short context",
    ),
    (
        (at_least("heads", 128), at_least("min_kv", 2048), LONG_KV_LIMIT),
        (MONOLITHIC, TRTLLM),
        "128 heads over a long context, limited work",
    ),
    ((at_least("heads", 128),), (TRTLLM, MONOLITHIC), "128 heads"),
    (
        (
            one_of("max_q", 1),
            either(
                at_least("min_kv", 8192),
                both(above("output_work", 384), above("max_kv", 512)),
                both(
                    above("heads", 16),
                    below("heads", 32),
                    above("min_kv", 512),
                    at_most("max_kv", 2048),
                ),
            ),
        ),
        (MONOLITHIC, TRTLLM),
        "decode over a long context",
    ),
    ((one_of("max_q", 1), at_most("work", MI)), (TRTLLM, MONOLITHIC), "a small decode step"),
    ((), (MONOLITHIC, TRTLLM), "everything else in a graph"),
)
LARGE: tuple[_Preference, ...] = (
    ((at_least("heads", 128), *MODULAR_WINS), (TRTLLM, MONOLITHIC, MODULAR), "128 heads"),
    ((at_least("heads", 128),), (TRTLLM, MONOLITHIC), "128 heads"),
    ((SMALL, one_of("max_q", 1)), (TRTLLM, MONOLITHIC), "small work over a long context"),
    ((SMALL, *MODULAR_WINS), (TRTLLM, MODULAR, "fa2"), "small work, several query tokens"),
    ((SMALL,), (TRTLLM, "fa2"), "small work, several query tokens"),
    (MODULAR_WINS, (MONOLITHIC, TRTLLM, MODULAR), "large work, several query tokens"),
    ((), (MONOLITHIC, TRTLLM), "large work"),
)


def _policy(
    when: tuple[Condition | Group, ...], candidates: tuple[str, ...], release: str
) -> tuple[Rule, ...]:
    """The Blackwell policy as rows: each preference first, then the release's other candidates."""
    eager = [((no("graph"), *row[0]), *row[1:]) for row in EAGER]
    graph = [((yes("graph"), *row[0]), *row[1:]) for row in IN_GRAPH]
    source = f"FlashInfer _auto_policy.py, {release}"
    return tuple(
        Rule((*when, *conditions), _complete(first, candidates), why, source)
        for conditions, first, why in (*eager, *WITH_LSE, *graph, *LARGE)
    )


def _complete(first: tuple[str, ...], candidates: tuple[str, ...]) -> tuple[str, ...]:
    return first + tuple(name for name in candidates if name not in first)


def _order(gpu: str, *first: str) -> Rule:
    source = "FlashInfer _auto_policy.py, 0.7.2"
    when = (since("0.7.2"), one_of("gpu", gpu))
    return Rule(when, _complete(first, CANDIDATES), "what the policy prefers there", source)


MLA = (
    Rule((before("0.2.2"),), ("fa2",), "no auto yet, fa2 by default", "FlashInfer mla.py, 0.2.1"),
    *_policy((since("0.7.1"), before("0.7.2"), one_of("gpu", "sm100")), CANDIDATES_0_7_1, "0.7.1"),
    *_policy((since("0.7.2"), one_of("gpu", "sm100", "sm103")), CANDIDATES, "0.7.2"),
    _order("sm80", "fa2"),
    _order("sm90", "fa3", "fa2"),
    _order("sm120", "fa2", "xqa", "cutile"),
    _order("sm89"),
    Rule((one_of("gpu", "sm90"),), ("fa3",), "fa3 on Hopper", "FlashInfer determine_mla_backend"),
    Rule((), ("fa2",), "fa2 on every other GPU", "FlashInfer determine_mla_backend"),
)
