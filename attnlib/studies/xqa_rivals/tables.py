"""XQA over its rivals, shape by shape, L2 cold; each rival's shapes are judged as one table."""

import pandas as pd

from ...run.frame import FA2, LABELS, decode_rows, over, tally
from .study import COLD, FLASH_ATTENTION, FLASHINFER, LAYERS, SHAPES, XQA

RIVALS = (*FLASHINFER[1:], FLASH_ATTENTION)
_LAYER = {spec: name for name, spec in LAYERS.items()}
_SHAPE = {shape: name for name, shape in SHAPES.items()}


def over_rival(frame: pd.DataFrame, rival: str = FA2) -> pd.DataFrame:
    """Ratio and verdict on XQA: a row per layer, a column per shape; empty where nothing pairs."""
    found = over(decode_rows(frame, timer=COLD[0]), XQA, rival)
    table = pd.DataFrame("", [*LAYERS], [*SHAPES])
    for row in found.itertuples():
        shape = row.case.batch_size, row.case.kv_len, row.case.lengths
        table.loc[_LAYER[row.case.spec], _SHAPE[shape]] = f"{row.ratio:.2f} {row.verdict}"
    return table.rename_axis("XQA over " + LABELS[rival])


def counts(frame: pd.DataFrame) -> pd.DataFrame:
    """The same over each rival, counted by verdict, with one long request apart from the others."""
    rows, parts = decode_rows(frame, timer=COLD[0]), []
    for rival in RIVALS:
        found = over(rows, XQA, rival)
        kind = (found.lengths == "one_long").map({True: ", one long", False: ", others"})
        parts.append(found.assign(pair="XQA over " + LABELS[rival] + kind))
    return tally(pd.concat(parts, ignore_index=True), "pair")
