"""What a choice loses: its time over the best one's, less 1 (its regret), batch by batch.

The measured policy is judged by layers that it did not learn from, beside the rules of libraries
and engines. What a rule loses depends on what else could have run: pools of backends.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial

import numpy as np
import pandas as pd

from ...core.gpu import REFERENCE
from ...core.policy.policy import Policy, Prediction, confidence_of
from ...core.spec import AttnSpec
from ...kinds.decode.case import DecodeCase
from ...kinds.lengths import sample_seq_lens
from ...run.frame import CUDA_CORES, FA2, FA3, LABELS
from ...select import Call, explain
from .learn import Taught, advising, case_times, policy_from
from .study import FLASHINFER, ONCE, RELEASE

PRECOMPUTED = ONCE[0]
POOLS = {
    "as released": (FA2, FA3, CUDA_CORES),
    "FlashInfer": FLASHINFER,
    "with FlashAttention-3": (*FLASHINFER, *ONCE),
}
"""FlashInfer's kernels by its own plans, by ours too, and what engines add."""
MEASURED = "measured"
EXPLAINED = {
    "FlashInfer 0.6.3 auto": ("flashinfer==0.6.3", "auto"),
    f"FlashInfer {RELEASE} auto": (f"flashinfer=={RELEASE}", "auto"),
    "SGLang with FlashInfer": (f"flashinfer=={RELEASE}", "sglang"),
}
"""Rule -> library and policy for `select.explain`."""
ALWAYS = {"always fa2": FA2, "always fa3": FA3, "always FlashAttention-3": PRECOMPUTED}
"""FlashAttention-3 as engines run it, its schedule made once a step (SGLang 0.5.23
flashattention_backend.py:409-438, but under DP attention; vLLM 0.33.0 flash_attn.py:835-949)."""
SHOWN = {"mean, %": 2, "95th percentile, %": 1, "worst, %": 1, "of all lost, %": 1}
"""Decimals of a summary's columns."""
SURE = (0.5, 0.7, 0.9, 0.99, 1.0)
"""Ends of the groups of confidence."""

Rule = Callable[[DecodeCase], str]
Times = dict[DecodeCase, dict[str, float]]
"""Microseconds of a batch by backend."""


def regrets(frame: pd.DataFrame, policy: Policy, pools: Collection[str] = POOLS) -> pd.DataFrame:
    """A row per pool, rule and batch of `frame`: the `chosen` backend and its `regret`.

    A rule is judged in pools with all of its choices, by batches of which the pool has a time;
    `regret` is NaN where a choice has none.
    `confidence` is the policy's own, of rules 1. ValueError for a case that no backend can run.
    """
    return _regrets(case_times(advising(frame)), policy, pools)


def left_out(known: Taught, pools: Collection[str] = POOLS) -> pd.DataFrame:
    """`regrets` of each layer's batches by a policy that all other layers taught."""
    found = []
    for spec in dict.fromkeys(case.spec for case in known.times):
        own = {case: us for case, us in known.times.items() if case.spec == spec}
        found.append(_regrets(own, policy_from(known, without=spec), pools))
    return pd.concat(found, ignore_index=True)


def _regrets(times: Times, policy: Policy, pools: Collection[str]) -> pd.DataFrame:
    found, asked = [], {name for pool in pools for name in pool_of(policy, pool)}
    told = {c: policy.predict(c.spec, sample_seq_lens(c), backends=sorted(asked)) for c in times}
    for pool in pools:
        backends = pool_of(policy, pool)
        own = {
            case: {name: by_name[name] for name in backends if name in by_name}
            for case, by_name in told.items()
        }
        if none := [case.key for case, by_name in own.items() if not by_name]:
            raise ValueError(f"{pool} must hold a backend that can run each case, not {none[0]}")
        sure = {case: confidence_of(by_name.values()) for case, by_name in own.items()}
        timed = [case for case, us in times.items() if not us.keys().isdisjoint(backends)]
        for rule, choose in _rules(own).items():
            chosen = {case: choose(case) for case in timed}
            if set(chosen.values()) <= set(backends):
                found += [
                    (case, name, _lost(times[case], name, backends), pool, rule)
                    + (sure[case] if rule == MEASURED else 1.0,)
                    for case, name in chosen.items()
                ]
    columns = ["case", "chosen", "regret", "pool", "rule", "confidence"]
    return pd.DataFrame(found, columns=columns)


def pool_of(policy: Policy, pool: str) -> list[str]:
    """The backends of a pool that the policy knows: a GPU may lack a library."""
    return [name for name in POOLS[pool] if name in policy.backends]


def _own(lost: pd.DataFrame, pool: str) -> pd.DataFrame:
    """Of `regrets` or `left_out` what the policy chose in a pool."""
    return lost[(lost.pool == pool) & (lost.rule == MEASURED)]


def regret_table(lost: pd.DataFrame) -> pd.DataFrame:
    """A row per pool and rule of `regrets` or `left_out`, what they come to in percent.

    `cases` are those with a time of the choice; `over 5 %` counts cases that lose more than that.
    """
    groups = lost.groupby(["pool", "rule"], sort=False)
    rows = [{"pool": p, "rule": r} | summary(group.regret) for (p, r), group in groups]
    table = pd.DataFrame(rows).sort_values("mean, %").round(SHOWN)
    return pd.concat([table[table.pool == pool] for pool in POOLS], ignore_index=True)


