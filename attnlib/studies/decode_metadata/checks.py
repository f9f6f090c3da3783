"""Checks of claims about SGLang's fused metadata kernel; the op by op it replaced is our own."""

from collections.abc import Sequence

import pandas as pd

from ...kinds.cases import Case
from ...run.frame import good_rows, launches
from ..decode_metadata_eager.study import SOURCE_CASE
from ..evidence import (
    ABOUT,
    CONFIRMED,
    REFUTED,
    Finding,
    counted,
    figure_word,
    judge_rows,
    needed,
    vote,
)
from .study import METADATA, METADATA_SWEEP, WINDOWED
from .tables import FUSED, MERGED, OPS, SERIAL, TODAY, metadata_records

EAGER = "decode_metadata_eager"
READS = {"speedup_at_source_case": ("decode_metadata", EAGER)}
"""Checks that read more than this study's records."""
FAST_PATH, GENERAL_PATH = "_fused_metadata_kernel_ps1_no_swa", "_fused_metadata_kernel_general"
MANY = (512, 4096)
"""Batches between which a serial prefix sum must show, at a page or less of context a request."""
SHORT_CTX = 128


def speedup_at_source_case(frame: pd.DataFrame, figure: float) -> Finding:
    """Op by op takes `figure` times SGLang's fused kernel at its case, launched eagerly.

    A thousand iterations of a kernel by itself are eager calls; in a graph is told beside it.
    """
    said, values, records = list[str](), list[float](), list[str]()
    for timer, mode in (("graph", "in a graph"), ("eager", "launched eagerly")):
        rows = frame[(frame.study == EAGER) == (timer == "eager")]
        rows = metadata_records(rows, timer=timer)
        own, anew = (
            judge_rows(good_rows(needed(rows, SOURCE_CASE, (OPS, rival)), timer), (OPS, rival))
            for rival in (MERGED, SERIAL)
        )
        values += own.ratios.tolist()
        records += dict.fromkeys((*own.records, *anew.records))
        said.append(f"{anew.ratios[0]:.2f} x {mode}")
    graph, eager = values
    reason = (
        "Iterations of a kernel by itself are probably eager calls, so those decide. "
        "Over the same design written anew: "
        f"{' and '.join(said)}. Our op by op writes the first prefix sum in each call, "
        f"which SGLang wrote once."
    )
    measured = f"{graph:.2f} x in a graph, {eager:.2f} x launched eagerly"
    word = figure_word([eager], figure)
    return Finding(word, reason, measured, records=tuple(dict.fromkeys(records)))


def one_launch(frame: pd.DataFrame) -> Finding:
    """Many launches op by op are one in SGLang's fused kernel."""
    rows = _ran(frame, METADATA, (OPS, MERGED))
    counts = launches(rows)
    many, one = counts[rows.backend == OPS], counts[rows.backend == MERGED]
    measured = f"{many.min():.0f} to {many.max():.0f} launches, then {one.max():.0f}"
    return counted(rows, [*(many > 1), *(one == 1)], "So say {held} traces.", measured)


def fused_kernels(frame: pd.DataFrame, figure: float) -> Finding:
    """So many different kernels ran in the release that has them as merged."""
    rows = _ran(frame, METADATA, (MERGED, TODAY))
    kernels = {name: rows[rows.backend == name].kernels.explode() for name in (MERGED, TODAY)}
    names = {name: sorted({kernel.name for kernel in ran}) for name, ran in kernels.items()}
    word = CONFIRMED if len(names[MERGED]) == figure else REFUTED
    reason = f"{TODAY} runs {len(names[TODAY])}: {', '.join(names[TODAY])}."
    return Finding(word, reason, ", ".join(names[MERGED]), records=tuple(rows.id))


def fast_path_for_page_one(frame: pd.DataFrame) -> Finding:
    """The special kernel runs at page_size 1, the general one elsewhere."""
    rows = _ran(frame, METADATA_SWEEP, (MERGED,))
    expected = rows.page_size.map(lambda page: FAST_PATH if page == 1 else GENERAL_PATH)
    ran = rows.kernels.map(lambda kernels: ", ".join(kernel.name for kernel in kernels))
    says = (
        "So say {held} traces; whether it is faster than the general kernel would be there, none "
        "says."
    )
    return counted(rows, ran == expected, says)


def every_page_size(frame: pd.DataFrame) -> Finding:
    """Both page tables are right, with a window, at every page size of SGLang's tests."""
    rows = needed(metadata_records(frame), WINDOWED, (MERGED,))
    right = (rows.status == "ok") & (rows.oracle_error == 0)
    pages = ", ".join(str(page) for page in sorted(rows.page_size.unique()))
    measured = f"{sum(~right)} wrong of {len(rows)} at page sizes {pages}"
    says = "Of records with a window {held} have each word of both page tables as the oracle."
    return counted(rows, right, says, measured)


def time_grows_with_batch(frame: pd.DataFrame) -> Finding:
    """With short requests SGLang's time grows about as the batch does, a parallel scan's less."""
    cases = [c for c in METADATA_SWEEP if c.max_ctx == SHORT_CTX and c.batch_size in MANY]
    rows = _ran(frame, cases, (MERGED, FUSED))
    growth = MANY[1] / MANY[0]
    settled = rows[~rows.throttled]
    times = settled.pivot_table(
        index=["backend", "page_size"], columns="batch_size", values="run_us"
    )
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


def _ran(frame: pd.DataFrame, cases: Sequence[Case], designs: Sequence[str]) -> pd.DataFrame:
    """Rows that are ok, settled or not: every record has its trace."""
    rows = needed(metadata_records(frame), cases, designs)
    return rows[rows.status == "ok"]
