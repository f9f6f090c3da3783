"""Checks of claims about whole steps of an engine, of the metadata and of FA3's schedule."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ...kinds.engine.case import EngineCase
from ...run.frame import good_rows, intervals, launches
from ..engine_ranks.study import RANKS
from ..evidence import CONFIRMED, NOT_HERE, OPEN, REFUTED, Finding, MissingRecordsError, near, vote
from .study import EAGER, GROUPS, LAYER, METADATA, NOW, ONE_LAUNCH, SCHEDULE
from .tables import PREPARE, groups_table, measured, outputs

READS = dict.fromkeys(
    ("schedule_gain", "schedule_gain_alone", "ranks_keep_outputs"), ("engine_ranks",)
)
STEPS = 8
"""Decode steps of the source's profile, beside one prefill."""
Cases = Sequence[EngineCase]


def metadata_saves_a_step(frame: pd.DataFrame) -> Finding:
    """Each shape's step is faster with SGLang's kernels than op by op, by its interval over 0."""
    table, held, lost = _metadata(frame)
    word = vote(held, lost, len(table) - held - lost)
    reason = f"Faster in {held} and slower in {lost} of {len(table)} shapes, synchronous steps."
    return _finding(frame, table, word, reason)


def metadata_row(frame: pd.DataFrame) -> Finding:
    """What SGLang's kernels gain over op by op at the shape of one row of the source's table.

    Its rows are whole requests of 64 and 128 tokens, prefill with them, a run each; none is a step.
    """
    table, faster, slower = _metadata(frame)
    table = _percent(table, table.step)
    reason = (
        f"Its shape, whole requests with their prefill, is none of ours. In steps of 1,024 and "
        f"8,192 tokens SGLang's kernels are faster in {faster} and slower in {slower} of "
        f"{len(table)} shapes."
    )
    return _finding(frame, table, NOT_HERE, reason, "%")


def schedule_gain(frame: pd.DataFrame, figure: float) -> Finding:
    """The `Engine` over two GPUs has `figure` % more throughput with the schedule once a step.

    A synchronous step says less of it: it shows the host's time of making the schedule in full.
    """
    return _schedule_gain(frame, figure, RANKS)


def schedule_gain_alone(frame: pd.DataFrame, figure: float) -> Finding:
    """The same of a batch of one."""
    return _schedule_gain(frame, figure, RANKS[:1])


def profiled_prepares(frame: pd.DataFrame, figure: float) -> Finding:
    """A prefill, one prepare a layer, and `STEPS` traced decode steps have `figure` in all."""
    rows = _of_arms(frame, (NOW, LAYER), "profiler", SCHEDULE[:1])
    counts = launches(rows, PREPARE).groupby(rows.backend).median()
    each, once = counts[LAYER], counts[NOW]
    window = each + STEPS * once
    reason = f"A traced step has {each:.0f} in layers, or {once:.0f}; no prefill is traced."
    said = f"{(1 + STEPS) * each:.0f}, then {window:.0f}"
    return Finding(CONFIRMED if window == figure else REFUTED, reason, said, records=tuple(rows.id))


def schedule_keeps_outputs(frame: pd.DataFrame) -> Finding:
    """Tokens and logits are the same bits whether the schedule is made once or in layers.

    A shape speaks for it by a round in which they are. Other bits do not speak against it: layers
    take their split cap from the table's width, SGLang's schedule from the longest request, and
    processes may have come to the shape with other values in their caches.
    """
    rows = _of_arms(frame, (NOW, ONE_LAUNCH, LAYER), "host", SCHEDULE)
    index = ["case", "round"]
    hashes = rows.assign(said=outputs(rows)).pivot(index=index, columns="backend", values="said")
    same = hashes.eq(hashes[LAYER], axis=0).groupby("case", sort=False).any().sum()
    reason = (
        f"In some round the bits of layers are those of {NOW} in {same[NOW]} of {len(SCHEDULE)} "
        f"shapes, of {ONE_LAUNCH}, which has the layers' split cap, in {same[ONE_LAUNCH]}."
    )
    word = CONFIRMED if same[NOW] == len(SCHEDULE) else OPEN
    return Finding(word, reason, records=tuple(rows.id))


