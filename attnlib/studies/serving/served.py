"""Does a fix reach the user of a loaded server? Tokens per second and times between tokens.

A ratio is the time of `arm` over that of `base`, round by round: below 1 `arm` is faster. Time per
token is the inverse of tokens per second. Each round has a fresh server for each arm. Each model
was served on a GPU of its own, so a machine has the records of one of them (`load_all`). Two arms
are compared where one GPU has both.

| question | arm | base |
|---|---|---|
| `DEEPSEEK`, `LLAMA` | splits=bounded | default |
| `ONE_LAUNCH` | all schedules of a step in one launch | splits=bounded |
| `SCHEDULE` | the schedule once per step: default | in every layer |
| `METADATA` | SGLang's metadata kernel: default | op by op |
| `FLASHINFER` | FlashInfer's fa2 | its fa3 |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from ...core.call_text import Lens
from ...core.spec import require_word
from ...measure.stats import LEAST_ROUNDS, judge_ratios, judge_savings
from ...run import store
from ...run.figures import charts, style
from ...run.frame import good_rows, require_comparable
from ...run.study import Study
from ..splits.traffic import batches
from .case import NEW, ServingCase
from .measure import TIMER

MACHINES = ("nvidia-h200-b7fa7e16", "nvidia-h200-a0e83bb0")
"""Who has the published records: of `DEEPSEEK`, of `LLAMA`; a later one is added behind them."""
STUDY = Study(
    name="served",
    question="Does a fix reach the user of a loaded server, at the 50th and the 99th percentile?",
    reference_machine=MACHINES[0],
    retired="its servers are started by `python -m attnlib serve`; records load with attnlib.load",
)
LLAMA = "llama-3.1-8b"
DEEPSEEK = "deepseek-v3-8-layers"
GPT_OSS = "gpt-oss-120b-dense"
LLAMA_TP8 = "llama-3.1-70b-tp8"
QWEN_TP4 = "qwen3-32b-tp4"
FEW_LAYERS = "llama-3.1-8b-8-layers"
NOW = "sglang"
BOUNDED = "sglang splits=bounded"
BOUNDED_ONCE = "sglang splits=bounded metadata=one-launch"
PER_LAYER = "sglang schedule=layer"
EAGER = "sglang metadata=eager"
FA2 = "sglang --attention-backend flashinfer"
FA3 = "sglang decode=fa3 --attention-backend flashinfer"
VLLM = "vllm"


def _load(
    model: str,
    prompts: Sequence[int],
    output: int,
    turns: int = 1,
) -> ServingCase:
    """Clients with these prompts, in the prefix cache."""
    lens = Lens.of(prompts)
    return ServingCase(
        model=model,
        **lens.fields,
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
_LONG_MLA = (65_536, *[2048] * 31)
ONE_LONG_MLA = (_load(DEEPSEEK, _LONG_MLA, 512),)
CONTROLS = (
    _load(DEEPSEEK, [2048] * 64, 512),
    _load(LLAMA, [512] * 40, 320),
)
"""Requests that are alike: both caps allow the same splits."""
BATCHES = 8
"""Batches of new prompts, one after the other, of which a request's median life is taken."""
_LARGEST_GAIN = _load(LLAMA, [128] * 32, 128, BATCHES)
_LOSS = _load(LLAMA, [64] * 32, 64, BATCHES)
BEST = (replace(_LARGEST_GAIN, prompts=NEW),)
WORST = (replace(_LOSS, prompts=NEW),)
"""The rows of #20778's table with the largest gain, and with a loss."""
ALONE = (_load(QWEN_TP4, [500], 1024),)
DECODE_HEAVY = (
    *ALONE,
    _load(QWEN_TP4, [500] * 4, 512),
    _load(QWEN_TP4, [500] * 16, 512),
)
"""#21104's loads with many tokens out, on one of the four GPUs; it has 8k tokens out."""
FLASHINFER_DECODE = (
    _load(FEW_LAYERS, [8192] * 16, 256),
    _load(FEW_LAYERS, [512] * 16, 512),
)
WINDOWS = (_load(GPT_OSS, _traffic("azure-conversation", 64), 512),)
SHARED_HEADS = (_load(LLAMA_TP8, _traffic("azure-conversation", 64), 512),)
"""Layers with a window, and 8 query heads that share one KV head."""
LOADS = {
    CONVERSATION[0]: "Kimi, 32 in flight",
    CLOSED[0]: "Kimi, closed loop",
    OPEN[0]: "Kimi, open loop, 60 %",
    OPEN[1]: "Kimi, open loop, 90 %",
    CONVERSATION[1]: "Azure, 64 in flight",
    ONE_LONG_MLA[0]: "65,536 + 31 x 2,048",
    CONTROLS[0]: "control, 64 x 2,048",
    ONE_LONG[0]: "100,000 + 40 x 512",
    ONE_LONG[1]: "the same, closed loop",
    LATE[0]: "the same, the 100,000 after 1 s",
    CONTROLS[1]: "control, 40 x 512",
}
"""Loads of `bounded` over the default -> words for each, in the order of a table."""
MODELS = {
    DEEPSEEK: "DeepSeek-V3",
    LLAMA: "Llama-3.1-8B",
}
"""Models on record, in words; of the first the attention, with 8 dense layers."""
DRAWN = {MODELS[DEEPSEEK]: "DeepSeek-V3, 8 layers"}
"""Names in a chart, which is shown without its page."""
ARMS = {NOW: "default", BOUNDED: "SPLITS=bounded"}
"""Arms on record, in words."""


