"""How near the chosen chunk is to the best of its sweep; of the records of `fa2_chunks` alone.

A loss is the time under the chosen chunk over that under the best one, less 1: medians over rounds,
and the choice is that of `core.gpu.FA2_RATES` among the chunks that were swept. The best of many
noisy ones is a little too good.
"""

from collections.abc import Iterable

import pandas as pd

from ...core.gpu import FA2_RATES
from ...kinds.decode.case import DecodeCase
from ..fa2_plan.tables import EVERY, batch_of
from .learn import LEAST_SWEEPS, Key, by_key, cross_validated, regret, summary, sweeps
from .study import SWEPT_SERVED

LOSS = "loss, %"
MUCH = 0.02
"""A loss above it is told: `measure.stats.MIN_EFFECT`."""


def swept_cases(kinds: Iterable[str]) -> list[DecodeCase]:
    """The first case of each kind whose chunks the study sweeps."""
    return [next(case for case in SWEPT_SERVED if batch_of(case) == kind) for kind in kinds]


def sweep_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per batch swept, worst first: what it is, chosen and best chunk, both times in us."""
    found = regret(sweeps(frame), FA2_RATES)
    cases = found.case.map(lambda case: case.decode)
    found = found.assign(
        batch=cases.map(batch_of),
        heads=[case.spec.heads for case in cases],
        q_len=[case.q_len for case in found.case],
        kernels=found.key.map(_words),
        loss=(100 * (found.ratio - 1)).round(2),
    )
    found = found.sort_values("loss", ascending=False, ignore_index=True)
    names = {"chosen_us": "chosen, us", "best_us": "best, us", "loss": LOSS}
    shown = ["batch", "heads", "q_len", "kernels", "chosen", "best", *names]
    return found[shown].rename(columns=names).round({"chosen, us": 1, "best, us": 1})


def sweep_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Losses by kernels and over all: sweeps, mean and worst in %, and how many lose over 2 %.

    `crossed` is what each half of the sweeps loses by constants of the other half; left out where
    there are too few sweeps.
    """
    known = sweeps(frame)
    found, groups = regret(known, FA2_RATES), by_key(known)
    named = {str(key): _words(key) for key in groups}
    told = [summary(found), summary(found.assign(key=EVERY))]
    table = pd.concat(told, ignore_index=True)
    lost = found.ratio - 1 > MUCH
    over = lost.groupby(found.key.map(str)).sum().to_dict() | {EVERY: lost.sum()}
    table = table.assign(**{"over 2 %": table.key.map(over)})
    if max(map(len, groups.values())) >= 2 * LEAST_SWEEPS:
        crossed = cross_validated(known).set_index("key")
        for name in ("mean", "worst"):
            table[f"crossed {name}"] = table.key.map(crossed[name])
    losses = {name: 100 * (table[name] - 1) for name in table if name.endswith(("mean", "worst"))}
    table = table.assign(**losses, key=table.key.replace(named)).round(2)
    return table.rename(columns={"key": "kernels"} | {name: f"{name}, %" for name in losses})


def _words(key: Key) -> str:
    rows, *layer = (key,) if isinstance(key, int) else key
    of = f", head_dim {layer[0]}, {8 * layer[1]} bits" if layer else ""
    return f"{rows} query rows{of}"
