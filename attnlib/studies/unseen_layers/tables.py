"""What the policy of `layer_policy` loses in layers that it never saw, beside fixed rules."""

import pandas as pd

from ...core.policy.policy import Policy
from ..backend_policy.learn import advising, case_times
from ..backend_policy.tables import confidence_of, regret_table, regrets_of
from ..layer_policy.study import FLASHINFER, OTHERS

POOLS = {"FlashInfer": FLASHINFER, "with FlashAttention-3": (*FLASHINFER, *OTHERS)}


def lost_table(frame: pd.DataFrame, policy: Policy) -> pd.DataFrame:
    """By pool and rule: batches that it can run, mean, worst and 95th percentile, in percent."""
    found = regrets_of(case_times(advising(frame)), policy, POOLS, _known(policy))
    high = 100 * found.groupby(["pool", "rule"]).regret.quantile(0.95)
    table = regret_table(found).set_index(["pool", "rule"])
    return table.assign(**{"95th percentile, %": high.round(1)}).reset_index()


def sure_table(frame: pd.DataFrame, policy: Policy, *, pool: str) -> pd.DataFrame:
    """How often a choice of so much confidence was the fastest of `pool`."""
    return confidence_of(case_times(advising(frame)), policy, _known(policy)[pool])


def _known(policy: Policy) -> dict[str, list[str]]:
    return {pool: [n for n in names if n in policy.backends] for pool, names in POOLS.items()}
