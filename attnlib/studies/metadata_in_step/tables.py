"""What a call of the metadata takes behind another kernel, behind a copy of itself, in a step."""

import pandas as pd

from ...run.frame import by_design, decode_rows, intervals, over, times
from ..decode_metadata.tables import (
    ALONE,
    DESIGNS,
    FUSED,
    MERGED,
    OPS,
    RIVALS,
    SERIAL,
    SIZES,
    TODAY,
    metadata_rows,
)


def behind(frame: pd.DataFrame) -> pd.DataFrame:
    """Behind a foreign kernel, us: op by op, the newest rival measured, and fused over it; in the
    last columns the same behind a copy."""
    rows = metadata_rows(frame, timer="graph-behind")
    shown, rival = times(rows), [name for name in RIVALS if name in set(rows.backend)][-1]
    shown = shown[["case", *SIZES, OPS, rival, FUSED]].round(2)
    for end, part in (("", rows), (", copy", metadata_rows(frame))):
        found = over(part, FUSED, rival)
        told = {f"{FUSED} / {rival}{end}": found.ratio.round(2), f"interval{end}": intervals(found)}
        told |= {f"rounds{end}": found.rounds, f"{FUSED} is{end}": found.verdict}
        shown = shown.merge(found[["case"]].assign(**told), on="case")
    return shown.drop(columns=["case", "interval, copy", "rounds, copy"])


def overlap(frame: pd.DataFrame) -> pd.DataFrame:
    """Behind a copy of itself, which fused may overlap: without that over with it."""
    rows = metadata_rows(frame)
    designs = times(rows).set_index("case")[sorted(rows.backend.unique())]
    found = over(rows, ALONE, FUSED).join(designs, on="case").sort_values(SIZES, ignore_index=True)
    shown = found.filter(items=[*SIZES, OPS, MERGED, TODAY, ALONE, FUSED]).round(2)
    return shown.assign(**{"without / with": found.ratio.round(2), "interval": intervals(found)})


def step_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Records of whole steps that are ok and not throttled, graph timer, by design."""
    if "layers" not in frame:
        return frame.iloc[:0].assign(layers=None)
    return by_design(decode_rows(frame[frame.layers.notna()]), DESIGNS)


def step_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A step's layers with each design's metadata, us; op by op over fused, and its verdict."""
    rows = step_rows(frame)
    found = over(rows, OPS, FUSED)
    clocks = rows.groupby("case", sort=False).sm_clock_mhz.median().round().astype(int)
    told = {"op by op / fused": found.ratio.round(3), "interval": intervals(found)}
    told |= {"margin, %": (100 * found.margin).round(1), "op by op is": found.verdict}
    told |= {"rounds": found.rounds, "SM MHz": found.case.map(clocks)}
    shown = found[["case"]].assign(**told).merge(times(rows).round(0), on="case")
    keys = ["layers", "batch_size", "page_size", "kv_len", OPS, SERIAL, FUSED]
    return shown.reindex(columns=[*keys, *told])
