"""Checks of claims about scheduler metadata that went stale under DP attention.

The records are of one GPU given metadata that does not fit its call; SGLang's engine is not run.
"""

from collections.abc import Sequence

import pandas as pd

from ...kinds.mismatch.case import MISMATCHES, Splits, predict_splits
from ..evidence import CONFIRMED, PARTLY, REFUTED, Finding, MissingRecordsError, vote

HARMLESS = "harmless"
LENGTHS = ("lengths-grown", "lengths-shrunk")


def stale_lengths_mislead(frame: pd.DataFrame) -> Finding:
    """Metadata of other lengths has other splits than the call would make, and harms it."""
    rows, splits = _unguarded(frame, LENGTHS)
    differ = sum(each.in_metadata != each.right for each in splits)
    wrong = int((rows.reported_backend != HARMLESS).sum())
    verdict = REFUTED if not differ else CONFIRMED if wrong == len(rows) else PARTLY
    pairs = " and ".join(f"{s.in_metadata} where {s.right} is right" for s in splits)
    heads, _ = _unguarded(frame, ("head-counts",))
    reason = (
        f"By the model the splits differ ({pairs}), but {len(rows) - wrong} of {len(rows)} outputs "
        f"are right: stale lengths only unbalance. Head counts of the wrong parallel size are "
        f"{heads.reported_backend.iloc[0]}, by a relative error of {heads.oracle_error.iloc[0]:.0f}"
    )
    measured = f"{wrong} of {len(rows)} wrong"
    return Finding(verdict, reason + ".", measured, records=(*rows.id, *heads.id))


def splits_overrun_buffers(frame: pd.DataFrame) -> Finding:
    """Metadata with more splits than the call's buffers hold gives wrong output or a crash."""
    rows, splits = _unguarded(frame, [mismatch.name for mismatch in MISMATCHES])
    over = rows[[each.overrun for each in splits]]
    harmed = int((over.reported_backend != HARMLESS).sum())
    reason = (
        f"By the model {len(over)} mismatches have more splits than the call's buffers hold: "
        f"{', '.join(over.name)}. {harmed} of them gave wrong output, {len(over) - harmed} right "
        f"output, {(over.status == 'crashed').sum()} crashed. Which address the combine "
        f"kernel read is not observed."
    )
    verdict = vote(harmed, len(over) - harmed)
    return Finding(verdict, reason, f"{harmed} of {len(over)} wrong", records=tuple(over.id))


def _unguarded(frame: pd.DataFrame, names: Sequence[str]) -> tuple[pd.DataFrame, list[Splits]]:
    """The runs of `names` past the guard, in the order of `MISMATCHES`, and their splits."""
    bare = frame[~frame.guard.astype(bool)].set_index("name", drop=False)
    known = [mismatch for mismatch in MISMATCHES if mismatch.name in names]
    missing = [mismatch.name for mismatch in known if mismatch.name not in bare.index]
    if missing:
        raise MissingRecordsError(f"not run past the guard: {', '.join(missing)}")
    num_sms = int(frame.num_sms.max())
    rows = bare.loc[[mismatch.name for mismatch in known]]
    return rows, [predict_splits(mismatch, num_sms=num_sms) for mismatch in known]
