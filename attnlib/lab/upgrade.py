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
from ..core.call_text import Lens, shortened
from ..core.layer import MODELS, parse_layer, sizes_given
from ..core.spec import MLA, AttnSpec
from ..measure.calls.cases import parse_cases
from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.form import Item, NamedCase
from ..measure.stats import (
    FASTER,
    INCONCLUSIVE,
    LONG_MARGIN,
    NOT_SLOWER,
    SAME,
    SHORT_MARGIN,
    SHORT_US,
    SLOWER,
    Ratio,
    tally,
)
from ..run import store
from ..run.pairs import PREFIX, Comparison, families_of, next_round
from ..run.releases import InvalidVersion, Version, build_version, overlay_for, own_build
from ..run.rows import machine_slug
from ..run.study import Sweep, machine_shown, mode
from ..select.changes import ProblemChanges, add_changes, change_in_words
from ..select.libraries import LIBRARIES, find
from ..select.lines import NOT_ON_RECORD
from ..studies import STUDIES
from ..studies.releases.calls import calls_of_layer
from .asked_calls import LIBRARY, Layer, backends_named, items_of, layers_named
from .cards import NO_VALUE, Card, Shown, in_words
from .known_calls import known_at, mode_of
from .next_step import nearest_items, next_step, releases_on_record, why_not_run

