"""Checks of claims about pinning fa2 for decode, by the plan that the library makes for it."""

import pandas as pd

from ...run.frame import AUTO, FA2
from ..evidence import Finding, judge_cases, vote
from ..fa3_decode_regression.study import HEADLINE, REGRESSED
from .study import REALISTIC
from .tables import OURS

REGRESSION, STUDY = "fa3_decode_regression", "fa2_plan"
READS = {"pin_is_consistent": (REGRESSION, STUDY)}
"""Checks that read more than this study's records."""


def pin_is_consistent(frame: pd.DataFrame) -> Finding:
    """Pinned, fa2 is faster than `auto` was, and by the library's plan as fast as it can be.

    Cases of both kinds vote; the figure is of the second: the library's plan over ours.
    """
    sides = (f"{AUTO}=={REGRESSED}", f"{FA2}=={REGRESSED}")
    improved = judge_cases(frame[frame.study == REGRESSION], HEADLINE, sides)
    planned = judge_cases(frame[frame.study == STUDY], REALISTIC, (FA2, OURS))
    both = improved + planned
    kept, undecided = planned.count("same", "faster"), both.count("ambiguous")
    support = improved.count("slower") + kept
    word = vote(support, len(both.verdicts) - support - undecided, undecided)
    reason = (
        f"Against the pin auto is {improved.counts}. By the library's plan the pinned kernels are "
        f"{planned.counts} against a plan that is made for the lengths, by more than "
        f"{max(verdict.margin for verdict in planned.verdicts):.1%} where they differ."
    )
    found = planned.finding(word, reason)
    return Finding(**{**vars(found), "records": both.records})
