"""Tables of the study `metadata_mismatch`: metadata that does not fit, guarded or past it."""

import pandas as pd

from ...kinds.mismatch.case import MISMATCHES, predict_splits

COLUMNS = [
    *("name", "splits in metadata", "right", "cap of the call", "overruns", "past the guard"),
    *("relative error", "with the guard"),
]


def mismatch_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per mismatch that was run: splits, outcome past the guard and with it, relative error.

    Splits are those of the request with the most, by the model; `overruns` says whether they are
    more than the call's buffers hold. The error is the worst row's, past the guard; NaN is no
    finite number.
    """
    num_sms = int(frame.num_sms.max())
    found = []
    for mismatch in MISMATCHES:
        runs = frame[frame.name == mismatch.name]
        if not runs.empty:
            splits = predict_splits(mismatch, num_sms=num_sms)
            told = (splits.in_metadata, splits.right, splits.cap, "yes" if splits.overrun else "")
            bare, guarded = runs[~runs.guard.astype(bool)], runs[runs.guard.astype(bool)]
            error = bare.oracle_error.astype(float).iloc[0] if len(bare) else float("nan")
            found.append((mismatch.name, *told, _outcome(bare), error, _outcome(guarded)))
    return pd.DataFrame(found, columns=COLUMNS).round({"relative error": 4})


def outcomes(frame: pd.DataFrame) -> pd.DataFrame:
    """How many mismatches ended how, past the guard and with it."""
    named = {False: "past the guard", True: "with the guard"}
    counts = pd.crosstab(frame.reported_backend, frame.guard.map(named))
    return counts.rename_axis(index="outcome", columns=None).reset_index()


def guard_messages(frame: pd.DataFrame) -> pd.DataFrame:
    """What the guard said of each mismatch that it refused."""
    refused = frame[frame.reported_backend == "refused by the guard"]
    said = refused.reason.str.removeprefix("scheduler metadata does not fit the call: ")
    return refused[["name"]].assign(said=said).reset_index(drop=True)


def descriptions() -> pd.DataFrame:
    """The mismatches: name, and what differs between the metadata and the call."""
    return pd.DataFrame([(each.name, each.what) for each in MISMATCHES], columns=["name", "what"])


def _outcome(runs: pd.DataFrame) -> str:
    return "not run" if runs.empty else runs.reported_backend.iloc[0] or runs.status.iloc[0]
