"""Calls that serving makes, about fifty, each named by its traffic, and what runs them.

A record has the time of planning beside the time of the call (`plan_us`), so no call is about
planning alone. Page tables are as wide as the longest request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...core.spec import ELEMENT_BYTES, AttnSpec, MlaSpec, require_word
from ...measure.calls.cases import read_case
from ...measure.calls.decode.case import DecodeCase
from ...measure.calls.extend.case import ExtendCase
from ...measure.calls.form import Item, NamedCase
from ...measure.calls.mla.case import MlaCase
from ..splits.traffic import batches

FLASHINFER = "flashinfer-python"
SGLANG = "sglang-kernel"
VLLM = "vllm"
BACKENDS = {
    FLASHINFER: {
        "": "flashinfer-auto",
        "extend": "flashinfer-prefill-auto",
        "mla": "flashinfer-mla-fa3",
    },
    SGLANG: {
        "": "sglang-flash-attn-3",
        "extend": "sglang-flash-attn-3-extend",
        "mla": "sglang-flash-attn-3-mla",
    },
    VLLM: {"": "vllm-flash-attn-3"},
}
"""Package -> kind of a case -> the backend that is timed."""
BY_GROUP = {
    "16 users of 8k, 1 query head per KV head": "heads=32/32 page=16 lens=8192x16",
    "16 users of 8k, 4 query heads per KV head": "heads=32/8 page=16 lens=8192x16",
    "16 users of 8k, 8 query heads per KV head": "heads=16/2 page=16 lens=8192x16",
    "16 users of 8k, 16 query heads per KV head": "heads=16/1 page=16 lens=8192x16",
}
BY_REQUESTS = {
    "1 user of 4k": "heads=32/8 page=16 lens=4096",
    "4 users of 4k": "heads=32/8 page=16 lens=4096x4",
    "64 users of 4k": "heads=32/8 page=16 lens=4096x64",
    "128 users of 4k": "heads=32/8 page=16 lens=4096x128",
    "256 users of 1k": "heads=32/8 page=16 lens=1024x256",
    "256 users of 1k, a GPU of 4": "heads=16/2 page=16 lens=1024x256",
}
LONG = {
    "1 user of 32k": "heads=32/8 page=16 lens=32768",
    "1 user of 32k, a GPU of 4": "heads=16/2 page=16 lens=32768",
    "1 user of 131k, a GPU of 8": "heads=8/1 page=16 lens=131072",
    "8 users of 32k, a GPU of 8": "heads=8/1 page=16 lens=32768x8",
}
ONE_LONG = {
    "1 agent of 100k among 39 chats": "heads=32/8 page=16 lens=100000,512x39",
    "1 agent of 100k among 39 chats, a GPU of 4": "heads=16/2 page=16 lens=100000,512x39",
    "1 document of 64k among 127 chats, a GPU of 8": "heads=8/1 page=16 lens=65536,2048x127",
    "1 document of 64k among 127 chats, 16 per KV head": "heads=16/1 page=16 lens=65536,2048x127",
}
PAGE_1 = {
    "1 user of 4k, pages of 1": "heads=32/8 page=1 lens=4096",
    "16 users of 8k, pages of 1": "heads=32/8 page=1 lens=8192x16",
    "128 users of 4k, pages of 1": "heads=32/8 page=1 lens=4096x128",
    "1 agent of 100k among 39 chats, pages of 1": "heads=32/8 page=1 lens=100000,512x39",
}
WINDOWS = {
    "1 user of 8k, window of 128": "heads=64/8 head_dim=64 window=128 page=16 lens=8192",
    "64 users of 8k, window of 128": "heads=64/8 head_dim=64 window=128 page=16 lens=8192x64",
    "16 users of 8k, head_dim 64": "heads=64/8 head_dim=64 page=16 lens=8192x16",
}
FP8 = {
    "1 user of 32k, FP8 cache": "heads=32/8 kv_dtype=float8_e4m3fn page=16 lens=32768",
    "16 users of 8k, FP8 cache": "heads=32/8 kv_dtype=float8_e4m3fn page=16 lens=8192x16",
    "128 users of 4k, FP8 cache": "heads=32/8 kv_dtype=float8_e4m3fn page=16 lens=4096x128",
}
VERIFY = {
    "4 drafts of 1 user of 8k": "mode=target_verify q_len=4 mask=causal heads=32/8 page=16 "
    "lens=8192",
    "4 drafts of 32 users of 8k": "mode=target_verify q_len=4 mask=causal heads=32/8 page=16 "
    "lens=8192x32",
    "4 drafts, 1 document of 64k among 31 chats": "mode=target_verify q_len=4 mask=causal "
    "heads=8/1 page=16 lens=65536,2048x31",
    "a tree of 4 drafts of 32 users of 8k": "mode=target_verify q_len=4 mask=tree heads=32/8 "
    "page=16 lens=8192x32",
    "accepted drafts of 32 users of 8k": "mode=draft_extend q_len=5 heads=32/8 page=16 "
    "lens=8192x32",
}
PROMPTS = {
    "a prompt of 2k": "mode=prefill_paged q_len=2048 heads=32/8 page=16 lens=2048",
    "chunks of 512 of 8 prompts": "mode=prefill_paged q_len=512 heads=32/8 page=16 lens=8704x8",
    "a chunk of 2k behind 30k": "mode=prefill_paged q_len=2048 heads=32/8 page=16 lens=32768",
    "4 prompts of 2k, no cache": "mode=prefill_ragged q_len=2048 heads=32/8 page=1 lens=2048x4",
}
LATENT = {
    "MLA, 1 user of 4k": "mode=mla heads=128/1 page=1 lens=4096",
    "MLA, 16 users of 8k": "mode=mla heads=128/1 page=1 lens=8192x16",
    "MLA, 1 document of 64k among 31 chats": "mode=mla heads=128/1 page=1 lens=65536,2048x31",
    "MLA, 128 users of 4k, a GPU of 8": "mode=mla heads=16/1 page=1 lens=4096x128",
    "MLA, 4 drafts of 32 users of 8k, a GPU of 8": "mode=mla q_len=4 heads=16/1 page=1 "
    "lens=8192x32",
}
STEPS_IN_FLIGHT = {
    "kimi-conversation": (16, 64),
    "kimi-synthetic": (32,),
    "azure-conversation": (64, 128),
    "azure-code": (32, 64),
}
"""Trace -> requests in flight of its steps: `studies.splits.traffic`, the first step of each."""
OF_TRACES = {"": "heads=32/8 page=16", ", a GPU of 4": "heads=16/2 page=16"}


def _traced() -> dict[str, str]:
    """Decode steps of published traces."""
    calls = {}
    for batch in batches():
        if batch.step == 0 and batch.in_flight in STEPS_IN_FLIGHT[batch.trace]:
            for where, layer in OF_TRACES.items():
                name = f"{batch.trace}, {batch.in_flight} in flight{where}"
                calls[name] = f"{layer} lens={batch.lengths}"
    return calls


TRACED = _traced()
TEXTS = {
    **BY_GROUP,
    **BY_REQUESTS,
    **LONG,
    **ONE_LONG,
    **PAGE_1,
    **TRACED,
    **WINDOWS,
    **FP8,
    **VERIFY,
    **PROMPTS,
    **LATENT,
}
"""Name of a call, its traffic -> its text; without head_dim it is 128."""
CALLS: dict[str, NamedCase] = {name: read_case(text) for name, text in TEXTS.items()}
"""Name of a call -> its case."""
NAMES = {case: name for name, case in CALLS.items()}

STEPS = ((1, 4096), (16, 8192), (128, 4096))
"""Batch and kv_len of the decode steps of a layer."""
EXTENDS = (
    ("prefill_paged", 2048, 1, 2048),
    ("prefill_paged", 512, 8, 8704),
    ("prefill_ragged", 2048, 4, 2048),
    ("target_verify", 4, 32, 8192),
    ("draft_extend", 5, 32, 8192),
)
"""Mode, queries per request, batch and kv_len of its other calls."""
MLA_HEADS = (128, 16)
"""Of all heads on a GPU, and of one GPU of eight."""


def calls_of_layer(layer: AttnSpec | str) -> list[NamedCase]:
    """Calls of one layer of a model (a text: MLA), few, in each mode that it has.

    A ragged prefill has no pages.
    """
    cases: list[NamedCase] = []
    if not isinstance(layer, AttnSpec):
        for heads in MLA_HEADS:
            for batch, kv_len in STEPS:
                cases.append(MlaCase(MlaSpec(heads), batch, kv_len))
        return cases
    for batch, kv_len in STEPS:
        cases.append(DecodeCase(layer, batch, kv_len))
    for mode, q_len, batch, kv_len in EXTENDS:
        paged = replace(layer, page_size=1) if mode == "prefill_ragged" else layer
        cases.append(ExtendCase(DecodeCase(paged, batch, kv_len), mode, q_len))
    return cases


def timer_of(case: NamedCase) -> str:
    """How engines run it: prefill eagerly, all else in a CUDA graph."""
    is_eager = getattr(case, "mode", "").startswith("prefill")
    return "profiler" if is_eager else "graph"


def items_of(package: str, names: Iterable[str] = CALLS) -> list[Item]:
    """The calls that a package has a kernel for, without a release; ValueError lists the packages.

    Examples
    --------
    >>> len(items_of("flashinfer-python")), len(items_of("sglang-kernel"))
    (56, 47)
    """
    require_word("package", package, tuple(BACKENDS))
    backends = BACKENDS[package]
    items = []
    for name in names:
        case = CALLS[name]
        if case.kind in backends and _runs(package, case):
            items.append(Item(backends[case.kind], timer_of(case), case))
    return items


def _runs(package: str, case: NamedCase) -> bool:
    """Whether the backend of a package can run a case of ours.

    FlashAttention-3 of SGLang and of vLLM is called as their decode and verification do.
    """
    if package == FLASHINFER:
        return True
    if isinstance(case, MlaCase):
        return True
    spec: Any = case.spec  # type: ignore[attr-defined]
    is_usual = ELEMENT_BYTES[spec.kv_dtype] == ELEMENT_BYTES["bfloat16"]
    if package == VLLM and spec.page_size < 16:
        return False
    is_decode = isinstance(case, DecodeCase)
    is_verify = getattr(case, "mode", "") == "target_verify" and case.mask == "causal"  # type: ignore[attr-defined]
    return is_usual and (is_decode or is_verify)
