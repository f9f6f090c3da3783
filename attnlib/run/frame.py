"""From a study's frame to the rows, times and ratios that tables and figures share.

A frame has one row per record (`store.frame`). Ratios pair two backends round by round, within one
case, release and timer, and refuse rows of different GPUs, power limits, timers or schemas. A table
per case has the column `case` and the case's own columns, in the order of `COLUMNS`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from packaging.version import Version

from ..core.backends.table import TABLE
from ..kinds.cases import Case
from ..kinds.cost import Ceilings
from ..kinds.item import Item
from ..measure.stats import LOOKS, Verdict, gap_table, judge, judge_table
from .store import COMPARABLE, require_comparable

if TYPE_CHECKING:
    from .study import Study

CASE = ["heads", "head_dim", "dtype", "kv_dtype", "page_size", "batch_size", "kv_len", "lengths"]
SHAPE = ["heads", "page_size", "batch_size", "kv_len"]
COUNTS = (
    *("num_qo_heads", "num_kv_heads", "top_k", "head_dim", "page_size", "batch_size", "kv_len"),
    *(
        "window",
        "sinks",
        "q_len",
        "chunk",
        "layers",
        "max_ctx",
        "seq_len_delta",
        "pool_size",
        "topk",
    ),
    *("draft_tokens", "output_len", "tp", "seed"),
)
"""Columns of a case that are integers."""
_FIRST = ("model", "driver", "builder", "heads", "num_qo_heads", "top_k", *CASE)
COLUMNS = tuple(dict.fromkeys((*_FIRST, "mode", "mask", "q_lengths", "group", *COUNTS, "swa")))
"""Columns that say what a case is, in the order in which tables are sorted by them."""
FA2, FA3, AUTO = "flashinfer-fa2", "flashinfer-fa3", "flashinfer-auto"
GRAPH_AUTO, CUDA_CORES = "flashinfer-graph-auto", "flashinfer-cuda-cores"
WIDE = 10
"""An interval whose ends lie further apart than this factor is not written out: it says nothing."""
LABELS = {entry.name: entry.label for entry in TABLE.values() if entry.label}


def ceilings(frame: pd.DataFrame, needed: Sequence[str] = ("copy", "matmul")) -> Ceilings:
    """Rates measured in the same study: median over rounds. ValueError if a needed one lacks."""
    names = ("copy", "matmul", "read", "launch", "gather")
    found = frame[frame.backend.isin(names) & (frame.status == "ok")]
    require_comparable(found)
    rates = {}
    for name in names:
        rows = found[found.backend == name]
        if rows.empty and name in needed:
            raise ValueError(f"frame must hold a {name!r} ceiling measured ok, it has none")
        rates[name] = float((rows.work_per_call / rows.run_us).median())
    return Ceilings(
        copy_gbps=rates["copy"] / 1e3,
        matmul_tflops=rates["matmul"] / 1e6,
        num_sms=int(frame.num_sms.max()),
        read_gbps=rates["read"] / 1e3,
        launch_us=1 / rates["launch"],
        gather_per_us=rates["gather"],
    )


def good_rows(frame: pd.DataFrame, timer: str = "graph") -> pd.DataFrame:
    """Records of one timer that are ok and not left out, counts of their cases as integers."""
    return whole_counts(frame[(frame.timer == timer) & (frame.status == "ok") & ~frame.left_out])


def decode_rows(
    frame: pd.DataFrame, *, release: str | None = None, timer: str = "graph"
) -> pd.DataFrame:
    """`good_rows` of attention with heads, of one timer and (if named) one release."""
    rows = frame[frame.heads.notna()]
    return good_rows(rows if release is None else rows[rows.release == release], timer)


def by_design(rows: pd.DataFrame, designs: dict[str, str]) -> pd.DataFrame:
    """`rows` with the design's name for `backend`, and the release of a library with several."""
    names = rows.backend.map(designs) + rows.release.map(lambda r: f" {r}" if r else "")
    return rows.assign(backend=names)


def whole_counts(rows: pd.DataFrame) -> pd.DataFrame:
    """`rows` with `COUNTS` as integers, which cases that lack them made floats in the frame."""
    floats = [rows[name] for name in COUNTS if name in rows and rows[name].dtype == float]
    return rows.assign(**{own.name: own.astype(int) for own in floats if own.notna().all()})


