"""Fixed splits over those that the library chooses, call by call."""

import pandas as pd

from ...run.frame import LABELS, decode_rows, intervals, over, times
from .study import CAPPED, COLD, FIXED, FREE, FREE_3, ONE

NO_SPLITS = {FIXED: "fa2, no splits"}  # in a graph; planned for eager it has fixed ones
PAIRS = ((FIXED, FREE), (CAPPED, FREE_3), (ONE, FREE_3))


def price(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per call and rule: times (us) by it and `free`, their ratio, interval, verdict."""
    rows, found = decode_rows(frame, timer=COLD[0]), []
    us = times(rows)
    for fixed, free in PAIRS:
        if not {fixed, free} <= {*rows.backend}:
            continue
        table = over(rows, fixed, free).merge(us[["case", fixed, free]], on="case")
        told = {"by rule": table[fixed].round(1), "free": table[free].round(1)}
        ratio = {"ratio": table.ratio.round(2), "interval": intervals(table)}
        shown = table[["heads", "batch_size", "kv_len", "lengths"]].assign(**told, **ratio)
        found.append(shown.assign(verdict=table.verdict, kernel=(LABELS | NO_SPLITS)[fixed]))
    table = pd.concat(found, ignore_index=True)
    return table[["kernel", *table.columns.drop("kernel")]]
