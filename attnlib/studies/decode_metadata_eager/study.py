"""One call of a metadata builder outside a graph, where Python launches it.

Each item has a process of its own, and is timed before it is traced: once a profiler has run in a
process, its callbacks stay on and slow every launch.
"""

from ...run.study import Grid, Study
from ..decode_metadata.study import DESIGNS, METADATA, SGLANG, SGLANG_RELEASES

SOURCE_CASE = METADATA[1:2]
"""Batch 32, page_size 1, 8192 tokens: the case of SGLang's pull request."""

STUDY = Study(
    name="decode_metadata_eager",
    question="What does one launch of a step's metadata cost the host?",
    grids=(
        Grid(SOURCE_CASE, DESIGNS, timers=("eager",), rounds=3, isolated=True),
        Grid(SOURCE_CASE, SGLANG, SGLANG_RELEASES, timers=("eager",), rounds=3, isolated=True),
        Grid(SOURCE_CASE, DESIGNS, timers=("eager",), rounds=3, headline=True, isolated=True),
    ),
    reference_machine="nvidia-h200-434edd91",
    ceilings=(),
)
