"""Models by name: the attention that one GPU has of them, and which cases are theirs.

| kind of model | `variant` says |
|---|---|
| grouped-query attention | dtype of query and cache, `bfloat16` or `bfloat16/float8_e4m3fn` |
| latent attention (MLA) | query heads, tokens attended to, cache: `128 heads, dense, bfloat16` |
"""

from __future__ import annotations

import re

from ..core.spec import AttnSpec, MlaSpec
from ..kinds.cases import Case
from ..kinds.decode.case import DecodeCase
from ..kinds.lengths import MODELS, model_spec
from ..kinds.mla.case import MlaCase

MLA = "DeepSeek MLA"
_SHAPES = {
    "Llama-3.1-8B": "llama-3.1-8b",
    "Llama-3.1-70B at TP 8": "llama-3.1-70b-tp8",
    "Qwen3-32B at TP 4": "qwen3-32b-tp4",
    "Qwen3-0.6B": "qwen3-0.6b",
    "Llama-2-7B": "llama-2-7b",
}
NAMES = (*_SHAPES, MLA)
"""What `model` may be; `workload.MODELS` has the head counts."""
_LATENT = re.compile(r"(\d+) heads, (?:dense|top (\d+)), (\S+)")


def require_model(model: str) -> None:
    """ValueError listing the names there are, unless `model` is one."""
    if model not in NAMES:
        raise ValueError(f"model must be one of {', '.join(NAMES)}; got {model!r}")


def model_of(case: Case | None) -> str:
    """The model that a case is of; empty for another shape and another kind of case."""
    if isinstance(case, MlaCase):
        return MLA
    if not isinstance(case, DecodeCase):
        return ""
    spec = case.spec
    heads = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim)
    return next((name for name, shape in _SHAPES.items() if MODELS[shape] == heads), "")


def variant_of(spec: AttnSpec | MlaSpec) -> str:
    """What the model's name leaves open, by the table above."""
    if isinstance(spec, MlaSpec):
        read = f"top {spec.top_k}" if spec.top_k else "dense"
        return f"{spec.num_qo_heads} heads, {read}, {spec.kv_format}"
    return spec.dtypes


def spec_of(model: str, *, variant: str, page_size: int) -> AttnSpec | MlaSpec:
    """The spec of a named model: inverse of `model_of` and `variant_of`; ValueError."""
    require_model(model)
    if model == MLA:
        return _latent_spec(variant, page_size)
    dtype, _, kv_dtype = variant.partition("/")
    plain = model_spec(_SHAPES[model], page_size=page_size, dtype=dtype)
    heads = (plain.num_qo_heads, plain.num_kv_heads, plain.head_dim)
    return AttnSpec(*heads, page_size, dtype, kv_dtype)


def _latent_spec(variant: str, page_size: int) -> MlaSpec:
    found = _LATENT.fullmatch(variant)
    if not found:
        raise ValueError(
            f"variant of {MLA} must be as '128 heads, dense, bfloat16' or "
            f"'128 heads, top 2048, fp8-656', got {variant!r}"
        )
    heads, top_k, kv_format = found.groups()
    return MlaSpec(int(heads), int(top_k or 0), page_size, kv_format)
