"""What would decide a comparison of releases: minutes on a GPU, and what is on record nearby."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import pandas as pd

from ..core.backends.limits import why_not
from ..core.backends.table import entry_of
from ..core.spec import AttnSpec
from ..measure.calls.form import Item
from ..run import store
from ..run.look_up import nearest_calls, sizes_of
from ..run.pairs import PREFIX, Comparison
from ..run.releases import Version
from ..run.study import in_about
from ..select.libraries import FLASHINFER, LIBRARIES
from ..studies import PACE, STUDIES

Releases = tuple[str, str]
"""The base and the new one."""
ROUND = ["study", "gpu_id", "round", "case"]
"""Columns that records of one round of a case share."""
RECORD_COLUMNS = [*ROUND, "backend", "timer", "status", "release"]


def next_step(comparison: Comparison) -> str:
    """What would decide the calls that are not decided; the empty string if all are."""
    items = comparison.undecided()
    if comparison.failed and not items:
        return f"a base that runs what {comparison.both[0]} does not would decide it"
    reasons = [why_not_run(item, comparison.both) for item in items]
    if all(reasons):
        return reasons[0] if reasons else ""
    first, last = comparison.looks[0], comparison.looks[-1]
    was_measured_now = _studies_of(comparison) == {comparison.study}
    if was_measured_now and all(len(comparison.pairs[item]) >= last for item in items):
        return f"{last} rounds, the last look, do not decide it: only a wider margin can"
    # A round takes a process per release; each runs all items.
    processes = (2 * first, 2 * last)
    sweeps = [(count, count * len(items)) for count in processes]
    return f"on a GPU the same command measures it{in_about(*sweeps, pace=PACE)}"


def _studies_of(comparison: Comparison) -> set[str]:
    """The studies that the rounds on record are of."""
    rounds = []
    for pairs in comparison.pairs.values():
        if pairs:
            rounds.append(pairs[0])
    return {base.study for base, _ in rounds}


def why_not_run(item: Item, both: Releases) -> str:
    """Why one of two releases of FlashInfer cannot run a call, or the empty string."""
    case = item.case
    if not isinstance(case.spec, AttnSpec):
        return ""
    asks = entry_of(item.backend).asks
    mode = getattr(case, "mode", "decode")
    for release in both:
        why = why_not(
            kernel=asks,
            spec=case.spec,
            mode=mode,
            release=release,
        )
        if why:
            return f"{item.backend} of {release} cannot run {case.label}: {why}"
    return ""


def _on_record(item: Item) -> pd.DataFrame:
    """The records of an item's backend and timer, of any release and call; of searches too."""
    tables = [pd.DataFrame(columns=RECORD_COLUMNS)]
    for study in STUDIES:
        for name in (study, PREFIX + study):
            for machine in store.machines(name):
                rows = store.load(name, machine)[RECORD_COLUMNS]
                is_item = (rows.backend == item.backend) & (rows.timer == item.timer)
                tables.append(rows[is_item])
    table = pd.concat(tables)
    return table[(table.status == "ok") & (table.release != "")]


def nearest_items(item: Item, both: Releases) -> dict[Releases, Item]:
    """The item nearest to `item` on record of both releases in one round.

    If there is none, of the closest releases around them that have one, seen from either.
    """
    rows = _on_record(item)
    is_kind = rows.case.map(lambda case: case.kind == item.case.kind)
    cases = _cases_of_pairs(rows[is_kind.astype(bool)])
    place = _places({*rows.release, *both})
    if place[both[0]] > place[both[1]]:  # a downgrade
        place = {release: -number for release, number in place.items()}
    base, new = (place[release] for release in both)
    apart: dict[Releases, tuple[int, int]] = {}
    for pair in cases:
        before = base - place[pair[0]]
        after = place[pair[1]] - new
        if before >= 0 and after >= 0:
            apart[pair] = (before, after)
    if not apart:
        return {}
    seen_from_base = min(apart, key=lambda pair: apart[pair])
    seen_from_new = min(apart, key=lambda pair: apart[pair][::-1])
    near = {}
    for pair in (seen_from_base, seen_from_new):
        nearest = _nearest(item.case, cases[pair])
        near[pair] = replace(item, case=nearest)
    return near


def _places(releases: set[str]) -> Mapping[str, int]:
    """Each release -> how many releases of FlashInfer came before it or are it."""
    known = LIBRARIES[FLASHINFER].versions
    return {release: bisect_right(known, Version(release)) for release in releases}


def _cases_of_pairs(rows: pd.DataFrame) -> dict[Releases, set[Any]]:
    """Each ordered pair of releases -> the cases that a round has both of."""
    cases: defaultdict[Releases, set[Any]] = defaultdict(set)
    for _, records in rows.groupby(ROUND, sort=False):
        case = records.case.iloc[0]
        for pair in permutations(records.release.unique(), 2):
            cases[pair].add(case)
    return cases


def _nearest(case: Any, recorded: set[Any]) -> Any:
    """The recorded case that is nearest to one; of several the one with the shortest text."""
    cases = sorted(recorded, key=lambda case: (len(case.label), case.label))
    sizes = [sizes_of(each) for each in cases]
    rows = pd.DataFrame(sizes).assign(case=cases)
    return nearest_calls(case, rows).case.iloc[0]


def releases_on_record(item: Item) -> str:
    """The releases on record of an item's backend, of which no round has two."""
    releases = {*_on_record(item).release}
    if not releases:
        return f"{item.backend} is in no record by the timer {item.timer}"
    known = ", ".join(sorted(releases, key=Version))
    return f"releases of {item.backend} on record: {known}"
