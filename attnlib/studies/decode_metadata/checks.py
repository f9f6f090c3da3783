"""The checks of published claims about metadata: SGLang's fused kernel, FA3's schedule once a step.

As in `claim_checks`, a check computes from records alone. The baselines are ours: the op-by-op
sequence written anew from its description, and FlashAttention-3 asked in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from ...kinds.metadata.case import MetadataCase
from ...run.frame import decode_rows, launches, paired_times
from ..decode_metadata_eager.study import SOURCE_CASE
from ..evidence import (
    ABOUT,
    CONFIRMED,
    OPEN,
    REFUTED,
    Finding,
    Judged,
    MissingRecordsError,
    figure_word,
    judge_rows,
    vote,
)
from .study import METADATA, METADATA_SWEEP
from .tables import (
    FUSED,
    MERGED,
    OPS,
    SERIAL,
    TODAY,
    metadata_rows,
)

DECODE, EAGER, SCHEDULE = "decode_metadata", "decode_metadata_eager", "scheduler_metadata"
FAST_PATH, GENERAL_PATH = "_fused_metadata_kernel_ps1_no_swa", "_fused_metadata_kernel_general"
MANY = (512, 4096)
"""Batches between which a serial prefix sum must show, at a page or less of context a request."""
SHORT_CTX = 128
LAYERS = 64
EACH, ONCE, PREPARE = "fa3-step-each", "fa3-step-once", "prepare_varlen_num_blocks"

Check = Callable[[pd.DataFrame, float | None], Finding]


def speedup_at_source_case(frame: pd.DataFrame, figure: float | None) -> Finding:
    """Op by op takes `figure` times SGLang's fused kernel at its case, in a graph and eagerly."""
    assert figure is not None, "load_claims lets no such claim through"
    said, values, records = [], [], []
    for timer, mode in (("graph", "in a graph"), ("eager", "launched eagerly")):
        rows = frame[frame.study == (DECODE if timer == "graph" else EAGER)]
        own, anew = (_judge(rows, SOURCE_CASE, (OPS, n), timer) for n in (MERGED, SERIAL))
        values += own.ratios.tolist()
        records += [*own.records, *anew.records]
        said.append(f"{anew.ratios[0]:.2f} x {mode}")
    graph, eager = values
    reason = (
        f"Which of the two was timed is not said; {figure:g} x is within a quarter of "
        f"{sum(_near(v, figure) for v in values)} of them. Over the same design written anew: "
        f"{' and '.join(said)}. Our op by op computes the column offsets that SGLang kept ready, "
        f"so it has more launches than what was replaced."
    )
    measured = f"{graph:.2f} x in a graph, {eager:.2f} x launched eagerly"
    return Finding(figure_word(values, figure), reason, measured, records=_unique(records))


def speedup_at_all_sizes(frame: pd.DataFrame, figure: float | None) -> Finding:
    """Op by op takes `figure` times SGLang's fused kernel at the study's sizes, in a graph."""
    assert figure is not None, "load_claims lets no such claim through"
    judged = _judge(frame, METADATA, (OPS, MERGED))
    near = sum(_near(ratio, figure) for ratio in judged.ratios)
    lost = judged.count("faster")
    return judged.finding(
        figure_word(judged.ratios.tolist(), figure),
        f"{near} of {len(judged.verdicts)} sizes are within a quarter of {figure:g} x, and op by "
        f"op is faster in {lost}.",
    )


def one_launch(frame: pd.DataFrame, _: float | None) -> Finding:
    """Many launches op by op are one in SGLang's fused kernel."""
    rows = _needed(metadata_rows(frame), METADATA, (OPS, MERGED))
    counts = launches(rows)
    many, one = counts[rows.backend == OPS], counts[rows.backend == MERGED]
    held = int((many > 1).sum() + (one == 1).sum())
    measured = f"{many.min():.0f} to {many.max():.0f} launches, then {one.max():.0f}"
    reason = f"So say {held} of {len(rows)} traces."
    return Finding(vote(held, len(rows) - held), reason, measured, records=tuple(rows.id))


