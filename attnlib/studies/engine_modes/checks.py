"""Checks of claims about pinning fa2 for every mode of an engine.

In the records FlashInfer 0.6.4 is pinned to fa2 and to fa3, mode by mode. What SGLang's code passes
to its wrappers is no record's business; what a wrapper pinned so runs, and in what time, is.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ...kinds.extend.case import MODES
from ..evidence import (
    CONFIRMED,
    REFUTED,
    Finding,
    Judged,
    judge_rows,
    together,
)
from .tables import AUTO, FA2, FA3, mode_rows, plain

EVERY = tuple(MODES)
"""Every mode that goes through FlashInfer's prefill wrappers."""


def pin_in_paged_prefill(frame: pd.DataFrame) -> Finding:
    """Paged prefill pinned to fa2 runs fa2; its time over fa3's."""
    return _pinned(frame, "prefill_paged")


def pin_in_draft_extend(frame: pd.DataFrame) -> Finding:
    """Draft extension pinned to fa2 runs fa2; its time over fa3's."""
    return _pinned(frame, "draft_extend")


def pin_in_dllm_extend(frame: pd.DataFrame) -> Finding:
    """Block extension pinned to fa2 runs fa2; its time over fa3's."""
    return _pinned(frame, "dllm_extend")


def verify_pin_gains(frame: pd.DataFrame) -> Finding:
    """Verification by `auto` is slower than pinned to fa2, with and without a custom mask."""
    rows = mode_rows(frame)
    rows = rows[(rows["mode"] == "target_verify") & rows.backend.isin((AUTO, FA2))]
    parts = {mask: _with_auto(rows[rows["mask"] == mask]) for mask in ("causal", "tree")}
    judged = {mask: judge_rows(part, (AUTO, FA2)) for mask, part in parts.items()}
    said = " and ".join(
        f"under a {mask} mask auto runs {_families(part)} (against the pin {judged[mask].counts})"
        for mask, part in parts.items()
    )
    both = together(judged.values())
    return both.finding(both.vote("slower"), f"In 0.6.4 {said}.")


def all_prefill_pins_gain(frame: pd.DataFrame) -> Finding:
    """fa2 is the faster of the two in every mode of the prefill wrappers."""
    judged, said = _by_mode(frame)
    return judged.finding(judged.vote("faster"), f"Shapes where fa2 is faster than fa3: {said}.")


def pin_loses_somewhere(frame: pd.DataFrame) -> Finding:
    """fa2 is no faster than fa3 at one shape of the prefill wrappers at least."""
    judged, said = _by_mode(frame)
    reason = f"fa2 is {judged.counts}. Shapes where it is the faster: {said}."
    return judged.finding(judged.somewhere("same", "slower"), reason)


def _pinned(frame: pd.DataFrame, mode: str) -> Finding:
    rows = _of_modes(frame, (mode,))
    judged, pinned = judge_rows(rows, (FA2, FA3)), rows[rows.backend == FA2]
    held = int((pinned.kernel_family == "fa2").sum())
    reason = (
        f"Pinned, {held} of {len(pinned)} records ran fa2; against fa3, which auto runs there, it "
        f"is {judged.counts}."
    )
    return judged.finding(CONFIRMED if held == len(pinned) else REFUTED, reason)


def _by_mode(frame: pd.DataFrame) -> tuple[Judged, str]:
    parts = {mode: judge_rows(_of_modes(frame, (mode,)), (FA2, FA3)) for mode in EVERY}
    counts = {mode: (part.count("faster"), len(part.verdicts)) for mode, part in parts.items()}
    said = ", ".join(f"{mode} {faster} of {shapes}" for mode, (faster, shapes) in counts.items())
    return together(parts.values()), said


def _of_modes(frame: pd.DataFrame, modes: Sequence[str]) -> pd.DataFrame:
    """The rows of `modes` as engines call them, fa2 and fa3, without a custom mask."""
    rows = plain(mode_rows(frame))
    return rows[rows["mode"].isin(modes) & rows.backend.isin((FA2, FA3))]


def _with_auto(rows: pd.DataFrame) -> pd.DataFrame:
    """Of both backends the records of cases and rounds in which `auto` ran too."""
    return rows[rows.groupby(["case", "round"], sort=False).backend.transform("nunique") == 2]


def _families(rows: pd.DataFrame) -> str:
    return ", ".join(sorted(rows[rows.backend == AUTO].kernel_family.unique()))
