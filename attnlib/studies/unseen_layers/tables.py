"""What the policy of `layer_policy` loses in layers that it never saw, beside fixed rules."""

import numpy as np
import pandas as pd

from ...core.policy.policy import Policy
from ...kinds.lengths import sample_seq_lens
from ...run.frame import FA2
from ..backend_policy.learn import advising, case_times
from ..backend_policy.tables import MEASURED, explained, regret_table
from ..layer_policy.study import FLASHINFER, OTHERS, RELEASE

POOLS = {"FlashInfer": FLASHINFER, "with FlashAttention-3": (*FLASHINFER, *OTHERS)}
ONCE = "FA3, schedule once a step"
"""What SGLang and vLLM run on Hopper where nobody says otherwise (16-bit caches)."""
FIXED = {"always fa2": FA2, "always fa3": "flashinfer-fa3", ONCE: OTHERS[1]}


def lost(frame: pd.DataFrame, policy: Policy) -> pd.DataFrame:
    """A row per pool, rule and batch: chosen, regret (NaN where it cannot run), confidence."""
    rows = []
    for case, us in case_times(advising(frame)).items():
        lens = sample_seq_lens(case).tolist()
        for pool, names in POOLS.items():
            able = [name for name in names if name in us and name in policy.backends]
            pick, best = policy.choose(case.spec, lens, backends=able), min(us[n] for n in able)
            told = {"case": case, "pool": pool, "apart": pick.apart, "sure": pick.confidence}
            sglang = explained(f"flashinfer=={RELEASE}", "sglang", case)
            rules = {MEASURED: pick.backend, "SGLang with FlashInfer": sglang} | FIXED
            for rule, name in rules.items():
                if rule == MEASURED or name in names:
                    off = us.get(name, np.nan) / best - 1
                    rows.append({**told, "rule": rule, "chosen": name, "regret": off})
    return pd.DataFrame(rows)


def lost_table(found: pd.DataFrame) -> pd.DataFrame:
    """By pool and rule: batches that it can run, mean, worst and 95th percentile, in percent."""
    high = 100 * found.groupby(["pool", "rule"]).regret.quantile(0.95)
    table = regret_table(found).set_index(["pool", "rule"])
    return table.assign(**{"95th percentile, %": high.round(1)}).reset_index()
