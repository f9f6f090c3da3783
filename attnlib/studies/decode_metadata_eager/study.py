"""One call of a metadata builder outside a graph, where Python launches it.

Each item has a process of its own, and is timed before it is traced: once a profiler has run in a
process, its callbacks stay on and slow every launch. One request is there for A/A items alone.
"""

from ...run.study import Grid, Study
from ..decode_metadata.study import DESIGNS, METADATA, SGLANG, SGLANG_RELEASES

SOURCE_CASE = METADATA[1:2]
"""Batch 32, page_size 1, 8192 tokens: the case of SGLang's pull request."""

STUDY = Study(
    name="decode_metadata_eager",
    question="What does one launch of a step's metadata cost the host?",
    grids=(
        Grid(SOURCE_CASE, DESIGNS, timers=("eager",), rounds=4, isolated=True),
        Grid(SOURCE_CASE, SGLANG, SGLANG_RELEASES, timers=("eager",), rounds=4, isolated=True),
        Grid(METADATA[:1], DESIGNS, timers=("eager",), rounds=2, isolated=True, again=DESIGNS),
        Grid(SOURCE_CASE, (), timers=("eager",), rounds=2, isolated=True, again=DESIGNS),
        Grid(SOURCE_CASE, (), SGLANG_RELEASES, ("eager",), 2, isolated=True, again=SGLANG),
        Grid(SOURCE_CASE, DESIGNS, timers=("eager",), rounds=3, headline=True, isolated=True),
    ),
    reference_machine="nvidia-h100-80gb-hbm3-da6a6c3c",
    ceilings=(),
)
