"""What a rule loses that does not measure: its choice's time over the best one's, case by case.

Rules choose for the held-out cases of the study `backend_policy`, or for known ones left out; the
measured policy learns from the other known ones. A rule's regret depends on what else could have
run: two pools of backends.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial

import numpy as np
import pandas as pd

from ...core.gpu import FA2_CTAS, REFERENCE
from ...core.policy.policy import Policy
from ...core.spec import AttnSpec
from ...kinds.decode.case import DecodeCase
from ...kinds.lengths import sample_seq_lens
from ...run.frame import FA2, FA3, LABELS, decode_rows
from ...select import Call, explain
from .learn import case_times, policy_of
from .study import FLASHINFER, HELD_OUT_CASES, KNOWN_CASES, POLICY_RELEASE

FA3_LIBRARY = "fa3"
POOLS = {"FlashInfer": FLASHINFER, "with FA3": (*FLASHINFER, FA3_LIBRARY)}
MEASURED = "measured"
EXPLAINED = {
    "FlashInfer 0.6.3 auto": ("flashinfer==0.6.3", "auto"),
    "FlashInfer 0.6.4 auto": (f"flashinfer=={POLICY_RELEASE}", "auto"),
    "SGLang with FlashInfer": (f"flashinfer=={POLICY_RELEASE}", "sglang"),
}
"""Rule -> library and policy for `select.explain`."""
EVERY_CALL = "FA3, schedule in every call"
"""Not what engines run by default, who make FlashAttention-3's schedule once a step (SGLang 0.5.23
flashattention_backend.py:409-438, but under DP attention; vLLM 0.33.0 flash_attn.py:835-949)."""
ONCE = "FA3, schedule once a step"
FOLDS = 7
LONG, MANY = 16384, 12
"""Tokens of a long request, and requests of a batch, that a table of skewed batches begins at."""
SHOWN = {"mean, %": 2, "worst, %": 1}
"""Decimals of a summary's columns."""

Rule = Callable[[DecodeCase], str]


def regrets(frame: pd.DataFrame, pools: Iterable[str] = POOLS) -> pd.DataFrame:
    """A row per pool, rule and held-out case: the `chosen` backend, its time over the best, less 1.

    A rule is judged in pools with all of its choices; `regret` is NaN where a choice has no time.
    """
    return regrets_of(_held_out(frame), policy_of(frame, KNOWN_CASES), pools)


def left_out(frame: pd.DataFrame, pools: Iterable[str] = POOLS) -> pd.DataFrame:
    """`regrets` of the known cases, each by a policy that learned from six sevenths without it.

    Known cases have one round, so some of it is noise.
    """
    times, found = case_times(decode_rows(frame)), []
    known = [case for case in KNOWN_CASES if case in times]
    parts = [set(known[part::FOLDS]) for part in range(FOLDS)]
    for part in filter(None, parts):
        policy = policy_of(frame, [case for case in known if case not in part])
        found.append(regrets_of({c: times[c] for c in known if c in part}, policy, pools))
    return pd.concat(found, ignore_index=True)


def answers(policy: Policy, layers: Mapping[str, AttnSpec], lens: Sequence[int]) -> pd.DataFrame:
    """What the policy says of named layers for requests of `lens` tokens: of FlashInfer's kernels
    the choice, how sure it is, how far its kin lie, each one's time over the choice's."""
    rows = {}
    for name, spec in layers.items():
        pick = policy.choose(spec, lens, backends=POOLS["FlashInfer"])
        told = {"choice": LABELS[pick.backend], "sure": pick.confidence, "apart": pick.apart}
        rows[name] = told | {LABELS[n]: ratio for n, ratio in pick.slowdown.items()}
    return pd.DataFrame(rows.values(), rows).round(2)


def regrets_of(
    times: dict[DecodeCase, dict[str, float]],
    policy: Policy,
    pools: Iterable[str],
    backends_of: Mapping[str, Sequence[str]] = POOLS,
) -> pd.DataFrame:
    """`regrets` of a policy in batches whose times (us) by backend are known."""
    found = []
    for pool, backends in ((pool, backends_of[pool]) for pool in pools):
        for rule, choose in _rules(policy, backends).items():
            chosen = {case: choose(case) for case in times}
            if set(chosen.values()) <= set(backends):
                found += [
                    (case, name, _lost(times[case], name, backends), pool, rule)
                    for case, name in chosen.items()
                ]
    return pd.DataFrame(found, columns=["case", "chosen", "regret", "pool", "rule"])


def regret_table(lost: pd.DataFrame) -> pd.DataFrame:
    """A row per pool and rule of `regrets` or `left_out`; geometric mean and worst in percent.

    `over 5 %` counts cases that lose more than that.
    """
    groups = lost.groupby(["pool", "rule"], sort=False)
    rows = [{"pool": p, "rule": r} | summary(group.regret) for (p, r), group in groups]
    return pd.DataFrame(rows).sort_values(["pool", "mean, %"], ignore_index=True).round(SHOWN)


def worst_choices(frame: pd.DataFrame, *, pool: str, rule: str = MEASURED) -> pd.DataFrame:
    """The cases in which `rule` loses more than 1 % in `pool`, most first, with all times in us."""
    lost, times = regrets(frame, (pool,)), case_times(decode_rows(frame))
    lost = lost[(lost.rule == rule) & (lost.regret > 0.01)]
    rows = []
    for case, chosen, regret, *_ in lost.sort_values("regret", ascending=False).itertuples(False):
        told = {"case": case.key, "chosen": LABELS[chosen], "regret, %": round(100 * regret, 1)}
        rows.append(told | {LABELS[n]: us for n, us in times[case].items() if n in POOLS[pool]})
    return pd.DataFrame(rows).round(2)


