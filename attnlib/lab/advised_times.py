"""The times of an advice in brief: the engine's backends, best first, and what to set for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from ..measure.stats import LEAST_ROUNDS, geometric_mean
from ..select.lines import NOT_ON_RECORD
from .cards import NO_VALUE, in_words
from .engine_builds import ANOTHER_BUILD, GROUP, PLANNER, PLUGIN, SGLANG, rivals_of
from .expected import Expected

MOST_ROWS = 5
"""Backends of a table; the engine's own pick is among them."""
VLLM = "vllm"
RUNS_NOW = "(runs now)"
TIMED_ELSEWHERE = "(runs now, timed in another build)"
"""For the engine's pick where the records are of another build of its kernel."""
NO_CAP = "(another build, without SGLang's cap)"
"""In its place where what runs loses splits that the other build does not."""
NO_CUBINS = "cubins=no"
NEAR = 3
"""The distance of batches that lie about a factor of two apart in tokens or requests."""
SPEEDUP = "speedup"
"""The time of the engine's pick over that of a backend."""
SLOWDOWN = "slowdown"
"""The time of a backend over that of the fastest."""
SET = "set in the engine"
Runs = Mapping[str, str] | None
"""Our names of what an engine has -> its words (`run_by_engine`)."""


def setting_of(word: str, engine: str) -> str:
    """What a user sets for what an engine has under a word."""
    if word.startswith(PLUGIN):
        return f"ATTNLIB_{engine.upper()}_{word.removeprefix(PLUGIN)}"
    if engine not in (SGLANG, VLLM):
        return word
    if word == PLANNER:
        return f"ATTNLIB_{engine.upper()}_DECODE=planned, with FlashInfer"
    return f"--attention-backend {word.replace(NO_CUBINS, 'without cubins')}"


def recorded_rows(
    same: pd.DataFrame,
    own: str,
    runs: Runs,
) -> pd.DataFrame:
    """The records of a call that are of what the engine has: of one study, GPU, timer and page
    table, with the engine's own pick if there is such a group, and with most backends."""
    groups = [same.head(0)]
    for _, rows in same.groupby(list(GROUP), sort=False):
        names = [own, *rivals_of(own, rows.backend.tolist(), runs)]
        groups.append(rows[rows.backend.isin(names)])
    return max(groups, key=lambda rows: (own in set(rows.backend), len(rows)))


def of_other_pages(
    nearest: pd.DataFrame,
    rows: pd.DataFrame,
    own: str,
    runs: Runs,
) -> pd.DataFrame:
    """Rows for backends that `rows` lack and that were measured on the same requests, in pages of
    another size, on the same GPU."""
    same = nearest[(nearest.distance == 0) & (nearest.gpu == rows.gpu.iloc[0])]
    found = []
    for batch in same.to_dict("records"):
        names = rivals_of(own, list(batch), runs)
        for name in names:
            if name not in set(rows.backend) and pd.notna(batch[name]):
                words = f"{name}, page={batch['case'].spec.page_size}"
                found.append({"backend": words, "us": batch[name], "rounds": batch["rounds"]})
    return pd.DataFrame(found)


def with_speedups(rows: pd.DataFrame, own: str) -> pd.DataFrame:
    """Backend, us, rounds, and the speedup over the engine's pick, where that is among them."""
    table = rows[["backend", "us", "rounds"]].sort_values("us", ignore_index=True)
    times = table.set_index("backend").us
    if own in times:
        table[SPEEDUP] = (times[own] / times).to_numpy()
    return table


def mean_speedups(
    draws: Sequence[pd.DataFrame],
    own: str,
    runs: Runs,
) -> pd.DataFrame:
    """Backend, speedup over the engine's pick and the batches that have both (geometric mean, and
    their count), best first, those of few batches last (`is_of_few`). Each of `draws` has the times
    of one; those without the pick are left out."""
    rows: dict[str, dict[str, object]] = {}
    for times in draws:
        if own not in times:
            continue
        for name in [own, *rivals_of(own, list(times), runs)]:
            speedups = (times[own] / times[name]).dropna()
            if len(speedups):
                row = {"backend": name, SPEEDUP: geometric_mean(speedups), "batches": len(speedups)}
                rows.setdefault(name, row)
    table = pd.DataFrame(list(rows.values()), columns=["backend", SPEEDUP, "batches"])
    return ranked(table, own)


def ranked(table: pd.DataFrame, own: str) -> pd.DataFrame:
    """The rows by speedup, those of few batches last."""
    table = table.sort_values(SPEEDUP, ascending=False, kind="stable")
    few = is_of_few(table, own)
    return pd.concat([table[~few], table[few]], ignore_index=True)


def is_of_few(table: pd.DataFrame, own: str) -> pd.Series:
    """Which rows are of less than half as many batches as another rival: they are no ranking."""
    most = table.batches[table.backend != own].max()
    return 2 * table.batches < most


