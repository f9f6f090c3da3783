"""SGLang's and mini-sglang's rules: the engine's backend, and what its FlashInfer backend asks for.

Read in the wheels of SGLang 0.5.8 to 0.5.23 (server_args.py, later model_override_base.py;
flashinfer_backend.py) and in mini-sglang's main of March 2026. Left out: rules for one model, for
other vendors' hardware, speculation without branches (n-gram), and environment switches. SGLang's
fa3 is FlashAttention 3 of its own kernel package, not FlashInfer's fa3.
"""

from __future__ import annotations

from .rules import (
    Condition,
    Group,
    Rule,
    at_least,
    before,
    both,
    either,
    no,
    none_of,
    one_of,
    since,
    yes,
)
from .situation import PAGED_PREFILL_MODES, PREFILL_MODES

_When = tuple[Condition | Group, ...]
SM100 = one_of("gpu", "sm100", "sm103")
ONE_BRANCH = either(one_of("eagle_topk", 0), both(one_of("eagle_topk", 1), one_of("page_size", 1)))
LATENT_MODE = one_of("mode", "mla")
DEFAULT, WRAPPERS = "SGLang get_default_attn_backend", "SGLang flashinfer_backend.py"
SINCE_0_5_11 = f"{DEFAULT}, 0.5.11"


def _row(when: _When, then: str, why: str, source: str) -> Rule:
    return Rule(when, (then,), why, source)


MHA = (
    _row(
        (one_of("gpu", "sm90"), ONE_BRANCH),
        "fa3",
        "Hopper; FlashInfer 0.6.1 was slow there (#17411), and fa3 stayed",
        "SGLang #17425",
    ),
    _row(
        (since("0.5.17"), SM100, ONE_BRANCH, no("one_head_dim")),
        "fa4",
        "K and V of unequal width",
        f"{DEFAULT}, 0.5.17",
    ),
    _row((SM100, ONE_BRANCH), "trtllm_mha", "datacenter Blackwell", DEFAULT),
    _row((since("0.5.11"), yes("sinks")), "triton", "FlashInfer has no sinks", SINCE_0_5_11),
    _row((), "flashinfer", "whatever else has FlashInfer", DEFAULT),
)
LATENT = (
    _row((one_of("gpu", "sm90"),), "fa3", "MLA on Hopper", DEFAULT),
    _row((SM100,), "flashinfer", "MLA on datacenter Blackwell", DEFAULT),
    _row((), "triton", "MLA anywhere else", DEFAULT),
)
AUTO = dict.fromkeys(("decode", *PREFILL_MODES), MHA) | {"mla": LATENT}

_REGISTRY, _CHECKS = "SGLang attention_registry.py", "SGLang server_args.py"
PREFILL = one_of("mode", *PREFILL_MODES)
NOT_SM100 = none_of("gpu", "sm100", "sm103")
LIMITS = (
    _row((none_of("gpu", "sm80", "sm89", "sm90"),), "fa3", "needs 8.x or 9.x", _REGISTRY),
    _row((LATENT_MODE, none_of("gpu", "sm90")), "fa3", "MLA needs 9.x", _REGISTRY),
    _row((LATENT_MODE,), "trtllm_mha", "not for MLA", _REGISTRY),
    _row((before("0.5.10"), NOT_SM100), "trtllm_mha", "needs SM100", f"{_CHECKS}, 0.5.8"),
    _row(
        (before("0.5.19"), PREFILL, NOT_SM100),
        "trtllm_mha",
        "prefill needs SM100 before 0.5.19",
        f"{_CHECKS}, 0.5.10",
    ),
    _row(
        (none_of("gpu", "sm90", "sm100", "sm103", "sm120"),),
        "trtllm_mha",
        "needs Hopper or Blackwell",
        f"{_CHECKS}, 0.5.10",
    ),
    _row(
        (since("0.5.19"), PREFILL, one_of("gpu", "sm120"), yes("fp8_kv")),
        "trtllm_mha",
        "prefill on SM120 takes no FP8 cache",
        "SGLang attention_hook.py, 0.5.19",
    ),
    _row((none_of("mode", "mla"),), "trtllm_mla", "only for MLA", _REGISTRY),
    _row((none_of("gpu", "sm100", "sm103", "sm120"),), "trtllm_mla", "needs Blackwell", _CHECKS),
    _row((since("0.5.11"), yes("sinks")), "flashinfer", "no attention sinks", SINCE_0_5_11),
)
BACKENDS = dict.fromkeys(
    ("decode", *PREFILL_MODES), ("fa3", "flashinfer", "triton", "trtllm_mha")
) | {"mla": ("fa3", "flashinfer", "triton", "trtllm_mla")}
"""Backends whose limits were read, so that they can be asked for by name."""

