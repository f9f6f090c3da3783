"""What the configured context costs a step's metadata: SGLang, release by release, and ours.

Requests of up to 2,500 tokens; the page table is as wide as `context`. Each kernel is told the
pages that its engine tells it (`studies.metadata.sglang`): 0.5.14 those of the step's longest
request, later ones and ours the whole table's. Ratios are time over time; those of ours are without
its overlap with the call before it, which is its own copy in a graph that repeats one call.
"""

from __future__ import annotations

from itertools import product

import pandas as pd

from ...measure.stats import geometric_mean
from ...run.figures import charts, style
from ...run.frame import intervals, over
from ...run.study import Grid, Study
from .case import MetadataCase
from .decode_metadata import ALONE, MERGED, SGLANG, TODAY, metadata_rows

PAGES = (1, 16, 64)
CONTEXTS = (8192, 32_768, 131_072)
BATCHES = (16, 128)


def _case(page: int, context: int, batch: int) -> MetadataCase:
    return MetadataCase("decode", batch, page, max_ctx=2500, context=context)


CASES = tuple(_case(*sizes) for sizes in product(PAGES, CONTEXTS, BATCHES))
WIDEST = _case(page=1, context=131_072, batch=128)
AGAIN = (
    _case(page=1, context=8192, batch=16),
    WIDEST,
    _case(page=16, context=131_072, batch=16),
    _case(page=64, context=32_768, batch=128),
)
OURS = ("metadata-fused", "metadata-fused-alone")
RELEASES = ("0.5.14", "0.5.16", "0.5.17", "0.5.23")
UNGUARDED, GUARDED = "SGLang 0.5.16", "SGLang 0.5.17"
DRAWN = {
    MERGED: "SGLang 0.5.14",
    UNGUARDED: "SGLang 0.5.16",
    TODAY: "SGLang 0.5.23",
    ALONE: "attnlib, one launch",
}
"""Backends of the chart and their labels; 0.5.17 is as 0.5.23."""
PAIRS = (
    (UNGUARDED, MERGED),
    (GUARDED, UNGUARDED),
    (TODAY, MERGED),
    (ALONE, MERGED),
    (ALONE, UNGUARDED),
    (ALONE, GUARDED),
    (ALONE, TODAY),
)

STUDY = Study(
    name="context_width",
    question="What does the configured context cost the metadata of short requests?",
    grids=(
        Grid(CASES, SGLANG, releases=RELEASES, rounds=2),
        Grid(CASES, OURS, rounds=2),
        Grid(AGAIN, (), rounds=2, again=("metadata-fused",)),
        Grid((WIDEST,), OURS, headline=True),
    ),
    reference_machine="nvidia-h200-7fb603f2",
    bisect_machine="nvidia-h200-7fb603f2",
    ceilings=(),
)


def width_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Time over time, a row per pair of `PAIRS`: over all cases, and at `WIDEST` its verdict."""
    lines = []
    for name, base in PAIRS:
        table = over(metadata_rows(frame), name, base)
        widest = table[table.case == WIDEST]
        line = {
            "time of": name,
            "over": base,
            "cases": len(table),
            "geometric mean": geometric_mean(table.ratio),
            "median": table.ratio.median(),
            "worst": table.ratio.max(),
            "faster": sum(table.verdict == "faster"),
            "slower": sum(table.verdict == "slower"),
            "widest": widest.ratio.iloc[0],
            "95 % CI": intervals(widest, 3)[0],
            "verdict": widest.verdict.iloc[0],
        }
        lines.append(line)
    return pd.DataFrame(lines).round(3)


def width_chart(frame: pd.DataFrame) -> charts.Figure:
    """Time of the metadata of 128 requests over the context: a panel per page size."""
    rows = metadata_rows(frame)
    rows = rows[rows.batch_size == 128]
    figure, axes = charts.panels(
        [f"pages of {page}" for page in PAGES],
        (8.4, 3.2),
        rows,
        ("context, tokens (log)", "us per step (log)"),
        title="Metadata of a decode step: 128 requests of at most 2,500 tokens",
        share_y=True,
    )
    for axis, page in zip(axes, PAGES, strict=True):
        for name, look in style.looks(DRAWN).items():
            of_page = rows[rows.page_size == page]
            part = of_page[of_page.backend == name]
            axis.plot(
                part.groupby("context").run_us.median(),
                color=look.color,
                marker=look.marker,
                label=DRAWN[name],
            )
        style.log_axes(axis, "x", "y")
        axis.set_xticks(CONTEXTS, [f"{context // 1024}k" for context in CONTEXTS])
    axes[0].legend(fontsize=7.5)
    return figure
