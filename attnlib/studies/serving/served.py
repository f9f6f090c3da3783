"""Does a fix reach the user of a loaded server? Tokens per second and times between tokens.

A ratio is the time of `arm` over that of `base`, round by round: below 1 `arm` is faster. Time per
token is the inverse of tokens per second. Each round has a fresh server for each arm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from ...core.call_text import Lens
from ...measure.stats import judge_ratios, judge_savings
from ...run.figures import charts, style
from ...run.frame import good_rows, require_comparable
from ...run.study import Study
from ..splits.traffic import batches
from .case import NEW, ServingCase
from .measure import TIMER

STUDY = Study(
    name="served",
    question="Does a fix reach the user of a loaded server, at the 50th and the 99th percentile?",
    retired="its servers are started by `python -m attnlib serve`; records load with attnlib.load",
)
LLAMA = "llama-3.1-8b"
FEW_LAYERS = "llama-3.1-8b-8-layers"
DEEPSEEK = "deepseek-v3-8-layers"
NOW = "sglang"
BOUNDED = "sglang splits=bounded"
EAGER = "sglang metadata=eager"
FA2 = "sglang --attention-backend flashinfer"
FA3 = "sglang decode=fa3 --attention-backend flashinfer"
VLLM = "vllm"


def _load(model: str, prompts: Sequence[int], output: int, turns: int = 1) -> ServingCase:
    """Clients with these prompts, in the prefix cache."""
    return ServingCase(
        model=model,
        **Lens.of(prompts).fields,
        output_len=output,
        turns=turns,
    )


def _traffic(trace: str, in_flight: int) -> tuple[int, ...]:
    """The first decode batch of a trace with so many requests."""
    for batch in batches():
        if (batch.trace, batch.in_flight) == (trace, in_flight):
            return batch.tokens
    raise ValueError(f"trace must be in data/traffic, got {trace!r} with {in_flight}")


_KIMI = _traffic("kimi-conversation", 32)
_LONG = (100_000, *[512] * 40)
CONVERSATION = (
    _load(DEEPSEEK, _KIMI, 768),
    _load(DEEPSEEK, _traffic("azure-conversation", 64), 512),
)
"""Decode batches of real conversations; no request ends while tokens are counted."""
CLOSED = (_load(DEEPSEEK, _KIMI, 256, 3),)
"""Requests end, and others begin."""
OPEN = (
    replace(CLOSED[0], load=60),
    replace(CLOSED[0], load=90),
)
ONE_LONG = (
    _load(LLAMA, _LONG, 320),
    _load(LLAMA, _LONG, 256, 3),
)
LATE = (replace(ONE_LONG[0], output_len=380, late_s=1),)
"""The long request begins while the others are served."""
ONE_LONG_MLA = (_load(DEEPSEEK, (65_536, *[2048] * 31), 512),)
CONTROLS = (
    _load(DEEPSEEK, [2048] * 64, 512),
    _load(LLAMA, [512] * 40, 320),
)
"""Requests that are alike: both caps allow the same splits."""
FLASHINFER = (
    _load(FEW_LAYERS, [8192] * 16, 256),
    _load(FEW_LAYERS, [8192] * 16, 128, 3),
)
BEST = (replace(_load(LLAMA, [128] * 32, 128), prompts=NEW),)
WORST = (replace(_load(LLAMA, [64] * 32, 64), prompts=NEW),)
"""The rows of #20778's table with the largest gain, and with a loss."""
METRICS = {
    "time per token": "us_per_token",
    "ITL p50": "itl_p50_us",
    "ITL p90": "itl_p90_us",
    "ITL p99": "itl_p99_us",
    "TTFT p50": "ttft_p50_us",
    "request": "us_per_request",
}
"""What is compared -> its column, in microseconds."""
COLUMNS = [
    "case",
    "arm",
    "base",
    "metric",
    "base_ms",
    "arm_ms",
    "ratio",
    "low",
    "high",
    "rounds",
    "verdict",
]


def compared(
    frame: pd.DataFrame,
    pairs: Sequence[tuple[str, str]],
    *,
    metrics: Sequence[str] = tuple(METRICS),
    not_slower: float = 0.0,
) -> pd.DataFrame:
    """`arm` over `base` of each pair (backends of the records), a row per case and metric.

    Columns: `COLUMNS`; times in ms, medians over the rounds that both have. All rows are judged as
    one table (`judge_ratios`, which has `not_slower`).
    """
    lines = []
    times = []
    for metric in metrics:
        for pair in _paired(frame, pairs, METRICS[metric]):
            times.append((pair.arm_us, pair.base_us))
            line = {
                "case": pair.case,
                "arm": pair.arm,
                "base": pair.base,
                "metric": metric,
                "base_ms": pair.base_us.median() / 1e3,
                "arm_ms": pair.arm_us.median() / 1e3,
            }
            lines.append(line)
    judged = pd.DataFrame(judge_ratios(times, not_slower=not_slower))
    return pd.DataFrame(lines).join(judged).reindex(columns=COLUMNS)