def kind_table(lost: pd.DataFrame, *, pool: str) -> pd.DataFrame:
    """Where the policy loses: by group size, head_dim and dtypes, what `regret_table` has.

    Also each kind's share of all that is lost (logs of times), and in how many batches CUDA cores
    are chosen.
    """
    found = _own(lost, pool)
    specs = [case.spec for case in found.case]
    told = {"group": [spec.group_size for spec in specs], "head_dim": [s.head_dim for s in specs]}
    told["dtypes"] = [spec.dtypes for spec in specs]
    found, rows = found.assign(**told, lost=np.log1p(found.regret)), []
    for kind, part in found.groupby([*told]):
        share = {"of all lost, %": 100 * part.lost.sum() / found.lost.sum()}
        cores = {"CUDA cores": (part.chosen == CUDA_CORES).sum()}
        rows.append(dict(zip(told, kind, strict=True)) | summary(part.regret) | share | cores)
    return pd.DataFrame(rows).round(SHOWN)


def worst_choices(times: Times, lost: pd.DataFrame, *, pool: str) -> pd.DataFrame:
    """The ten batches in which the policy loses most in `pool`, of at least 5 %, with all times in
    us."""
    found, rows = _own(lost, pool), []
    most = found[found.regret > 0.05].nlargest(10, "regret")
    for case, chosen, regret, *_ in most.itertuples(False):
        told = {"case": case.key, "chosen": LABELS[chosen], "regret, %": round(100 * regret, 1)}
        rows.append(told | {LABELS[n]: us for n, us in times[case].items() if n in POOLS[pool]})
    return pd.DataFrame(rows).round(2)


def answers(policy: Policy, layers: Mapping[str, AttnSpec], lens: Sequence[int]) -> pd.DataFrame:
    """What the policy says of named layers for requests of `lens` tokens: of FlashInfer's kernels
    the choice, how sure it is, how far its kin lie, each one's time over the choice's."""
    rows = {}
    for name, spec in layers.items():
        pick = policy.choose(spec, lens, backends=pool_of(policy, "FlashInfer"))
        told = {"choice": LABELS[pick.backend], "sure": pick.confidence, "apart": pick.apart}
        rows[name] = told | {LABELS[n]: ratio for n, ratio in pick.slowdown.items()}
    return pd.DataFrame(rows.values(), rows).round(2)


def plan_errors(policy: Policy) -> pd.DataFrame:
    """How far measured times lie from those by plan and rates, before near cases correct them.

    Quantiles of measured over predicted, less 1, in percent without sign: a row per backend.
    """
    rows = []
    for name in policy.backends:
        points = [p for each in policy.points.values() for p in each if name in p.run_us]
        off = np.abs(np.expm1([point.log_error(name) for point in points])) * 100
        told = {"backend": LABELS[name], "cases": len(points), "median, %": np.median(off)}
        rows.append(told | {"95th percentile, %": np.quantile(off, 0.95)})
    return pd.DataFrame(rows).round(1)


def confidence_table(lost: pd.DataFrame, *, pool: str) -> pd.DataFrame:
    """How often a choice of so much confidence, with a time, was the fastest of `pool`."""
    found = _own(lost, pool).dropna(subset="regret")
    bins = pd.cut(found.confidence, SURE, labels=[f"up to {high}" for high in SURE[1:]])
    counts = (found.regret == 0).groupby(bins, observed=False).agg(["size", "sum"])
    return counts.rename(columns={"size": "choices", "sum": "fastest"}).reset_index()


def fastest(times: Times, *, pool: str) -> pd.DataFrame:
    """In how many batches each backend is the fastest: a row per group, head_dim and dtypes."""
    rows = [
        {"group": spec.group_size, "head_dim": spec.head_dim, "dtypes": spec.dtypes}
        | {"fastest": LABELS[min((us, n) for n, us in found.items() if n in POOLS[pool])[1]]}
        for spec, found in ((case.spec, found) for case, found in times.items())
    ]
    table = pd.DataFrame(rows)
    kinds = [table[name] for name in ("group", "head_dim", "dtypes")]
    wide = pd.crosstab(kinds, table["fastest"])
    return wide.rename_axis(columns=None).reset_index()


def _rules(told: Mapping[DecodeCase, Mapping[str, Prediction]]) -> dict[str, Rule]:
    def measured(case: DecodeCase) -> str:
        return min(told[case], key=lambda name: told[case][name].us)

    always = {rule: partial(_always, name) for rule, name in ALWAYS.items()}
    explained = {name: partial(_explained, *asked) for name, asked in EXPLAINED.items()}
    return {MEASURED: measured, **always, **explained}


def _always(name: str, _: DecodeCase) -> str:
    return name


# All pools ask, and every table.
@cache
def _explained(library: str, policy: str, case: DecodeCase) -> str:
    call = Call(kv_lens=tuple(sample_seq_lens(case).tolist()), graph=True)
    asked = {"mode": "decode", "gpu": REFERENCE, "library": library, "policy": policy}
    choice = explain(case.spec, call=call, env={}, **asked)
    known = POOLS["FlashInfer"]
    if choice.ours not in known:
        raise ValueError(f"{library} must choose one of {', '.join(known)}, got {choice.kernel!r}")
    return choice.ours


def summary(lost: pd.Series) -> dict[str, float]:
    """What regrets come to: cases that have one, geometric mean and worst in percent, bad ones."""
    return {
        "cases": lost.count(),
        "mean, %": math.expm1(np.log1p(lost).mean()) * 100,
        "95th percentile, %": lost.quantile(0.95) * 100,
        "worst, %": lost.max() * 100,
        "over 5 %": int((lost > 0.05).sum()),
    }


def _lost(times: dict[str, float], chosen: str, backends: Sequence[str]) -> float:
    best = min(us for name, us in times.items() if name in backends)
    return times.get(chosen, np.nan) / best - 1
