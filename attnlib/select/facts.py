"""The facts of one attention call that a rule can test: GPU, mode, layer, and how it is called.

data/rules/README.md explains the modes. GPUs are compute capabilities, with CUDA 12.8 or newer.
"""

import operator
from dataclasses import dataclass, field, fields
from math import gcd
from typing import Any

from packaging.version import Version

from ..core.backends.limits import LATENT_MODES, facts_for_limits
from ..core.checkpoints import served
from ..core.layer import heads_named
from ..core.spec import ELEMENT_BYTES, AttnSpec, nearest, require_type, require_word
from .models import ARCHITECTURES, FAMILIES, MODELS, OTHER

GPUS = {
    "sm75": "T4, RTX 2080",
    "sm80": "A100, A800, A30",
    "sm86": "A10, A10G, A40, A6000, RTX 3090",
    "sm89": "L4, L20, L40, L40S, RTX 4090, RTX 6000 Ada",
    "sm90": "H100, H200, H20, H800, GH200",
    "sm100": "B200, GB200",
    "sm103": "B300, GB300",
    "sm120": "RTX PRO 6000, RTX 5090, RTX 5080",
    "sm121": "DGX Spark, GB10",
}


def gpu_named(text: str) -> str:
    """The key of `GPUS` of `sm90`, `rtx4090` or `NVIDIA H100 80GB HBM3`; ValueError names some."""
    require_type("gpu", text, str, such_as="h100")
    words = text.lower().replace("-", " ").replace("_", " ").strip()
    for gpu, names in GPUS.items():
        for name in (gpu, *names.lower().split(", ")):
            is_among = f" {name} " in f" {words} "
            if is_among or words == name.replace(" ", ""):  # rtx4090
                return gpu
    cards = [card for names in GPUS.values() for card in names.split(", ")]
    near = ", ".join(nearest(text, (*GPUS, *cards)))
    raise ValueError(
        f"gpu must be one of {', '.join(GPUS)}, or a card such as {near}, got {text!r}"
    )


DECODE_MODES = ("decode", *LATENT_MODES)
PREFILL_MODES = ("prefill_paged", "target_verify", "draft_extend", "dllm_extend", "prefill_ragged")
DRAFT_MODES = ("target_verify", "draft_extend")
MODES = ("decode", *PREFILL_MODES, *LATENT_MODES)
PLAIN_CACHE = "plain"
CACHES = (PLAIN_CACHE, "fp8_e5m2", "nvfp4", "turboquant")
"""Formats of a KV cache that a rule may ask for: `plain` is 16 bits or FP8 (E4M3)."""
WORDS: dict[str, tuple[str, ...]] = {
    "model": (OTHER, *MODELS),
    "architecture": tuple(ARCHITECTURES),
    "gpu": tuple(GPUS),
    "mode": MODES,
    "dtype": tuple(ELEMENT_BYTES),
    "kv_dtype": tuple(ELEMENT_BYTES),
    "cache": CACHES,
}
"""Facts with a fixed set of values."""


class Facts(dict[str, Any]):
    """The facts of one call by name. A fact that needs lengths raises ValueError without."""

    def __missing__(self, name: str) -> Any:
        if name not in (*FLAGS, *NUMBERS):
            raise KeyError(name)
        raise ValueError(
            f"a rule tests {name}: give call=Call(kv_lens=(...)), the tokens of each "
            "request (as an argument: --call kv_lens=8192x16)"
        )


def facts_of_model(name: str) -> dict[str, Any]:
    """The facts of a call that a model of data/checkpoints.yaml states: its architecture, where an
    engine has rules for it, what its layers have, and speculation that its words name."""
    if not name or heads_named(name):
        return {}
    of_model = served(name)
    architecture = of_model.checkpoint.architecture
    facts: dict[str, Any] = {"model": architecture if architecture in FAMILIES else OTHER}
    if of_model.speculative:
        facts |= {"speculative": True, "eagle_topk": of_model.branches}
    return facts | of_model.checkpoint.facts


Lengths = tuple[int, ...]


