"""What the policy loses in layers that it never saw, beside fixed rules."""

import numpy as np
import pandas as pd

from ...core.policy.policy import Policy
from ...run.frame import CUDA_CORES
from ..backend_policy.learn import advising, case_times
from ..backend_policy.tables import MEASURED, confidence_of, regret_table, regrets_of, summary
from ..layer_policy.study import FLASHINFER, ONCE

POOLS = {"FlashInfer": FLASHINFER, "with FlashAttention-3": (*FLASHINFER, *ONCE)}


def lost_table(frame: pd.DataFrame, policy: Policy) -> pd.DataFrame:
    """By pool and rule: batches that it can run, mean, worst and 95th percentile, in percent."""
    found = regrets_of(case_times(advising(frame)), policy, POOLS, _known(policy))
    high = 100 * found.groupby(["pool", "rule"]).regret.quantile(0.95)
    table = regret_table(found).set_index(["pool", "rule"])
    return table.assign(**{"95th percentile, %": high.round(1)}).reset_index()


def kind_table(frame: pd.DataFrame, policy: Policy, *, pool: str) -> pd.DataFrame:
    """Where the policy loses: by group size, head_dim and dtypes, what `lost_table` has.

    Also each kind's share of all that is lost (logs of times), in how many batches CUDA cores are
    the fastest of `pool`, and in how many they are chosen.
    """
    times, names = case_times(advising(frame)), _known(policy)
    found = regrets_of(times, policy, [pool], names)
    found = found[found.rule == MEASURED]
    specs = [case.spec for case in found.case]
    told = {"group": [spec.group_size for spec in specs], "head_dim": [s.head_dim for s in specs]}
    told["dtypes"] = [spec.dtypes for spec in specs]
    first = [min(names[pool], key=lambda n: times[case].get(n, np.inf)) for case in found.case]
    found = found.assign(**told, lost=np.log1p(found.regret), first=np.equal(first, CUDA_CORES))
    rows = []
    for kind, part in found.groupby([*told]):
        share = {"of all lost, %": 100 * part.lost.sum() / found.lost.sum()}
        cores = {"CUDA cores": part["first"].sum(), "chosen": (part.chosen == CUDA_CORES).sum()}
        rows.append(dict(zip(told, kind, strict=True)) | summary(part.regret) | share | cores)
    return pd.DataFrame(rows).round({"mean, %": 2, "worst, %": 1, "of all lost, %": 1})


def sure_table(frame: pd.DataFrame, policy: Policy, *, pool: str) -> pd.DataFrame:
    """How often a choice of so much confidence was the fastest of `pool`."""
    return confidence_of(case_times(advising(frame)), policy, _known(policy)[pool])


def _known(policy: Policy) -> dict[str, list[str]]:
    return {pool: [n for n in names if n in policy.backends] for pool, names in POOLS.items()}