def saved(
    frame: pd.DataFrame,
    pairs: Sequence[tuple[str, str]],
    metric: str,
) -> pd.DataFrame:
    """What `arm` saves of `base`, in percent, a row per case and pair; all judged as one table.

    Columns: case, arm, base, saved, low, high, rounds and verdict, which is `faster` or `slower`
    where the interval excludes 0, whatever its size.
    """
    found = list(_paired(frame, pairs, METRICS[metric]))
    judged = judge_savings([(pair.base_us, pair.arm_us) for pair in found])
    lines = []
    for pair, saving in zip(found, judged, strict=True):
        percent = 100 / pair.base_us.mean()
        line = {
            "case": pair.case,
            "arm": pair.arm,
            "base": pair.base,
            "saved": percent * saving.saved,
            "low": percent * saving.low,
            "high": percent * saving.high,
            "rounds": saving.rounds,
            "verdict": saving.verdict,
        }
        lines.append(line)
    return pd.DataFrame(lines)


class _Pair(NamedTuple):
    """Two arms at a case, round by round."""

    case: ServingCase
    arm: str
    base: str
    arm_us: pd.Series
    base_us: pd.Series


def _paired(
    frame: pd.DataFrame,
    pairs: Sequence[tuple[str, str]],
    column: str,
) -> Iterator[_Pair]:
    """The rounds that both arms of a pair have, case by case."""
    rows = served_rows(frame)
    for case in dict.fromkeys(rows.case):
        of_case = rows[rows.case == case]
        for arm, base in pairs:
            both = of_case[of_case.backend.isin((arm, base))]
            require_comparable(both)
            wide = both.pivot(index="round", columns="backend", values=column)
            wide = wide.reindex(columns=[arm, base]).dropna()
            if len(wide):
                yield _Pair(case, arm, base, wide[arm], wide[base])


def served_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The records of servers that count, with two columns more: `us_per_token`, the time in which
    the server makes one token, and `us_per_request`, the median life of a request."""
    rows = good_rows(frame, TIMER)
    if rows.empty:
        return rows.assign(us_per_token=[], us_per_request=[])
    lives = [
        float(np.median(np.subtract(row.ended_us, row.started_us))) for row in rows.itertuples()
    ]
    return rows.assign(
        us_per_token=1e6 / rows.tokens_per_s,
        us_per_request=lives,
    )


def throughput(frame: pd.DataFrame) -> pd.DataFrame:
    """Tokens per second, median over rounds: a row per case, a column per arm."""
    rows = served_rows(frame)
    table = rows.pivot_table(
        values="tokens_per_s",
        index="case",
        columns="backend",
        aggfunc="median",
        sort=False,
    )
    return table.reset_index()


def tokens_over_time(row: pd.Series) -> pd.DataFrame:
    """Of one record: when a token came (s) and the time since the one before it (ms)."""
    return pd.DataFrame(
        {
            "at_s": np.divide(row.token_at_us, 1e6),
            "itl_ms": np.divide(row.steps_us, 1e3),
        }
    )


def requests_of(row: pd.Series) -> pd.DataFrame:
    """Of one record: a row per request, its tokens and its life in seconds of the load."""
    return pd.DataFrame(
        {
            "prompt": row.prompt,
            "output": row.output,
            "started_s": np.divide(row.started_us, 1e6),
            "first_s": np.divide(row.first_us, 1e6),
            "ended_s": np.divide(row.ended_us, 1e6),
        }
    )


def life_chart(frame: pd.DataFrame, case: ServingCase, arms: Sequence[str]) -> charts.Figure:
    """Time between tokens over a load, a panel per arm; the life of the longest request is shaded.

    The first round of each arm; a dot is a token, and only some are drawn (`measure.MOST_SAMPLES`).
    """
    rows = served_rows(frame)
    rows = rows[(rows.case == case) & rows.backend.isin(arms)]
    drawn = rows.sort_values("round").groupby("backend").first().reindex(arms)
    words = ("seconds after the load began", "time between two tokens, ms")
    size = (3.6 * len(arms), 3.0)
    figure, axes = charts.panels(arms, size, rows, words, share_y=True)
    for axis, arm in zip(axes, arms, strict=True):
        row = drawn.loc[arm]
        tokens = tokens_over_time(row)
        requests = requests_of(row)
        longest = requests.loc[requests.prompt.idxmax()]
        axis.axvspan(
            longest.first_s,
            longest.ended_s,
            color="0.9",
            label=f"a request of {longest.prompt:,.0f} tokens decodes",
        )
        axis.plot(tokens.at_s, tokens.itl_ms, ".", markersize=2, color=style.PALETTE[0].color)
        axis.legend(loc="upper left", fontsize=7)
    return figure