PINS = (
    ("0.5.8", "0.6.1"),
    ("0.5.9", "0.6.3"),
    ("0.5.10", "0.6.7.post2"),
    ("0.5.11", "0.6.8.post1"),
    ("0.5.12", "0.6.11.post1"),
    ("0.5.13.post1", "0.6.12"),
    ("0.5.14", "0.6.12"),
    ("0.5.15", "0.6.12"),
    ("0.5.16", "0.6.14"),
    ("0.5.17", "0.6.15.post1"),
    ("0.5.18", "0.6.17"),
    ("0.5.19", "0.6.18"),
    ("0.5.20", "0.6.18"),
    ("0.5.21", "0.6.18"),
    ("0.5.22", "0.7.1"),
    ("0.5.23", "0.7.2"),
)
"""SGLang's releases that were read, with the FlashInfer release that each requires."""
FIRST_PINNED = "0.5.9"


def _tensor_cores(then: str, why: str, source: str) -> tuple[Rule, ...]:
    four = "group size from 4 up: tensor cores"
    return (
        _row((yes("fp8_kv"),), then, f"FP8 cache: tensor cores; {why}", source),
        _row((at_least("group_size", 4),), then, f"{four}; {why}", source),
        _row((), "cuda-cores", "group size below 4: CUDA cores", source),
    )


def _ragged(policy_source: str) -> tuple[Rule, ...]:
    return (
        _row(
            (SM100, no("piecewise_graph"))
            + (one_of("head_dims", (64, 64), (128, 128), (192, 128)),),
            "cutlass",
            "CUTLASS on SM100, unless prefill runs in a piecewise graph",
            policy_source,
        ),
        _row((), "auto", "ragged prefill is left to auto", policy_source),
    )


PINNED_POLICY = {
    "decode": _tensor_cores("fa2", "pinned to fa2", "SGLang #18364"),
    **dict.fromkeys(PAGED_PREFILL_MODES, (_row((), "fa2", "pinned to fa2", "SGLang #18364"),)),
    "prefill_ragged": _ragged(WRAPPERS),
    "mla": (
        Rule(
            (),
            ("auto",),
            "the MLA wrapper is left to auto: split tensors in 16 bits, pages of one token",
            f"{WRAPPERS} (MLA)",
            (
                ("page_size", 1),
                ("packed", False),
                ("causal", False),
                ("fp8_kv", False),
                ("one_dtype", True),
            ),
        ),
    ),
}
"""What SGLang gives FlashInfer's wrappers since 0.5.9."""
_WAS_FA2 = (_row((), "fa2", "was pinned before", f"{WRAPPERS}, 0.5.8"),)
UNPINNED_POLICY = PINNED_POLICY | {
    "decode": _tensor_cores("auto", "left to auto", f"{WRAPPERS}, 0.5.8"),
    "prefill_paged": _WAS_FA2,
    "draft_extend": _WAS_FA2,
    "dllm_extend": _WAS_FA2,
    "target_verify": (_row((), "auto", "left to auto", f"{WRAPPERS}, 0.5.8"),),
}
"""The same until 0.5.8."""

MINI = "mini-sglang engine.py"
MINI_AUTO = {
    "decode": (
        _row((none_of("gpu", "sm80", "sm89", "sm90"),), "trtllm", "10.0 and newer", MINI),
        _row((), "fi", "FlashInfer decodes everywhere else", MINI),
    ),
    "prefill_paged": (
        _row((none_of("gpu", "sm80", "sm89", "sm90"),), "trtllm", "10.0 and newer", MINI),
        _row((one_of("gpu", "sm90"),), "fa", "FlashAttention 3 on Hopper", MINI),
        _row((), "fi", "FlashInfer", MINI),
    ),
}
MINI_POLICY = {
    "decode": (
        _row((at_least("group_size", 4),), "fa2", "tensor cores from group size 4 up; fa2", MINI),
        _row((), "cuda-cores", "group size below 4: CUDA cores", MINI),
    ),
    "prefill_paged": (_row((), "fa2", "pinned: FlashInfer's fa3 is slow", "mini-sglang fi.py"),),
}
"""What mini-sglang gives FlashInfer's wrappers."""
MINI_BACKENDS = dict.fromkeys(("decode", "prefill_paged"), ("trtllm", "fa", "fi"))
MINI_LIMITS = (
    Rule(
        (either(yes("fp8_query"), yes("fp8_kv")),),
        ("trtllm", "fa", "fi"),
        "the cache has the model's 16-bit dtype",
        MINI,
    ),
    Rule((one_of("gpu", "sm80", "sm89"),), ("trtllm", "fa"), "auto takes it from 9.0 on", MINI),
)
