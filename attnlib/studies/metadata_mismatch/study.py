"""Scheduler metadata that does not fit its attention call: with the guard, and past it."""

from ...kinds.mismatch.case import MISMATCHES, MismatchCase
from ...kinds.mismatch.case import call_facts as call_facts
from ...kinds.mismatch.case import told_facts as told_facts
from ...run.study import Grid, Study

CASES = tuple(MismatchCase(each.name, guard) for guard in (False, True) for each in MISMATCHES)
HEADLINE = tuple(case for case in CASES if case.name == "head-counts")

STUDY = Study(
    name="metadata_mismatch",
    question="What happens when FA3's metadata does not fit the call, and who notices?",
    grids=(
        Grid(CASES, ("flash-attn-3",), timers=("eager",), isolated=True),
        Grid(HEADLINE, ("flash-attn-3",), timers=("eager",), headline=True, isolated=True),
    ),
    reference_machine="nvidia-h200-68fde87c",
    ceilings=(),
)