def plan_errors(frame: pd.DataFrame) -> pd.DataFrame:
    """How far measured times lie from those by plan and rates, before near cases correct them.

    Quantiles of measured over predicted, less 1, in percent without sign: a row per backend.
    """
    policy = policy_of(frame)
    rows = []
    for name in policy.backends:
        points = [p for each in policy.points.values() for p in each if name in p.run_us]
        off = np.abs(np.expm1([point.log_error(name) for point in points])) * 100
        told = {"backend": LABELS[name], "cases": len(points), "median, %": np.median(off)}
        rows.append(told | {"95th percentile, %": np.quantile(off, 0.95)})
    return pd.DataFrame(rows).round(1)


def confidence_table(frame: pd.DataFrame, *, pool: str) -> pd.DataFrame:
    """How often a choice of so much confidence was the fastest, in the held-out cases."""
    return confidence_of(_held_out(frame), policy_of(frame, KNOWN_CASES), POOLS[pool])


def confidence_of(
    times: dict[DecodeCase, dict[str, float]], policy: Policy, backends: Sequence[str]
) -> pd.DataFrame:
    """The same of a policy in batches whose times (us) by backend are known."""
    rows = []
    for case, run_us in times.items():
        pick = policy.choose(case.spec, sample_seq_lens(case).tolist(), backends=backends)
        rows.append((pick.confidence, _lost(run_us, pick.backend, backends) == 0))
    found = pd.DataFrame(rows, columns=["confidence", "right"])
    bins = pd.cut(found.confidence, [0.5, 0.9, 0.99, 1.0], labels=["up to 0.9", "to 0.99", "above"])
    counts = found.groupby(bins, observed=False).right.agg(["size", "sum"])
    return counts.rename(columns={"size": "choices", "sum": "fastest"}).reset_index()


def fastest(frame: pd.DataFrame, *, pool: str) -> pd.DataFrame:
    """In how many cases, known and held out, each backend is the fastest: a row per layer."""
    rows = [
        {"heads": case.spec.heads, "group": case.spec.group_size, "page size": case.spec.page_size}
        | {"fastest": LABELS[min((us, n) for n, us in found.items() if n in POOLS[pool])[1]]}
        for case, found in case_times(decode_rows(frame)).items()
    ]
    table = pd.DataFrame(rows)
    wide = pd.crosstab([table.group, table.heads, table["page size"]], table.fastest)
    return wide.rename_axis(columns=None).reset_index()


def one_long_request(frame: pd.DataFrame) -> pd.DataFrame:
    """Batches of one long request among many short ones: fa2's time beside the fastest backend's.

    `splits` is FlashInfer's rule, in a graph and outside: fa2 splits requests while requests x KV
    heads are fewer than two blocks per SM (`PrefillBinarySearchKVChunkSize`, scheduler.cuh:101-129
    of 0.6.4).
    """
    slots, rows = FA2_CTAS * int(frame.num_sms.max()), []
    for case, times in case_times(decode_rows(frame)).items():
        if case.lengths != "skewed" or case.kv_len < LONG or case.batch_size < MANY:
            continue
        best = min(times, key=lambda name: times[name])
        tiles = case.batch_size * case.spec.num_kv_heads
        told = {"heads": case.spec.heads, "batch": case.batch_size, "longest": case.kv_len}
        told |= {"requests x KV heads": tiles, "splits": "yes" if tiles < slots else "no"}
        told |= {"fa2": times.get(FA2, np.nan), "fastest": LABELS[best], "us": times[best]}
        rows.append(told)
    table = pd.DataFrame(rows).sort_values(["requests x KV heads", "longest"])
    return table.assign(ratio=table.fa2 / table.us).round(2).reset_index(drop=True)


def _held_out(frame: pd.DataFrame) -> dict[DecodeCase, dict[str, float]]:
    """Times (us) by backend of the held-out cases that were measured."""
    times = case_times(decode_rows(frame))
    return {case: times[case] for case in HELD_OUT_CASES if case in times}


def _rules(policy: Policy, backends: Sequence[str]) -> dict[str, Rule]:
    return {
        MEASURED: partial(_measured, policy, backends),
        "always fa2": lambda _: FA2,
        "always fa3": lambda _: FA3,
        EVERY_CALL: lambda _: FA3_LIBRARY,
        ONCE: lambda _: "fa3-precomputed",
        **{name: partial(_explained, *asked) for name, asked in EXPLAINED.items()},
    }


def _measured(policy: Policy, backends: Sequence[str], case: DecodeCase) -> str:
    return policy.choose(case.spec, sample_seq_lens(case).tolist(), backends=backends).backend


# Both pools ask, and every table.
@cache
def _explained(library: str, policy: str, case: DecodeCase) -> str:
    call = Call(kv_lens=tuple(sample_seq_lens(case).tolist()), graph=True)
    asked = {"mode": "decode", "gpu": REFERENCE, "library": library, "policy": policy}
    choice = explain(case.spec, call=call, env={}, **asked)
    known = POOLS["with FA3"]
    if choice.ours not in known:
        raise ValueError(f"{library} must choose one of {', '.join(known)}, got {choice.kernel!r}")
    return choice.ours


def summary(lost: pd.Series) -> dict[str, float]:
    """What regrets come to: cases that have one, geometric mean and worst in percent, bad ones."""
    return {
        "cases": lost.count(),
        "mean, %": math.expm1(np.log1p(lost).mean()) * 100,
        "worst, %": lost.max() * 100,
        "over 5 %": int((lost > 0.05).sum()),
    }


def _lost(times: dict[str, float], chosen: str, backends: Sequence[str]) -> float:
    best = min(us for name, us in times.items() if name in backends)
    return times.get(chosen, np.nan) / best - 1