def _flag(words: str, default: bool = False) -> Any:
    """A true-or-false field of a call; `words` is how a reason names it."""
    return field(default=default, metadata={"words": words})


@dataclass(frozen=True)
class Call:
    """How a layer is called: everything that a rule of selection tests, beside the layer itself.

    The defaults are a plain call. Which facts decide a call, `explain` says (`Choice.unused`).

    Parameters
    ----------
    kv_lens : tuple of int, optional
        Tokens of each request, each >= 1. Most rules do not test them.
    q_lens : tuple of int, optional
        Query tokens of each request, each >= 1; as many as `kv_lens`. By default 1 in decode and
        MLA, `kv_lens` in prefill.
    head_dim_vo : int, default 0
        V's head_dim where it is not K's (ragged prefill of MLA: 192 and 128); 0: K's.
    graph : bool, default False
        The call is captured in a CUDA graph.
    tensor_cores : bool, default True
        FlashInfer's `use_tensor_cores`; an engine's rule decides it itself.
    causal : bool, default True
        The mask is causal.
    custom_mask : bool, default False
        A mask is given bit by bit.
    window : bool, default False
        A query sees a sliding window.
    softcap : bool, default False
        Logits have a soft cap.
    sinks : bool, default False
        The model has attention sinks.
    positions : bool, default False
        The kernel applies a position encoding.
    fp16_qk : bool, default False
        QK is reduced in FP16.
    fixed_split : bool, default False
        KV splits are fixed or switched off (batch invariance).
    batch_invariant : bool, default False
        vLLM's VLLM_BATCH_INVARIANT, SGLang's deterministic inference.
    mm_prefix : bool, default False
        Tokens of an image attend to each other (Gemma 3 and 4).
    block_tables : bool, default False
        The caller owns the block table (FlashInfer asks for it in a graph).
    packed : bool, default True
        Query and cache are one tensor each (MLA; the flat `plan` of old takes them split).
    base2_lse : bool, default False
        The log-sum-exp is returned to base 2.
    topk : int, default 0
        Chosen tokens of sparse MLA.
    speculative : bool, default False
        Speculative decoding is on, as it always is in target_verify and draft_extend.
    eagle_topk : int, default 0
        Branches of speculative decoding, which is then on; 0: left to the engine.
    pinned_page : bool, default False
        The user fixed `page_size`; otherwise the engine may choose another.
    pinned_kv_dtype : bool, default False
        The user fixed the cache's dtype; otherwise an engine may choose another.
    piecewise_graph : bool, default False
        SGLang's piecewise CUDA graph for prefill.
    cubins : bool, default True
        NVIDIA's cubins can be downloaded.
    cudnn : bool, default True
        A cuDNN frontend with FROST is installed.
    auto_cudnn : bool, default True
        FLASHINFER_DECODE_AUTO_CUDNN is not 0 (1: `cudnn` may be an older frontend).
    cache : str, default "plain"
        Another format of the KV cache than 16 bits or FP8 (E4M3): `fp8_e5m2`, `nvfp4` or
        `turboquant`. No kernel of ours has them: only what an engine selects is known.
    model : str, default "other"
        A model of data/models.yaml, for which an engine may have rules, or an architecture of one.

    Raises
    ------
    ValueError
        For an unknown model or cache, lengths below 1 or of different counts, a negative number.

    Examples
    --------
    >>> import attnlib
    >>> call = attnlib.Call(kv_lens=(8192,) * 16, graph=True)
    >>> len(call.kv_lens), call.causal
    (16, True)
    """

    kv_lens: Lengths = ()
    q_lens: Lengths = ()
    head_dim_vo: int = 0
    graph: bool = _flag("a CUDA graph")
    tensor_cores: bool = _flag("tensor cores", default=True)
    causal: bool = _flag("a causal mask", default=True)
    custom_mask: bool = _flag("a custom mask")
    window: bool = _flag("a sliding window")
    softcap: bool = _flag("a logits soft cap")
    sinks: bool = _flag("attention sinks")
    positions: bool = _flag("a position encoding")
    fp16_qk: bool = _flag("FP16 reduction of QK")
    fixed_split: bool = _flag("a fixed split")
    batch_invariant: bool = _flag("batch invariance")
    mm_prefix: bool = _flag("an image prefix")
    block_tables: bool = _flag("a block table of the caller's own")
    packed: bool = _flag("packed tensors", default=True)
    base2_lse: bool = _flag("a base-2 LSE")
    topk: int = 0
    speculative: bool = _flag("speculation")
    eagle_topk: int = 0
    pinned_page: bool = _flag("a page size of the user's")
    pinned_kv_dtype: bool = _flag("a cache dtype of the user's")
    piecewise_graph: bool = _flag("a piecewise graph")
    cubins: bool = _flag("NVIDIA's cubins", default=True)
    cudnn: bool = _flag("cuDNN", default=True)
    auto_cudnn: bool = _flag("cuDNN for auto", default=True)
    cache: str = PLAIN_CACHE
    model: str = OTHER

    def __post_init__(self) -> None:
        require_word("cache", self.cache, CACHES)
        require_word("model", self.model, tuple(FAMILIES))
        if self.q_lens and len(self.q_lens) != len(self.kv_lens):
            words = f"q_lens must have one entry for each of kv_lens ({len(self.kv_lens)})"
            raise ValueError(f"{words}, got {len(self.q_lens)}")
        if min((*self.q_lens, *self.kv_lens), default=1) < 1:
            raise ValueError(f"kv_lens and q_lens must be >= 1, got {self.kv_lens}, {self.q_lens}")
        for name in ("head_dim_vo", "topk", "eagle_topk"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name} must be >= 0, got {value}")