def best_over_few(
    table: pd.DataFrame,
    times: pd.DataFrame,
    own: str,
) -> str:
    """What the best rival of most batches has over those of a row of few; else the empty string.

    `table` is that of `mean_speedups`, `times` those of the nearest batches.
    """
    few = is_of_few(table, own)
    most = table[~few & (table.backend != own)]
    if not few.any() or most.empty:
        return ""
    best = most.backend.iloc[0]
    name = table.backend[few].iloc[0]
    both = times.reindex(columns=[own, best, name]).dropna()
    if both.empty:
        return ""
    speedup = geometric_mean(both[own] / both[best])
    batches = "batch" if len(both) == 1 else f"{len(both)} batches"
    return (
        f"Rows of few batches stand last: over the {batches} of {name}, {best} has a speedup of "
        f"{speedup:.2f}."
    )


def expected_speedups(
    expected: Mapping[str, Expected],
    own: str,
    runs: Runs,
) -> pd.DataFrame:
    """The same, as all batches let expect, and how many have both."""
    rows = []
    for name in [own, *rivals_of(own, list(expected), runs)]:
        ratio, batches, _ = expected[name]
        rows.append({"backend": name, SPEEDUP: 1 / ratio, "batches": batches})
    table = pd.DataFrame(rows)
    return table.sort_values(SPEEDUP, ascending=False, kind="stable", ignore_index=True)


def mean_slowdowns(times: pd.DataFrame, runs: Runs) -> pd.DataFrame:
    """The same where no batch has the engine's pick: the slowdown against the fastest that the
    engine has."""
    kept = times[rivals_of("", list(times), runs)].dropna(axis=1, how="all")
    means = geometric_mean(kept.div(kept.min(axis=1), axis=0))
    table = pd.DataFrame({SLOWDOWN: means, "batches": kept.count()})
    table = table.sort_values(SLOWDOWN, kind="stable")
    return table.rename_axis("backend").reset_index()


def shown(
    table: pd.DataFrame,
    own: str,
    runs: Runs,
    engine: str,
) -> pd.DataFrame:
    """The first rows of a table, that of the engine's pick among them, in words, and what to set
    for each in the engine."""
    is_own = table.backend == own
    others = table[~is_own].head(MOST_ROWS - int(is_own.any()))
    table = table[is_own | table.index.isin(others.index)]
    table = in_words(table, {"us": ",.1f", SPEEDUP: ".2f", SLOWDOWN: ".2f"})
    if runs is None:
        return table
    settings = [_setting_in(runs, name, own, engine) for name in table.backend]
    table[SET] = settings
    return table


def with_unrecorded(
    rows: pd.DataFrame,
    other_build: str,
    names: Sequence[str],
    runs: Mapping[str, str],
) -> pd.DataFrame:
    """Rows of `shown`, of SGLang, with its own pick, the first of `names`, and its other caps of
    splits before them: none is on record, and the row of another build is not of what runs."""
    rows = rows.copy()
    rows.loc[rows.backend == other_build, SET] = NO_CAP
    own, *caps = names
    settings = {own: f"(runs now, {NOT_ON_RECORD})"}
    for name in caps:
        settings[name] = f"{setting_of(runs[name], SGLANG)} ({NOT_ON_RECORD})"
    more = []
    for name, setting in settings.items():
        row = dict.fromkeys(rows.columns, NO_VALUE)
        more.append(row | {"backend": name, SET: setting})
    return pd.concat([pd.DataFrame(more), rows], ignore_index=True)


def _setting_in(runs: Mapping[str, str], name: str, own: str, engine: str) -> str:
    """What to set for a row, or that it runs now, `own` being the row of the engine's pick."""
    word = runs.get(name.partition(",")[0], "")
    if name == own:
        return TIMED_ELSEWHERE if word.endswith(ANOTHER_BUILD) else RUNS_NOW
    if runs.get(own) == f"{word}, {ANOTHER_BUILD}":
        return RUNS_NOW
    return setting_of(word, engine)


def confidence_of_call(
    rounds: int,
    has_own: bool,
    is_here: bool,
) -> str:
    """How far rounds of the very call speak for it; on another GPU little."""
    if not is_here:
        return "Confidence: low, this call was measured on another GPU."
    if not has_own:
        return "Confidence: low, what the engine runs is not on record."
    level = "high" if rounds >= LEAST_ROUNDS else "medium"
    counted = "1 round" if rounds == 1 else f"{rounds} rounds"
    return f"Confidence: {level}, this call was measured in {counted}."


def confidence_of_nearest(distance: float, is_alike: bool) -> str:
    """How far other batches speak for a call."""
    level = "medium" if is_alike and distance <= NEAR else "low"
    return f"Confidence: {level}, the nearest batch is at distance {distance:.2f}."
