"""Checks of claims about whole steps of an engine, of the metadata and of FA3's schedule."""

from collections.abc import Sequence

import pandas as pd

from ...kinds.engine.case import EngineCase
from ...run.frame import good_rows, launches
from ..evidence import (
    CONFIRMED,
    OPEN,
    REFUTED,
    Finding,
    MissingRecordsError,
    counted,
    figure_word,
    vote,
)
from .study import LAYER, METADATA, SCHEDULE
from .tables import EAGER, NOW, measured, outputs

STEPS = 8
"""Decode steps of the source's profile, beside one prefill."""
PREPARE = "prepare_varlen_num_blocks"
Cases = Sequence[EngineCase]


def metadata_saves_a_step(frame: pd.DataFrame) -> Finding:
    """Each shape's step is faster with SGLang's kernels than op by op, by its interval over 0."""
    table, held, lost = _metadata(frame)
    word = vote(held, lost, len(table) - held - lost)
    reason = f"Faster in {held} and slower in {lost} of {len(table)} shapes, synchronous steps."
    return _finding(frame, table, "saved", word, reason)


def largest_metadata_gain(frame: pd.DataFrame, figure: float) -> Finding:
    """The largest gain by SGLang's kernels over op by op, in % of a step, is about `figure`."""
    table, *_ = _metadata(frame)
    best = table.loc[table.gain.idxmax()]
    reason = f"The largest is {best.gain:.2f} %, at {best.case.label}."
    return _finding(frame, table, "gain", figure_word([best.gain], figure), reason)


def metadata_loses_somewhere(frame: pd.DataFrame) -> Finding:
    """Some shape's step is slower with SGLang's kernels than op by op."""
    table, faster, held = _metadata(frame)
    word = CONFIRMED if held else REFUTED if faster == len(table) else OPEN
    reason = f"Slower in {held}, faster in {faster} of {len(table)} shapes, none of 64 tokens."
    return _finding(frame, table, "gain", word, reason)


def schedule_gain(frame: pd.DataFrame, figure: float) -> Finding:
    """A step that prepares the schedule once has `figure` % more throughput: all shapes."""
    return _schedule_gain(frame, figure, SCHEDULE)


def schedule_gain_alone(frame: pd.DataFrame, figure: float) -> Finding:
    """The same of a batch of one."""
    return _schedule_gain(frame, figure, SCHEDULE[:1])


def profiled_prepares(frame: pd.DataFrame, figure: float) -> Finding:
    """A prefill, one prepare a layer, and `STEPS` traced decode steps have `figure` in all."""
    rows = _once_and_layer(frame, "profiler", SCHEDULE[:1])
    counts = launches(rows, PREPARE).groupby(rows.backend).median()
    each, once = counts[LAYER], counts[NOW]
    window = each + STEPS * once
    reason = f"A traced step has {each:.0f} in layers, or {once:.0f}; no prefill is traced."
    said = f"{(1 + STEPS) * each:.0f}, then {window:.0f}"
    return Finding(CONFIRMED if window == figure else REFUTED, reason, said, records=tuple(rows.id))


def schedule_keeps_outputs(frame: pd.DataFrame) -> Finding:
    """Tokens and logits are the same bits whether the schedule is made once or in layers."""
    rows = _once_and_layer(frame, "host", SCHEDULE)
    hashes = outputs(rows)
    wanted = hashes.groupby(rows.case, sort=False).transform("first")
    return counted(rows, hashes == wanted, "{held} records have their shape's first outputs.")


def _once_and_layer(frame: pd.DataFrame, timer: str, cases: Cases) -> pd.DataFrame:
    rows = good_rows(frame[frame.backend.isin((NOW, LAYER)) & frame.case.isin(cases)], timer)
    if rows.groupby("case", sort=False).backend.nunique().tolist() != [2] * len(cases):
        raise MissingRecordsError(f"{NOW} and {LAYER}: a shape lacks one by the timer {timer}")
    return rows


def _metadata(frame: pd.DataFrame) -> tuple[pd.DataFrame, int, int]:
    """All shapes, and in how many of them SGLang's kernels are faster and slower than op by op."""
    table = _compared(frame, NOW, EAGER, METADATA)
    return table, *(int((table.verdict == word).sum()) for word in ("faster", "slower"))


def _schedule_gain(frame: pd.DataFrame, figure: float, cases: Cases) -> Finding:
    table = _compared(frame, NOW, LAYER, cases)
    table = table.assign(more=100 * table.saved / (table.step - table.saved))
    sizes = ", ".join(f"{case.batch_size} x {case.kv_len}" for case in table.case)
    saved = ", ".join(f"{us:.0f}" for us in table.saved)
    reason = f"{saved} us a step at {sizes}, one GPU's part of the model, without all-reduce."
    word = figure_word(table.more.tolist(), figure)
    return _finding(frame, table, "more", word, reason)


def _compared(frame: pd.DataFrame, arm: str, over: str, cases: Cases) -> pd.DataFrame:
    table = measured(frame)
    table = table[(table.arm == arm) & (table.over == over) & table.case.isin(cases)]
    if len(table) != len(cases):
        raise MissingRecordsError(f"{arm} over {over}: {len(table)} of {len(cases)} shapes")
    return table


def _finding(
    frame: pd.DataFrame, table: pd.DataFrame, column: str, word: str, reason: str
) -> Finding:
    """With the spread of a column over shapes; of one shape there is its value alone."""
    low, value, high = (float(each) for each in table[column].quantile([0, 0.5, 1]))
    unit = "us a step" if column == "saved" else "%"
    said = f"{low:.2f} to {high:.2f} {unit}" if len(table) > 1 else f"{value:.2f} {unit}"
    arms = {*table.arm, *table.over}
    rows = frame[frame.case.isin(table.case) & frame.backend.isin(arms) & (frame.timer == "host")]
    return Finding(word, reason, said, value, low, high, tuple(rows.id))