_flag_fields = [each for each in fields(Call) if each.metadata]
OF_CALL = {flag.name: flag.metadata["words"] for flag in _flag_fields}
"""The flags that are fields of a call."""
FLAGS: dict[str, str] = OF_CALL | {
    "kv_auto": "a cache dtype left to the engine",
    "fp8_query": "an FP8 query",
    "fp8_kv": "an FP8 cache",
    "one_dtype": "one dtype for query and cache",
    "one_head_dim": "one head_dim for K and V",
    "one_q_len": "equally many query tokens per request",
    "same_lens": "as many query tokens as cached ones",
    "near_prefill": "almost as many query tokens as cached ones",
}
"""Facts that are true or false, and how a reason names them."""


def facts_of(
    spec: AttnSpec,
    call: Call,
    *,
    mode: str,
    gpu: str,
    release: Version | None,
) -> Facts:
    """Every fact of the call by name; without `kv_lens`, facts that need lengths are missing.

    Raises ValueError for a layer or a call that does not fit the mode.
    """
    if mode in LATENT_MODES and spec.num_kv_heads != 1:
        raise ValueError(f"num_kv_heads must be 1 in mode {mode}, got {spec.num_kv_heads}")
    if mode == "sparse_mla" and call.topk < 1:
        raise ValueError(f"topk must be >= 1 in mode {mode}, got {call.topk}")
    head_dim_vo = call.head_dim_vo or spec.head_dim
    facts = Facts(topk=call.topk, eagle_topk=call.eagle_topk)
    for name in OF_CALL:
        facts[name] = getattr(call, name)
    facts |= facts_for_limits(spec)
    facts |= _lengths(spec, call, mode)
    if release is not None:
        facts["release"] = release
    facts.update(
        window=call.window or spec.window > 0,
        speculative=call.speculative or call.eagle_topk > 0 or mode in DRAFT_MODES,
        gpu=gpu,
        mode=mode,
        cache=call.cache,
        model=FAMILIES[call.model],
        architecture=ARCHITECTURES[call.model],
        head_dims=f"{spec.head_dim}/{head_dim_vo}",
        one_head_dim=spec.head_dim == head_dim_vo,
        block_size=spec.page_size if call.pinned_page else 0,
    )
    is_plain = call.cache == PLAIN_CACHE
    facts["kv_auto"] = is_plain and spec.kv_dtype == spec.dtype and not call.pinned_kv_dtype
    if not is_plain:
        facts |= {"one_dtype": False, "fp8_kv": call.cache == "fp8_e5m2"}
    return facts


