"""How near the chosen chunk is to the best of its sweep; of the records of `fa2_chunks` alone.

A regret is the time of the planner's choice over that of the best chunk swept, less 1: medians over
rounds. The best of many noisy ones is a little too good.
"""

from collections.abc import Iterable

import pandas as pd

from ...core.fa2.choice import Key
from ...kinds.decode.case import DecodeCase
from ...measure.stats import LONG_MARGIN
from ..fa2_plan.tables import EVERY, batch_of
from .learn import cross_validated, summary, sweeps
from .study import SWEPT_SERVED


def swept_cases(kinds: Iterable[str]) -> list[DecodeCase]:
    """The first case of each kind whose chunks the study sweeps."""
    return [next(case for case in SWEPT_SERVED if batch_of(case) == kind) for kind in kinds]


def sweep_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Regrets by kernels and over all: sweeps, mean and worst in %, and how many are over 2 %.

    `crossed` is what the model loses where constants of the other half of the sweeps predict each
    half; left out where there are too few.
    """
    known = sweeps(frame)
    ratios = [(_words(sweep.key), sweep.own_us / sweep.run_us.min()) for sweep in known]
    found = pd.DataFrame(ratios, columns=["key", "ratio"])
    found = pd.concat([found, found.assign(key=EVERY)])
    over = found[found.ratio > 1 + LONG_MARGIN].groupby("key").size()
    table = summary(found).set_index("key")
    table = table.assign(**{"over 2 %": over.reindex(table.index, fill_value=0)})
    if len(crossed := cross_validated(known)):
        told = summary(crossed.assign(key=crossed.key.map(_words))).set_index("key")
        table = table.join(told[["mean", "worst"]].add_prefix("crossed "))
    shares = [name for name in table if name.endswith(("mean", "worst"))]
    table[shares] = (100 * (table[shares] - 1)).round(2)
    table = table.rename(columns={name: f"{name}, %" for name in shares})
    return table.rename_axis("kernels").reset_index()


def _words(key: Key) -> str:
    rows, *layer = (key,) if isinstance(key, int) else key
    of = f", head_dim {layer[0]}, {8 * layer[1]} bits" if layer else ""
    return f"{rows} query rows{of}"