PACKAGE = COMPARED[LIBRARY]
STUDY_NAME = f"compare_{LIBRARY}"
LOOKS = (4, 8, 16, 24)
"""Rounds after which all rows are judged."""
NOT_DECIDED = "not decided"
FAILS = "fails"
FAILING = (SLOWER, FAILS)
PROVED = (NOT_SLOWER, FASTER, SAME)
"""Verdicts that prove a call not slower by more than the margin."""
TAKEN = (
    "Pages have 16 tokens (--page-size), and FlashInfer picks the backend unless --backend names "
    "it. What an engine takes: python -m attnlib explain heads={} --gpu h100 "
    f"--library sglang=={LIBRARIES['sglang'].releases[-1]} --policy flashinfer"
)
RATIO = ["ratio", "low", "high"]
SIDES = ["base", "new"]
CALL = ["case", "backend"]
TIME_COLUMNS = ["base_us", "new_us", *RATIO, "rounds", "verdict"]
KERNELS = ["base_ran", "new_ran", "kernels"]
PLAN_COLUMNS = ["base_plan_us", "new_plan_us"]
FORMATS = {
    "base_us": ",.1f",
    "new_us": ",.1f",
    "base_plan_us": ",.1f",
    "new_plan_us": ",.1f",
    "ratio": ",.2f",
    "low": ",.2f",
    "high": ",.2f",
    "rounds": "d",
}
HEADS = {
    "case": "call",
    "base_us": "base, us",
    "new_us": "new, us",
    "base_plan_us": "base, us",
    "new_plan_us": "new, us",
    "base_ran": "base ran",
    "new_ran": "new ran",
    "low": "95 % CI",
}
"""Columns as a card heads them."""
Releases = tuple[str, str]
"""The base and the new one."""
Builds = Mapping[str, Path]
"""Release -> the wheel or folder of one's own that is called so."""
Calls = Sequence[NamedCase]
Row = dict[str, Any]
COLUMNS = [
    *SIDES,
    *CALL,
    "timer",
    *TIME_COLUMNS,
    *KERNELS,
    *PLAN_COLUMNS,
    "study",
    "machine",
]


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
        fails = self.rows.verdict.isin(FAILING)
        return self.rows.case[fails].tolist()

    @property
    def outcome(self) -> str:
        """`slower` if one call is, `not slower` if that is proved of each, else `not decided`."""
        if self.slower:
            return SLOWER
        proved = self.rows.verdict.isin(PROVED)
        if len(proved) and proved.all():
            return NOT_SLOWER
        return NOT_DECIDED

    @property
    def conclusion(self) -> str:
        """The outcome in a line: the calls that it stands on, or what would decide it."""
        calls = "1 call" if len(self.rows) == 1 else f"{len(self.rows)} calls"
        if self.outcome == NOT_SLOWER:
            return f"not slower: proved of {calls}"
        if self.outcome == SLOWER:
            named = self.rows.groupby("verdict", sort=False).case.agg(", ".join)
            return "; ".join(f"{word}: {named[word]}" for word in FAILING if word in named)
        rows = self.rows[~self.rows.verdict.isin(PROVED)]
        parts = [f"not decided: {tally(rows.verdict, rows['rounds'])}, of {calls}", self.next_step]
        for near in self.nearest.itertuples():
            if near.case in set(self.rows.case):
                parts.append(f"this call is on record: --base {near.base} --new {near.new}")
                continue
            parts.append(f"near {near.case}, {near.base} to {near.new}, on record: {near.verdict}")
        return "; ".join(filter(None, parts))

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "base": self.base,
            "new": self.new,
            "outcome": self.outcome,
            "conclusion": self.conclusion,
            "slower": self.slower,
            "notes": self.notes,
            "cases": json.loads(self.rows.to_json(orient="records")),
            "nearest": json.loads(self.nearest.to_json(orient="records")),
        }

    def card(self) -> Card:
        """Verdicts, then kernels and planning."""
        is_other = ~self.rows.case.isin(self.slower)
        order = is_other.argsort(kind="stable")
        rows = _shown(self.rows.iloc[order])
        verdicts = tally(self.rows.verdict, self.rows["rounds"])
        near = _shown(self.nearest)
        if (rows.verdict == NOT_ON_RECORD).all():  # the title says so
            rows = rows.head(0)
        origins: dict[str, None] = {}
        for table in (self.rows, self.nearest):
            for row in table.dropna(subset="study").itertuples():
                origins[f"{row.study} on {row.machine}"] = None
        return Card(
            title=f"FlashInfer {self.base} (base) to {self.new} (new): {verdicts}",
            notes=self.notes,
            facts=[],
            table=_headed(rows, CALL + TIME_COLUMNS),
            caption="time of one call in microseconds, new over base",
            footer=f"records of {', '.join(origins)}" if origins else "no such call is on record",
            more=[
                ("kernels that changed", _headed(rows[rows.kernels != ""], CALL + KERNELS)),
                ("plan on the host", _headed(rows[rows.base_plan_us != "-"], CALL + PLAN_COLUMNS)),
                (
                    "nearest on record, which decides nothing",
                    _headed(near, SIDES + CALL + TIME_COLUMNS),
                ),
                (
                    "its plan on the host",
                    _headed(near[near.base_plan_us != "-"], CALL + PLAN_COLUMNS),
                ),
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
    cases: str | Sequence[str] = "",
    backend: str = "",
    not_slower: float = 0.02,
) -> Upgrade:
    """Measure, or replay, which calls a release of FlashInfer runs slower than another.

    Parameters
    ----------
    base, new : str
        Releases such as `0.6.3`, or a wheel or a folder of your own.
    models : str or sequence of str, optional
        Models whose usual calls are compared; by default all usual ones.
    tp : int, optional
        GPUs that share the heads of each model.
    heads : str, optional
        A layer in place of models, such as `8/1`.
    head_dim, page_size : int, optional
        Sizes of the layers; pages in tokens.
    lens : str, optional
        One decode call of each layer instead: tokens of each request, `8192x16`.
    batch : int, optional
        Requests, where `lens` is one length or range.
    cases : str or sequence of str, optional
        Calls, a line each (`heads=32/8 head_dim=128 page=16 lens=8192x16`), in place of layers.
    backend : str, optional
        What an engine pins, such as `fa2`; by default what the library picks.
    not_slower : float, default 0.02
        The margin, 0..1, within which a call counts as not slower. 0 asks whether it is faster,
        slower or the same.

    Returns
    -------
    Upgrade
        `.table()` has a row per call: both times in microseconds, ratio, verdict.

    Raises
    ------
    ValueError, RuntimeError
        For what cannot be asked; for a release that cannot be had.

    Examples
    --------
    >>> import attnlib
    >>> call = "heads=32/8 head_dim=128 page=16 lens=8192x16"
    >>> found = attnlib.compare_releases("0.6.3", "0.6.4", cases=call)
    >>> found.outcome
    'not slower'
    """
    return _compared(**locals())


def _compared(base: str, new: str, **given: Any) -> Upgrade:
    """The answer to the arguments of `compare_releases`."""
    not_slower = given["not_slower"]
    cases = given.pop("cases")
    _require_text(
        base=base,
        new=new,
        heads=given["heads"],
        lens=given["lens"],
        backend=given["backend"],
    )
    if isinstance(not_slower, str) or not 0 <= not_slower < 1:
        raise ValueError(f"not_slower must lie in 0..1, such as 0.02 for 2 %, got {not_slower}")
    lines = _lines_of(cases)
    layers, calls = _calls_asked(lines, **given)
    both, builds = _releases_of(base, new)
    items = _items_of(calls, given["backend"], both)
    comparison = Comparison(STUDY_NAME, both, LOOKS, not_slower)
    _fill(comparison, items, builds)
    first = layers[0] if layers else None
    are_taken = not lines and not given["page_size"]
    taken = []
    if are_taken and isinstance(first, AttnSpec):
        taken = [TAKEN.format(first.heads)]
    return _upgrade(comparison, builds, taken)


def _require_text(**texts: Any) -> None:
    """ValueError for an argument that is no text."""
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} must be text, got {text!r}")


