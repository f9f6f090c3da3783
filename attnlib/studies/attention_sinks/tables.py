"""A layer with sinks over the same without, and with a window over the same without."""

from dataclasses import replace

import pandas as pd

from ...run.frame import LABELS, decode_rows, intervals, over
from .study import COLD

WITH, WITHOUT = "with", "without"


def price(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """Of `what`, `sinks` or `window`: the ratio of its time to the time without, call by call."""
    rows, found = decode_rows(frame, timer=COLD[0]), []
    for name, own in rows.groupby("backend"):
        has = own.case.map(lambda case: bool(getattr(case.spec, what)))
        none = type(getattr(own.case.iloc[0].spec, what))()
        bare = [replace(case, spec=replace(case.spec, **{what: none})) for case in own.case]
        paired = own.assign(backend=has.map({True: WITH, False: WITHOUT}), case=bare)
        found.append(over(paired, WITH, WITHOUT).assign(kernel=LABELS[name]))
    table = pd.concat(found, ignore_index=True)
    other = "window" if what == "sinks" else "sinks"
    told = {other: [getattr(case.spec, other) for case in table.case]}
    ratio = {"ratio": table.ratio.round(2), "interval": intervals(table), "verdict": table.verdict}
    return table[["kernel", "batch_size", "kv_len"]].assign(**told, **ratio)
