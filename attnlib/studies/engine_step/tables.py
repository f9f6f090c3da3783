"""Tables of `engine_step` and `engine_ranks`: what kernels promise a step, what it shows of that.

A saving is microseconds a step by `arm` in place of `over`, above 0 where it is faster. Of arms
that take turns in one process a round's saving is the median over neighbouring steps' differences,
of others the difference of the processes' medians; the interval is Student's t over rounds. There
are no A/A items: how far an arm's step lies from its own next one says the same (`itself`).
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from ...kinds.engine.case import IN_TURNS, EngineCase
from ...kinds.engine.model import CONFIGS
from ...measure.stats import judge_savings
from ...run import store
from ...run.frame import FA2 as FA2_CALL
from ...run.frame import FA3 as FA3_CALL
from ...run.frame import decode_rows, good_rows, intervals, launches, whole_counts
from ..decode_metadata.tables import FUSED, MERGED, OPS, metadata_rows
from ..engine_ranks.study import RANKS
from ..fa2_plan.tables import HOST as HOST_STEP
from ..fa2_plan.tables import OURS
from ..fa2_plan.tables import PLANNED as PLANNED_STEP
from ..scheduler_metadata.tables import prepare_us, savings
from .study import (
    BATCHING,
    EAGER,
    FA2,
    FA3,
    GROUPS,
    HF,
    HF_ONCE,
    KERNELS,
    LAYER,
    METADATA,
    NOW,
    OFFLINE,
    ONE_LAUNCH,
    OURS_FUSED,
    PLANNED,
    SCHEDULE,
    SERVED,
)

COMPARED = (
    *((NOW, EAGER, case) for case in (*METADATA, *SCHEDULE)),
    *((OURS_FUSED, NOW, case) for case in (*METADATA, *SCHEDULE)),
    *((ONE_LAUNCH, NOW, case) for case in (*METADATA, *SCHEDULE)),
    *((NOW, LAYER, case) for case in (*SCHEDULE, *RANKS, *METADATA)),
    *((FA2, FA3, case) for case in KERNELS),
    *((PLANNED, FA2, case) for case in (*KERNELS, *SERVED, *OFFLINE)),
    *((HF_ONCE, HF, case) for case in BATCHING),
)
"""(arm, over, case) in the order of the tables."""
PREPARE = "prepare_varlen_num_blocks"
PAIR = ["arm", "over"]
SIZES = ["model", "tp", "batch_size", "kv_len", "lengths", "driver"]
MEASURED = [*PAIR, "case", "step", "saved", "low", "high", "rounds", "gain", "itself", "verdict"]


def predicted(
    metadata: pd.DataFrame, schedule: pd.DataFrame, kernels: pd.DataFrame, plans: pd.DataFrame
) -> pd.DataFrame:
    """What each comparison should save by kernel records alone, `predicted` us and `by` what case.

    That is the nearest on record in batch and context, not scaled but for attention, whose time is
    taken to grow with all tokens. The host's time is in none, but in the plans of served lengths.
    """
    found = []
    for arm, over, case in COMPARED:
        if over == EAGER:
            told = _metadata_saving(metadata, case, OPS, MERGED)
        elif over in (LAYER, HF):
            told = _schedule_saving(schedule, case)
        elif arm == FA2:
            told = _call_saving(decode_rows(kernels), case, FA3_CALL, FA2_CALL)
        elif arm == PLANNED:
            told = _plan_saving(plans, case)
        else:
            told = _metadata_saving(metadata, case, MERGED, FUSED)
            if arm == ONE_LAUNCH:
                alone = prepare_us(schedule)
                prepare = alone.iloc[np.abs(np.log(alone.index / case.batch_size)).argmin()]
                told = told[0] + prepare, f"{told[1]}, and prepare"
        found.append((arm, over, case, *told))
    return pd.DataFrame(found, columns=[*PAIR, "case", "predicted", "by"])


def promised() -> pd.DataFrame:
    """`predicted` by the published records, whichever GPU the steps are of."""
    from .. import STUDIES

    names = ("decode_metadata", "scheduler_metadata", "fa3_decode_regression", "fa2_plan")
    return predicted(*(store.load(name, STUDIES[name].reference_machine) for name in names))


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """What each comparison on record saves: a row with `MEASURED`, steps in us, gain in %.

    `verdict` is `faster` or `slower` where the interval excludes 0 and more is saved than either
    arm differs by from `itself`, else `ambiguous`; all rows are one table (`judge_savings`).
    """
    found, by_case = [], dict(iter(good_rows(frame, "host").groupby("case", sort=False)))
    rounds = {
        (arm, over, case): pairs
        for arm, over, case in COMPARED
        if case in by_case and (pairs := list(_rounds(by_case[case], arm, over, case)))
    }
    steps_us = [
        ([step for step, *_ in pairs], [step - us for step, us, _ in pairs])
        for pairs in rounds.values()
    ]
    for ((arm, over, case), pairs), gap in zip(
        rounds.items(), judge_savings(steps_us), strict=True
    ):
        step = float(np.median([step for step, *_ in pairs]))
        itself = max(hop for *_, hop in pairs)
        word = "ambiguous" if abs(gap.saved) <= itself else gap.verdict
        bounds = (gap.saved, gap.low, gap.high, gap.rounds)
        found.append((arm, over, case, step, *bounds, 100 * gap.saved / step, itself, word))
    return pd.DataFrame(found, columns=MEASURED)


def core_table(frame: pd.DataFrame, promised: pd.DataFrame) -> pd.DataFrame:
    """Predicted, measured, and where the rest went: a row per comparison on record.

    `traced` is what the kernels of one traced step take less, where both arms were traced; `rest`
    is measured - traced, what the host saves or another kernel hides, else measured - predicted.
    """
    table = measured(frame).merge(promised, on=[*PAIR, "case"])
    traced = [traced_saving(frame, *row) for row in table[[*PAIR, "case"]].itertuples(index=False)]
    table["traced"] = np.array(traced, float)
    rest = table.saved - table.traced.fillna(table.predicted)
    shown = _sizes(table)[["predicted", "saved", "itself", "traced", "step"]].round(1)
    shown = pd.concat([table[PAIR], _sizes(table)[SIZES], shown], axis=1)
    shown.insert(len(shown.columns) - 2, "interval", intervals(table, decimals=0))
    more = {"gain, %": table.gain.round(2), "verdict": table.verdict}
    return shown.assign(rest=rest.round(1), **more, by=table.by)


def summary_table(core: pd.DataFrame) -> pd.DataFrame:
    """`core_table`, a row for all shapes of two arms, a model, a driver and a kind of lengths, and
    numbers as least to most."""
    kinds = core.groupby([*PAIR, "model", "driver", "lengths"], sort=False)
    columns = {"shapes": kinds.size()}
    for name in ("predicted", "saved", "itself", "rest", "step", "gain, %"):
        columns[name] = kinds[name].agg(_range)
    columns["verdict"] = kinds.verdict.agg(lambda words: ", ".join(dict.fromkeys(words)))
    return pd.DataFrame(columns).reset_index()


def traced_saving(frame: pd.DataFrame, arm: str, over: str, case: EngineCase) -> float:
    """Microseconds by which kernels of a traced step take less; NaN where one was not traced."""
    rows = good_rows(frame[frame.case == case], "profiler").groupby("backend").run_us.median()
    return float(rows.get(over, np.nan) - rows.get(arm, np.nan))


def users_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What users see of each arm: median and slowest step, tokens a second; medians of rounds.

    `slowest` is the 99th percentile of a round's steps; an offline engine's are means.
    """
    rows = good_rows(frame[frame.case.notna()], "host")
    slowest = [float(np.percentile(steps, 99)) for steps in rows.steps_us]
    rows = rows.assign(step=rows.run_us / 1e3, slowest=np.array(slowest) / 1e3)
    rows = rows.assign(tokens=1e3 * rows.batch_size / rows.step)
    found = rows.groupby([*SIZES, "backend"], sort=False)[["step", "slowest", "tokens"]].median()
    shown = found.round({"step": 3, "slowest": 3, "tokens": 0}).reset_index()
    return shown.rename(columns=dict(step="step, ms", slowest="slowest, ms", tokens="tokens/s"))