def _lines_of(cases: str | Sequence[str]) -> Sequence[str]:
    """The lines of cases; ValueError for a list without one, and for what is no list of texts."""
    if isinstance(cases, str):
        return cases.splitlines()
    is_list = isinstance(cases, list | tuple)
    if not is_list or not all(isinstance(line, str) for line in cases):
        raise ValueError(f"cases must be text or a list of texts, got {cases!r}")
    if not cases:
        raise ValueError(f"cases must hold one that can be run, got {cases!r}")
    return cases


def _calls_asked(
    lines: Sequence[str],
    *,
    models: str | Sequence[str],
    heads: str,
    lens: str,
    batch: int | None,
    tp: int | None,
    head_dim: int | None,
    page_size: int | None,
    **_: Any,
) -> tuple[list[Layer], Calls]:
    """The layers that were named or all usual ones, and the calls; ValueError for what cannot be
    asked."""
    names = (models,) if isinstance(models, str) else models
    sizes = sizes_given(tp=tp, head_dim=head_dim, page_size=page_size)
    has_layer = names or heads or sizes
    has_lengths = lens or batch is not None
    if lines and (has_layer or has_lengths):
        raise ValueError("cases must stand alone, they say layer and lengths, got others too")
    layers = layers_named(names, heads, sizes)
    listed: Calls = parse_cases(lines)
    if lines and not listed:
        raise ValueError("cases must hold one that can be run; all are empty")
    if lens:
        listed = _decode_calls(layers, lens, batch)
    elif batch is not None:
        raise ValueError(f"batch must go with lens, got {batch}")
    if not layers:
        layers = [parse_layer(model=name) for name in MODELS]
        layers.append(MLA)
    if not listed:
        listed = []
        for layer in layers:
            listed += calls_of_layer(layer)
    return layers, listed


def _decode_calls(layers: list[Layer], lens: str, batch: int | None) -> Calls:
    """A decode call of each layer with these lengths."""
    if MLA in layers or not layers:
        words = f"lens must go with heads (--heads) or models (--model) other than {MLA}"
        raise ValueError(f"{words}, got {lens!r}")
    lengths = Lens.read(lens, batch=batch).fields
    calls = []
    for layer in layers:
        if isinstance(layer, AttnSpec):
            calls.append(DecodeCase(layer, **lengths))
    return calls


def _releases_of(base: str, new: str) -> tuple[Releases, Builds]:
    """Both releases, and the builds of one's own among them; ValueError unless there are two."""
    named = {side.partition("==")[0] for side in (base, new)}
    if named & {*LIBRARIES} - {LIBRARY}:
        command = f"python -m attnlib advise --diff {base} {new} --model NAME --lens 8192x16"
        raise ValueError(f"base and new must be of {PACKAGE}; what engines change: {command}")
    builds: dict[str, Path] = {}
    releases = []
    for given in (base, new):
        side = _release_named(given)
        if _is_release(side):
            releases.append(side)
            continue
        path = Path(side)
        release = build_version(path, PACKAGE)
        builds[release] = path
        releases.append(release)
    first, last = releases
    if Version(first) == Version(last):
        advice = f"give a build of yours a version of its own, such as {first}+mine"
        raise ValueError(f"base and new must be two releases ({advice}), both are {first}")
    return (first, last), builds


def _items_of(calls: Calls, backend: str, both: Releases) -> list[Item]:
    """What is run of the calls; ValueError for a backend that runs none of them."""
    backends = backends_named(backend, both)
    items = items_of(calls, backends)
    if not items:
        kinds = {case.kind or "decode" for case in calls}
        plans = ", ".join(sorted(kinds))
        raise ValueError(f"backend must run one of the calls ({plans}), got {backend!r}")
    return items


