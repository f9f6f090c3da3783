"""Checks of claims about the regression that no single comparison decides."""

from dataclasses import replace

import pandas as pd

from ...run.frame import AUTO, FA2
from ..evidence import Finding, judge_cases, together
from .study import BEFORE, HEADLINE, REGRESSED


def slower_before_fix(frame: pd.DataFrame) -> Finding:
    """`auto` is slower than the pinned fa2 in every release before the fix."""
    releases = (BEFORE, REGRESSED)
    parts = {r: judge_cases(frame, HEADLINE, (f"{AUTO}=={r}", f"{FA2}=={r}")) for r in releases}
    said = " and ".join(
        f"{part.count('slower')} of {len(part.verdicts)} shapes in {release}"
        for release, part in parts.items()
    )
    judged = together(parts.values())
    found = judged.finding(judged.vote("slower"), f"The default, auto, is slower in {said}.")
    medians = ", ".join(f"{p.ratios.median():.2f} x in {release}" for release, p in parts.items())
    # One median over both releases would describe neither.
    return replace(found, measured=f"median {medians}", value=None)
