"""One call over all of a mixed batch, beside one for each of its two parts."""

import pandas as pd

from ...run.frame import decode_rows, intervals, over, times
from .study import DECODE, EAGER, MANY, MIXED, chunk, decodes

TWO = "two calls"
NAMES = dict(zip(MANY, ("fa2", "fa3", "library"), strict=True))
TWICE = {name: f"{name}, {TWO}" for name in NAMES.values()}
BESIDE = dict(zip(MANY, (DECODE[0], *DECODE), strict=True))
"""What decodes where the chunk has a call of its own; beside fa3 that is fa2, as engines do it."""


def mixed_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of mixed batches, and as `TWICE`, in each round, the sum of a kernel's two parts."""
    rows, found = decode_rows(frame, timer=EAGER[0]), []
    us = rows.set_index(["case", "round", "backend"]).run_us
    mine = rows[rows.case.isin([*MIXED])]
    for row in mine.itertuples():
        requests, tokens = MIXED[row.case]
        kernels = {decodes(requests): BESIDE[row.backend], chunk(tokens): row.backend}
        parts = [(case, row.round, name) for case, name in kernels.items()]
        if all(part in us.index for part in parts):
            found.append((row.Index, sum(us[part] for part in parts)))
    mine = mine.assign(backend=mine.backend.map(NAMES))
    two = mine.loc[[place for place, _ in found]].assign(run_us=[us for _, us in found])
    return pd.concat([mine, two.assign(backend=two.backend.map(TWICE))])


def one_or_two(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per kernel and mixed batch: one call and two, us, their ratio, interval, verdict."""
    rows, found = mixed_rows(frame), []
    us = times(rows)
    for name, two in TWICE.items():
        if not {name, two} <= {*us}:
            continue
        table = over(rows, name, two).merge(us[["case", name, two]], on="case")
        sizes = pd.DataFrame([MIXED[case] for case in table.case], columns=["decodes", "chunk"])
        both = {"one call": table[name].round(1), TWO: table[two].round(1)}
        told = {"ratio": table.ratio.round(2), "interval": intervals(table)}
        found.append(sizes.assign(backend=name, **both, **told, verdict=table.verdict))
    order = ["backend", "decodes", "chunk"]
    none = pd.DataFrame(columns=[*order, "one call", TWO, "ratio", "interval", "verdict"])
    return pd.concat(found or [none]).sort_values(order, ignore_index=True)[[*none]]


def findings(frame: pd.DataFrame) -> str:
    """Per backend, in how many batches one call is faster than two, and its ratio's range."""
    lines = []
    for name, own in one_or_two(frame).groupby("backend"):
        words = ", ".join(f"{count} {word}" for word, count in own.verdict.value_counts().items())
        least, middle, most = own.ratio.quantile([0, 0.5, 1])
        lines.append(
            f"{name}: {len(own)} batches, one call is {words}; "
            f"{least:.2f} to {most:.2f} of the time of two, median {middle:.2f}"
        )
    return "\n".join(lines)
