"""What would decide a comparison of releases: minutes on a GPU, and what is on record nearby."""

import math
from typing import Any

import pandas as pd

from ..core.backends.limits import why_not
from ..core.backends.table import TABLE
from ..core.spec import AttnSpec
from ..kinds.item import Item
from ..run import store
from ..run.pairs import Comparison
from ..run.releases import Version
from ..select.libraries import neighbours
from . import STUDIES

PACE = "fa3_decode_regression"
"""The study whose published sweep says how long a record takes."""
OTHER_KERNEL = 6.0
"""The distance of another head_dim or element size (`lab.advise`)."""
LONGEST_GAP_S = 300
"""Between two records of one sweep; after a longer one it had been stopped."""


def next_step(comparison: Comparison) -> str:
    """What would decide the calls that are not decided; the empty string if none is left."""
    items = comparison.undecided()
    if not items:
        return ""
    if all(reasons := [why_not_run(item, comparison.both) for item in items]):
        return reasons[0]
    spent = [len(comparison.pairs[item]) >= comparison.looks[-1] for item in items]
    measured = [pairs[0][0].study for pairs in comparison.pairs.values() if pairs]
    if all(spent) and {*measured} == {comparison.study}:
        words = "rounds, the last look, do not decide it: only a wider margin can"
        return f"{comparison.looks[-1]} {words}"
    steps = ["on a GPU this line measures it"]
    if seconds := seconds_of_a_sweep():
        process, record = seconds
        a_round = 2 * (process + len(items) * record) / 60
        few, many = (math.ceil(comparison.looks[look] * a_round) for look in (0, -1))
        steps = [f"{steps[0]}, in about {few} to {many} minutes"]
    if missing := [item for item in items if not comparison.pairs[item]]:
        steps.append(nearest_on_record(missing[0], comparison.both))
    return "; ".join(steps)


def why_not_run(item: Item[Any], both: tuple[str, str]) -> str:
    """Why one of two releases of FlashInfer cannot run a call, or the empty string."""
    case, entry = item.case, TABLE[item.backend]
    for release in both if isinstance(case.spec, AttnSpec) else ():
        mode = getattr(case, "mode", "decode")
        if why := why_not(entry.asks, case.spec, mode=mode, release=release):
            return f"{item.backend} of {release} cannot run {case.key}: {why}"
    return ""


def seconds_of_a_sweep() -> tuple[float, float] | None:
    """What a process and a record of it took in a published sweep (means); None without one."""
    machine = STUDIES[PACE].reference_machine
    if machine not in store.machines(PACE):
        return None
    rows = store.load(PACE, machine).sort_values("started_at", kind="stable")
    gaps = pd.to_datetime(rows.started_at).diff().dt.total_seconds()
    same = (rows[["round", "release"]] == rows[["round", "release"]].shift()).all(axis=1)
    usual = gaps < LONGEST_GAP_S
    # Means: times are whole seconds, and most records take less than one.
    return float(gaps[usual & ~same].mean()), float(gaps[usual & same].mean())


def nearest_on_record(item: Item[Any], both: tuple[str, str]) -> str:
    """The releases on record of a call, or the nearest call that both releases have on record."""
    frames = []
    for study in STUDIES.values():
        if item.backend in {name for grid in study.grids for name in grid.backends}:
            frames += [store.load(study.name, machine) for machine in store.machines(study.name)]
    rows = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    if len(rows):
        good = (rows.status == "ok") & (rows.backend == item.backend) & (rows.timer == item.timer)
        rows = rows[good & (rows.release != "")]
    if rows.empty:
        return f"{item.backend} is in no record"
    of_call = {*rows.release[rows.case == item.case]}
    if len(of_call) > 1:
        return _nearest_releases(item.case.key, of_call, both)
    tried = rows[rows.release.isin(both)].groupby("case", sort=False).release.nunique()
    cases = [case for case in tried.index[tried == len(both)] if case.kind == item.case.kind]
    if not cases:
        return _nearest_releases(item.backend, {*rows.release}, both)
    nearest = min(cases, key=lambda case: distance(case, item.case))
    return f"nearest call on record of both: {nearest.key}"


def _nearest_releases(name: str, releases: set[str], both: tuple[str, str]) -> str:
    """What is on record of a call or a backend in place of each of two releases."""
    known = sorted(map(Version, releases))
    words = [
        f"{release}: {' and '.join(map(str, neighbours(known, Version(release))))}"
        for release in both
        if Version(release) not in known
    ]
    if not words:
        return f"{name} is on record of both releases, but of no round with both"
    return f"releases of {name} on record nearest to {', to '.join(words)}"


def distance(a: Any, b: Any) -> float:
    """Factors of two between two calls, in bytes of the cache and in query heads per KV head.

    Another head_dim or dtype counts as `OTHER_KERNEL`.
    """
    sizes = (a.cost.kv_bytes, b.cost.kv_bytes)
    groups = [getattr(case.spec, "group_size", case.spec.num_qo_heads) for case in (a, b)]
    apart = sum(abs(math.log2(x / y)) for x, y in (sizes, groups))
    kernels = [
        [getattr(case.spec, name, None) for name in ("head_dim", "dtypes", "kv_format")]
        for case in (a, b)
    ]
    return apart + OTHER_KERNEL * (kernels[0] != kernels[1])
