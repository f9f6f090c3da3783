"""What the configured context costs a step's metadata: SGLang, release by release, and ours.

Requests of up to 2,500 tokens; the page table is as wide as `context`. Each kernel is told the
pages that its engine tells it (`kinds.metadata.sglang`): 0.5.14 those of the step's longest
request, later ones and ours the whole table's. Ratios are time over time; those of ours are without
its overlap with the call before it, which is its own copy in a graph that repeats one call.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd

from ..draw import charts
from ..kinds.metadata.case import MetadataCase
from ..run.frame import intervals, over
from ..run.study import Grid, Study
from .decode_metadata import ALONE, FUSED, MERGED, SGLANG, TODAY, metadata_rows

PAGES, CONTEXTS, BATCHES = (1, 16, 64), (8192, 32_768, 131_072), (16, 128)
CASES = tuple(
    MetadataCase("decode", batch, page, 2500, context=context)
    for page, context, batch in product(PAGES, CONTEXTS, BATCHES)
)
WIDEST = MetadataCase("decode", 128, 1, 2500, context=131_072)
OURS = ("metadata-fused", "metadata-fused-alone")
RELEASES = ("0.5.14", "0.5.16", "0.5.17", "0.5.23")
UNGUARDED, GUARDED = "SGLang 0.5.16", "SGLang 0.5.17"
SGLANGS = (MERGED, UNGUARDED, GUARDED, TODAY)
NAMES = (*SGLANGS, ALONE, FUSED)
CHANGES = ((UNGUARDED, MERGED), (GUARDED, UNGUARDED), (TODAY, MERGED))
PAIRS = (*CHANGES, *((ALONE, name) for name in SGLANGS))

STUDY = Study(
    name="context_width",
    question="What does the configured context cost the metadata of short requests?",
    grids=(
        Grid(CASES, SGLANG, RELEASES, rounds=2),
        Grid(CASES, OURS, rounds=2),
        Grid(CASES[::5], (), rounds=2, again=OURS[:1]),
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
        middle = {"geometric mean": np.exp(np.log(table.ratio).mean())}
        middle |= {"median": table.ratio.median(), "worst": table.ratio.max()}
        counts = {word: int((table.verdict == word).sum()) for word in ("faster", "slower")}
        line = {"time of": name, "over": base, "cases": len(table), **middle, **counts}
        line |= {"widest": widest.ratio.iloc[0], "95 % CI": intervals(widest, 3)[0]}
        lines.append(line | {"verdict": widest.verdict.iloc[0]})
    return pd.DataFrame(lines).round(3)


def width_chart(frame: pd.DataFrame) -> charts.Figure:
    """Time of 128 requests over the context, a panel per page size."""
    rows = metadata_rows(frame)
    return charts.medians(rows[rows.batch_size == 128], "context", panel="page_size", names=NAMES)
