"""A layer from its heads or its model. No torch."""

import re
from typing import Any

from .checkpoints import served
from .spec import MLA, AttnSpec, MlaSpec, require_int

NAMED = re.compile(r"heads=(\d+/\d+) head_dim=(\d+)", re.ASCII)
HEADS = re.compile(r"(\d+)/(\d+)", re.ASCII)


MODELS = {
    "Llama-3.1-8B": (32, 8, 128),
    "Llama-3.1-70B at TP 8": (8, 1, 128),
    "Qwen3-32B at TP 4": (16, 2, 128),
    "Qwen3-0.6B": (16, 8, 128),
    "Llama-2-7B": (32, 32, 128),
}
"""Usual model -> the heads of one GPU: (num_qo_heads, num_kv_heads, head_dim)."""


def heads_named(model: str) -> re.Match[str] | None:
    """Heads and head_dim of what `name_of` calls a layer; None of a model's name."""
    return NAMED.fullmatch(model)


def parse_layer(
    heads: str = "",
    *,
    model: str = "",
    tp: int = 1,
    dp: int = 1,
    head_dim: int = 0,
    page_size: int = 16,
    **fields: Any,
) -> AttnSpec:
    """A layer from heads such as `32/8`, or the first kind of a model's layers over `tp` GPUs.

    `model` is a name of data/checkpoints.yaml, with the words of `checkpoints.served`, or what
    `name_of` calls a layer. `head_dim` 0 is the model's, or 128. `fields` are those of `AttnSpec`.
    Raises ValueError for other text, and unless heads or a model are given, not both.
    """
    if named := heads_named(model):
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
        of_model = served(model, tp, dp)
        kind = of_model.checkpoint.kinds[0]
        if kind.mode:
            words = f"model must have layers with KV heads here; those of {model} are {kind.name}"
            raise ValueError(f"{words}: explain and advise take it, and the rest takes {MLA!r}")
        query, kv, its_head_dim = kind.on_one_gpu(of_model.ranks)
        return AttnSpec(query, kv, head_dim or its_head_dim, page_size, **fields)
    if dp != 1:
        raise ValueError(f"dp must go with a model, got dp {dp} with heads {heads}")
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
