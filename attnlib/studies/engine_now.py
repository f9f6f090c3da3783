"""Decode steps of SGLang 0.5.23 (torch 2.14.1): metadata, schedule and backend, arm by arm."""

from ..kinds.engine.case import EngineCase
from ..run.study import Grid, Study
from . import engine_step
from .engine_step import EAGER, FA2, FA3, FUSED, LAYER, LLAMA, NOW, ONE_LAUNCH, PLANNED, SPLITS

CASES = tuple(
    EngineCase(LLAMA, batch, 1024, lengths=lengths, context=131_072)
    for batch, lengths in ((1, "fixed"), (16, "fixed"), (64, "fixed"), (128, "ragged"))
)
"""The context is Llama-3.1's own, which SGLang takes where none is given."""
KERNELS = tuple(EngineCase(LLAMA, batch, 8192, context=131_072) for batch in (1, 16))
SERVED = (
    EngineCase(LLAMA, 64, 32768, lengths="chat", context=131_072),
    EngineCase(LLAMA, 32, 65536, lengths="retrieval", context=131_072),
    EngineCase(LLAMA, 40, 100_000, lengths="one_long", context=131_072),
)
"""Lengths that people serve."""
RANK = engine_step.SCHEDULE
"""One GPU of four that serve Qwen3-32B."""
METADATA, HOST = (NOW, EAGER, FUSED, ONE_LAUNCH), engine_step.HOST
STUDY = Study(
    name="engine_now",
    question="What do metadata, schedule and backend cost a step of SGLang 0.5.23?",
    # In the order of the engines' processes, so that each starts once per round.
    grids=(
        Grid((*CASES, *SERVED), METADATA, timers=HOST, rounds=4),
        Grid(SERVED, (SPLITS,), timers=HOST, rounds=4),
        Grid(KERNELS, (FA2, FA3, PLANNED), timers=HOST, rounds=4),
        Grid(SERVED, (FA2, PLANNED), timers=HOST, rounds=4),
        Grid(SERVED, (NOW, SPLITS, PLANNED, FA2), timers=("ahead",), rounds=3),
        Grid(RANK, METADATA, timers=HOST, rounds=2),
        Grid(RANK, (LAYER,), timers=HOST, rounds=2),
        Grid(CASES[1:2], METADATA, timers=HOST, headline=True),
    ),
    reference_machine="nvidia-h200-04520efe",
    ceilings=(),
)
AHEAD_ON = "nvidia-h100-80gb-hbm3-11b7d086"
"""The machine that published `SERVED` by both timers."""
ALL = (*CASES, *SERVED, *RANK)
COMPARED = ((NOW, EAGER, ALL), (FUSED, NOW, ALL), (ONE_LAUNCH, NOW, ALL), (NOW, LAYER, RANK))
"""For `engine_step.savings`."""
COMPARED_BACKENDS = ((SPLITS, NOW, SERVED), (PLANNED, NOW, SERVED), (PLANNED, FA2, SERVED))
"""For lengths that differ; `NOW` decodes with FlashAttention-3, in a process of its own."""
