"""What a comparison of releases runs: the usual calls of a layer, and the backends of each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.backends.table import TABLE
from ..core.layer import parse_layer
from ..core.spec import MLA, AttnSpec, MlaSpec, require_word
from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.extend.case import ExtendCase
from ..measure.calls.form import Item, NamedCase
from ..measure.calls.mla.case import MlaCase
from ..run.pairs import TIMER
from ..run.releases import Version
from ..select.libraries import FLASHINFER as LIBRARY

Layer = AttnSpec | str
"""A layer, or `MLA`."""
Sizes = dict[str, Any]
Backends = Mapping[str, Sequence[str]]
"""Kind of a case -> the backends compared."""
USUAL_BACKENDS: Backends = {
    "": ("flashinfer-auto",),
    "extend": ("flashinfer-prefill-auto",),
    "mla": ("flashinfer-mla-fa2", "flashinfer-mla-fa3"),
}
"""By default; of MLA both kernels, which a caller names."""
MLA_HEADS = (128, 16)
"""Of all heads on a GPU, and of one GPU of eight."""
DECODE_STEPS = ((1, 4096), (16, 8192), (128, 4096))
"""Batch and kv_len of the decode steps of a model."""
EXTENDS = (
    ("prefill_paged", 2048, 1, 2048),
    ("prefill_paged", 512, 8, 8704),
    ("prefill_ragged", 2048, 4, 2048),
    ("target_verify", 4, 32, 8192),
    ("draft_extend", 5, 32, 8192),
)
"""Mode, queries per request, batch and kv_len of its other calls."""


def backends_named(text: str, releases: Sequence[str]) -> Backends:
    """Kind of a case -> the backends to compare: `USUAL_BACKENDS`, or the one that `text` names.

    ValueError lists the names, and says since which release there is such a backend.
    """
    if not text:
        return USUAL_BACKENDS
    prefix = f"{LIBRARY}-"
    short = text.lower().removeprefix(prefix)
    names = [name.removeprefix(prefix) for name in TABLE if name.startswith(LIBRARY)]
    require_word("backend", short, names)
    entry = TABLE[prefix + short]
    since = entry.since
    for release in releases:
        if since and Version(release) < Version(since):
            words = f"backend {entry.name} must be in both releases"
            raise ValueError(f"{words}: since {since}, got {release}")
    kind = "" if entry.plans == "decode" else entry.plans
    return {kind: (entry.name,)}


def layers_named(models: Sequence[str], heads: str, sizes: Sizes) -> list[Layer]:
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
    layers: list[Layer] = []
    for name in models:
        layers.append(MLA if name == MLA else parse_layer(model=name, **sizes))
    return layers


def items_of(cases: Sequence[NamedCase], backends: Backends) -> list[Item]:
    """What is run of each case, as engines call it: prefill eagerly, all else in a CUDA graph."""
    items = []
    for case in cases:
        is_eager = getattr(case, "mode", "").startswith("prefill")
        timer = "profiler" if is_eager else TIMER
        for name in backends.get(case.kind, ()):
            items.append(Item(name, timer, case))
    return items


def usual_calls_of(layer: Layer) -> list[NamedCase]:
    """The usual calls of a layer in each mode that it has (a ragged prefill has no pages)."""
    cases: list[NamedCase] = []
    if not isinstance(layer, AttnSpec):
        for heads in MLA_HEADS:
            cases += [MlaCase(MlaSpec(heads), batch, kv_len) for batch, kv_len in DECODE_STEPS]
        return cases
    for batch, kv_len in DECODE_STEPS:
        cases.append(DecodeCase(layer, batch, kv_len))
    for mode, q_len, batch, kv_len in EXTENDS:
        paged = replace(layer, page_size=1) if mode == "prefill_ragged" else layer
        cases.append(ExtendCase(DecodeCase(paged, batch, kv_len), mode, q_len))
    return cases
