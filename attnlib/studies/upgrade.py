"""Two releases of a library over the calls of models, or a list of cases: a study on the spot.

A case is done at the first of `LOOKS` that gives a verdict (`pairs`). All rows are one table
(`stats.judge_ratios`).

Records are those of `compare_flashinfer`; without a GPU also of each study or search with both
releases.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from ..core.backends.table import COMPARED
from ..core.layer import MODELS, lengths_of_case, parse_layer, parse_lengths, sizes_given
from ..core.spec import MLA, AttnSpec
from ..draw.cards import Card, Shown, in_words
from ..kinds.cases import parse_cases
from ..kinds.decode.case import DecodeCase
from ..kinds.item import Item
from ..measure.stats import (
    AMBIGUOUS,
    FASTER,
    LONG_MARGIN,
    NOT_SLOWER,
    SAME,
    SHORT_MARGIN,
    SHORT_US,
    SLOWER,
    Ratio,
)
from ..run import store
from ..run.pairs import PREFIX, Comparison, families_of, next_round, times_of
from ..run.record import Record
from ..run.releases import InvalidVersion, Version, build_version, overlay_for, own_build
from ..run.study import Sweep, machine_shown, mode
from ..select.libraries import LIBRARIES, find
from . import STUDIES
from .next_step import nearest_items, next_step, releases_on_record, why_not_run
from .usual_calls import LIBRARY, backends_named, calls_of, items_of, layers_named

PACKAGE = COMPARED[LIBRARY]
NAME = f"compare_{LIBRARY}"
LOOKS = (4, 8, 16, 24)
"""Rounds after which all rows are judged."""
NOT_DECIDED, NOT_ON_RECORD = "not decided", "not on record"
FAILING, PROVED = (SLOWER, "fails"), (NOT_SLOWER, FASTER, SAME)
"""Verdicts that prove a call not slower by more than the margin."""
TAKEN = (
    "Pages have 16 tokens (--page-size), and FlashInfer picks the backend unless --backend names "
    "it. What an engine takes: python -m attnlib explain --mode decode --gpu h100 --heads {} "
    f"--library sglang=={LIBRARIES['sglang'].releases[-1]} --policy flashinfer"
)
LONGEST_KEY = 60
RATIO = ["ratio", "low", "high"]
SIDES = ["base", "new"]
CALL = ["case", "backend"]
TIMES = ["base_us", "new_us", *RATIO, "rounds", "verdict"]
KERNELS = ["base_ran", "new_ran", "kernels"]
PLANS = ["base_plan_us", "new_plan_us"]
FORMATS = dict.fromkeys(["base_us", "new_us", *PLANS], ",.1f") | dict.fromkeys(RATIO, ",.3f")
FORMATS["rounds"] = "d"
COLUMNS = [*SIDES, *CALL, "timer", *TIMES, *KERNELS, *PLANS, "study", "machine"]


@dataclass(frozen=True, eq=False, repr=False)
class Upgrade(Shown):
    """From release `base` to `new`: a row per case and backend.

    `nearest` are the recorded calls and releases nearest to the first that is not on record.
    """

    base: str
    new: str
    rows: pd.DataFrame
    notes: tuple[str, ...]
    next_step: str
    nearest: pd.DataFrame

    def table(self) -> pd.DataFrame:
        """Both times (us), ratio, verdict, kernels, planning on the host apart."""
        return self.rows.round(3)

    @property
    def slower(self) -> list[str]:
        """The cases that became slower, or that only the old release runs."""
        return self.rows.case[self.rows.verdict.isin(FAILING)].tolist()

    @property
    def outcome(self) -> str:
        """`slower` if one call is, `not slower` if that is proved of each, else `not decided`."""
        if self.slower:
            return SLOWER
        proved = self.rows.verdict.isin(PROVED)
        return NOT_SLOWER if len(proved) and proved.all() else NOT_DECIDED

    @property
    def conclusion(self) -> str:
        """The outcome in a line: the calls that it stands on, or what would decide it."""
        calls = "1 call" if len(self.rows) == 1 else f"{len(self.rows)} calls"
        if self.outcome == NOT_SLOWER:
            return f"not slower: proved of {calls}"
        if self.outcome == SLOWER:
            calls_of = self.rows.groupby("verdict", sort=False).case.agg(", ".join)
            return "; ".join(f"{word}: {calls_of[word]}" for word in FAILING if word in calls_of)
        counts = self.rows.verdict[~self.rows.verdict.isin(PROVED)].value_counts()
        tally = ", ".join(f"{count} {word}" for word, count in counts.items())
        parts = [f"not decided: {tally}, of {calls}", self.next_step]
        for near in self.nearest.itertuples():
            parts.append(f"near {near.case}, {near.base} to {near.new}, on record: {near.verdict}")
        return "; ".join(filter(None, parts))

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        names = ("base", "new", "outcome", "conclusion", "slower", "notes")
        tables = {"cases": self.rows, "nearest": self.nearest}
        rows = {name: json.loads(t.to_json(orient="records")) for name, t in tables.items()}
        return {name: getattr(self, name) for name in names} | rows

    def card(self) -> Card:
        """Verdicts, then kernels and planning."""
        rows = self.rows.iloc[(~self.rows.case.isin(self.slower)).argsort(kind="stable")]
        rows, near = _shown(rows), _shown(self.nearest)
        if (rows.verdict == NOT_ON_RECORD).all():  # the title says so
            rows = rows.head(0)
        counts = self.rows.verdict.value_counts()
        tally = ", ".join(f"{count} {word}" for word, count in counts.items())
        every = [*self.rows.itertuples(), *self.nearest.itertuples()]
        origins = dict.fromkeys(f"{r.study} on {r.machine}" for r in every if r.study == r.study)
        return Card(
            title=f"FlashInfer {self.base} (base) to {self.new} (new): {tally}",
            notes=self.notes,
            facts=[],
            table=rows[CALL + TIMES],
            caption="time of one call in microseconds, new over base",
            footer=f"records of {', '.join(origins)}" if origins else "no such call is on record",
            more=[
                ("kernels that changed", rows[rows.kernels != ""][CALL + KERNELS]),
                ("planning on the host, apart", rows[rows.base_plan_us != "-"][CALL + PLANS]),
                ("nearest on record, which decides nothing", near[[*SIDES, *CALL, *TIMES, *PLANS]]),
            ],
        )


def compare_releases(
    base: str,
    new: str,
    *,
    models: str | Sequence[str] = (),
    tp: int | None = None,
    heads: str = "",
    head_dim: int | None = None,
    page_size: int | None = None,
    lens: str = "",
    batch: int | None = None,
    cases: str | Sequence[str] = (),
    backend: str = "",
    not_slower: float = 0.02,
) -> Upgrade:
    """Measure, or replay, which calls release `new` of FlashInfer runs slower than `base`.

    Either may be a wheel or a folder of your own. `cases` are lines as of `kinds.cases`; without
    them the usual calls of `models` (`core.layer`, over `tp` GPUs each), or of the layer of `heads`
    (`8/1`), or of all models; `head_dim` and `page_size` are those of the layers that are given.
    `lens` (`core.layer.parse_lengths`, of `batch` requests) is one decode call of each instead.
    `backend` is what an engine pins, such as flashinfer-fa2 or fa2; by default what the library
    picks. `not_slower` is the margin within which a call counts as not slower; 0 asks whether it is
    faster, slower or the same.

    Raises ValueError for what cannot be asked, RuntimeError for a release that cannot be had.
    """
    texts = {"base": base, "new": new, "heads": heads, "lens": lens, "backend": backend}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} must be text, got {text!r}")
    models = (models,) if isinstance(models, str) else models
    cases = cases.splitlines() if isinstance(cases, str) else cases
    if isinstance(not_slower, str) or not 0 <= not_slower < 1:
        raise ValueError(f"not_slower must lie in 0..1, such as 0.02 for 2 %, got {not_slower}")
    sizes = sizes_given(tp=tp, head_dim=head_dim, page_size=page_size)
    if cases and (models or heads or lens or sizes or batch is not None):
        raise ValueError("cases must stand alone, they say layer and lengths, got others too")
    layers = layers_named(models, heads, sizes)
    listed = parse_cases(cases)
    if cases and not listed:
        raise ValueError("cases must hold one that can be run; all are empty")
    if lens:
        if MLA in layers or not layers:
            words = f"lens must go with heads (--heads) or models (--model) other than {MLA}"
            raise ValueError(f"{words}, got {lens!r}")
        call = lengths_of_case(parse_lengths("lens", lens, batch))
        listed = tuple(DecodeCase(spec, **call) for spec in layers if isinstance(spec, AttnSpec))
    elif batch is not None:
        raise ValueError(f"batch must go with lens, got {batch}")
    if {text.partition("==")[0] for text in (base, new)} & {*LIBRARIES} - {LIBRARY}:
        command = f"python -m attnlib explain --diff {base} {new}"
        raise ValueError(f"base and new must be of {PACKAGE}; what engines change: {command}")
    base, new = map(_release_named, (base, new))
    base_release, new_release = (
        text if _is_release(text) else build_version(Path(text), PACKAGE) for text in (base, new)
    )
    both = (base_release, new_release)
    if Version(both[0]) == Version(both[1]):
        advice = f"give a build of yours a version of its own, such as {both[0]}+mine"
        raise ValueError(f"base and new must be two releases ({advice}), both are {both[0]}")
    names = backends_named(backend, both)
    layers = layers or [*(parse_layer(model=name) for name in MODELS), MLA]
    chosen = listed or [case for layer in layers for case in calls_of(layer)]
    items = items_of(chosen, names)
    if not items:
        plans = ", ".join(sorted({case.kind or "decode" for case in chosen}))
        raise ValueError(f"backend must run one of the calls ({plans}), got {backend!r}")
    comparison = Comparison(NAME, both, LOOKS, not_slower)
    builds = {r: Path(t) for r, t in zip(both, (base, new), strict=True) if not _is_release(t)}
    if mode() == "live":
        overlays = {f"{PACKAGE}=={r}": own_build(path, PACKAGE)[1] for r, path in builds.items()}
        for release in both:
            overlay_for(PACKAGE, release, overlays)
        _measure(comparison, items, Sweep(overlays=overlays))
    elif builds:
        comparison.pairs = {item: [] for item in items}
    else:
        _replay(comparison, items)
        if not any(comparison.pairs.values()):
            _require_known(both)
    taken = [TAKEN.format(layer.heads) for layer in layers[:1] if isinstance(layer, AttnSpec)]
    return _upgrade(comparison, builds, () if cases or page_size else taken)


def _shown(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows in words; of a key with many lengths the first ones."""
    keys = [k if len(k) <= LONGEST_KEY else f"{k[:LONGEST_KEY]}..." for k in rows.case]
    return in_words(rows.assign(case=keys), FORMATS)