def _cut_key(heads: int, q_lens: Lengths, kv_lens: Lengths) -> int:
    """Where a causal tile of fa2's MLA ends amid the heads of a query: the largest power of two up
    to 64 that divides the last key that this query sees; of all requests the largest, or 0."""
    mean_rows = sum(q_lens) * heads // len(q_lens)
    rows = 128 if mean_rows > 64 else 64
    largest = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        for end in range(rows, q_len * heads, rows):
            key = kv_len - q_len + end // heads
            if end % heads and key >= 0:
                largest = max(largest, gcd(key, 64))
    return largest


def _lengths(spec: AttnSpec, call: Call, mode: str) -> dict[str, Any]:
    """The facts that lengths decide; without `kv_lens`, those that a decode step has all the same:
    one query token for each request."""
    decode = mode in DECODE_MODES
    kv_lens = call.kv_lens or (1,)
    if decode:
        usual = (1,) * len(kv_lens)
    else:
        usual = kv_lens
    q_lens = call.q_lens or usual
    heads = spec.num_qo_heads
    total_q = sum(q_lens)
    total_kv = sum(kv_lens)
    scaled_q = total_q * (4 if heads <= 8 else 2)
    without_kv = {
        "max_q": max(q_lens),
        "min_q": min(q_lens),
        "one_q_len": len(set(q_lens)) == 1,
        "q_rows": max(q_lens) * spec.group_size,
        "cut_key": _cut_key(heads, q_lens, kv_lens) if mode in LATENT_MODES else 0,
    }
    if not call.kv_lens:
        return without_kv if decode else {}
    return without_kv | {
        "batch_size": len(kv_lens),
        "total_q": total_q,
        "total_kv": total_kv,
        "min_kv": min(kv_lens),
        "max_kv": max(kv_lens),
        "same_lens": list(q_lens) == list(kv_lens),
        "work": heads * sum(map(operator.mul, q_lens, kv_lens)),
        "output_work": heads * total_q,
        "q_tile": max(q_lens) * heads,
        "q_tiles": sum(-(-length // 256) for length in q_lens) * heads,
        "kv_units": len(kv_lens) * spec.num_kv_heads,
        "near_prefill": scaled_q + 32 * len(kv_lens) >= total_kv,
    }


_LAYER = AttnSpec(num_qo_heads=1, num_kv_heads=1, head_dim=1, page_size=1)
_STEP = Call(kv_lens=(1,))
_EVERY = facts_of(_LAYER, _STEP, mode="decode", gpu="", release=None)
NUMBERS = tuple(name for name, value in _EVERY.items() if type(value) is int)
"""Facts that are numbers. `release` and `head_dims` (K and V, such as 192/128) are neither."""
_LENGTHS = set(_lengths(_LAYER, _STEP, "decode"))
_KV_DTYPE = {"pinned_kv_dtype", "kv_auto", "fp8_kv", "kv_dtype", "one_dtype", "dtypes"}
_PAGE = {"pinned_page", "block_size", "page_size"}
DECIDES = {
    "kv_lens": _LENGTHS,
    "q_lens": _LENGTHS,
    "head_dim_vo": {"head_dims", "one_head_dim"},
    "eagle_topk": {"eagle_topk", "speculative"},
    "pinned_page": _PAGE,
    "pinned_kv_dtype": _KV_DTYPE,
    "cache": {"cache", "kv_auto", "fp8_kv", "one_dtype"},
    "page_size": _PAGE,
    "kv_dtype": _KV_DTYPE,
    "dtype": {"dtype", "fp8_query", "one_dtype", "dtypes"},
    "head_dim": {"head_dim", "head_dims"},
}
"""Field of a call, or of a layer -> the facts that it decides; others decide that of their name."""


def decided(name: str, call: Call) -> set[str]:
    """The facts that a field of a call, or of a layer, decides, by the names of `tests`."""
    if name == "model":
        return {f"model {FAMILIES[call.model]}", f"architecture {ARCHITECTURES[call.model]}"}
    return DECIDES.get(name, {name})
