"""The metadata of a decode step: op by op, SGLang's fused kernels, and ours.

The main records repeat one call in a graph. Records of other GPUs of the same study time a call
behind another kernel (`IN_STEP_MACHINE`), and eager calls (`EAGER_MACHINE`). Times are us.
"""

from __future__ import annotations

from itertools import product

import pandas as pd

from ..draw import charts
from ..kinds.metadata.case import MetadataCase
from ..run.frame import good_rows, intervals, over, times
from ..run.study import Grid, Study

IN_STEP_MACHINE = "nvidia-h200-54fb76dd"
EAGER_MACHINE = "nvidia-h100-80gb-hbm3-da6a6c3c"
METADATA = (
    MetadataCase("decode", 1, 1, 8192),
    MetadataCase("decode", 32, 1, 8192),
    MetadataCase("decode", 128, 1, 8192),
    MetadataCase("decode", 512, 1, 8192),
    MetadataCase("decode", 1024, 1, 8192),
    MetadataCase("decode", 2048, 16, 32768),
    MetadataCase("decode", 4096, 16, 32768),
    MetadataCase("decode", 32, 1, 131072),
)
"""(batch, page_size, max_ctx); the second is the case of SGLang's pull request."""
SOURCE_CASE = METADATA[1:2]
METADATA_SWEEP = tuple(
    MetadataCase("decode", batch, page, ctx)
    for batch, page, ctx in product((1, 8, 64, 512, 4096), (1, 16, 256), (128, 2048, 16384, 131072))
)
WINDOWED = tuple(MetadataCase("decode", 32, 2**bits, 8192, swa=True) for bits in range(8))
"""The page sizes of SGLang's tests, with the table of a sliding window."""
OURS, SGLANG = ("metadata-eager", "metadata-fused"), ("sglang-metadata",)
RELEASES = ("0.5.14", "0.5.23")
BEHIND = ("graph-behind", "graph")

STUDY = Study(
    name="decode_metadata",
    question="What does the metadata of a decode step cost?",
    grids=(
        Grid((*METADATA, *METADATA_SWEEP), OURS, rounds=4),
        Grid((*METADATA, *METADATA_SWEEP, *WINDOWED), SGLANG, RELEASES, rounds=4),
        Grid(WINDOWED, OURS[1:], rounds=4),
        Grid(METADATA_SWEEP[::4], (), rounds=4, again=OURS[1:]),
        Grid(METADATA, OURS, timers=BEHIND, rounds=4, again=OURS),
        Grid(METADATA, SGLANG, RELEASES, timers=BEHIND, rounds=4),
        Grid(METADATA, ("metadata-fused-alone",), rounds=4),
        Grid(SOURCE_CASE, OURS, timers=("eager",), rounds=4, isolated=True),
        Grid(SOURCE_CASE, SGLANG, RELEASES, timers=("eager",), rounds=4, isolated=True),
        Grid(METADATA[:6], OURS, timers=BEHIND, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-a9a9b6cc",
    ceilings=("copy",),
)

SIZES = ["batch_size", "page_size", "max_ctx"]
OP_BY_OP, FUSED, ALONE = "op by op", "fused", "fused, no overlap"
MERGED, TODAY, COPY = "SGLang 0.5.14", "SGLang 0.5.23", "vLLM's copy"
"""The fused kernels as SGLang merged them, its newest; vLLM's of page arrays, given the sums."""
DESIGNS = {
    "metadata-eager": OP_BY_OP,
    "metadata-fused": FUSED,
    "metadata-fused-alone": ALONE,
    "sglang-metadata": "SGLang",
    "vllm-metadata": COPY,
}
DESIGNS_SHOWN = (OP_BY_OP, MERGED, TODAY, COPY, ALONE, FUSED)
"""Columns of `design_times`; the release follows the name SGLang."""


def metadata_rows(
    frame: pd.DataFrame, *, timer: str = "graph", windowed: bool = False, builder: str = "decode"
) -> pd.DataFrame:
    """Good rows of a builder and a timer, with a window's page table or without.

    `backend` is the design, so two releases of SGLang are two designs.
    """
    rows = good_rows(frame[(frame.builder == builder) & (frame.swa == windowed)], timer)
    releases = rows.release.map(lambda release: f" {release}" if release else "")
    return rows.assign(backend=rows.backend.map(DESIGNS) + releases)


def design_times(rows: pd.DataFrame) -> pd.DataFrame:
    """Median time of each design per size; fused, without overlap if measured, / SGLang 0.5.23."""
    ours = ALONE if ALONE in set(rows.backend) else FUSED
    ratio = over(rows, ours, TODAY)
    words = {f"{ours} / 0.5.23": ratio.ratio.round(2), "95 % CI": intervals(ratio)}
    judged = ratio[["case", "verdict"]].assign(**words)[["case", *words, "verdict"]]
    shown = times(rows)[["case", *SIZES, *(n for n in DESIGNS_SHOWN if n in set(rows.backend))]]
    table = shown.round(2).merge(judged, on="case", how="left").drop(columns="case")
    return table.sort_values(SIZES, ignore_index=True)


def designs_chart(frame: pd.DataFrame) -> charts.Figure:
    """Time over batch size at page size 1, a panel per context length."""
    rows = metadata_rows(frame)
    rows = rows[(rows.page_size == 1) & rows.case.isin(METADATA_SWEEP)]
    names = (OP_BY_OP, MERGED, TODAY, FUSED)
    return charts.medians(rows, "batch_size", panel="max_ctx", names=names)
