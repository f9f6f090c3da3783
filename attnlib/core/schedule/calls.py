"""What a call of FlashAttention-3's functions says of itself: its facts, by its arguments.

Engines' modules have the functions under names and parameters of their own: SGLang's, vLLM's and
upstream's are known.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from ..spec import dtype_name
from .facts import FULL, SchedulerFacts
from .flash_attn3 import sm_count

Function = Callable[..., Any]
MAKES = "get_scheduler_metadata"
ATTENDS = ("flash_attn_with_kvcache", "flash_attn_varlen_func")
CPU_SMS = 132
SIZES = (
    "batch_size",
    "max_seqlen_q",
    "max_seqlen_k",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim",
)
READS = {
    MAKES: (
        "cache_seqlens",
        "qkv_dtype",
        "headdim_v",
        "cu_seqlens_q",
        "page_size",
        "causal",
        "window_size",
        "has_softcap",
        "num_splits",
    )
} | dict.fromkeys(
    ATTENDS,
    (
        "q",
        "k_cache or k",
        "v_cache or v",
        "page_table or block_table",
        "cu_seqlens_q",
        "max_seqlen_q",
        "causal",
        "window_size",
        "softcap",
        "num_splits",
    ),
)
"""Name of a function -> parameters that are read of its calls."""
# Cached, because every layer asks: equal calls are one object, which is settled once.
_known = lru_cache(maxsize=256)(SchedulerFacts)


def unfit(name: str, function: Function) -> str:
    """Why calls of the function of this name cannot be read, or the empty string."""
    names = [*defaults(function)]
    missing = []
    for each in READS[name]:
        either = each.split(" or ")
        if not any(word in names for word in either):
            missing.append(each)
    path = f"{function.__module__}.{name}"
    if missing:
        return f"{path} must have the parameters {', '.join(missing)}"
    if name == MAKES and names.index("cache_seqlens") != len(SIZES):
        return f"{path} must have the parameters {', '.join(SIZES)} before cache_seqlens"
    return ""


def defaults(function: Function) -> dict[str, Any]:
    """Parameters of a function, in order -> their defaults."""
    parameters = inspect.signature(function).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def named(
    parameters: dict[str, Any],
    args: Any,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The arguments of a call by name; `parameters` are the function's `defaults`."""
    by_position = dict(zip(parameters, args, strict=False))
    return parameters | by_position | options


def facts_of(arguments: dict[str, Any], build: str) -> SchedulerFacts:
    """The facts of a call that makes words or takes them, of this build."""
    if isinstance(arguments["causal"], Tensor):
        raise TypeError("causal must be a bool, got a tensor")
    sizes = _attention_facts(arguments) if "q" in arguments else _metadata_facts(arguments)
    device = sizes.pop("device")
    return _known(
        **sizes,
        num_sms=sm_count(device) if device.type == "cuda" else CPU_SMS,
        causal=arguments["causal"],
        window=tuple(arguments["window_size"] or FULL),
        varlen_q=arguments["cu_seqlens_q"] is not None,
        pack_gqa=arguments.get("pack_gqa"),
        num_splits=arguments["num_splits"],
        sm_margin=arguments.get("sm_margin", 0),
        build=build,
    )


def _attention_facts(arguments: dict[str, Any]) -> dict[str, Any]:
    """Sizes of an attention call, from its tensors: SGLang's names, or vLLM's."""
    q = arguments["q"]
    k = arguments["k_cache"] if "k_cache" in arguments else arguments["k"]
    v = arguments["v_cache"] if "v_cache" in arguments else arguments["v"]
    table = arguments.get("page_table", arguments.get("block_table"))
    sums = arguments["cu_seqlens_q"]
    if sums is None:
        batch_size, max_seqlen_q = q.shape[:2]
    else:
        batch_size = len(sums) - 1
        max_seqlen_q = arguments["max_seqlen_q"]
    width = k.shape[1]
    page_size = None
    if table is not None:
        width *= table.shape[1]
        page_size = k.shape[1]
    return {
        "batch_size": batch_size,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": arguments.get("max_seqlen_k") or width,
        "num_qo_heads": q.shape[-2],
        "num_kv_heads": k.shape[-2],
        "head_dim": k.shape[-1],
        "head_dim_v": v.shape[-1],
        "page_size": page_size,
        "dtype": dtype_name(q.dtype),
        "has_softcap": arguments["softcap"] > 0,
        "device": q.device,
    }


def _metadata_facts(arguments: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a metadata call. Builds differ in the names of the first six, not in the order."""
    return {
        **dict(zip(SIZES, arguments.values(), strict=False)),
        "head_dim_v": arguments["headdim_v"] or 0,
        "page_size": arguments["page_size"],
        "dtype": dtype_name(arguments["qkv_dtype"]),
        "has_softcap": arguments["has_softcap"],
        "device": arguments["cache_seqlens"].device,
    }