class Question(NamedTuple):
    """What `arm` gains over `base`, both as records call them; loads with words for each."""

    arm: str
    base: str
    loads: Mapping[ServingCase, str]


def _of_model(model: str) -> dict[ServingCase, str]:
    return {case: words for case, words in LOADS.items() if case.model == model}


ONE_LAUNCH = "one launch"
SCHEDULE = "schedule"
METADATA = "metadata"
FLASHINFER = "flashinfer"
QUESTIONS = {
    DEEPSEEK: Question(BOUNDED, NOW, _of_model(DEEPSEEK)),
    LLAMA: Question(BOUNDED, NOW, _of_model(LLAMA)),
    ONE_LAUNCH: Question(
        BOUNDED_ONCE,
        BOUNDED,
        {
            CONVERSATION[0]: "DeepSeek-V3: Kimi, 32 in flight",
            CLOSED[0]: "DeepSeek-V3: Kimi, closed loop",
            CONTROLS[0]: "DeepSeek-V3: control, 64 x 2,048",
            WINDOWS[0]: "gpt-oss-120b: Azure, 64 in flight",
            SHARED_HEADS[0]: "Llama-3.1-70B, TP 8: Azure, 64 in flight",
        },
    ),
    SCHEDULE: Question(
        NOW,
        PER_LAYER,
        {
            DECODE_HEAVY[0]: "Qwen3-32B, TP 4: 1 x 500",
            DECODE_HEAVY[1]: "Qwen3-32B, TP 4: 4 x 500",
            DECODE_HEAVY[2]: "Qwen3-32B, TP 4: 16 x 500",
        },
    ),
    METADATA: Question(
        NOW,
        EAGER,
        {
            BEST[0]: "Llama-3.1-8B: 32 x 128, 128 out",
            WORST[0]: "Llama-3.1-8B: 32 x 64, 64 out",
        },
    ),
    FLASHINFER: Question(
        FA2,
        FA3,
        {
            FLASHINFER_DECODE[0]: "8 layers of Llama-3.1-8B: 16 x 8,192",
            FLASHINFER_DECODE[1]: "8 layers of Llama-3.1-8B: 16 x 512",
        },
    ),
}
"""What the tables answer: `bounded` by model, and the others by name."""
RIVALS = {
    CONVERSATION[0]: "DeepSeek-V3: Kimi, 32 in flight",
    BEST[0]: "Llama-3.1-8B: 32 x 128, 128 out",
}
"""Loads of SGLang and vLLM -> words for each."""
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


def load_all() -> pd.DataFrame:
    """The records of `MACHINES`; FileNotFoundError if there are none."""
    frames = [store.load(STUDY.name, machine) for machine in MACHINES]
    return pd.concat(frames, ignore_index=True)


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
    """The rounds that both arms of a pair have on one GPU, case by case."""
    rows = served_rows(frame)
    for (case, _), of_gpu in rows.groupby(["case", "gpu_id"], sort=False):
        for arm, base in pairs:
            both = of_gpu[of_gpu.backend.isin((arm, base))]
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
    lives = []
    for row in rows.itertuples():
        lived = np.subtract(row.ended_us, row.started_us)
        lives.append(float(np.median(lived)))
    return rows.assign(
        us_per_token=1e6 / rows.tokens_per_s,
        us_per_request=lives,
    )


