"""What all metadata in one launch saves of two: by itself, and of the attention of a step."""

import pandas as pd

from ...run.frame import decode_rows, gaps, intervals, told_gaps
from .study import ALONE, BEFORE_LAYERS


def savings(frame: pd.DataFrame, pair: tuple[str, str] = ALONE) -> pd.DataFrame:
    """Time with two launches, with one, and saved, us: a row per size; `pair` as in the study."""
    digits = 2 if pair == ALONE else 0
    table = gaps(decode_rows(frame), *pair)
    shown = table[["page_size", "batch_size", "kv_len", *pair, "saved"]].round(digits)
    shown = shown.rename(columns=dict(zip(pair, ("two launches", "one launch"), strict=True)))
    return shown.assign(interval=intervals(table, digits), rounds=table.rounds)


def findings(frame: pd.DataFrame) -> str:
    """A line by itself, and one before the layers where that was measured."""
    parts = {"alone": ALONE, "before the layers": BEFORE_LAYERS}
    found = {name: gaps(decode_rows(frame), *pair) for name, pair in parts.items()}
    return "\n".join(f"{name}: {told_gaps(table)}" for name, table in found.items() if len(table))
