"""Which release of a kernel package made a call that serving makes slower?

The study has the calls of `HISTORY` that each package of `RELEASES` has a kernel for, over its
releases, so that a step shows where it came. `watch --measure` runs all calls of a package on its
newest release beside the one before. The L2 is warm.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ...core.spec import require_word
from ...measure.calls.form import Item
from ...measure.stats import judge_ratios
from ...run.figures import charts, style
from ...run.frame import good_rows, release_order, require_comparable
from ...run.study import Grid, Study
from .calls import (
    BACKENDS,
    BY_GROUP,
    BY_REQUESTS,
    CALLS,
    FLASHINFER,
    LATENT,
    LONG,
    NAMES,
    ONE_LONG,
    SGLANG,
    VERIFY,
    VLLM,
    items_of,
)

RELEASES = {
    FLASHINFER: {"0.6.4": 1, "0.6.13": 2, "0.7.2.post1": 2, "0.7.4": 2},
    SGLANG: {"0.4.4": 0, "0.4.5": 0, "0.4.9": 0, "0.4.10": 0},
}
"""Package -> its releases -> whole rounds on record. They are too few for verdicts: time on the GPU
was over within the second round of 0.6.4, before other packages and calls of other modules.
`measure suite --releases PACKAGE==...` takes four rounds of any releases."""
EQUAL_RELEASES = {SGLANG: {"0.4.10": "0.4.9"}}
"""Package -> a release -> one before it whose kernels of FlashAttention-3 are all the same machine
code, by hash (17 of 17), so that its times are the same, too."""

_DECODE = (
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
    "a tree of 4 drafts of 32 users of 8k",
)
"""16 bits, head_dim 128, without a window: FlashInfer runs all of these by one module of fa2."""
HISTORY = {
    FLASHINFER: _DECODE,
    SGLANG: (*_DECODE, *VERIFY, *LATENT),
    VLLM: _DECODE,
}
"""Package -> names of its calls; it is asked for those that it has a kernel for."""
SHARED = ("1 user of 4k", "16 users of 8k, 4 query heads per KV head", "128 users of 4k")
"""Calls that are measured twice a round (A/A), and live in notebooks."""
LARGE_STEP = 1.05
"""The ratio of two releases in a row from which the figure names a call."""


def grids_of(items: Sequence[Item], releases: Sequence[str], rounds: int) -> list[Grid]:
    """Items of a package over releases: a grid for each backend and timer."""
    grids = []
    groups: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        cases = groups.setdefault((item.backend, item.timer), [])
        cases.append(item.case)
    for (backend, timer), cases in groups.items():
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
    """The histories, the A/A items of FlashInfer's newest release, and what notebooks measure
    live."""
    grids = []
    for package, rounds_of in RELEASES.items():
        names = dict.fromkeys(HISTORY[package])
        items = items_of(package, names)
        for release, rounds in rounds_of.items():
            grids += grids_of(items, (release,), rounds)
    shared = tuple(CALLS[name] for name in SHARED)
    *_, newest = RELEASES[FLASHINFER]
    decode = (BACKENDS[FLASHINFER][""],)
    once = Grid(
        shared,
        decode,
        releases=(newest,),
        rounds=RELEASES[FLASHINFER][newest],
    )
    again = replace(once, again=decode)
    live = replace(once, headline=True)
    return (*grids, again, live)


STUDY = Study(
    name="suite",
    question="Which release of a kernel package made a call that serving makes slower?",
    grids=_grids(),
    reference_machine="nvidia-h200-b7fa7e16",
    ceilings=(),
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
    later = wide[releases[1:]]
    before = wide[releases[:-1]].to_numpy()
    ratios = later.div(before)
    table = wide.round(2)
    if ratios.empty:
        return table
    farthest = ratios.where(ratios >= 1, 1 / ratios)
    at = farthest.fillna(1.0).idxmax(axis=1)
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
    if not tables:
        return pd.DataFrame(columns=STEP_COLUMNS)
    return pd.concat(tables, ignore_index=True)


STEP_COLUMNS = [
    "base",
    "new",
    "call",
    "case",
    "ratio",
    "low",
    "high",
    "rounds",
    "verdict",
]


def judged(rows: pd.DataFrame, base: str, new: str) -> pd.DataFrame:
    """Release `new` over `base`, a row per call that both ran in a round, as one table (Holm)."""
    sides: list[Any] = []
    found = []
    both = rows[rows.release.isin([base, new])]
    groups = both.groupby(["call", "timer"], sort=False)
    for (call, timer), calls in groups:
        wide = calls.pivot_table(
            values="run_us",
            index="round",
            columns="release",
        )
        wide = wide.dropna()
        has_both = {base, new}.issubset(wide.columns)
        if wide.empty or not has_both:
            continue
        new_us = wide[new].tolist()
        base_us = wide[base].tolist()
        sides.append((new_us, base_us))
        row = {
            "base": base,
            "new": new,
            "call": call,
            "case": calls.case.iloc[0],
            "timer": timer,
        }
        found.append(row)
    calls_judged = pd.DataFrame(found)
    ratios = pd.DataFrame(judge_ratios(sides))
    return pd.concat([calls_judged, ratios], axis=1)


def named_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The good records of calls of the suite, eager prefill too, with the name of each, `call`."""
    tables = []
    for timer in ("graph", "profiler"):
        rows = good_rows(frame, timer)
        require_comparable(rows)
        tables.append(rows)
    rows = pd.concat(tables)
    names = rows.case.map(NAMES)
    return rows.assign(call=names).dropna(subset="call")


