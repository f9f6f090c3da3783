"""Checks of claims about FA3's schedule, made once per step in place of once per layer."""

import pandas as pd

from ...run.frame import decode_rows, launches, whole_counts
from ..evidence import Finding, MissingRecordsError, counted, figure_word, near, vote
from .tables import EACH, ONCE, savings

LAYERS, CONTEXT = 64, 8192
KERNEL = "prepare_varlen_num_blocks"


def launches_saved(frame: pd.DataFrame, figure: float) -> Finding:
    """A step of 64 layers has `figure` prepare kernels fewer when the schedule is made once."""
    rows = _steps(frame)
    saved = _difference(rows, launches(rows))
    prepares = _difference(rows, launches(rows, KERNEL))
    held = int((prepares == figure).sum())
    reason = (
        f"{KERNEL} falls by {figure:g} in {held} of {len(prepares)} shapes. All launches of the "
        f"step fall by {saved.min():.0f} to {saved.max():.0f}: where requests are not split, each "
        f"layer clears the schedule's semaphore with a launch of its own."
    )
    measured = f"{prepares.min():.0f} to {prepares.max():.0f} of {KERNEL} fewer"
    return Finding(vote(held, len(saved) - held), reason, measured, records=tuple(rows.id))


def microseconds_saved(frame: pd.DataFrame, figure: float) -> Finding:
    """One request's step of 64 layers in a graph saves `figure` us: paired differences of rounds.

    One request of up to 8,192 tokens is the case whose throughput the source tells.
    """
    rows, eager = _steps(frame), _steps(frame, timer="eager")
    most = savings(rows).saved.max()
    rows = rows[(rows.batch_size == 1) & (rows.kv_len <= CONTEXT)]
    saved, outside = savings(rows).saved, savings(eager, timer="eager")
    sure = (outside.verdict != "ambiguous").sum()
    held = near(saved, figure)
    low, middle, high = saved.quantile([0, 0.5, 1])
    reason = (
        f"One request of up to {CONTEXT:,} tokens is its case: {held} of {len(saved)} shapes are "
        f"within a quarter of {figure:g} us; any batch saves up to {most:.0f}. Launched eagerly "
        f"{sure} of {len(outside)} shapes differ beyond doubt. The attention of one GPU of four, "
        f"nothing else of a step."
    )
    measured = f"{low:.0f} to {high:.0f} us, median {middle:.0f}"
    word = figure_word(saved.tolist(), figure)
    return Finding(word, reason, measured, middle, low, high, (*rows.id, *eager.id))


def no_layer_prepares(frame: pd.DataFrame) -> Finding:
    """With the schedule made once, a step has one prepare kernel, whatever its layers."""
    rows = decode_rows(frame)
    rows = rows[rows.backend == ONCE]
    if rows.empty:
        raise MissingRecordsError(f"{ONCE} has no record that is ok")
    layers = ", ".join(f"{n:.0f}" for n in sorted(rows.layers.unique()))
    says = f"{{held}} traces of steps of {layers} layers have one {KERNEL}."
    return counted(rows, launches(rows, KERNEL) == 1, says, "1 a step")


def _steps(frame: pd.DataFrame, *, timer: str = "graph") -> pd.DataFrame:
    """Steps that are ok, settled or not: every record has its trace."""
    rows = frame[frame.backend.isin((EACH, ONCE)) & (frame.layers == LAYERS) & ~frame.repeat]
    rows = whole_counts(rows[(rows.timer == timer) & (rows.status == "ok")])
    if rows.empty or rows.groupby(["case", "backend"], sort=False).size().nunique() != 1:
        raise MissingRecordsError(f"steps of {LAYERS} layers, timer {timer}: a shape lacks some")
    return rows


def _difference(rows: pd.DataFrame, counts: pd.Series) -> pd.Series:
    """Shape by shape, how many more `EACH` has than `ONCE`."""
    wide = rows.assign(count=counts).pivot_table(
        index="case", columns="backend", values="count", aggfunc="median", sort=False
    )
    return wide[EACH] - wide[ONCE]
