"""FlashInfer's `auto`: which kernel family a fresh wrapper picks, by release.

Read in decode.py, prefill.py, mla and utils.py of the releases; tests/test_select_flashinfer.py
plans the library's own wrappers and compares. The first row that matches decides. A wrapper keeps
the choice of its first plan(), whatever it is planned for later (ragged prefill from 0.7.1 and
decode on cuDNN choose again).
"""

from __future__ import annotations

from .flashinfer_mla import MLA
from .rules import Condition, Group, Rule, at_least, at_most, before, either, no, one_of, since, yes
from .situation import PAGED_PREFILL_MODES

HOPPER = one_of("gpu", "sm90")
BLACKWELL = one_of("gpu", "sm100", "sm103")
SIXTEEN_BIT = (no("fp8_query"), no("fp8_kv"))
FA3_HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
SUITS_FA3 = (HOPPER, no("custom_mask"), no("positions"), no("fp16_qk"))
PLAIN = (no("custom_mask"), no("positions"), no("window"), no("softcap"), no("sinks"))
FP8_KV_HAS_FP8_QUERY = either(no("fp8_kv"), yes("fp8_query"))


def _row(when: tuple[Condition | Group, ...], then: str, why: str, source: str) -> Rule:
    return Rule(when, (then,), why, f"FlashInfer {source}")


def _general(fallback: str) -> tuple[Rule, ...]:
    """determine_attention_backend, as prefill asks it: fa3 on Hopper where fa3 can do it."""
    only = "fa3 on Hopper, where it can do what is asked"
    return (
        _row((before("0.2.6"), *SUITS_FA3, *SIXTEEN_BIT), "fa3", f"{only}; no FP8 yet", "#667"),
        _row((since("0.2.6"), before("0.6.4"), *SUITS_FA3), "fa3", only, "utils.py, 0.2.6"),
        _row(
            (since("0.6.4"), before("0.6.15"), *SUITS_FA3, FP8_KV_HAS_FP8_QUERY),
            "fa3",
            f"{only}; an FP8 cache needs an FP8 query",
            "#2536",
        ),
        _row(
            (
                since("0.6.15"),
                *SUITS_FA3,
                FP8_KV_HAS_FP8_QUERY,
                one_of("head_dims", *FA3_HEAD_DIMS),
            ),
            "fa3",
            f"{only}, head_dim included",
            "#3739",
        ),
        _row((), "fa2", fallback, "utils.py"),
    )


CUDNN_TILE = (
    BLACKWELL,
    yes("cudnn"),
    *SIXTEEN_BIT,
    yes("one_dtype"),
    no("positions"),
    no("softcap"),
)
CUDNN_IN_GRAPH = either(no("graph"), yes("block_tables"))
DECODE = (
    _row(
        (since("0.7.2"), no("tensor_cores"), at_least("max_q", 2), *CUDNN_TILE)
        + (one_of("head_dim", 128, 256),),
        "cudnn",
        "several query tokens without tensor cores: only cuDNN runs them",
        "decode.py, 0.7.2",
    ),
    _row(
        (no("tensor_cores"),),
        "cuda-cores",
        "use_tensor_cores=False: the CUDA-core kernel, whatever backend says",
        "decode.py",
    ),
    _row(
        (since("0.7.2"), *CUDNN_TILE, no("fixed_split"), one_of("head_dim", 128))
        + (
            Condition("group_size", "divides", 128),
            Condition("page_size", "a multiple of", 8),
            no("window"),
            CUDNN_IN_GRAPH,
            at_least("max_q", 2),
            at_most("max_q", 4),
            at_least("q_rows", 32),
            at_most("q_rows", 128),
            at_least("kv_units", 64),
        ),
        "cudnn",
        "2 to 4 query tokens fill cuDNN's 128-row tile, and there are 64 of them",
        "decode.py, 0.7.2",
    ),
    _row((before("0.6.0"),), "fa2", 'the code says "fa2"', "decode.py"),
    _row(
        (before("0.6.4"), HOPPER, no("positions")),
        "fa3",
        "a general function chooses, fa3 on Hopper",
        "#2148",
    ),
    _row((before("0.6.4"),), "fa2", "a general function chooses, fa3 only on Hopper", "#2148"),
    _row(
        (before("0.6.15"), HOPPER, no("positions"), yes("fp8_query")),
        "fa3",
        "FP8 queries are spared: fa3 as before",
        "#2530",
    ),
    _row(
        (since("0.6.15"), HOPPER, no("positions"), yes("fp8_query"))
        + (one_of("head_dim", 64, 128, 256),),
        "fa3",
        "FP8 queries are spared: fa3 as before, where it has the head_dim",
        "#2530, #3739",
    ),
    _row((), "fa2", "auto means fa2 again", "#2530"),
)

PAGED_PREFILL = _general("anything else is fa2")
VERIFY = (
    _row(
        (since("0.7.2.post1"), HOPPER, yes("custom_mask"), no("positions"), no("fp16_qk"))
        + (
            one_of("heads", 4),
            one_of("kv_heads", 1),
            one_of("head_dims", (256, 256)),
            one_of("page_size", 1),
            one_of("dtype", "bfloat16"),
            yes("fp8_kv"),
        ),
        "fa2",
        "fa2 by name; told uniform_q_len=4, a kernel of its own runs (eagle_verify_fp8kv_sm90)",
        "prefill.py, 0.7.2.post1",
    ),
    *PAGED_PREFILL,
)

_UPGRADABLE = (yes("one_dtype"), *SIXTEEN_BIT, *PLAIN)
RAGGED_PREFILL = (
    _row(
        (since("0.6.16"), one_of("gpu", "sm120"), *_UPGRADABLE, yes("fp16_qk"), yes("one_head_dim"))
        + (
            one_of("head_dim", 64, 128, 256),
            one_of("group_size", 1),
            yes("same_lens"),
            at_least("max_kv", 256),
        ),
        "fmha_v2",
        "MHA prompts from 256 tokens, FP16 reduction allowed",
        "prefill.py, 0.6.16",
    ),
    _row(
        (since("0.7.1"), BLACKWELL, *_UPGRADABLE, yes("cudnn"))
        + (
            one_of("head_dims", (128, 128), (192, 128), (256, 256)),
            either(one_of("group_size", 1), at_least("max_q", 2)),
        ),
        "cudnn",
        "the first of cudnn, cutlass that serves the call",
        "prefill.py, 0.7.1",
    ),
    _row(
        (since("0.7.1"), BLACKWELL, *_UPGRADABLE, no("graph"))
        + (one_of("head_dims", (128, 128), (192, 128)), at_most("q_tiles", 131072)),
        "cutlass",
        "the second of cudnn, cutlass; its plan cannot be captured",
        "prefill.py, 0.7.1",
    ),
    *_general("anything else is fa2"),
)

AUTO = {
    "decode": DECODE,
    **dict.fromkeys(PAGED_PREFILL_MODES, PAGED_PREFILL),
    "target_verify": VERIFY,
    "prefill_ragged": RAGGED_PREFILL,
    "mla": MLA,
    "sparse_mla": MLA,
}