def ranks_keep_outputs(frame: pd.DataFrame) -> Finding:
    """Over two GPUs of one group tokens are the same by SGLang's schedule as without it."""
    rows = _of_arms(frame, (NOW, LAYER), "host", RANKS)
    same = outputs(rows).groupby([rows.case, rows["round"]], sort=False).nunique() == 1
    reason = f"Equal tokens in {same.sum()} of {len(same)} rounds of {len(RANKS)} shapes."
    return Finding(vote(int(same.sum()), int((~same).sum())), reason, records=tuple(rows.id))


def groups_need_layers(frame: pd.DataFrame) -> Finding:
    """Where groups attend apart, SGLang's schedule is told heads that are not the layers', and a
    request gets other tokens than by schedules in layers."""
    table = groups_table(frame).set_index("backend")
    if not {NOW, LAYER} <= set(table.index[table.status == "ok"]):
        raise MissingRecordsError(f"{NOW} and {LAYER}: {GROUPS.label} lacks one")
    heads, other = table.heads[NOW], int(table["other tokens"][NOW])
    told, own = heads.split(" heads of ")
    reason = f"Told {heads}; {other} of {GROUPS.batch_size} requests get other tokens."
    rows = frame[(frame.case == GROUPS) & frame.backend.isin((NOW, LAYER))]
    held = [told != own, other > 0]
    return Finding(vote(sum(held), 2 - sum(held)), reason, records=tuple(rows.id))


def _of_arms(frame: pd.DataFrame, arms: Sequence[str], timer: str, cases: Cases) -> pd.DataFrame:
    rows = good_rows(frame[frame.backend.isin(arms) & frame.case.isin(cases)], timer)
    found = rows.groupby("case", sort=False).backend.nunique().tolist()
    if found != [len(arms)] * len(cases):
        raise MissingRecordsError(f"{' and '.join(arms)}: a shape lacks one by the timer {timer}")
    return rows


def _metadata(frame: pd.DataFrame) -> tuple[pd.DataFrame, int, int]:
    """All shapes, and in how many of them SGLang's kernels are faster and slower than op by op."""
    table = _compared(frame, NOW, EAGER, METADATA)
    return table, *(int((table.verdict == word).sum()) for word in ("faster", "slower"))


def _schedule_gain(frame: pd.DataFrame, figure: float, cases: Cases) -> Finding:
    table = _compared(frame, NOW, LAYER, cases)
    saved = zip(table.case, table.saved, intervals(table, 0), strict=True)
    said = [f"{us:.0f} ({bounds}) at {c.batch_size} x {c.kv_len}" for c, us, bounds in saved]
    reason = f"{', '.join(said)} us a step over two GPUs."
    table = _percent(table, table.step - table.saved)
    return _finding(frame, table, _figure_told(table, figure), reason, "%")


def _percent(table: pd.DataFrame, of: pd.Series) -> pd.DataFrame:
    return table.assign(**{name: 100 * table[name] / of for name in ("saved", "low", "high")})


def _figure_told(table: pd.DataFrame, figure: float) -> str:
    """`figure_word` of `saved`; two rounds or an interval wider than the figure decide nothing."""
    told = table[(table.high - table.low <= abs(figure)) & (table.rounds > 2)]
    held = near(told.saved, figure)
    return vote(held, len(told) - held, len(table) - len(told))


def _compared(frame: pd.DataFrame, arm: str, over: str, cases: Cases) -> pd.DataFrame:
    """`measured` of these, each with an interval of its own: shapes vote."""
    rows = frame[frame.backend.isin((arm, over))]
    table = pd.concat([measured(rows[rows.case == case]) for case in cases], ignore_index=True)
    if len(table) != len(cases):
        raise MissingRecordsError(f"{arm} over {over}: {len(table)} of {len(cases)} shapes")
    return table


def _finding(
    frame: pd.DataFrame, table: pd.DataFrame, word: str, reason: str, unit: str = "us a step"
) -> Finding:
    """With the spread of what is saved over shapes; of one shape with its interval."""
    low, value, high = table.saved.quantile([0, 0.5, 1])
    said = f"{low:.2f} to {high:.2f} {unit}"
    if len(table) == 1:
        low, high = table.low.iloc[0], table.high.iloc[0]
        said = f"{value:.2f} {unit}, {intervals(table)[0]}"
    low, high = (None if np.isnan(each) else float(each) for each in (low, high))
    arms = {*table.arm, *table.over}
    rows = frame[frame.case.isin(table.case) & frame.backend.isin(arms) & (frame.timer == "host")]
    return Finding(word, reason, said, float(value), low, high, tuple(rows.id))
