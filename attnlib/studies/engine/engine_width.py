"""What the configured context costs a decode step inside SGLang 0.5.16 and 0.5.17.

Both pin torch 2.11.0 and sglang-kernel 0.4.5; `context_width` has the metadata kernels alone. By
the timer `host` a kernel can hide while the host prepares the graph's launch, by `ahead` none can.
"""

from ...run.study import Study
from .engine_now import RAGGED
from .engine_step import FUSED, NOW, ONE_LAUNCH, RETIRED

STUDY = Study(
    name="engine_width",
    question="What does the configured context cost a step inside SGLang?",
    reference_machine="nvidia-h200-72f2fe22",
    retired=RETIRED,
)
SECOND_GPU = "nvidia-h200-b4e95249"
COMPARED = (
    (FUSED, NOW, (RAGGED,)),
    (ONE_LAUNCH, NOW, (RAGGED,)),
)
"""For `engine_step.savings`."""
