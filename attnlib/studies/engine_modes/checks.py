"""Checks of claims about pinning fa2 for every mode of an engine.

What SGLang's code passes to its wrappers is on no record; what FlashInfer 0.6.4's run, pinned to
fa2 or fa3, is.
"""

import pandas as pd

from ...kinds.extend.case import MODES
from ..evidence import Finding, Judged, judge_rows, together
from .study import PINNED
from .tables import FA2, FA3, mode_rows, plain


def all_prefill_pins_gain(frame: pd.DataFrame) -> Finding:
    """fa2 is the faster of the two in every mode of the prefill wrappers."""
    judged, said = _by_mode(frame)
    return judged.finding(judged.vote("faster"), f"Shapes where fa2 is faster than fa3: {said}.")


def pin_loses_somewhere(frame: pd.DataFrame) -> Finding:
    """fa2 is no faster than fa3 at one shape of the prefill wrappers at least."""
    judged, said = _by_mode(frame)
    reason = f"fa2 is {judged.counts}. Shapes where it is the faster: {said}."
    return judged.finding(judged.somewhere("same", "slower"), reason)


def _by_mode(frame: pd.DataFrame) -> tuple[Judged, str]:
    """Every mode of the prefill wrappers as engines call it, fa2 over fa3, and counts by mode."""
    rows = plain(mode_rows(frame, release=PINNED))
    rows = rows[rows.backend.isin((FA2, FA3))]
    parts = {mode: judge_rows(rows[rows["mode"] == mode], (FA2, FA3)) for mode in MODES}
    counts = {mode: (part.count("faster"), len(part.verdicts)) for mode, part in parts.items()}
    said = ", ".join(f"{mode} {faster} of {shapes}" for mode, (faster, shapes) in counts.items())
    return together(parts.values()), said
