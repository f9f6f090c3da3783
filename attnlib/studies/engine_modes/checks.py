"""The checks of published claims about pinning fa2 for every mode of an engine.

As in `claim_checks`, a check computes from records alone: those of the study `engine_modes`, where
FlashInfer 0.6.4 is pinned to fa2 and to fa3, mode by mode. What SGLang's code passes to its
wrappers is no record's business; what a wrapper pinned so runs, and in what time, is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from ...kinds.extend.case import MODES
from ..evidence import (
    CONFIRMED,
    OPEN,
    REFUTED,
    Finding,
    Judged,
    MissingRecordsError,
    judge_rows,
    vote,
)
from .tables import AUTO, FA2, FA3, mode_rows, plain

STUDY = "engine_modes"
EVERY = tuple(MODES)
"""Every mode that goes through FlashInfer's prefill wrappers."""

Check = Callable[[pd.DataFrame, float | None], Finding]


def pin_in_paged_prefill(frame: pd.DataFrame, _: float | None) -> Finding:
    """Paged prefill pinned to fa2 runs fa2; its time over fa3's."""
    return _pinned(frame, "prefill_paged")


def pin_in_draft_extend(frame: pd.DataFrame, _: float | None) -> Finding:
    """Draft extension pinned to fa2 runs fa2; its time over fa3's."""
    return _pinned(frame, "draft_extend")


def pin_in_dllm_extend(frame: pd.DataFrame, _: float | None) -> Finding:
    """Block extension pinned to fa2 runs fa2; its time over fa3's."""
    return _pinned(frame, "dllm_extend")


def verify_pin_gains(frame: pd.DataFrame, _: float | None) -> Finding:
    """Verification by `auto` is slower than pinned to fa2, with and without a custom mask."""
    rows = mode_rows(frame)
    rows = rows[(rows["mode"] == "target_verify") & rows.backend.isin((AUTO, FA2))]
    parts = {mask: _with_auto(rows[rows["mask"] == mask]) for mask in ("causal", "tree")}
    judged = {mask: _judge(part, (AUTO, FA2)) for mask, part in parts.items()}
    said = " and ".join(
        f"under a {mask} mask auto runs {_families(part)} (against the pin {judged[mask].counts})"
        for mask, part in parts.items()
    )
    both = judged["causal"] + judged["tree"]
    against, undecided = both.count("same", "faster"), both.count("ambiguous")
    word = vote(both.count("slower"), against, undecided)
    return both.finding(word, f"In 0.6.4 {said}.")


def all_prefill_pins_gain(frame: pd.DataFrame, _: float | None) -> Finding:
    """fa2 is the faster of the two in every mode of the prefill wrappers."""
    judged, said = _by_mode(frame)
    against, undecided = judged.count("same", "slower"), judged.count("ambiguous")
    word = vote(judged.count("faster"), against, undecided)
    return judged.finding(word, f"Shapes where fa2 is faster than fa3: {said}.")


def pin_loses_somewhere(frame: pd.DataFrame, _: float | None) -> Finding:
    """fa2 is no faster than fa3 at one shape of the prefill wrappers at least."""
    judged, said = _by_mode(frame)
    lost, undecided = judged.count("same", "slower"), judged.count("ambiguous")
    word = CONFIRMED if lost else OPEN if undecided else REFUTED
    reason = f"fa2 is {judged.counts}. Shapes where it is the faster: {said}."
    return judged.finding(word, reason)


CHECKS: dict[str, tuple[tuple[str, ...], Check]] = {
    check.__name__: ((STUDY,), check)
    for check in (
        pin_in_paged_prefill,
        pin_in_draft_extend,
        pin_in_dllm_extend,
        verify_pin_gains,
        all_prefill_pins_gain,
        pin_loses_somewhere,
    )
}
"""Name in data/claims.yaml -> the studies it reads and the check."""


def _pinned(frame: pd.DataFrame, mode: str) -> Finding:
    rows = _of_modes(frame, (mode,))
    judged, pinned = _judge(rows, (FA2, FA3)), rows[rows.backend == FA2]
    held = int((pinned.kernel_family == "fa2").sum())
    reason = (
        f"Pinned, {held} of {len(pinned)} records ran fa2; against fa3, which auto runs there, it "
        f"is {judged.counts}."
    )
    return judged.finding(CONFIRMED if held == len(pinned) else REFUTED, reason)


def _by_mode(frame: pd.DataFrame) -> tuple[Judged, str]:
    parts = {mode: _judge(_of_modes(frame, (mode,)), (FA2, FA3)) for mode in EVERY}
    counts = {mode: (part.count("faster"), len(part.verdicts)) for mode, part in parts.items()}
    said = ", ".join(f"{mode} {faster} of {shapes}" for mode, (faster, shapes) in counts.items())
    return sum(list(parts.values())[1:], parts[EVERY[0]]), said


def _of_modes(frame: pd.DataFrame, modes: Sequence[str]) -> pd.DataFrame:
    """The rows of `modes` as engines call them, fa2 and fa3, without a custom mask."""
    rows = plain(mode_rows(frame))
    return rows[rows["mode"].isin(modes) & rows.backend.isin((FA2, FA3))]


def _with_auto(rows: pd.DataFrame) -> pd.DataFrame:
    """Of both backends the records of cases and rounds in which `auto` ran too."""
    return rows[rows.groupby(["case", "round"], sort=False).backend.transform("nunique") == 2]


def _families(rows: pd.DataFrame) -> str:
    return ", ".join(sorted(rows[rows.backend == AUTO].kernel_family.unique()))


def _judge(rows: pd.DataFrame, pair: tuple[str, str]) -> Judged:
    parts = [judge_rows(part, pair) for _, part in rows.groupby("timer")]
    judged = sum(parts, Judged((), ()))
    if not judged.verdicts:
        raise MissingRecordsError(f"{' and '.join(pair)} have no round that both are ok in")
    return judged
