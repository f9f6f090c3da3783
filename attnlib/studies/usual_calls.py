"""What a comparison of releases runs: the usual calls of a layer, and the backends of each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.backends.table import TABLE
from ..core.layer import parse_layer
from ..core.spec import MLA, AttnSpec, MlaSpec, require_word
from ..kinds.cases import Case
from ..kinds.decode.case import DecodeCase
from ..kinds.extend.case import ExtendCase
from ..kinds.item import Item
from ..kinds.mla.case import MlaCase
from ..run.pairs import TIMER
from ..run.releases import Version
from ..select.libraries import FLASHINFER as LIBRARY

Layer = AttnSpec | str
"""A layer, or `MLA`."""
BACKENDS: Mapping[str, Sequence[str]] = {
    "": ("flashinfer-auto",),
    "extend": ("flashinfer-prefill-auto",),
    "mla": ("flashinfer-mla-fa2", "flashinfer-mla-fa3"),
}
"""Kind of a case -> the backends compared; of MLA both kernels, which a caller names."""
STEPS = ((1, 4096), (16, 8192), (128, 4096))
"""Batch and kv_len of the decode steps of a model."""
EXTENDS = (
    ("prefill_paged", 2048, 1, 2048),
    ("prefill_paged", 512, 8, 8704),
    ("prefill_ragged", 2048, 4, 2048),
    ("target_verify", 4, 32, 8192),
    ("draft_extend", 5, 32, 8192),
)
"""Mode, queries per request, batch and kv_len of its other calls."""


def backends_named(text: str, releases: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Kind of a case -> the backends to compare: `BACKENDS`, or the one that `text` names.

    ValueError lists the names, and says since which release there is such a backend.
    """
    if not text:
        return BACKENDS
    short = text.lower().removeprefix(f"{LIBRARY}-")
    names = [name for name in TABLE if name.startswith(LIBRARY)]
    require_word("backend", short, [name.removeprefix(f"{LIBRARY}-") for name in names])
    name = f"{LIBRARY}-{short}"
    since = TABLE[name].since
    for release in releases:
        if since and Version(release) < Version(since):
            raise ValueError(
                f"backend {name} must be in both releases: since {since}, got {release}"
            )
    plans = TABLE[name].plans
    return {"" if plans == "decode" else plans: (name,)}


def layers_named(models: Sequence[str], heads: str, sizes: Mapping[str, Any]) -> list[Layer]:
    """The layers of `models`, or the one of `heads`, with `sizes` as of `parse_layer`.

    Empty if neither is given. ValueError for both, and for sizes that a layer does not have.
    """
    if heads and models:
        got = f"{heads} and {', '.join(models)}"
        raise ValueError(f"heads or models must be given, one of them, got {got}")
    if sizes and (MLA in models or not (heads or models)):
        got = ", ".join(f"{name} {value}" for name, value in sizes.items())
        words = f"{', '.join(sizes)} must go with heads or models other than {MLA}"
        raise ValueError(f"{words}, got {got}")
    if heads:
        return [parse_layer(heads, **sizes)]
    return [MLA if name == MLA else parse_layer(model=name, **sizes) for name in models]


def items_of(cases: Sequence[Case], backends: Mapping[str, Sequence[str]]) -> list[Item]:
    """What is run of each case, as engines call it: prefill eagerly, all else in a CUDA graph."""
    items = []
    for case in cases:
        eager = getattr(case, "mode", "").startswith("prefill")
        timer = "profiler" if eager else TIMER
        items += [Item(name, timer, case) for name in backends.get(case.kind, ())]
    return items


def calls_of(layer: Layer) -> list[Case]:
    """The usual calls of a layer in each mode that it has (a ragged prefill has no pages)."""
    if not isinstance(layer, AttnSpec):
        return [MlaCase(MlaSpec(heads), *step) for heads in (128, 16) for step in STEPS]
    cases: list[Case] = [DecodeCase(layer, *step) for step in STEPS]
    for name, q_len, batch, kv_len in EXTENDS:
        paged = replace(layer, page_size=1) if name == "prefill_ragged" else layer
        cases.append(ExtendCase(DecodeCase(paged, batch, kv_len), name, q_len))
    return cases