def of_study(frame: pd.DataFrame, study: Study) -> pd.DataFrame:
    """The rows that `study` asks for: of a frame that another study lends, its own part."""
    wanted = {item for grid in study.grids for item in grid.items()}
    asked = zip(frame.backend, frame.timer, frame.case, frame.release, strict=True)
    return frame.loc[np.array([Item(*each) in wanted for each in asked], dtype=bool)]


def cases_of(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per case: `case` and its own columns, in the order of `COLUMNS`."""
    found = rows.loc[~rows.case.duplicated(), ["case", *(n for n in COLUMNS if n in rows)]]
    found = found[["case", *found.columns[1:][found.iloc[:, 1:].notna().all()]]]
    keys = [found[name].tolist() for name in found.columns[1:]]  # pandas is slow with many keys
    order = [place for *_, place in sorted(zip(*keys, range(len(found)), strict=True))]
    return found.iloc[order].reset_index(drop=True)


def times(rows: pd.DataFrame, value: str = "run_us") -> pd.DataFrame:
    """Median of `value` over rounds: a row per case, a column per backend."""
    require_comparable(rows)
    wide = rows.pivot_table(value, "case", "backend", "median", sort=False)
    return cases_of(rows).merge(wide.sort_index(axis=1).reset_index(), on="case")


def over(
    rows: pd.DataFrame,
    numerator: str,
    denominator: str,
    *,
    noise: float | None = None,
    not_slower: float = 0.0,
) -> pd.DataFrame:
    """Paired ratio of two backends' run times and the verdict on `numerator`, a row per case.

    Columns: the case's, ratio, low, high, pairs (rounds), verdict, margin (`judged`; with `noise`
    row by row). ValueError for rows that must not be compared.
    """
    found, pairs = [], list(paired_times(rows, numerator, denominator))
    verdicts = judged(rows, [both for _, *both in pairs], noise=noise, not_slower=not_slower)
    for (case, *_), verdict in zip(pairs, verdicts, strict=True):
        told = {"verdict": verdict.word, "margin": verdict.margin}
        found.append({"case": case, **vars(verdict.ratio), **told})
    names = ["case", "ratio", "low", "high", "pairs", "verdict", "margin"]
    return cases_of(rows).merge(pd.DataFrame(found, columns=names), on="case")


def judged(
    rows: pd.DataFrame,
    pairs: Sequence[Sequence[Sequence[float]]],
    *,
    noise: float | None = None,
    not_slower: float = 0.0,
) -> list[Verdict]:
    """The verdicts on a table whose times are of `rows`: as one (`judge_table`), if A/A items say
    the noise; row by row of older records, or with `noise`."""
    own = noise_of(rows)
    if noise is not None or not own:
        return [judge(a, b, noise=noise or 0.0, not_slower=not_slower) for a, b in pairs]
    # More rounds than the first look has were added by looking; fewer are one look.
    looks = len(LOOKS) if max((len(a) for a, _ in pairs), default=0) > LOOKS[0] else 1
    return judge_table([(a, b) for a, b in pairs], noise=own, not_slower=not_slower, looks=looks)


def gaps(rows: pd.DataFrame, base: str, new: str) -> pd.DataFrame:
    """What `new` saves of the time of `base`, a row per case that both have, paired by round.

    Columns: the case's, `base` and `new` (medians, us), saved, low, high (us), rounds,
    verdict (`Gap.word`). Intervals are as wide as the table needs (`gap_table`).
    """
    found, pairs = [], list(paired_times(rows, base, new))
    judged_gaps = gap_table([(before, after) for _, before, after in pairs])
    for (case, before, after), gap in zip(pairs, judged_gaps, strict=True):
        told = (np.median(before), np.median(after), gap.mean, gap.low, gap.high)
        found.append((case, *map(float, told), gap.pairs, gap.word))
    names = ["case", base, new, "saved", "low", "high", "rounds", "verdict"]
    return cases_of(rows).merge(pd.DataFrame(found, columns=names), on="case")


def told_gaps(table: pd.DataFrame) -> str:
    """`gaps` in words: how many cases, how many of them for sure, and how much is saved."""
    low, middle, high = table.saved.quantile([0, 0.5, 1])
    words = table.verdict.tolist()
    sure = f"{words.count('faster')} faster, {words.count('slower')} slower beyond doubt"
    return f"{len(table)} shapes, {sure}; saved {low:.1f} to {high:.1f} us, median {middle:.1f}"


def noise_of(rows: pd.DataFrame) -> float:
    """The largest A/A noise among rows, 0 of none."""
    return float(rows.noise.max()) if len(rows) else 0.0


def paired_times(
    rows: pd.DataFrame, numerator: str, denominator: str
) -> Iterator[tuple[Case, list[float], list[float]]]:
    """Case by case: both backends' times of rounds that have both; ValueError as of `over`."""
    names = numerator, denominator
    both = rows.loc[rows.backend.isin(names), ["case", "round", "backend", "run_us", *COMPARABLE]]
    require_comparable(both)
    taken: dict[Case, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for case, round_, name, us in both.iloc[:, :4].dropna().itertuples(index=False, name=None):
        taken[case][round_][name].append(us)
    for case in cases_of(rows).case:
        paired = [us for _, us in sorted(taken[case].items()) if len(us) == len({*names})]
        if paired:
            yield case, *([fmean(us[name]) for us in paired] for name in names)


def same_against_same(rows: pd.DataFrame) -> pd.DataFrame:
    """A/A: each case and backend against itself, round 1 over 0, 3 over 2, ...: a row per pair."""
    require_comparable(rows)
    wide = rows.pivot_table("run_us", ["case", "backend"], "round", sort=False).sort_index(axis=1)
    even, odd = wide[wide.columns[0::2]], wide[wide.columns[1::2]]
    pairs = [
        (odd[after] / even[before]).rename("ratio").reset_index().assign(pair=number)
        for number, (before, after) in enumerate(zip(even, odd, strict=False))
    ]
    return pd.concat(pairs, ignore_index=True).dropna(subset="ratio")


def launches(rows: pd.DataFrame, name: str = "") -> pd.Series:
    """Launches per call, by the trace, of kernels and copies whose name contains `name`."""
    return rows.kernels.map(lambda found: sum(k.launches for k in found if name in k.name))


def spread(values: pd.Series, by: pd.Series) -> pd.DataFrame:
    """How many `values` there are per value of `by`, the least, the median and the most."""
    found = values.groupby(by).agg(["size", "min", "median", "max"])
    return found.set_axis(["shapes", "least", "median", "most"], axis=1)


def tally(found: pd.DataFrame, by: str) -> pd.DataFrame:
    """`spread` of the ratios that `over` found, how many have each verdict it gave (of none
    `faster`), the widest margin of a verdict, and the fewest and most rounds, where it has them."""
    counts = pd.crosstab(found[by], found.verdict).rename_axis(columns=None)
    counts = counts if len(counts) else counts.assign(faster=0)
    table = spread(found.ratio, found[by]).round(2)
    if "margin" in found:
        table["margin, %"] = (100 * found.groupby(by).margin.max()).round(1)
    if "pairs" in found:
        table["rounds"] = found.groupby(by).pairs.agg(_ends)
    return pd.concat([table[["shapes"]], counts, table.iloc[:, 1:]], axis=1).reset_index()


def _ends(values: pd.Series) -> str:
    return " to ".join(dict.fromkeys(str(value) for value in (values.min(), values.max())))


def with_better(rows: pd.DataFrame, a: str, b: str, name: str) -> pd.DataFrame:
    """`rows` and, as `name`, those of the faster of `a` and `b` in each case, by medians."""
    both = rows[rows.backend.isin((a, b))]
    median = both.groupby(["case", "backend"], sort=False).run_us.median().unstack()
    median = median.reindex(columns=[a, b]).dropna()
    chosen = both.case.map(median.idxmin(axis=1)) == both.backend
    return pd.concat([rows, both[chosen].assign(backend=name)])


def release_order(frame: pd.DataFrame) -> list[str]:
    """The releases in a frame, oldest first."""
    return sorted((r for r in frame.release.unique() if r), key=Version)


def intervals(table: pd.DataFrame, decimals: int = 2) -> list[str]:
    """The interval of each row of `low` and `high`, in words.

    Of `over` it is what the verdict was asked with: of 95 %, or beside A/A items so wide that the
    verdicts of a table are right together (`judge_table`).
    """
    bounds = zip(table.low, table.high, strict=True)
    words = f"{{:.{decimals}f}} to {{:.{decimals}f}}"
    found = (words.format(*both) if both[0] == both[0] else "one round" for both in bounds)
    wide = ("ratio" in table) & (table.high > WIDE * table.low)
    return [f"over {WIDE} x wide" if too else said for too, said in zip(wide, found, strict=True)]
