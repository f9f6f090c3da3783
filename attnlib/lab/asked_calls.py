"""What a comparison of releases was asked for: layers, and the backends of their calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.backends.table import TABLE
from ..core.layer import parse_layer
from ..core.spec import MLA, AttnSpec, require_word
from ..measure.calls.form import Item, NamedCase
from ..run.releases import Version
from ..select.libraries import FLASHINFER as LIBRARY
from ..studies.releases.calls import timer_of

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


def backends_named(text: str, releases: Sequence[str]) -> Backends:
    """Kind of a case -> the backends to compare: `USUAL_BACKENDS`, or the one that `text` names.

    ValueError lists the names, and says since which release there is such a backend.
    """
    if not text:
        return USUAL_BACKENDS
    prefix = f"{LIBRARY}-"
    short = text.lower().removeprefix(prefix)
    names = []
    for name in TABLE:
        if name.startswith(LIBRARY):
            names.append(name.removeprefix(prefix))
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
        for name in backends.get(case.kind, ()):
            items.append(Item(name, timer_of(case), case))
    return items
