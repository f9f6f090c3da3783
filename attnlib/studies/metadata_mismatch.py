"""Scheduler metadata that does not fit its attention call: with the guard, and without it."""

import pandas as pd

from ..kinds.mismatch.case import MISMATCHES, MismatchCase, predict_splits
from ..run.study import Grid, Study

CASES = tuple(
    MismatchCase(mismatch.name, guard) for guard in (False, True) for mismatch in MISMATCHES
)
HEADLINE = tuple(case for case in CASES if case.name == "head-counts")

STUDY = Study(
    name="metadata_mismatch",
    question="What happens when FlashAttention-3's metadata does not fit the call?",
    grids=(
        Grid(CASES, ("flash-attn-3",), timers=("eager",), isolated=True),
        Grid(HEADLINE, ("flash-attn-3",), timers=("eager",), headline=True, isolated=True),
    ),
    reference_machine="nvidia-h200-68fde87c",
    ceilings=(),
)


def mismatch_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per mismatch on record: splits, outcome without the guard, error, and the guard's first
    words.

    Splits are the most of any request, by the model; `overruns`: more than the call's buffers hold.
    The error is the worst row's, without the guard; NaN where no output is, or no finite one.
    """
    runs = frame.set_index("name")
    outcome = runs.reported_backend.where(runs.reported_backend != "", runs.status)
    outcome = outcome.replace("harmless", "output right")
    bare = ~runs.guard.astype(bool)
    shown = [mismatch for mismatch in MISMATCHES if mismatch.name in runs.index]
    splits = [predict_splits(mismatch, num_sms=int(frame.num_sms.max())) for mismatch in shown]
    table = pd.DataFrame(index=pd.Index([mismatch.name for mismatch in shown], name="name"))
    table["splits in metadata"] = [split.in_metadata for split in splits]
    table["overruns"] = ["yes" if split.overrun else "" for split in splits]
    table["without guard"] = outcome[bare]
    table["relative error"] = runs.oracle_error[bare].astype(float).round(4)
    said = runs.reason.str.removeprefix("scheduler metadata does not fit the call: ")
    said = "refused: " + said.str.split("; |, because", regex=True).str[0]
    table["with guard"] = said.where(runs.status == "refused", outcome)[~bare]
    return table.fillna({"without guard": "not run", "with guard": "not run"}).reset_index()
