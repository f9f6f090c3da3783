"""What a comparison of releases runs: the usual calls of a layer, and the backends of each."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ..core.backends.table import TABLE
from ..core.layer import sizes_of_model
from ..core.spec import MLA, AttnSpec, MlaSpec, require_word
from ..kinds.cases import Case
from ..kinds.decode.case import DecodeCase
from ..kinds.extend.case import ExtendCase
from ..kinds.item import Item
from ..kinds.mla.case import MlaCase
from ..run.pairs import TIMER
from ..run.releases import Version

LIBRARY = "flashinfer"
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
    known = {name: entry for name, entry in TABLE.items() if name.startswith(LIBRARY)}
    name = text if text in known else f"{LIBRARY}-{text}"
    require_word(
        "backend", name.removeprefix(f"{LIBRARY}-"), [n[len(LIBRARY) + 1 :] for n in known]
    )
    since = known[name].since
    for release in releases:
        if since and Version(release) < Version(since):
            raise ValueError(
                f"backend {name} must be in both releases: since {since}, got {release}"
            )
    plans = known[name].plans
    return {"" if plans == "decode" else plans: (name,)}


def items_of(
    cases: Sequence[Case], backends: Mapping[str, Sequence[str]] = MappingProxyType(BACKENDS)
) -> list[Item]:
    """What is run of each case, as engines call it: prefill eagerly, all else in a CUDA graph."""
    eager = [getattr(case, "mode", "").startswith("prefill") for case in cases]
    timed = zip(cases, ("profiler" if each else TIMER for each in eager), strict=True)
    return [
        Item(name, timer, case) for case, timer in timed for name in backends.get(case.kind, ())
    ]


def calls_of(layer: str | tuple[int, int, int], page_size: int = 16) -> list[Case]:
    """The usual calls of a layer in each mode that it has (a ragged prefill has no pages).

    `layer` is a model's name, or heads and head_dim; of `MLA` the pages have 64 tokens.
    """
    if layer == MLA:
        return [MlaCase(MlaSpec(heads), *step) for heads in (128, 16) for step in STEPS]
    sizes = sizes_of_model(layer) if isinstance(layer, str) else layer
    cases: list[Case] = [DecodeCase(AttnSpec(*sizes, page_size), *step) for step in STEPS]
    for name, q_len, batch, kv_len in EXTENDS:
        spec = AttnSpec(*sizes, 1 if name == "prefill_ragged" else page_size)
        cases.append(ExtendCase(DecodeCase(spec, batch, kv_len), name, q_len))
    return cases