def fused_kernels(frame: pd.DataFrame, figure: float | None) -> Finding:
    """So many different kernels ran in the release that has them as merged."""
    rows = _needed(metadata_rows(frame), METADATA, (MERGED, TODAY))
    kernels = {name: rows[rows.backend == name].kernels.explode() for name in (MERGED, TODAY)}
    names = {name: sorted({kernel.name for kernel in ran}) for name, ran in kernels.items()}
    word = CONFIRMED if len(names[MERGED]) == figure else REFUTED
    reason = f"{TODAY} runs {len(names[TODAY])}: {', '.join(names[TODAY])}."
    return Finding(word, reason, ", ".join(names[MERGED]), records=tuple(rows.id))


def fast_path_for_page_one(frame: pd.DataFrame, _: float | None) -> Finding:
    """The special kernel runs at page_size 1, the general one elsewhere."""
    rows = _needed(metadata_rows(frame), METADATA_SWEEP, (MERGED,))
    expected = rows.page_size.map(lambda page: FAST_PATH if page == 1 else GENERAL_PATH)
    ran = rows.kernels.map(lambda kernels: ", ".join(kernel.name for kernel in kernels))
    held = int((ran == expected).sum())
    reason = (
        f"So say {held} of {len(rows)} traces; whether it is faster than the general kernel would "
        f"be there, none says."
    )
    return Finding(vote(held, len(rows) - held), reason, records=tuple(rows.id))


def every_page_size(frame: pd.DataFrame, _: float | None) -> Finding:
    """Page tables are right at every page size on record; open while no record has a window."""
    rows = _needed(metadata_rows(frame), METADATA_SWEEP, (MERGED,))
    pages = ", ".join(str(page) for page in sorted(rows.page_size.unique()))
    wrong = int((rows.oracle_error > 0).sum())
    reason = "No record has a sliding window, nor the other page sizes."
    measured = f"{wrong} wrong of {len(rows)} at page sizes {pages}"
    return Finding(REFUTED if wrong else OPEN, reason, measured, records=tuple(rows.id))


def time_grows_with_batch(frame: pd.DataFrame, _: float | None) -> Finding:
    """With short requests SGLang's time grows about as the batch does, a parallel scan's less."""
    rows = metadata_rows(frame)
    cases = [c for c in METADATA_SWEEP if c.max_ctx == SHORT_CTX and c.batch_size in MANY]
    rows = _needed(rows, cases, (MERGED, FUSED))
    growth = MANY[1] / MANY[0]
    times = rows.pivot_table(index=["backend", "page_size"], columns="batch_size", values="run_us")
    grown = times[MANY[1]] / times[MANY[0]]
    held = int((grown[MERGED] >= growth / ABOUT).sum())
    low, high = grown[MERGED].min(), grown[MERGED].max()
    reason = (
        f"From {MANY[0]} to {MANY[1]:,} requests of {SHORT_CTX} tokens the batch grows {growth:g} "
        f"x and the time about as much in {held} of {len(grown[MERGED])} page sizes; with a scan "
        f"in parallel it grows {grown[FUSED].min():.1f} to {grown[FUSED].max():.1f} x."
    )
    word = vote(held, len(grown[MERGED]) - held)
    return Finding(word, reason, f"{low:.1f} to {high:.1f} x", records=tuple(rows.id))


def launches_saved(frame: pd.DataFrame, figure: float | None) -> Finding:
    """A step of 64 layers has `figure` launches fewer when the schedule is made once."""
    rows = _steps(frame)
    saved = _difference(rows, launches(rows))
    prepares = _difference(rows, launches(rows, PREPARE))
    held = int((saved == figure).sum())
    reason = (
        f"{PREPARE} falls by {prepares.min():.0f} to {prepares.max():.0f}, but all launches of the "
        f"step fall by {figure:g} in {held} of {len(saved)} shapes only: where requests are not "
        f"split, each layer clears the schedule's semaphore with a launch of its own."
    )
    measured = f"{saved.min():.0f} to {saved.max():.0f} launches fewer"
    return Finding(vote(held, len(saved) - held), reason, measured, records=tuple(rows.id))


