"""XQA or another kernel over its rivals, by shape, L2 cold; each rival's shapes are one table."""

import pandas as pd

from ...run.frame import LABELS, decode_rows, launches, over, tally
from .study import COLD, FLASH_ATTENTION, FLASHINFER, LAYERS, SHAPES, XQA

KERNELS = (*FLASHINFER, FLASH_ATTENTION)
_LAYER = {spec: name for name, spec in LAYERS.items()}
_SHAPE = {shape: name for name, shape in SHAPES.items()}
TILE_TOKENS = 256
"""Of a block of XQA at a time: it has four warps side by side, of 64 tokens each."""


def named(found: pd.DataFrame) -> pd.DataFrame:
    """`found`, a row per case, with the names of its `layer` and `shape`."""
    shapes = zip(found.batch_size, found.kv_len, found.lengths, strict=True)
    layers = [_LAYER[case.spec] for case in found.case]
    return found.assign(layer=layers, shape=[_SHAPE[shape] for shape in shapes])


def pair(kernel: str, rival: str) -> str:
    """`XQA over FlashAttention-3`: of FlashAttention-3 there is one configuration here."""
    return f"{LABELS[kernel]} over {LABELS[rival].partition(',')[0]}"


def counts(frame: pd.DataFrame, kernel: str = XQA) -> pd.DataFrame:
    """The same over each rival, counted by verdict, with one long request apart from the others."""
    rows, parts = decode_rows(frame, timer=COLD[0]), []
    for rival in (name for name in KERNELS if name != kernel):
        found = over(rows, kernel, rival)
        kind = (found.lengths == "one_long").map({True: ", one long", False: ", others"})
        parts.append(found.assign(pair=pair(kernel, rival) + kind))
    there = [part for part in parts if len(part)] or parts[:1]  # An empty one has no floats.
    return tally(pd.concat(there, ignore_index=True), "pair")


def launched(frame: pd.DataFrame, kernel: str) -> pd.DataFrame:
    """Launches of a call of `kernel`, as traced: a row per layer, a column per shape."""
    rows = named(decode_rows(frame, timer=COLD[0]).query("backend == @kernel"))
    table = rows.assign(launches=launches(rows)).pivot_table("launches", "layer", "shape")
    table = table.reindex(LAYERS, columns=[*SHAPES]).astype("Int64")
    return table.rename_axis(f"launches of {LABELS[kernel]}").rename_axis(columns=None)
