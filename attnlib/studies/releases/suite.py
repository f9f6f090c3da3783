"""Which release of a kernel package made a call that serving makes slower?

The study has `HISTORY`, most of `calls.CALLS`, over the releases of `RELEASES`, so that a step
shows where it came. `watch --measure` runs all calls of a package on its newest release beside the
one before. The L2 is warm.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd

from ...core.spec import require_word
from ...measure.calls.form import Item
from ...measure.stats import FASTER, SLOWER, judge_ratios
from ...run.figures import charts, style
from ...run.frame import good_rows, release_order, require_comparable
from ...run.study import Grid, Study
from .calls import (
    BACKENDS,
    BY_GROUP,
    BY_REQUESTS,
    CALLS,
    FLASHINFER,
    FP8,
    LATENT,
    LONG,
    NAMES,
    ONE_LONG,
    PROMPTS,
    SGLANG,
    VERIFY,
    VLLM,
    items_of,
)

RELEASES = {
    FLASHINFER: ("0.6.4", "0.6.13", "0.7.2.post1", "0.7.4"),
    SGLANG: ("0.4.4", "0.4.5", "0.4.10"),
    VLLM: ("",),
}
"""Package -> the releases on record; of vLLM one alone was brought, that of the environment."""

HISTORY = (
    *BY_GROUP,
    *BY_REQUESTS,
    *LONG,
    *ONE_LONG,
    "1 user of 4k, pages of 1",
    "16 users of 8k, pages of 1",
    "kimi-conversation, 16 in flight",
    "kimi-conversation, 64 in flight",
    "kimi-synthetic, 32 in flight",
    "azure-conversation, 128 in flight",
    "azure-code, 64 in flight",
    *FP8,
    *VERIFY,
    *PROMPTS,
    *LATENT,
)
"""Calls whose kernels few modules of FlashInfer have: those of head_dim 128, without a window."""
SHARED = ("1 user of 4k", "16 users of 8k, 4 query heads per KV head", "128 users of 4k")
"""Calls that are measured twice a round (A/A), and live in notebooks."""
ROUNDS = 3
REFERENCE = ""


def history_items(package: str) -> list[Item]:
    """Those of `HISTORY` that are measured of a package: of FlashInfer no MLA, which has a module
    of its own that compiles for minutes."""
    items = items_of(package, HISTORY)
    if package == FLASHINFER:
        return [item for item in items if item.case.kind != "mla"]
    return items


def grids_of(items: Sequence[Item], releases: Sequence[str], rounds: int = ROUNDS) -> list[Grid]:
    """Items of a package over releases: a grid for each backend and timer."""
    grids = []
    sides = dict.fromkeys((item.backend, item.timer) for item in items)
    for backend, timer in sides:
        cases = []
        for item in items:
            if (item.backend, item.timer) == (backend, timer):
                cases.append(item.case)
        grid = Grid(
            cases=tuple(cases),
            backends=(backend,),
            releases=tuple(releases),
            timers=(timer,),
            rounds=rounds,
        )
        grids.append(grid)
    return grids


def _grids() -> tuple[Grid, ...]:
    """The history of every package, its A/A items, and what notebooks measure live."""
    grids = []
    for package, releases in RELEASES.items():
        grids += grids_of(history_items(package), releases)
    shared = tuple(CALLS[name] for name in SHARED)
    newest = RELEASES[FLASHINFER][-1:]
    decode = (BACKENDS[FLASHINFER][""],)
    grids.append(Grid(shared, decode, releases=newest, rounds=ROUNDS, again=decode))
    grids.append(Grid(shared, decode, releases=newest, rounds=ROUNDS, headline=True))
    return tuple(grids)


STUDY = Study(
    name="suite",
    question="Which release of a kernel package made a call that serving makes slower?",
    grids=_grids(),
    reference_machine=REFERENCE,
)


def history(frame: pd.DataFrame, package: str) -> pd.DataFrame:
    """A row per call of a package, by its name: median time in us of each release, oldest first.

    `largest step` is the ratio of two releases in a row that is farthest from 1, `at` the later
    one. No verdict: `steps` has those.

    Parameters
    ----------
    frame : pandas.DataFrame
        Records of `suite`, as `load` gives them.
    package : str
        Of `BACKENDS`.

    Examples
    --------
    >>> import attnlib
    >>> from attnlib.studies import suite
    >>> frame = attnlib.load("suite", suite.STUDY.reference_machine)  # doctest: +SKIP
    >>> suite.history(frame, "flashinfer-python")  # doctest: +SKIP
    """
    rows = _rows_of(frame, package)
    wide = rows.pivot_table(
        values="run_us",
        index="call",
        columns="release",
        aggfunc="median",
        sort=False,
    )
    releases = release_order(rows) or [""]
    wide = wide.reindex(columns=releases)
    ratios = wide[releases[1:]].div(wide[releases[:-1]].to_numpy())
    table = wide.round(1)
    if ratios.empty:
        return table
    farthest = ratios.where(ratios >= 1, 1 / ratios).fillna(1.0)
    at = farthest.idxmax(axis=1)
    largest = [ratios.loc[call, release] for call, release in at.items()]
    table["largest step"] = largest
    table["at"] = at
    return table.round(3)


def steps(frame: pd.DataFrame, package: str) -> pd.DataFrame:
    """Every two releases in a row of a package: ratio, 95 % interval and verdict of each call.

    Calls of two releases are one table (Holm). Columns are those of `over`, and `call`, `base`,
    `new`. A call that one of both did not run has no row.
    """
    rows = _rows_of(frame, package)
    releases = release_order(rows)
    tables = []
    for base, new in itertools.pairwise(releases):
        tables.append(judged(rows, base, new))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=STEP_COLUMNS)


STEP_COLUMNS = ["base", "new", "call", "case", "ratio", "low", "high", "rounds", "verdict"]


def judged(rows: pd.DataFrame, base: str, new: str) -> pd.DataFrame:
    """Release `new` over `base`, a row per call that both ran in a round, as one table (Holm)."""
    sides: list[Any] = []
    found = []
    both = rows[rows.release.isin([base, new])]
    for (call, timer), calls in both.groupby(["call", "timer"], sort=False):
        wide = calls.pivot_table(values="run_us", index="round", columns="release").dropna()
        if {base, new} <= {*wide.columns} and len(wide):
            sides.append((wide[new].tolist(), wide[base].tolist()))
            case = calls.case.iloc[0]
            found.append({"base": base, "new": new, "call": call, "case": case, "timer": timer})
    ratios = judge_ratios(sides)
    return pd.concat([pd.DataFrame(found), pd.DataFrame(ratios)], axis=1)


def named_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The good records of calls of the suite, eager prefill too, with the name of each, `call`."""
    tables = []
    for timer in ("graph", "profiler"):
        rows = good_rows(frame, timer)
        require_comparable(rows)
        tables.append(rows)
    rows = pd.concat(tables)
    return rows.assign(call=rows.case.map(NAMES)).dropna(subset="call")


