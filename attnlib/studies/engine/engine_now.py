"""Decode steps of SGLang 0.5.23 (torch 2.14.1): metadata, schedule and backend, arm by arm."""

from ...run.study import Study
from .case import EngineCase
from .engine_step import (
    EAGER,
    FUSED,
    LAYER,
    LLAMA,
    NOW,
    ONE_LAUNCH,
    RETIRED,
    SCHEDULE,
)

CONTEXT = 131_072
"""Llama-3.1's own, which SGLang takes where none is given."""
RAGGED = EngineCase(
    LLAMA,
    128,
    1024,
    lengths="ragged",
    context=CONTEXT,
)
CASES = (
    EngineCase(LLAMA, 1, 1024, context=CONTEXT),
    EngineCase(LLAMA, 16, 1024, context=CONTEXT),
    EngineCase(LLAMA, 64, 1024, context=CONTEXT),
    RAGGED,
)
KERNELS = (
    EngineCase(LLAMA, 1, 8192, context=CONTEXT),
    EngineCase(LLAMA, 16, 8192, context=CONTEXT),
)
SERVED = (
    EngineCase(LLAMA, 64, 32768, lengths="chat", context=CONTEXT),
    EngineCase(LLAMA, 32, 65536, lengths="retrieval", context=CONTEXT),
    EngineCase(LLAMA, 40, 100_000, lengths="one_long", context=CONTEXT),
)
"""Lengths that people serve."""
STUDY = Study(
    name="engine_now",
    question="What do metadata, schedule and backend cost a step of SGLang 0.5.23?",
    reference_machine="nvidia-h200-04520efe",
    retired=RETIRED,
)
ALL = CASES + SERVED + SCHEDULE
COMPARED = (
    (NOW, EAGER, ALL),
    (FUSED, NOW, ALL),
    (ONE_LAUNCH, NOW, ALL),
    (NOW, LAYER, SCHEDULE),
)
"""For `engine_step.savings`."""
