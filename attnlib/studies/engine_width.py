"""What the configured context costs a decode step inside SGLang 0.5.16 and 0.5.17.

Both pin torch 2.11.0 and sglang-kernel 0.4.5; `context_width` has the metadata kernels alone. By
the timer `host` a kernel can hide while the host prepares the graph's launch, by `ahead` none can.
"""

from ..run.study import Grid, Study
from . import engine_now
from .engine_step import FUSED, NOW, ONE_LAUNCH

CASES = engine_now.CASES[-1:]
ARMS, RELEASES = (NOW, FUSED, ONE_LAUNCH), ("0.5.16", "0.5.17")
STUDY = Study(
    name="engine_width",
    question="What does the configured context cost a step inside SGLang?",
    grids=(
        Grid(CASES, ARMS, RELEASES, ("host", "ahead"), rounds=2),
        Grid(CASES, ARMS, RELEASES[:1], ("host", "ahead"), headline=True),
    ),
    reference_machine="nvidia-h200-72f2fe22",
    ceilings=(),
)
SECOND_GPU = "nvidia-h200-b4e95249"
COMPARED = tuple((arm, NOW, CASES) for arm in ARMS[1:])
