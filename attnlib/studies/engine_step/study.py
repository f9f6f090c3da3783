"""What fixes of metadata, schedule, kernel choice and plan are worth inside SGLang, a step.

Grids are in the order of the arms' processes, so that each engine starts once a round; odd rounds
run backwards, A B B A. The three rounds should take about 20 minutes of an H200: 20 starts of 30 to
40 s, 3 minutes of compilation, 90 s of steps a round. Traces come last in a process.
"""

from ...kinds.engine.case import SIDE_BY_SIDE, EngineCase
from ...run.study import Grid, Study

LLAMA, QWEN = "llama-3.1-8b", "qwen3-32b-tp4"
METADATA = (
    *(EngineCase(LLAMA, batch, 1024) for batch in (1, 16, 32, 128)),
    *(EngineCase(LLAMA, batch, 8192) for batch in (1, 16, 32)),
)
"""As far as they fit: 128 x 8,192 tokens take 128 GiB of cache."""
SCHEDULE = tuple(EngineCase(QWEN, batch, 1024) for batch in (1, 16))
"""All layers of Qwen3-32B, as one GPU of four has them."""
KERNELS = tuple(EngineCase(LLAMA, batch, 8192) for batch in (1, 16))
SERVED = (
    EngineCase(LLAMA, 64, 32768, lengths="chat"),
    EngineCase(LLAMA, 32, 65536, lengths="retrieval"),
    EngineCase(LLAMA, 40, 100_000, lengths="one_long"),
)
"""Lengths that people serve, as in the study `fa2_plan`."""
TRACED = (METADATA[2],)
OFFLINE = (EngineCase(LLAMA, 40, 100_000, 64, "offline", lengths="one_long"),)
LAYER, FA2, FA3, PLANNED = (f"sglang-{name}" for name in ("layer", "fa2", "fa3", "planned"))
HOST, PROFILER = ("host",), ("profiler",)

STUDY = Study(
    name="engine_step",
    question="What is a faster kernel or schedule worth to a user of SGLang, a step?",
    grids=(
        Grid(METADATA, SIDE_BY_SIDE, timers=HOST, rounds=3),
        Grid(TRACED, SIDE_BY_SIDE, timers=PROFILER),
        Grid(SCHEDULE, SIDE_BY_SIDE, timers=HOST, rounds=3),
        Grid(SCHEDULE[:1], ("sglang",), timers=PROFILER),
        Grid(SCHEDULE, (LAYER,), timers=HOST, rounds=3),
        Grid(SCHEDULE[:1], (LAYER,), timers=PROFILER),
        Grid((*KERNELS, *SERVED), (FA2,), timers=HOST, rounds=3),
        Grid(KERNELS[1:], (FA2,), timers=PROFILER),
        Grid(KERNELS, (FA3,), timers=HOST, rounds=3),
        Grid(KERNELS[1:], (FA3,), timers=PROFILER),
        Grid((*KERNELS, *SERVED), (PLANNED,), timers=HOST, rounds=3),
        Grid(KERNELS[1:], (PLANNED,), timers=PROFILER),
        *(Grid(OFFLINE, (arm,), timers=HOST) for arm in (FA2, PLANNED)),
        Grid(METADATA[:3:2], SIDE_BY_SIDE, timers=HOST, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-9ab23648",
    ceilings=(),
)