def launches_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Launches of a traced step, all and those that prepare FA3's schedule, with their time."""
    rows = good_rows(frame[frame.case.notna()], "profiler")
    counts = {"launches": launches(rows), "prepare": launches(rows, PREPARE)}
    us = rows.kernels.map(lambda found: sum(k.gpu_us for k in found if PREPARE in k.name))
    counts["prepare, us"] = us.round(1)
    return rows[[*SIZES, "backend"]].assign(**counts).reset_index(drop=True)


def groups_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Where groups attend apart, by arm: its status, what heads FA3's schedule is told, how many
    requests get other tokens than by schedules in layers, and what ended the engine."""
    rows = frame[frame.case == GROUPS].drop_duplicates("backend").set_index("backend")
    tokens = outputs(rows[rows.status == "ok"]).str.split("-")
    wanted = tokens.get(LAYER, ())
    other = tokens.map(lambda each: sum(a != b for a, b in zip(each, wanted, strict=False)))
    heads = rows.reported_backend.str.extract(r"told ([\d/]+ heads of [\d/]+)")[0].fillna("")
    told = {"status": rows.status, "heads": heads, "other tokens": other, "reason": rows.reason}
    return pd.DataFrame(told, index=rows.index).reset_index()


def outputs(frame: pd.DataFrame) -> pd.Series:
    """The hash of tokens and logits that each record with a time says."""
    return frame.reported_backend.map(lambda told: told.partition(", outputs ")[2])


def _rounds(
    rows: pd.DataFrame, arm: str, over: str, case: EngineCase
) -> Iterator[tuple[float, float, float]]:
    """Of each round that has both, among the case's: a step of `over`, what `arm` saves, and how
    far an arm's step lies from its own next one, the larger of both; NaN where they took no turns.
    """
    rows = rows[rows.backend.isin((arm, over))]
    store.require_comparable(rows)
    wide = rows.pivot(index="round", columns="backend", values="steps_us")
    wide = wide.reindex(columns=[arm, over]).dropna()
    # Metadata arms took turns before records said so.
    always = {arm, over} <= {NOW, EAGER, OURS_FUSED, ONE_LAUNCH} and case.driver == "steps"
    beside = always or rows.reported_backend.str.contains(IN_TURNS).all()
    for ours, theirs in zip(wide[arm], wide[over], strict=True):
        step, itself = float(np.median(theirs)), np.nan
        saved = step - np.median(ours)
        if beside:
            saved = np.median(np.subtract(theirs, ours))
            hops = (np.subtract(us[1::2], us[:-1:2]) for us in (ours, theirs))
            itself = max(abs(float(np.median(hop))) for hop in hops)
        yield step, float(saved), itself


def _range(values: pd.Series) -> str:
    ends = (
        f"{value:.{0 if values.abs().max() >= 10 else 2}f}" for value in values.agg(["min", "max"])
    )
    return " to ".join(dict.fromkeys(ends))


def _sizes(table: pd.DataFrame) -> pd.DataFrame:
    named = {name: [getattr(case, name) for case in table.case] for name in SIZES}
    return table.assign(**named)


def _nearest(rows: pd.DataFrame, **sizes: int) -> pd.DataFrame:
    """The rows of the case whose sizes are nearest, as ratios; ValueError without a row."""
    if rows.empty:
        raise ValueError(f"records must hold a case near {sizes}, they have none")
    off = sum(np.abs(np.log(rows[name].astype(float) / size)) for name, size in sizes.items())
    return rows[rows.case == rows.case[off.idxmin()]]


def _metadata_saving(
    frame: pd.DataFrame, case: EngineCase, slow: str, fast: str
) -> tuple[float, str]:
    rows = metadata_rows(frame)
    both = set(rows.case[rows.backend == slow]) & set(rows.case[rows.backend == fast])
    rows = rows[(rows.page_size == 1) & rows.case.isin(both)]
    rows = _nearest(rows, batch_size=case.batch_size, max_ctx=case.kv_len)
    us = rows.groupby("backend").run_us.median()
    return float(us[slow] - us[fast]), rows.case.iloc[0].label


def _schedule_saving(frame: pd.DataFrame, case: EngineCase) -> tuple[float, str]:
    layers = CONFIGS[case.model]["num_hidden_layers"]
    table = savings(frame)
    # The prepare kernel reads no pages: of two page sizes the smaller, which comes first.
    table = table[table.layers == layers]
    off = sum(np.abs(np.log(table[n] / getattr(case, n))) for n in ("batch_size", "kv_len"))
    row = table.loc[off.idxmin()]
    sizes = f"{row.batch_size:.0f} x {row.kv_len:.0f}, page {row.page_size:.0f}"
    return float(row.saved), f"{layers} layers, {sizes}"


def _call_saving(rows: pd.DataFrame, case: EngineCase, slow: str, fast: str) -> tuple[float, str]:
    """Of all layers, from attention calls of such heads and lengths, scaled by their tokens."""
    config = CONFIGS[case.model]
    heads = f"{config['num_attention_heads']}/{config['num_key_value_heads']}"
    layer = {"heads": heads, "lengths": case.lengths, "head_dim": 128}
    rows = rows[(rows[list(layer)] == pd.Series(layer)).all(axis=1)]
    rows = rows[rows.backend.isin((slow, fast)) & (rows.kv_dtype == "bfloat16")]
    rows = _nearest(whole_counts(rows), batch_size=case.batch_size, kv_len=case.kv_len)
    us = rows.groupby("backend").run_us.median()
    known = rows.case.iloc[0]
    scale = case.batch_size * case.kv_len / (known.batch_size * known.kv_len)
    return float(us[slow] - us[fast]) * config["num_hidden_layers"] * scale, known.label


def _plan_saving(frame: pd.DataFrame, case: EngineCase) -> tuple[float, str]:
    """From whole steps, planning included, of such lengths; else from attention calls."""
    steps = good_rows(frame[frame.backend.isin((HOST_STEP, PLANNED_STEP))], "eager")
    steps = steps[steps.lengths == case.lengths]
    if steps.empty:
        calls = good_rows(frame[frame.layers.isna()])
        return _call_saving(calls, case, FA2_CALL, OURS)
    steps = _nearest(steps, batch_size=case.batch_size, kv_len=case.kv_len)
    us = steps.groupby("backend").run_us.median()
    return float(us[HOST_STEP] - us[PLANNED_STEP]), steps.case.iloc[0].label
