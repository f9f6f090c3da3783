"""Two releases of a library over the calls of models, or a list of cases: a study on the spot.

A case is done at the first of `LOOKS` that gives a verdict (`pairs`). All rows are one table
(`stats.judge_ratios`).

Records are those of `compare_flashinfer`; without a GPU also of each study with both releases.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from ..core.backends.table import COMPARED
from ..core.spec import MLA, MODELS, AttnSpec, MlaSpec, model_of, require_word
from ..draw import charts, style
from ..draw.cards import Card, Shown
from ..kinds.cases import Case, parse_cases
from ..kinds.decode.case import DecodeCase
from ..kinds.extend.case import ExtendCase
from ..kinds.item import Item
from ..kinds.mla.case import MlaCase
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
from ..run.pairs import TIMER, Comparison, families_of, next_round, times_of
from ..run.record import Record
from ..run.releases import Version, overlay_for, own_build
from ..run.study import Sweep, machine_shown, mode
from ..select.changes import changes
from . import STUDIES

LIBRARY = "flashinfer"
PACKAGE = COMPARED[LIBRARY]
NAME = f"compare_{LIBRARY}"
LOOKS = (4, 8, 16, 24)
"""Rounds after which all rows are judged."""
BACKENDS = {
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
NOT_DECIDED = "not decided"
PROVED = (NOT_SLOWER, FASTER, SAME)
"""Verdicts that prove a call not slower by more than the margin."""
ROW_INCHES = 0.3
RATIO = ["ratio", "low", "high"]
CALL = ["case", "backend"]
TIMES = ["base_us", "new_us", *RATIO, "rounds", "verdict"]
KERNELS = ["base_ran", "new_ran", "kernels"]
PLANS = ["base_plan_us", "new_plan_us"]
COLUMNS = [*CALL, "timer", *TIMES, *KERNELS, *PLANS, "study", "machine"]


@dataclass(frozen=True, eq=False, repr=False)
class Upgrade(Shown):
    """From release `base` to `new`: a row per case and backend, what `auto` picks otherwise."""

    base: str
    new: str
    rows: pd.DataFrame
    picks: pd.DataFrame
    notes: tuple[str, ...]
    records: tuple[Record, ...]

    def table(self) -> pd.DataFrame:
        """Both times (us), ratio, verdict, kernels, planning on the host apart."""
        return self.rows.round(3)

    @property
    def slower(self) -> list[str]:
        """The cases that became slower, or that only the old release runs."""
        return self.rows.case[self.rows.verdict.isin(("slower", "fails"))].tolist()

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
        if self.outcome == NOT_SLOWER:
            return f"not slower: proved of all {len(self.rows)} calls"
        if self.outcome == SLOWER:
            return f"slower: {', '.join(self.slower)}"
        counts = self.rows.verdict[~self.rows.verdict.isin(PROVED)].value_counts()
        tally = ", ".join(f"{count} {word}" for word, count in counts.items())
        return (
            f"not decided: {tally}, of {len(self.rows)} calls; on a GPU the same command measures "
            f"what is not on record, and what is ambiguous in up to {LOOKS[-1]} rounds"
        )

    def figure(self) -> "charts.Figure":
        """Time of new over base, a dot per case that both releases ran; ValueError for none."""
        rows = self.rows.dropna(subset="ratio")
        if rows.empty:
            raise ValueError(f"no case ran on both releases, of {len(self.rows)}: nothing to draw")
        title, size = f"FlashInfer {self.base} to {self.new}", (9, 1.4 + ROW_INCHES * len(rows))
        words = ("run time of new over base, by rounds (log)", "")
        figure, (axis,) = charts.panels([title], size, store.frame(self.records), words)
        placed = rows.assign(place=range(len(rows)))
        charts.dots(
            axis, placed, "ratio", "place", by="verdict", looks=charts.VERDICTS, interval="x"
        )
        charts.categories(axis, "y", rows.case)
        axis.axvline(1, **style.RULE)
        style.log_axes(axis, "x")
        axis.legend(frameon=True)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        rows, picks = (json.loads(t.to_json(orient="records")) for t in (self.rows, self.picks))
        names = ("base", "new", "outcome", "conclusion", "slower", "notes")
        return {name: getattr(self, name) for name in names} | {"cases": rows, "picks": picks}

    def card(self) -> Card:
        """Verdicts, then kernels and planning, then what `auto` picks otherwise."""
        rows = self.rows.iloc[(~self.rows.case.isin(self.slower)).argsort(kind="stable")].copy()
        digits = dict.fromkeys(RATIO, 3) | {"rounds": 0}
        for name in rows.select_dtypes("number"):
            words = f"{{:,.{digits.get(name, 1)}f}}".format
            rows[name] = ["-" if pd.isna(value) else words(value) for value in rows[name]]
        tally = ", ".join(f"{count} {word}" for word, count in rows.verdict.value_counts().items())
        sources = self.rows.dropna(subset="study")[["study", "machine"]].drop_duplicates()
        origins = [f"{study} on {machine}" for study, machine in sources.to_numpy()]
        return Card(
            title=f"FlashInfer {self.base} (base) to {self.new} (new): {tally}",
            notes=self.notes,
            facts=[],
            table=rows[CALL + TIMES],
            caption="time of one call in microseconds, new over base",
            footer=f"records of {', '.join(origins) or 'no call that both ran'}",
            more=[
                ("kernels that changed", rows[rows.kernels != ""][CALL + KERNELS]),
                ("planning on the host, apart", rows[rows.base_plan_us != "-"][CALL + PLANS]),
                ("what auto picks otherwise, by the rules", self.picks),
            ],
        )


def compare_releases(
    base: str,
    new: str,
    *,
    models: str | Sequence[str] = (),
    cases: str | Sequence[str] = (),
    not_slower: float = 0.02,
    progress: Any = None,
) -> Upgrade:
    """Measure, or replay, which calls release `new` of FlashInfer runs slower than `base`.

    Either may be a wheel or a folder of your own. `cases` are lines as of `kinds.cases`; without
    them, live, the usual calls of `models` (of all, if none is named), and in replay what is on
    record of those. `not_slower` is the margin within which a call counts as not slower; 0 asks
    whether it is faster, slower or the same. `progress` is as tqdm.

    Raises ValueError for what cannot be asked, RuntimeError for a release that cannot be had,
    FileNotFoundError where none of the cases is on record.
    """
    models = (models,) if isinstance(models, str) else models
    cases = cases.splitlines() if isinstance(cases, str) else cases
    for name in models:
        require_word("model", name, (*MODELS, MLA))
    if not 0 <= not_slower < 1:
        raise ValueError(f"not_slower must lie in 0..1, such as 0.02 for 2 %, got {not_slower}")
    models = tuple(models) or (*MODELS, MLA)
    listed = parse_cases(cases)
    if cases and not listed:
        raise ValueError("cases must hold one that can be run; all are empty")
    overlays: dict[str, Path] = {}
    both = (_release(base, overlays), _release(new, overlays))
    if Version(both[0]) == Version(both[1]):
        advice = f"give a build of yours a version of its own, such as {both[0]}+mine"
        raise ValueError(f"base and new must be two releases ({advice}), both are {both[0]}")
    comparison = Comparison(NAME, both, LOOKS, not_slower)
    if mode() == "live":
        chosen = listed or [case for name in models for case in calls_of(name)]
        for release in both:
            overlay_for(PACKAGE, release, overlays)
        _measure(comparison, items_of(chosen), Sweep(overlays=overlays, progress=progress))
    else:
        _replay(comparison, items_of(listed), models)
    return _upgrade(comparison, models)


def items_of(cases: Sequence[Case]) -> list[Item]:
    """What is run of each case, as engines call it: prefill eagerly, all else in a CUDA graph."""
    eager = [getattr(case, "mode", "").startswith("prefill") for case in cases]
    timed = zip(cases, ("profiler" if each else TIMER for each in eager), strict=True)
    return [Item(name, timer, case) for case, timer in timed for name in BACKENDS[case.kind]]


def calls_of(model: str) -> list[Case]:
    """The usual calls of a model in each mode that it has, pages of 16 tokens (MLA: 64)."""
    if model == MLA:
        return [MlaCase(MlaSpec(heads), *step) for heads in (128, 16) for step in STEPS]
    cases: list[Case] = [DecodeCase(AttnSpec(*MODELS[model], 16), *step) for step in STEPS]
    for name, q_len, batch, kv_len in EXTENDS:
        spec = AttnSpec(*MODELS[model], 1 if name == "prefill_ragged" else 16)
        cases.append(ExtendCase(DecodeCase(spec, batch, kv_len), name, q_len))
    return cases


def _release(text: str, overlays: dict[str, Path]) -> str:
    """The release that `text` names, or that the build there holds, which `overlays` then has."""
    try:
        return str(Version(text))
    except ValueError:
        if mode() != "live" and Path(text).exists():  # Before a wheel is installed for nothing.
            raise RuntimeError(f"{text} is a build of your own: it needs a CUDA GPU") from None
        release, overlays[f"{PACKAGE}=={release}"] = own_build(Path(text), PACKAGE)
    return release


def _row(comparison: Comparison, item: Item, verdict: Ratio | None) -> dict[str, Any]:
    """The row of `COLUMNS` on an item, as far as it is known."""
    row: dict[str, Any] = {"case": item.case.key, "backend": item.backend}
    row |= {"timer": item.timer, "rounds": len(comparison.pairs[item]), "kernels": ""}
    if failed := comparison.failed.get(item):
        new_failed = failed.item.release == comparison.both[1]
        return row | {"verdict": "fails" if new_failed else "not run"}
    if verdict is None:
        return row | {"verdict": AMBIGUOUS if comparison.pairs[item] else "not on record"}
    last = comparison.pairs[item][-1]
    for name, side in zip(("base", "new"), zip(*comparison.pairs[item], strict=True), strict=True):
        plans = [time for record in side for time in record.plan_us]
        row |= {f"{name}_us": median(times_of(side)), f"{name}_ran": families_of(side)}
        row |= {f"{name}_plan_us": median(plans) if plans else None}
    a, b = ({k["name"]: k["launches"] for k in record.kernels} for record in last)
    changed = [f"{k} {a.get(k, 0):g} to {b.get(k, 0):g}" for k in a | b if a.get(k) != b.get(k)]
    row |= {name: getattr(verdict, name) for name in RATIO}
    row |= {"rounds": verdict.rounds, "verdict": verdict.verdict}
    row |= {"kernels": ", ".join(changed)}
    return row | {"study": last[0].study, "machine": last[0].machine_slug}


def _upgrade(comparison: Comparison, models: Sequence[str]) -> Upgrade:
    """The answer: rows, notes and what `auto` picks otherwise."""
    margin = f"{SHORT_MARGIN:.0%} below {SHORT_US:.0f} us, {LONG_MARGIN:.0%} from there on"
    margin = f"{comparison.not_slower:.1%}" if comparison.not_slower else margin
    notes = [f"All rows are judged as one table (Holm); margin {margin}."]
    for item, record in comparison.failed.items():
        why = f"{record.item.release} {record.status}: {' '.join(record.reason.split())}"
        notes.append(f"{item.case.key}, {item.backend}: {why}")
    machines = [pairs[0][0].machine for pairs in comparison.pairs.values() if pairs]
    known = {m["compute_capability"] for m in machines if "compute_capability" in m}
    gpus = ["sm" + capability.replace(".", "") for capability in sorted(known)]
    old, new = (f"{LIBRARY}=={Version(release).public}" for release in comparison.both)
    try:
        names = [""] if len(models) > len(MODELS) else models
        picks = pd.concat([changes(old, new, model=name, gpus=gpus) for name in names])
    except ValueError as error:
        picks = pd.DataFrame()
        notes.append(f"What auto picks is not known: {error}.")
    records = tuple(r for pairs in comparison.pairs.values() for pair in pairs for r in pair)
    verdicts = comparison.verdicts()
    rows = [_row(comparison, item, verdicts.get(item)) for item in comparison.pairs]
    table = pd.DataFrame(rows, columns=COLUMNS)
    return Upgrade(*comparison.both, table, picks.reset_index(drop=True), tuple(notes), records)


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


def _replay(comparison: Comparison, items: list[Item], models: Sequence[str]) -> None:
    """Take the rounds on record of `items` or, if there are none, of the calls of `models`."""
    wish, recorded = os.environ.get("ATTNLIB_MACHINE"), store.machines(NAME)
    sources = [(NAME, machine) for machine in recorded if wish in (None, machine)]
    for study in STUDIES.values():
        if set(comparison.both) <= {release for grid in study.grids for release in grid.releases}:
            named = [wish] if wish else store.machines(study.name)
            sources += [(study.name, machine) for machine in named]
    sources = [(name, machine) for name, machine in sources if machine in store.machines(name)]
    for name, machine in sources:
        records = store.find(name, machine)
        plain_items = {_plain(record) for record in records}
        wanted = plain_items & set(items) if items else _calls_among(plain_items, models)
        comparison.take(record for record in records if _plain(record) in wanted)
    if not comparison.pairs:
        both = " and ".join(comparison.both)
        where = ", ".join(name for name, _ in sources) or "none"
        raise FileNotFoundError(
            f"releases {both} must have rounds of such a case on record to be replayed, there are "
            f"none; studies that have both: {where}"
        )
    comparison.pairs = {item: comparison.pairs.get(item, []) for item in items or comparison.pairs}


def _calls_among(items: set[Item], models: Sequence[str]) -> set[Item]:
    """Those that are a call of one of `models`."""
    usual = {i for i in items if i.case and i.case.kind in BACKENDS and i in items_of([i.case])}
    return {item for item in usual if model_of(item.case.spec) in models}