def _is_release(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False


def _release_named(text: str) -> str:
    """The release of `flashinfer==0.6.13` or `v0.7` as records name it; other text as it is."""
    name, _, release = text.partition("==")
    text = release if name in (LIBRARY, PACKAGE) and release else text
    known = {version: version for version in LIBRARIES[LIBRARY].versions}
    return str(known.get(Version(text), text)) if _is_release(text) else text


def _require_known(both: Sequence[str]) -> None:
    """ValueError for a release that is in no index, or that nobody read: it may be misspelt."""
    last = LIBRARIES[LIBRARY].versions[-1]
    for name, release in zip(("base", "new"), both, strict=True):
        if Version(release).local:
            raise ValueError(f"{name} must be the wheel or folder of {release}, your own build")
        if Version(release) > last:
            words = f"{name} must be a release up to {last}, or on record"
            raise ValueError(f"{words}; a later one needs a CUDA GPU; got {release}")
        find(f"{LIBRARY}=={release}")


def _row(comparison: Comparison, item: Item, verdict: Ratio | None) -> dict[str, Any]:
    """The row of `COLUMNS` on an item, as far as it is known."""
    row: dict[str, Any] = dict(zip(SIDES, comparison.both, strict=True))
    row |= {"case": item.case.key, "backend": item.backend, "timer": item.timer}
    row |= {"rounds": len(comparison.pairs[item]), "kernels": ""}
    if failed := comparison.failed.get(item):
        new_failed = failed.item.release == comparison.both[1]
        return row | {"verdict": "fails" if new_failed else "not run"}
    if verdict is None:
        return row | {"verdict": AMBIGUOUS if comparison.pairs[item] else NOT_ON_RECORD}
    last = comparison.pairs[item][-1]
    for name, side in zip(("base", "new"), zip(*comparison.pairs[item], strict=True), strict=True):
        plans = [time for record in side for time in record.plan_us]
        row |= {f"{name}_us": median(times_of(side)), f"{name}_ran": families_of(side)}
        row |= {f"{name}_plan_us": median(plans) if plans else None}
    a, b = ({k["name"]: k["launches"] for k in record.kernels} for record in last)
    changed = [f"{k} {a.get(k, 0):g} to {b.get(k, 0):g}" for k in a | b if a.get(k) != b.get(k)]
    row |= {name: getattr(verdict, name) for name in (*RATIO, "rounds", "verdict")}
    row |= {"kernels": ", ".join(changed), "study": last[0].study}
    return row | {"machine": last[0].machine_slug}


def _upgrade(comparison: Comparison, builds: Mapping[str, Path], taken: Sequence[str]) -> Upgrade:
    """The answer: rows and notes; `taken` says what nobody gave."""
    margin = f"{SHORT_MARGIN:.0%} below {SHORT_US:.0f} us, {LONG_MARGIN:.0%} from there on"
    margin = f"{comparison.not_slower:.1%}" if comparison.not_slower else margin
    notes = [f"All rows are judged as one table (Holm); margin {margin}.", *taken]
    if mode() != "live":
        words = "is a build of your own: it needs a CUDA GPU."
        notes += [f"{path} {words}" for path in builds.values()]
    for item, record in comparison.failed.items():
        why = f"{record.item.release} {record.status}: {' '.join(record.reason.split())}"
        notes.append(f"{item.case.key}, {item.backend}: {why}")
    near, step = [], next_step(comparison)
    missing = [item for item in comparison.undecided() if not comparison.pairs[item]]
    can_run = [item for item in missing if not why_not_run(item, comparison.both)]
    if can_run:
        for pair, item in nearest_items(can_run[0], comparison.both).items():
            near.append(replace(comparison, both=pair, pairs={}, failed={}))
            _replay(near[-1], [item])
        step += "" if near else f"; {releases_on_record(can_run[0])}"
    return Upgrade(*comparison.both, _rows(comparison), tuple(notes), step, _rows(*near))


def _rows(*comparisons: Comparison) -> pd.DataFrame:
    """A row of `COLUMNS` per item."""
    rows = []
    for comparison in comparisons:
        verdicts = comparison.verdicts()
        rows += [_row(comparison, item, verdicts.get(item)) for item in comparison.pairs]
    return pd.DataFrame(rows, columns=COLUMNS)


def _plain(record: Record) -> Item:
    return replace(record.item, release="")


def _measure(comparison: Comparison, items: list[Item], sweep: Sweep) -> None:
    """Measure rounds of `items` until all are decided; on record they count too."""
    base, new = comparison.both
    machine = machine_shown(NAME, "cuda", "")
    number = next_round(NAME, machine)
    # A build may have been made anew under its old version: only the rounds of now count.
    first = number if sweep.overlays else 0
    comparison.pairs = {item: [] for item in items}
    comparison.measure(
        sweep,
        lambda: [
            record
            for record in store.find(NAME, machine)
            if record.round >= first and _plain(record) in comparison.pairs
        ],
        device="cuda",
        command=f"python -m attnlib compare --base {base} --new {new}",
        number=number,
    )


def _replay(comparison: Comparison, items: list[Item]) -> None:
    """Take the rounds on record of `items`."""
    names = [NAME]
    for study in STUDIES.values():
        if set(comparison.both) <= {release for grid in study.grids for release in grid.releases}:
            names.append(study.name)
        names.append(PREFIX + study.name)
    sources = [(name, machine) for name in names for machine in store.machines(name)]
    wish = os.environ.get("ATTNLIB_MACHINE", "")
    comparison.pairs = {item: [] for item in items}
    for name, machine in store.on_machine("ATTNLIB_MACHINE", wish, sources):
        records = store.find(name, machine)
        comparison.take(record for record in records if _plain(record) in comparison.pairs)
