"""The metadata of a decode step: op by op, SGLang's fused kernels, and ours.

The main records repeat one call in a graph. Records of other GPUs of the same study time a call
behind another kernel (`IN_STEP_MACHINE`), and eager calls (`EAGER_MACHINE`). Times are us.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import pandas as pd

from ...run.frame import good_rows, intervals, over, times
from ...run.study import Grid, Study
from .case import MetadataCase

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
_SHORT = [case for case in METADATA if case.max_ctx <= 32768]
LIVE = tuple(case for case in _SHORT if case.batch_size < 4096)
SOURCE_CASE = (MetadataCase("decode", 32, 1, 8192),)

SWEEP_BATCHES = (1, 8, 64, 512, 4096)
SWEEP_PAGES = (1, 16, 256)
SWEEP_CONTEXTS = (128, 2048, 16384, 131072)
_SIZES = product(SWEEP_BATCHES, SWEEP_PAGES, SWEEP_CONTEXTS)
METADATA_SWEEP = tuple(MetadataCase("decode", *sizes) for sizes in _SIZES)
DESIGN_CASES = (*METADATA, *METADATA_SWEEP)
SHORTEST = tuple(case for case in METADATA_SWEEP if case.max_ctx == 128)
WINDOWED = tuple(
    MetadataCase("decode", batch_size=32, page_size=page, max_ctx=8192, swa=True)
    for page in (1, 2, 4, 8, 16, 32, 64, 128)
)
"""The page sizes of SGLang's tests, with the table of a sliding window."""
EAGER_OURS, FUSED_OURS = "metadata-eager", "metadata-fused"
OURS = (EAGER_OURS, FUSED_OURS)
SGLANG = ("sglang-metadata",)
RELEASES = ("0.5.14", "0.5.23")
BEHIND = ("graph-behind", "graph")
EAGER = ("eager",)
_sglang = partial(Grid, backends=SGLANG, releases=RELEASES, rounds=4)

STUDY = Study(
    name="decode_metadata",
    question="What does the metadata of a decode step cost?",
    grids=(
        Grid(DESIGN_CASES, OURS, rounds=4),
        _sglang((*DESIGN_CASES, *WINDOWED)),
        Grid(WINDOWED, (FUSED_OURS,), rounds=4),
        Grid(SHORTEST, (), rounds=4, again=(FUSED_OURS,)),
        Grid(METADATA, OURS, timers=BEHIND, rounds=4, again=OURS),
        _sglang(METADATA, timers=BEHIND),
        Grid(METADATA, ("metadata-fused-alone",), rounds=4),
        Grid(SOURCE_CASE, OURS, timers=EAGER, rounds=4, isolated=True),
        _sglang(SOURCE_CASE, timers=EAGER, isolated=True),
        Grid(LIVE, OURS, timers=BEHIND, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-a9a9b6cc",
    ceilings=("copy",),
)

SIZES = ["batch_size", "page_size", "max_ctx"]
OP_BY_OP, FUSED, ALONE = "op by op", "fused", "fused, no overlap"
MERGED, TODAY = "SGLang 0.5.14", "SGLang 0.5.23"
"""The fused kernels as SGLang merged them, and its newest."""
DESIGNS = {
    "metadata-eager": OP_BY_OP,
    "metadata-fused": FUSED,
    "metadata-fused-alone": ALONE,
    "sglang-metadata": "SGLang",
}
WORDS = {
    "batch_size": "requests",
    "page_size": "page size",
    "max_ctx": "longest, tokens",
    FUSED: "attnlib",
    ALONE: "attnlib, no overlap",
    f"{FUSED} / 0.5.23": "attnlib / 0.5.23",
    f"{ALONE} / 0.5.23": "attnlib, no overlap / 0.5.23",
}
"""Columns as a reader wants them."""
DESIGNS_SHOWN = (OP_BY_OP, MERGED, TODAY, ALONE, FUSED)
"""Columns of `design_times`; the release follows the name SGLang."""


def metadata_rows(
    frame: pd.DataFrame,
    *,
    timer: str = "graph",
    windowed: bool = False,
    builder: str = "decode",
) -> pd.DataFrame:
    """Good rows of a builder and a timer, with a window's page table or without.

    `backend` is the design, so two releases of SGLang are two designs. Records of a design that is
    measured no more are left out.
    """
    is_built = (frame.builder == builder) & (frame.swa == windowed)
    is_design = frame.backend.isin(DESIGNS)
    rows = good_rows(frame[is_built & is_design], timer)
    designs = []
    for row in rows.itertuples():
        design = DESIGNS[row.backend]
        designs.append(f"{design} {row.release}" if row.release else design)
    return rows.assign(backend=designs)


def design_times(rows: pd.DataFrame) -> pd.DataFrame:
    """Median us of each design per size; ours, without overlap if measured, / SGLang 0.5.23."""
    measured = set(rows.backend)
    ours = ALONE if ALONE in measured else FUSED
    ratio = over(rows, ours, TODAY)
    judged = pd.DataFrame(
        {
            "case": ratio.case,
            f"{ours} / 0.5.23": ratio.ratio.round(2),
            "95 % CI": intervals(ratio),
            "verdict": ratio.verdict,
        }
    )
    designs = [name for name in DESIGNS_SHOWN if name in measured]
    shown = times(rows)[["case", *SIZES, *designs]].round(2)
    table = shown.merge(judged, on="case", how="left")
    table = table.sort_values(SIZES, ignore_index=True)
    return table.drop(columns="case").rename(columns=WORDS)