def _rows_of(frame: pd.DataFrame, package: str) -> pd.DataFrame:
    """Those of a package."""
    require_word("package", package, tuple(BACKENDS))
    rows = named_rows(frame)
    return rows[rows.backend.isin([*BACKENDS[package].values()])]


def draw_history(frame: pd.DataFrame) -> Any:
    """Time of each call over its time in the oldest release: a panel per package, a line per call.

    A call that some release made slower or faster (`steps`) has a colour and its name at the end of
    the line; all others are grey.
    """
    packages = [package for package in (FLASHINFER, SGLANG) if len(_rows_of(frame, package))]
    figure, axes = charts.panels(
        titles=packages,
        size=(5.6 * len(packages), 4.6),
        source=frame,
        words=("release", "time over that of the oldest release"),
        title="Calls that serving makes, release by release",
    )
    for axis, package in zip(axes, packages, strict=True):
        _draw_lines(axis, history(frame, package), steps(frame, package))
    return figure


def _draw_lines(axis: Any, table: pd.DataFrame, judged_steps: pd.DataFrame) -> None:
    """The lines of one package."""
    releases = [name for name in table.columns if name not in ("largest step", "at")]
    relative = table[releases].div(table[releases[0]], axis=0)
    changed = judged_steps[judged_steps.verdict.isin([SLOWER, FASTER])]
    named = [*dict.fromkeys(changed.call)]
    places = range(len(releases))
    for call, line in relative.iterrows():
        if call not in named:
            axis.plot(places, line.to_numpy(), color="0.75", linewidth=1)
    for number, call in enumerate(named):
        look = style.PALETTE[number % len(style.PALETTE)]
        axis.plot(
            places,
            relative.loc[call].to_numpy(),
            color=look.color,
            marker=look.marker,
            label=call,
        )
    axis.axhline(1, color="0.4", linewidth=0.8)
    axis.set_xticks(list(places), releases)
    if named:
        axis.legend(fontsize=6, loc="best")