def _rows_of(frame: pd.DataFrame, package: str) -> pd.DataFrame:
    """Those of a package."""
    require_word("package", package, tuple(BACKENDS))
    rows = named_rows(frame)
    backends = [*BACKENDS[package].values()]
    return rows[rows.backend.isin(backends)]


def draw_history(frame: pd.DataFrame, *packages: str) -> Any:
    """Time of each call over its time in the oldest release: a panel per package, a line per call.

    A call with a step of `LARGE_STEP` or more, up or down, has a colour and its name; all others
    are grey. A release with equal machine code is named beside its twin (`EQUAL_RELEASES`). No
    verdict: `steps` has those, where the rounds suffice.

    Parameters
    ----------
    frame : pandas.DataFrame
        Records of `suite` on one GPU, as `load` gives them; the footer names it.
    *packages : str
        Of `BACKENDS`; by default those with two releases in the frame.

    Raises
    ------
    ValueError
        For another package, and for one with fewer than two releases in the frame.

    Examples
    --------
    >>> import attnlib
    >>> from attnlib.studies import suite
    >>> frame = attnlib.load("suite", suite.STUDY.reference_machine)  # doctest: +SKIP
    >>> suite.draw_history(frame)  # doctest: +SKIP
    """
    shown = packages or _with_a_history(frame)
    tables = {package: history(frame, package) for package in shown}
    for package, table in tables.items():
        if "largest step" not in table:
            raise ValueError(f"frame must have two releases of {package}, got {[*table.columns]}")
    if not tables:
        raise ValueError("frame must have two releases of a package, got none")
    figure, axes = charts.panels(
        titles=[*tables],
        size=(7.5 * len(tables), 4.6),
        source=frame,
        words=("release", "time over that of the oldest release"),
        title="Calls that serving makes, release by release",
    )
    for axis, (package, table) in zip(axes, tables.items(), strict=True):
        _draw_lines(axis, table, EQUAL_RELEASES.get(package, {}))
    return figure


def _with_a_history(frame: pd.DataFrame) -> list[str]:
    """Packages of which the frame has two releases at least."""
    found = []
    for package in BACKENDS:
        releases = release_order(_rows_of(frame, package))
        if len(releases) > 1:
            found.append(package)
    return found


def _draw_lines(axis: Any, table: pd.DataFrame, equal: dict[str, str]) -> None:
    """The lines of a `history`, and the releases below them."""
    releases = [name for name in table.columns if name not in ("largest step", "at")]
    oldest = table[releases[0]]
    lines = table[releases].div(oldest, axis=0)
    named = style.looks(_with_large_steps(table))
    for call in lines.index.drop([*named]):
        axis.plot(
            releases,
            lines.loc[call],
            color="0.75",
            linewidth=1,
        )
    for call, look in named.items():
        axis.plot(
            releases,
            lines.loc[call],
            color=look.color,
            marker=look.marker,
            label=call,
        )
    axis.axhline(1, color="0.4", linewidth=0.8)
    ticks = []
    for release in releases:
        twin = equal.get(release)
        ticks.append(f"{release}\n= {twin}" if twin else release)
    axis.set_xticks(range(len(releases)), ticks)
    if named:
        axis.legend(fontsize=7, loc="best")


def _with_large_steps(table: pd.DataFrame) -> list[str]:
    """Calls of `history` whose largest step is large, the largest first."""
    farthest = np.maximum(table["largest step"], 1 / table["largest step"])
    return [*farthest[farthest >= LARGE_STEP].sort_values(ascending=False).index]
