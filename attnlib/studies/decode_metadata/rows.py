"""Rows of metadata studies: every design of a builder.

As in `rows`, nothing is drawn here, and two rows are divided only within a case, round and timer.
`backend` holds the design's name, so that two releases of one library are two designs.
"""

from __future__ import annotations

import pandas as pd

from ...run.frame import decode_rows, good_rows, over

SIZES = ["batch_size", "page_size", "max_ctx"]
OPS, SERIAL, FUSED, ALONE = "op by op", "serial", "fused", "fused, no overlap"
MERGED, TODAY = "SGLang 0.5.14", "SGLang 0.5.23"
"""The fused kernels as SGLang merged them, and its newest."""
RIVALS = (SERIAL, MERGED, TODAY)
DESIGNS = {
    "metadata-eager": OPS,
    "metadata-serial": SERIAL,
    "metadata-fused": FUSED,
    "metadata-fused-alone": ALONE,
    "sglang-metadata": "SGLang",
    "fa3-step-eager": OPS,
    "fa3-step-serial": SERIAL,
    "fa3-step-fused": FUSED,
}


def metadata_rows(
    frame: pd.DataFrame, builder: str = "decode", *, timer: str = "graph"
) -> pd.DataFrame:
    """Records of a builder that are ok and not throttled, of one timer; `backend` is the design."""
    return _named(good_rows(frame[frame.builder == builder], timer)).astype({"swa": bool})


def step_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Records of whole steps that are ok and not throttled, graph timer; `backend` is the design.

    Of a frame that has no step, none.
    """
    if "layers" not in frame:
        return frame.iloc[:0].assign(layers=None)
    return _named(decode_rows(frame[frame.layers.notna()]))


def against_best(rows: pd.DataFrame) -> pd.DataFrame:
    """`FUSED` over the rival that comes closest to it or beats it, case by case, named."""
    there = [name for name in (OPS, *RIVALS) if name in set(rows.backend)]
    found = pd.concat([over(rows, FUSED, name).assign(rival=name) for name in there])
    worst = found.sort_values(["ratio", "rival"], ascending=False).drop_duplicates("case")
    return worst.sort_values(SIZES, kind="stable", ignore_index=True)


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    names = rows.backend.map(DESIGNS) + rows.release.map(lambda r: f" {r}" if r else "")
    return rows.assign(backend=names)