def side_by_side(frame: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    """The records of these arms at the loads that one GPU has of all of them."""
    rows = frame[frame.backend.isin(arms)]
    of_load = rows.groupby(["case", "gpu_id"], sort=False)
    return rows[of_load.backend.transform("nunique") == len({*arms})]


def speedups(
    frame: pd.DataFrame,
    asked: str,
    metric: str = "time per token",
) -> pd.DataFrame:
    """What the arm of a question gains over its base, a row per load; all judged as one table.

    `asked` is a key of `QUESTIONS`. Columns: case, load (in words), speedup, low, high, rounds and
    verdict, which is `none` below three rounds. In one round there is no interval.
    """
    require_word("asked", asked, QUESTIONS)
    require_word("metric", metric, METRICS)
    arm, base, loads = QUESTIONS[asked]
    rows = frame[frame.case.isin([*loads])]
    judged = compared(rows, [(arm, base)], metrics=[metric])
    in_order = judged.set_index("case").reindex([*loads])
    table = in_order.dropna(subset="ratio").reset_index()
    few = table.rounds < LEAST_ROUNDS
    return pd.DataFrame(
        {
            "case": table.case,
            "load": table.case.map(loads),
            "speedup": 1 / table.ratio,
            "low": 1 / table.high,
            "high": 1 / table.low,
            "rounds": table.rounds.astype(int),
            "verdict": table.verdict.mask(few, "none"),
        }
    )


def reach_table(
    frame: pd.DataFrame,
    asked: str,
    metric: str = "time per token",
) -> pd.DataFrame:
    """The loads of a question as a reader wants them: base / arm, and the speedup of a metric.

    Times are milliseconds, medians over rounds. `asked` is a key of `QUESTIONS`. A metric that is
    asked for has only its own times.
    """
    judged = speedups(frame, asked, metric)
    arm, base, _ = QUESTIONS[asked]
    rows = side_by_side(served_rows(frame), (arm, base))
    shown = pd.DataFrame({"load": judged.load})
    for words in _columns(metric):
        cells = []
        for case in judged.case:
            of_case = rows[rows.case == case]
            sides = [_median(of_case, side, words) for side in (base, arm)]
            cells.append(" / ".join(sides))
        shown[words] = cells
    gains = []
    for row in judged.itertuples():
        interval = f" ({row.low:.2f} to {row.high:.2f})" if row.rounds > 1 else ""
        gains.append(f"{row.speedup:.2f}{interval}")
    shown["speedup (95 % CI)"] = gains
    verdicts = []
    for row in judged.itertuples():
        verdicts.append(f"{row.verdict} ({row.rounds})")
    shown["verdict (rounds)"] = verdicts
    return shown


def rival_table(frame: pd.DataFrame) -> pd.DataFrame:
    """SGLang and vLLM at the same load on one GPU, a row per engine and arm, without a verdict.

    Columns: load, server, attention (the backend that ran), those of `reach_table`, rounds.
    Medians over rounds, times in ms.
    """
    rows = served_rows(frame)
    rows = rows[rows.case.isin([*RIVALS])]
    lines = []
    for (case, _), of_gpu in rows.groupby(["case", "gpu_id"], sort=False):
        engines = set(of_gpu.backend.str.partition(" ")[0])
        if len(engines) < 2:
            continue
        for backend, of_arm in of_gpu.groupby("backend"):
            line = {"load": RIVALS[case], "server": backend}
            line["attention"] = of_arm.reported_backend.iloc[0].split()[0].rstrip(";")
            for words in _SHOWN:
                line[words] = _median(of_gpu, backend, words)
            line["rounds"] = of_arm["round"].nunique()
            lines.append(line)
    return pd.DataFrame(lines, columns=["load", "server", "attention", *_SHOWN, "rounds"])


def tokens_agree(frame: pd.DataFrame, asked: str) -> pd.Series:
    """Whether arm and base made the same tokens in all rounds, by load of a question, in words."""
    require_word("asked", asked, QUESTIONS)
    arm, base, loads = QUESTIONS[asked]
    rows = side_by_side(served_rows(frame), (arm, base))
    hashes = rows.reported_backend.str.partition("tokens ")[2]
    counts = hashes.groupby(rows.case.map(loads), sort=False).nunique()
    return counts == 1


def _median(rows: pd.DataFrame, backend: str, words: str) -> str:
    """A cell of a table: the median of what `words` names in `_SHOWN` or `_ASKED`."""
    column, scale, digits = (_SHOWN | _ASKED)[words]
    value = rows[rows.backend == backend][column].median() / scale
    return f"{value:,.{digits}f}"


_SHOWN = {
    "tokens/s": ("tokens_per_s", 1, 0),
    "ITL p50, ms": ("itl_p50_us", 1e3, 1),
    "ITL p99, ms": ("itl_p99_us", 1e3, 1),
    "TTFT p50, ms": ("ttft_p50_us", 1e3, 0),
}
"""Columns of `reach_table`: their column of the records, its divisor, decimals."""
_ASKED = {
    "ITL p90, ms": ("itl_p90_us", 1e3, 1),
    "request, ms": ("us_per_request", 1e3, 0),
}
"""Those of `METRICS` that are shown only if they are asked for."""


def _columns(metric: str) -> list[str]:
    """Columns of `reach_table` for a metric: all usual ones for the time per token."""
    if metric == "time per token":
        return [*_SHOWN]
    return [f"{metric}, ms"]


def reach_chart(frame: pd.DataFrame) -> charts.Figure:
    """Speedup of tokens per second, a bar per load with its interval.

    Controls are grey; a white bar is of fewer than three rounds, so it has no verdict.
    """
    figure, (axis,) = charts.panels(
        titles=[""],
        size=(8.6, 4.2),
        source=side_by_side(served_rows(frame), (BOUNDED, NOW)),
        words=("tokens/s with SPLITS=bounded / tokens/s by default", ""),
        title="Speedup under load (grey: control; white: no verdict)",
    )
    tables = []
    for model, name in MODELS.items():
        table = speedups(frame, model)
        tables.append(table.assign(model=name))
    table = pd.concat(tables, ignore_index=True)
    names = []
    for place, row in enumerate(table.itertuples()):
        edge = style.OTHER if row.case in CONTROLS else style.BLUE
        is_judged = row.rounds >= LEAST_ROUNDS
        axis.barh(
            place,
            row.speedup,
            color=edge if is_judged else "white",
            edgecolor=edge,
        )
        interval = [row.low, row.high]
        axis.plot(interval, [place, place], **style.RULE)
        axis.text(
            0.03,
            place,
            f"{row.speedup:.2f}",
            va="center",
            **style.SMALL,
        )
        rounds = "1 round" if row.rounds == 1 else f"{row.rounds} rounds"
        model = DRAWN.get(row.model, row.model)
        names.append(f"{model}: {row.load} ({rounds})")
    axis.axvline(1, **style.RULE)
    charts.categories(axis, "y", names)
    return figure


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


def life_chart(
    frame: pd.DataFrame,
    case: ServingCase,
    arms: Sequence[str] = tuple(ARMS),
) -> charts.Figure:
    """Time between tokens over a load, a panel per arm; the life of the longest request is shaded.

    The first round of each arm; a dot is a token, and only some are drawn (`measure.MOST_SAMPLES`).
    """
    rows = served_rows(frame)
    rows = side_by_side(rows[rows.case == case], arms)
    by_arm = rows.sort_values("round").groupby("backend")
    drawn = by_arm.first().reindex(arms)
    words = ("seconds after the load began", "time between two tokens, ms")
    size = (3.6 * len(arms), 3.0)
    titles = [ARMS.get(arm, arm) for arm in arms]
    figure, axes = charts.panels(titles, size, drawn, words, share_y=True)
    end = max(requests_of(row).ended_s.max() for _, row in drawn.iterrows())
    for axis, arm in zip(axes, arms, strict=True):
        axis.set_xlim(-0.03 * end, 1.03 * end)
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
        axis.plot(
            tokens.at_s,
            tokens.itl_ms,
            ".",
            markersize=2,
            color=style.BLUE,
        )
        axis.legend(loc="upper left", fontsize=7)
    return figure
