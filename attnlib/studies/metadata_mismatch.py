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
    """A row per mismatch on record: splits, outcome without the guard and with it, relative error.

    Splits are those of the request with the most, by the model; `overruns` says whether they are
    more than the call's buffers hold. The error is the worst row's, without the guard; NaN where
    there is no output or no finite one.
    """
    num_sms = int(frame.num_sms.max())
    rows = []
    for mismatch in MISMATCHES:
        runs = frame[frame.name == mismatch.name]
        if runs.empty:
            continue
        splits = predict_splits(mismatch, num_sms=num_sms)
        guarded = runs.guard.astype(bool)
        errors = runs[~guarded].oracle_error.astype(float)
        rows.append(
            {
                "name": mismatch.name,
                "splits in metadata": splits.in_metadata,
                "right": splits.right,
                "cap of the call": splits.cap,
                "overruns": "yes" if splits.overrun else "",
                "without guard": _outcome(runs[~guarded]),
                "relative error": errors.iloc[0] if len(errors) else float("nan"),
                "with guard": _outcome(runs[guarded]),
            }
        )
    return pd.DataFrame(rows).round({"relative error": 4})


def _outcome(runs: pd.DataFrame) -> str:
    return "not run" if runs.empty else runs.reported_backend.iloc[0] or runs.status.iloc[0]
