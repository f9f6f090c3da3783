"""What all metadata in one launch saves of two: by itself, and of the attention of a step."""

import pandas as pd

from ...run import frame as frames
from ...run.frame import decode_rows, intervals, savings_in_words
from .study import ALONE, BEFORE_LAYERS


def savings(frame: pd.DataFrame, pair: tuple[str, str] = ALONE) -> pd.DataFrame:
    """Time with two launches, with one, and saved, us: a row per size; `pair` as in the study."""
    digits = 2 if pair == ALONE else 0
    table = frames.savings(decode_rows(frame), *pair)
    sizes = ["page_size", "batch_size", "kv_len"]
    shown = table[[*sizes, "base_us", "new_us", "saved"]].round(digits)
    shown = shown.rename(columns={"base_us": "two launches", "new_us": "one launch"})
    return shown.assign(interval=intervals(table, digits), rounds=table.rounds)


def findings(frame: pd.DataFrame) -> str:
    """A line by itself, and one before the layers where that was measured."""
    parts = {"alone": ALONE, "before the layers": BEFORE_LAYERS}
    found = {name: frames.savings(decode_rows(frame), *pair) for name, pair in parts.items()}
    return "\n".join(
        f"{name}: {savings_in_words(table)}" for name, table in found.items() if len(table)
    )
