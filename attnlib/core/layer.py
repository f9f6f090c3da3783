"""A layer from its heads or its model. No torch."""

import re
from typing import Any

from .spec import MLA, AttnSpec, MlaSpec, require_int, require_word

WHOLE_MODELS = {
    "Llama-2-7B": (32, 32, 128),
    "Llama-2-70B": (64, 8, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "Llama-3.1-70B": (64, 8, 128),
    "Llama-3.1-405B": (128, 8, 128),
    "Mistral-7B": (32, 8, 128),
    "Mixtral-8x7B": (32, 8, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen2.5-14B": (40, 8, 128),
    "Qwen2.5-32B": (40, 8, 128),
    "Qwen2.5-72B": (64, 8, 128),
    "Qwen3-0.6B": (16, 8, 128),
    "Qwen3-8B": (32, 8, 128),
    "Qwen3-14B": (40, 8, 128),
    "Qwen3-32B": (64, 8, 128),
    "Qwen3-30B-A3B": (32, 4, 128),
    "Qwen3-235B-A22B": (64, 4, 128),
    "gpt-oss-20b": (64, 8, 64),
    "gpt-oss-120b": (64, 8, 64),
}
"""Model -> its query heads, KV heads and head_dim, as its config.json has them."""
SPLIT = re.compile(r"(.+) at TP (\d+)")
NAMED = re.compile(r"heads=(\d+/\d+) head_dim=(\d+)", re.ASCII)
NAMED_OF_OLD = re.compile(r"(\d+/\d+) heads, head_dim (\d+)", re.ASCII)
"""What older releases called a layer; still read."""
HEADS = re.compile(r"(\d+)/(\d+)", re.ASCII)


def _sizes_of_model(model: str, tp: int = 1) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim of one GPU of `tp`; `model` may end in ` at TP 8`.

    With more GPUs than KV heads each holds one, as in the engines. ValueError lists the models.
    """
    if split := SPLIT.fullmatch(model):
        if tp != 1:
            raise ValueError(f"tp must be left out with {model!r}, which contains it, got {tp}")
        model = split[1]
        tp = int(split[2])
    require_word("model", model, WHOLE_MODELS)
    require_int("tp", tp)
    query, kv, head_dim = WHOLE_MODELS[model]
    if query % tp or (kv % tp and tp % kv):
        raise ValueError(f"tp must divide the heads of {model}, {query}/{kv}, got {tp}")
    return query // tp, max(1, kv // tp), head_dim


USUAL = (
    "Llama-3.1-8B",
    "Llama-3.1-70B at TP 8",
    "Qwen3-32B at TP 4",
    "Qwen3-0.6B",
    "Llama-2-7B",
)
MODELS = {model: _sizes_of_model(model) for model in USUAL}
"""Usual model -> the heads of one GPU: (num_qo_heads, num_kv_heads, head_dim)."""


def parse_layer(
    heads: str = "",
    *,
    model: str = "",
    tp: int = 1,
    head_dim: int = 0,
    page_size: int = 16,
    **fields: Any,
) -> AttnSpec:
    """A layer from heads such as `32/8`, or from a model of `WHOLE_MODELS` over `tp` GPUs.

    `model` may be what `name_of` calls a layer. `head_dim` 0 is the model's, or 128. `fields` are
    those of `AttnSpec`. Raises ValueError for other text, and unless heads or a model are given,
    not both.
    """
    named = NAMED.fullmatch(model) or NAMED_OF_OLD.fullmatch(model)
    if named:
        if head_dim:
            words = f"head_dim must be left out with {model!r}, which contains it"
            raise ValueError(f"{words}, got {head_dim}")
        heads = named[1]
        model = ""
        head_dim = int(named[2])
    if bool(heads) == bool(model):
        got = f"{heads} and {model}" if heads else "neither"
        raise ValueError(f"pass either heads or model, got {got}")
    if model:
        query, kv, of_model = _sizes_of_model(model, tp)
        return AttnSpec(query, kv, head_dim or of_model, page_size, **fields)
    if tp != 1:
        raise ValueError(f"tp must go with a model, got tp {tp} with heads {heads}")
    counts = HEADS.fullmatch(heads)
    if not counts:
        raise ValueError(f"heads must be QUERY/KV such as 32/8, got {heads!r}")
    return AttnSpec(
        num_qo_heads=int(counts[1]),
        num_kv_heads=int(counts[2]),
        head_dim=head_dim or 128,
        page_size=page_size,
        **fields,
    )


def sizes_given(**sizes: int | None) -> dict[str, Any]:
    """The sizes of a layer that are not None; ValueError for one below 1."""
    given = {name: value for name, value in sizes.items() if value is not None}
    for name, value in given.items():
        require_int(name, value)
    return given


def name_of(spec: AttnSpec | MlaSpec) -> str:
    """The model of `MODELS` with such a layer, or `heads=24/8 head_dim=128`."""
    if isinstance(spec, MlaSpec):
        return MLA
    sizes = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim)
    heads = f"heads={spec.heads} head_dim={spec.head_dim}"
    return next((name for name, known in MODELS.items() if known == sizes), heads)