def _fill(comparison: Comparison, items: list[Item], builds: Builds) -> None:
    """Measure the rounds of `items`, or take those on record; of a build of one's own none is."""
    if mode() == "live":
        overlays = {}
        for release, path in builds.items():
            _, overlay = own_build(path, PACKAGE)
            overlays[f"{PACKAGE}=={release}"] = overlay
        for release in comparison.both:
            overlay_for(PACKAGE, release, overlays)
        _measure(comparison, items, Sweep(overlays=overlays))
    elif builds:
        comparison.pairs = {item: [] for item in items}
    else:
        _replay(comparison, items)
        if not any(comparison.pairs.values()):
            _require_known(comparison.both)


def _shown(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows in words; of a call with many lengths the first ones."""
    shown = rows.assign(case=rows.case.map(shortened))
    return in_words(shown, FORMATS)


def _headed(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Columns of ready words as a reader knows them; one backend is not repeated in every row."""
    table = rows[[*columns]]
    if "low" in table:
        interval = table.low.astype(str) + " to " + table.high.astype(str)
        interval = interval.where(table.low != NO_VALUE, NO_VALUE)
        table = table.assign(low=interval).drop(columns="high")
    heads = dict(HEADS)
    if table.backend.nunique() == 1:
        backend = table.backend.iloc[0]
        heads["case"] = f"call of {backend}"
        table = table.drop(columns="backend")
    return table.rename(columns=heads)


def _is_release(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False


def _release_named(text: str) -> str:
    """The release of `flashinfer==0.6.13` or `v0.7` as records name it; other text as it is."""
    name, _, release = text.partition("==")
    if name in (LIBRARY, PACKAGE) and release:
        text = release
    if not _is_release(text):
        return text
    wanted = Version(text)
    for version in LIBRARIES[LIBRARY].versions:
        if version == wanted:
            return str(version)
    return text


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


def _row(comparison: Comparison, item: Item, verdict: Ratio | None) -> Row:
    """The row of `COLUMNS` on an item, as far as it is known."""
    pairs = comparison.pairs[item]
    base, new = comparison.both
    row: Row = {
        "base": base,
        "new": new,
        "case": item.case.label,
        "backend": item.backend,
        "timer": item.timer,
        "rounds": len(pairs),
        "kernels": "",
    }
    failed = comparison.failed.get(item)
    if failed:
        row["verdict"] = FAILS if failed.release == new else "not run"
        return row
    if verdict is None:
        row["verdict"] = INCONCLUSIVE if pairs else NOT_ON_RECORD
        return row
    base_records = [record for record, _ in pairs]
    new_records = [record for _, record in pairs]
    last_base, last_new = pairs[-1]
    return {
        **row,
        "base_us": median(row.run_us for row in base_records),
        "base_ran": families_of(base_records),
        "base_plan_us": _plan_us(base_records),
        "new_us": median(row.run_us for row in new_records),
        "new_ran": families_of(new_records),
        "new_plan_us": _plan_us(new_records),
        "ratio": verdict.ratio,
        "low": verdict.low,
        "high": verdict.high,
        "rounds": verdict.rounds,
        "verdict": verdict.verdict,
        "kernels": _changed_kernels(last_base, last_new),
        "study": last_base.study,
        "machine": machine_slug({"gpu": last_base.gpu, "gpu_id": last_base.gpu_id}),
    }


def _plan_us(records: Sequence[Any]) -> float | None:
    """The median time of planning on the host, us; None where nothing is planned."""
    times: list[float] = []
    for record in records:
        times += record.plan_samples
    return median(times) if times else None


def _changed_kernels(base: Any, new: Any) -> str:
    """The kernels whose launches differ, in words."""
    before = {kernel.name: kernel.launches for kernel in base.kernels}
    after = {kernel.name: kernel.launches for kernel in new.kernels}
    words = []
    for name in before | after:
        a = before.get(name, 0)
        b = after.get(name, 0)
        if a != b:
            words.append(f"{name} {a:g} to {b:g}")
    return ", ".join(words)


def _upgrade(comparison: Comparison, builds: Builds, taken: list[str]) -> Upgrade:
    """The answer: rows and notes; `taken` says what nobody gave."""
    margin = f"{SHORT_MARGIN:.0%} below {SHORT_US:.0f} us, {LONG_MARGIN:.0%} from there on"
    if comparison.not_slower:
        margin = f"{comparison.not_slower:.1%}"
    notes = [f"All rows are judged as one table (Holm); margin {margin}.", *taken]
    notes += _known_notes(comparison)
    if mode() != "live":
        for path in builds.values():
            notes.append(f"{path} is a build of your own: it needs a CUDA GPU.")
    for item, record in comparison.failed.items():
        reason = " ".join(record.reason.split())
        why = f"{record.release} {record.status}: {reason}"
        notes.append(f"{item.case.label}, {item.backend}: {why}")
    step = next_step(comparison)
    nearest = []
    missing = _first_missing(comparison)
    if missing:
        for both, item in nearest_items(missing, comparison.both).items():
            near = replace(
                comparison,
                both=both,
                pairs={},
                failed={},
            )
            _replay(near, [item])
            nearest.append(near)
        if not nearest:
            step += f"; {releases_on_record(missing)}"
    return Upgrade(
        base=comparison.both[0],
        new=comparison.both[1],
        rows=_rows(comparison),
        notes=tuple(notes),
        next_step=step,
        nearest=_rows(*nearest),
    )


def _first_missing(comparison: Comparison) -> Item | None:
    """The first item that has no round and that both releases can run."""
    for item in comparison.undecided():
        has_rounds = bool(comparison.pairs[item])
        if not has_rounds and not why_not_run(item, comparison.both):
            return item
    return None


def _known_notes(comparison: Comparison) -> list[str]:
    """The known problems that come or end between the releases, for the calls that were timed."""
    changes: ProblemChanges = {}
    stack = {LIBRARY: Version(comparison.both[1])}
    for item, pairs in comparison.pairs.items():
        if not pairs:
            continue
        sides = []
        for record, release in zip(pairs[-1], comparison.both, strict=True):
            answers = known_at(
                item.case,
                item.backend,
                release=release,
                gpu=record.gpu,
                timer=item.timer,
                kernel=record.kernel_family,
            )
            sides.append(answers)
        before, after = sides
        where = f"{mode_of(item.case)} on {record.gpu}"
        add_changes(
            changes=changes,
            before=before,
            after=after,
            stack=stack,
            where=where,
        )
    lines: list[str] = []
    for change in changes.values():
        lines += change_in_words(change)
    return [line.strip().removeprefix("- ") for line in lines]


def _rows(*comparisons: Comparison) -> pd.DataFrame:
    """A row of `COLUMNS` per item."""
    rows = []
    for comparison in comparisons:
        verdicts = comparison.verdicts()
        for item in comparison.pairs:
            row = _row(
                comparison=comparison,
                item=item,
                verdict=verdicts.get(item),
            )
            rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def _measure(comparison: Comparison, items: list[Item], sweep: Sweep) -> None:
    """Measure rounds of `items` until all are decided; on record they count too."""
    base, new = comparison.both
    machine = machine_shown(STUDY_NAME, "cuda", "")
    number = next_round(STUDY_NAME, machine)
    # A build may have been made anew under its old version: only the rounds of now count.
    first = number if sweep.overlays else 0
    comparison.pairs = {item: [] for item in items}

    def on_record() -> pd.DataFrame:
        rows = store.find(STUDY_NAME, machine)
        return rows[rows["round"] >= first]

    comparison.measure(
        sweep,
        on_record,
        device="cuda",
        command=f"python -m attnlib compare --base {base} --new {new}",
        number=number,
    )


def _replay(comparison: Comparison, items: list[Item]) -> None:
    """Take the rounds on record of `items`."""
    names = [STUDY_NAME]
    for study in STUDIES.values():
        releases: set[str] = set()
        for grid in study.grids:
            releases.update(grid.releases)
        if releases.issuperset(comparison.both):
            names.append(study.name)
        names.append(PREFIX + study.name)
    sources = []
    for name in names:
        for machine in store.machines(name):
            sources.append((name, machine))
    wish = os.environ.get("ATTNLIB_MACHINE", "")
    comparison.pairs = {item: [] for item in items}
    for name, machine in store.on_machine("ATTNLIB_MACHINE", wish, sources):
        comparison.take(store.find(name, machine))
