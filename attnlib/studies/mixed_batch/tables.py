"""One call over all of a mixed batch, beside one for each of its two parts."""

import pandas as pd

from ...run.frame import decode_rows, intervals, over, times
from .study import DECODE, EAGER, MANY, MIXED, chunk, decodes

TWO = "two calls"
NAMES = dict(zip(MANY, ("fa2", "fa3", "library"), strict=True))


def mixed_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of mixed batches; of `TWO`, in each round, the sum of the fastest of either part."""
    rows = decode_rows(frame, timer=EAGER[0])
    fastest = (
        rows[rows.backend.isin((*DECODE, *MANY))]
        .groupby(["case", "round"], sort=False)
        .run_us.min()
    )
    found = []
    for row in rows[rows.case.isin([*MIXED]) & (rows.backend == MANY[0])].itertuples():
        requests, tokens = MIXED[row.case]
        parts = [(part, row.round) for part in (decodes(requests), chunk(tokens))]
        if all(part in fastest.index for part in parts):
            found.append((row.Index, sum(fastest[part] for part in parts)))
    two = rows.loc[[place for place, _ in found]].assign(
        backend=TWO, run_us=[us for _, us in found]
    )
    mine = rows[rows.case.isin([*MIXED])]
    return pd.concat([mine.assign(backend=mine.backend.map(NAMES)), two])


def one_or_two(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per backend and mixed batch: one call and two, us, their ratio, interval, verdict."""
    rows, columns = mixed_rows(frame), [*NAMES.values(), TWO]
    us, found = times(rows).reindex(columns=["case", *columns]), []
    for name in NAMES.values():
        table = over(rows, name, TWO).merge(us, on="case")
        sizes = pd.DataFrame([MIXED[case] for case in table.case], columns=["decodes", "chunk"])
        told = {
            "ratio": table.ratio.round(2),
            "interval": intervals(table),
            "verdict": table.verdict,
        }
        both = {"one call": table[name].round(1), TWO: table[TWO].round(1)}
        found.append(sizes.assign(backend=name, **both, **told))
    order = ["backend", "decodes", "chunk"]
    return pd.concat(found).sort_values(order, ignore_index=True)[
        [*order, "one call", TWO, "ratio", "interval", "verdict"]
    ]


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
