"""Does a fix reach the user of a loaded server? Tokens per second and times between tokens.

A ratio is the time of `arm` over that of `base`, round by round: below 1 `arm` is faster. Time per
token is the inverse of tokens per second. Each round has a fresh server for each arm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ...measure.stats import judge_ratios
from ...run.frame import good_rows, require_comparable
from ...run.study import Study
from .measure import TIMER

STUDY = Study(
    name="served",
    question="Does a fix reach the user of a loaded server, at the 50th and the 99th percentile?",
    retired="its servers are started by `python -m attnlib serve`; records load with attnlib.load",
)
METRICS = {
    "time per token": "us_per_token",
    "ITL p50": "itl_p50_us",
    "ITL p90": "itl_p90_us",
    "ITL p99": "itl_p99_us",
    "TTFT p50": "ttft_p50_us",
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
    rows = served_rows(frame)
    lines = []
    times = []
    for case in dict.fromkeys(rows.case):
        of_case = rows[rows.case == case]
        for arm, base in pairs:
            both = of_case[of_case.backend.isin((arm, base))]
            require_comparable(both)
            for metric in metrics:
                wide = both.pivot(
                    index="round",
                    columns="backend",
                    values=METRICS[metric],
                )
                wide = wide.reindex(columns=[arm, base]).dropna()
                if wide.empty:
                    continue
                times.append((wide[arm], wide[base]))
                line = {
                    "case": case,
                    "arm": arm,
                    "base": base,
                    "metric": metric,
                    "base_ms": wide[base].median() / 1e3,
                    "arm_ms": wide[arm].median() / 1e3,
                }
                lines.append(line)
    judged = pd.DataFrame(judge_ratios(times, not_slower=not_slower))
    return pd.DataFrame(lines).join(judged).reindex(columns=COLUMNS)


def served_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The records of servers that count, with `us_per_token`: the time in which one token comes."""
    rows = good_rows(frame, TIMER)
    if rows.empty:
        return rows.assign(us_per_token=[])
    return rows.assign(us_per_token=1e6 / rows.tokens_per_s)


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
