"""A layer and the lengths of its requests, from the words of a command line. No torch."""

import re
from itertools import groupby
from typing import Any

import numpy as np

from .checkpoints import served
from .spec import INT32_MAX, MLA, AttnSpec, MlaSpec, require_int

NAMED = re.compile(r"(\d+/\d+) heads, head_dim (\d+)", re.ASCII)
HEADS = re.compile(r"(\d+)/(\d+)", re.ASCII)
LENGTH = re.compile(r"(\d+)(?:\.\.(\d+))?(?:x([1-9]\d*))?", re.ASCII)
MAX_REQUESTS = 65_536
"""Of one call; more than engines run concurrently."""
LENGTHS_HELP = "tokens per request: 8192x16, 100,200, 2048..30720x64 (64 lengths, evenly spaced)"


MODELS = {
    "Llama-3.1-8B": (32, 8, 128),
    "Llama-3.1-70B at TP 8": (8, 1, 128),
    "Qwen3-32B at TP 4": (16, 2, 128),
    "Qwen3-0.6B": (16, 8, 128),
    "Llama-2-7B": (32, 32, 128),
}
"""Usual model -> the heads of one GPU: (num_qo_heads, num_kv_heads, head_dim)."""


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
    `name_of` calls a layer. `head_dim` 0 is the model's, or 128. `fields` are
    those of `AttnSpec`. Raises ValueError for other text, and unless heads or a model are given,
    not both.
    """
    if named := NAMED.fullmatch(model):
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
            raise ValueError(f"{words}: explain takes it, and the rest takes {MLA!r}")
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


def parse_lengths(
    name: str,
    text: str,
    batch: int | None = None,
) -> tuple[int, ...]:
    """Tokens per request from `8192x16` (16 requests), `100,200`, `8192x15,100`, `2048..30720x64`.

    A range is evenly spaced, both ends included. `batch` is the number of requests where `text` is
    one length or range without a count. ValueError calls the lengths `name`.
    """
    if batch is not None:
        require_int("batch", batch, most=MAX_REQUESTS)
    parts = [LENGTH.fullmatch(part) for part in text.split(",")]
    lengths: list[int] = []
    for part in parts:
        if part is None:
            raise ValueError(f"{name} must be such as 8192x16, 100,200 or 1..9x4, got {text!r}")
        low = int(part[1])
        high = int(part[2] or part[1])
        if batch and (part[3] or len(parts) > 1):
            raise ValueError(f"batch must be left out where {name} has the counts, got {batch}")
        count = batch or int(part[3] or 1)
        if count + len(lengths) > MAX_REQUESTS or high > INT32_MAX:
            limits = f"at most {MAX_REQUESTS} requests of at most {INT32_MAX} tokens"
            raise ValueError(f"{name} must be {limits}, got {text!r}")
        if high < low or (high > low and count < 2):
            words = f"{name} must have a range from low to high of 2 requests or more (1..9x2)"
            raise ValueError(f"{words}, got {part[0]!r} of {count}")
        spaced = np.linspace(low, high, count).round()
        lengths += spaced.astype(int).tolist()
    if min(lengths) < 1:
        raise ValueError(f"{name} must be >= 1, got {text!r}")
    return tuple(lengths)


def words_of_lengths(lengths: tuple[int, ...]) -> str:
    """Lengths as `parse_lengths` reads them, in their shortest form."""
    low = min(lengths)
    high = max(lengths)
    count = len(lengths)
    as_range = f"{low}..{high}x{count}"
    if count > 1 and high > low and parse_lengths("lens", as_range) == lengths:
        return as_range
    words = []
    for length, run in groupby(lengths):
        times = len([*run])
        words.append(f"{length}x{times}" if times > 1 else str(length))
    return ",".join(words)


def lengths_of_case(lengths: tuple[int, ...]) -> dict[str, Any]:
    """The fields of a case whose requests have these tokens."""
    equal = len({*lengths}) == 1
    words = "fixed" if equal else "+".join(map(str, lengths))
    return {"batch_size": len(lengths), "kv_len": max(lengths), "lengths": words}


def name_of(spec: AttnSpec | MlaSpec) -> str:
    """The model of `MODELS` with such a layer, or `24/8 heads, head_dim 128`."""
    if isinstance(spec, MlaSpec):
        return MLA
    sizes = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim)
    heads = f"{spec.heads} heads, head_dim {spec.head_dim}"
    return next((name for name, known in MODELS.items() if known == sizes), heads)
