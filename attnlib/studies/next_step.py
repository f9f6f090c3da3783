"""What would decide a comparison of releases: minutes on a GPU, and what is on record nearby."""

import math
from bisect import bisect_right
from dataclasses import replace
from itertools import permutations
from typing import Any

import pandas as pd
from numpy.typing import NDArray

from ..core.backends.limits import why_not
from ..core.backends.table import entry_of
from ..core.spec import ELEMENT_BYTES, AttnSpec, MlaSpec
from ..kinds.item import Item
from ..kinds.lengths import sample_seq_lens
from ..run import store
from ..run.pairs import PREFIX, Comparison
from ..run.releases import Version
from ..run.study import in_about
from ..select.libraries import FLASHINFER, LIBRARIES
from . import PACE, STUDIES

OTHER_KERNEL, GROUP_WEIGHT = 6.0, 3.0
"""The distance of another head_dim or element size, and the weight of a factor of two in query
heads per KV head: chosen among 24 settings by `lab.advise.neighbour_loss`."""
ROUND = ["study", "gpu_id", "round", "case"]
"""Columns that records of one round of a case share."""


def next_step(comparison: Comparison) -> str:
    """What would decide the calls that are not decided; the empty string if all are."""
    items = comparison.undecided()
    if comparison.failed and not items:
        return f"a base that runs what {comparison.both[0]} does not would decide it"
    if all(reasons := [why_not_run(item, comparison.both) for item in items]):
        return reasons[0] if reasons else ""
    spent = [len(comparison.pairs[item]) >= comparison.looks[-1] for item in items]
    measured = [pairs[0][0].study for pairs in comparison.pairs.values() if pairs]
    if all(spent) and {*measured} == {comparison.study}:
        words = "rounds, the last look, do not decide it: only a wider margin can"
        return f"{comparison.looks[-1]} {words}"
    processes = (2 * comparison.looks[0], 2 * comparison.looks[-1])
    sweeps = [(count, count * len(items)) for count in processes]
    return f"on a GPU the same command measures it{in_about(*sweeps, pace=PACE)}"


def why_not_run(item: Item[Any], both: tuple[str, str]) -> str:
    """Why one of two releases of FlashInfer cannot run a call, or the empty string."""
    case, entry = item.case, entry_of(item.backend)
    for release in both if isinstance(case.spec, AttnSpec) else ():
        mode = getattr(case, "mode", "decode")
        if why := why_not(entry.asks, case.spec, mode=mode, release=release):
            return f"{item.backend} of {release} cannot run {case.key}: {why}"
    return ""


def _on_record(item: Item[Any]) -> pd.DataFrame:
    """The records of an item's backend and timer, of any release and call; of searches too."""
    parts = []
    for study in STUDIES.values():
        for name in (study.name, PREFIX + study.name):
            for machine in store.machines(name):
                rows = store.load(name, machine)[[*ROUND, "backend", "timer", "status", "release"]]
                parts.append(rows[(rows.backend == item.backend) & (rows.timer == item.timer)])
    table = pd.concat([*parts, pd.DataFrame(columns=[*ROUND, "status", "release"])])
    return table[(table.status == "ok") & (table.release != "")]


def nearest_calls(item: Item[Any], both: tuple[str, str]) -> dict[tuple[str, str], Item[Any]]:
    """The item nearest to `item` on record of both releases in one round.

    If there is none, of the closest releases around them that have one, seen from either.
    """
    rows = _on_record(item)
    known = LIBRARIES[FLASHINFER].versions
    place = {name: bisect_right(known, Version(name)) for name in {*rows.release, *both}}
    if place[both[0]] > place[both[1]]:  # a downgrade
        place = {name: -number for name, number in place.items()}
    first, last = (place[name] for name in both)
    cases: dict[tuple[str, str], set[Any]] = {}
    for (*_, case), releases in rows.groupby(ROUND, sort=False).release.unique().items():
        for pair in permutations(releases, 2) if case.kind == item.case.kind else ():
            if place[pair[0]] <= first and last <= place[pair[1]]:
                cases.setdefault(pair, set()).add(case)
    apart = {pair: [first - place[pair[0]], place[pair[1]] - last] for pair in cases}
    return {
        pair: replace(item, case=min(cases[pair], key=lambda c: (distance(c, item.case), c.key)))
        for step in (1, -1)
        for pair in sorted(cases, key=lambda pair: apart[pair][::step])[:1]
    }


def releases_on_record(item: Item[Any]) -> str:
    """The releases on record of an item's backend, of which no round has two."""
    if not (releases := {*_on_record(item).release}):
        return f"{item.backend} is in no record by the timer {item.timer}"
    known = ", ".join(sorted(releases, key=Version))
    return f"releases of {item.backend} on record: {known}"


def distance(a: Any, b: Any) -> float:
    """How far two calls are apart: 1 is a factor of two in one of `features`.

    Another mode or another of `kernel_of` counts as `OTHER_KERNEL`.
    """
    lengths = [sample_seq_lens(getattr(case, "cached", case)) for case in (a, b)]
    ours, theirs = map(features, (a.spec, b.spec), lengths)
    kernels = [kernel_of(case.spec) | {"mode": getattr(case, "mode", "")} for case in (a, b)]
    differ = sum(value != kernels[1][name] for name, value in kernels[0].items())
    return sum(abs(ours[name] - theirs[name]) for name in ours) + OTHER_KERNEL * differ


def features(layer: AttnSpec | MlaSpec, lengths: NDArray[Any]) -> dict[str, float]:
    """The logarithms of a call's sizes; heads count most."""
    kv_heads, group = 1, layer.num_qo_heads
    if isinstance(layer, AttnSpec):
        kv_heads, group = layer.num_kv_heads, layer.group_size
    tokens = int(lengths.sum())
    return {
        "log_tokens": math.log2(tokens * kv_heads),
        "log_batch": math.log2(len(lengths)),
        "log_skew": math.log2(int(lengths.max()) * len(lengths) / tokens),
        "log_group": GROUP_WEIGHT * math.log2(group),
    }


def kernel_of(layer: AttnSpec | MlaSpec) -> dict[str, Any]:
    """What has kernels of its own."""
    if isinstance(layer, MlaSpec):
        return {"kv_format": layer.kv_format, "dense": not layer.top_k}
    query_bytes, kv_bytes = ELEMENT_BYTES[layer.dtype], ELEMENT_BYTES[layer.kv_dtype]
    return {"head_dim": layer.head_dim, "kv_bytes": kv_bytes, "query_bytes": query_bytes}