def microseconds_saved(frame: pd.DataFrame, figure: float | None) -> Finding:
    """A step of 64 layers, in a graph, saves `figure` us, the rounds' paired differences."""
    assert figure is not None, "load_claims lets no such claim through"
    rows, eager = _steps(frame), _steps(frame, timer="eager")
    saved, outside = _saved(rows), _saved(eager)
    near = sum(_near(value, figure) for value in saved)
    low, middle, high = saved.min(), saved.median(), saved.max()
    reason = (
        f"{near} of {len(saved)} shapes are within a quarter of {figure:g} us. Launched eagerly "
        f"the step takes {-outside.max():.0f} to {-outside.min():.0f} us longer with it "
        f"made once. The attention of one GPU of four, nothing else of a step."
    )
    measured = f"{low:.0f} to {high:.0f} us, median {middle:.0f}"
    word = figure_word(saved.tolist(), figure)
    return Finding(word, reason, measured, middle, low, high, (*rows.id, *eager.id))


def no_layer_prepares(frame: pd.DataFrame, _: float | None) -> Finding:
    """With the schedule made once, a step has one prepare kernel, whatever its layers."""
    rows = decode_rows(frame)
    rows = rows[rows.backend == ONCE]
    if rows.empty:
        raise MissingRecordsError(f"{ONCE} has no record that is ok")
    held = int((launches(rows, PREPARE) == 1).sum())
    layers = ", ".join(f"{n:.0f}" for n in sorted(rows.layers.unique()))
    reason = f"{held} of {len(rows)} traces of steps of {layers} layers have one {PREPARE}."
    return Finding(vote(held, len(rows) - held), reason, "1 a step", records=tuple(rows.id))


CHECKS: dict[str, tuple[tuple[str, ...], Check]] = {
    check.__name__: (studies, check)
    for studies, checks in {
        (DECODE, EAGER): (speedup_at_source_case,),
        (DECODE,): (
            speedup_at_all_sizes,
            one_launch,
            fused_kernels,
            fast_path_for_page_one,
            every_page_size,
            time_grows_with_batch,
        ),
        (SCHEDULE,): (launches_saved, microseconds_saved, no_layer_prepares),
    }.items()
    for check in checks
}
"""Name in data/claims.yaml -> the studies it reads and the check."""


def _judge(
    frame: pd.DataFrame,
    cases: Sequence[MetadataCase],
    pair: tuple[str, str],
    timer: str = "graph",
) -> Judged:
    rows = _needed(metadata_rows(frame, timer=timer), cases, pair)
    return judge_rows(rows, pair)


def _needed(
    rows: pd.DataFrame, cases: Sequence[MetadataCase], designs: Sequence[str]
) -> pd.DataFrame:
    """Rows of `designs` at `cases`; MissingRecordsError unless all have as many rounds."""
    found = rows[rows.backend.isin(designs) & rows.case.isin(cases)]
    counts = found.groupby(["case", "backend"], sort=False).size()
    if len(counts) != len(cases) * len(designs) or counts.nunique() != 1:
        raise MissingRecordsError(
            f"{' and '.join(designs)}: {len(found)} records of {len(cases)} sizes, one lacks some"
        )
    return found


def _steps(frame: pd.DataFrame, *, timer: str = "graph") -> pd.DataFrame:
    rows = decode_rows(frame, timer=timer)
    rows = rows[rows.backend.isin((EACH, ONCE)) & (rows.layers == LAYERS)]
    if rows.empty or rows.groupby(["case", "backend"], sort=False).size().nunique() != 1:
        raise MissingRecordsError(f"steps of {LAYERS} layers, timer {timer}: a shape lacks some")
    return rows


def _difference(rows: pd.DataFrame, counts: pd.Series) -> pd.Series:
    """Shape by shape, how many more `EACH` has than `ONCE`."""
    wide = rows.assign(count=counts).pivot_table(
        index="case", columns="backend", values="count", aggfunc="median", sort=False
    )
    return wide[EACH] - wide[ONCE]


def _saved(rows: pd.DataFrame) -> pd.Series:
    """Shape by shape, the mean over rounds of what `ONCE` saves, in us."""
    found = paired_times(rows, EACH, ONCE)
    return pd.Series([(pd.Series(each) - pd.Series(once)).mean() for _, each, once in found])


def _near(value: float, figure: float) -> bool:
    return figure / ABOUT <= value <= figure * ABOUT


def _unique(ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ids))
