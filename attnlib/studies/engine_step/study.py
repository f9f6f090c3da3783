"""What fixes of metadata, schedule, kernel choice and plan are worth inside an engine, a step.

Grids are in the order of the engines' processes, so that each starts once a round; odd rounds run
backwards, A B B A. All of it should take about 18 minutes of two H200s, a round of SGLang's
synchronous steps 130 s of them. On one GPU the cases of two are refused. Traces come last in a
process.
"""

from dataclasses import replace

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
OFFLINE = tuple(replace(case, driver="offline") for case in SERVED)
RANKS_LLAMA = tuple(EngineCase(LLAMA, n, 1024, 128, "offline", tp=2) for n in (1, 16))
"""SGLang as it is; what its schedule saves over two GPUs is the study `engine_ranks`."""
GROUPS = EngineCase(
    *("qwen3-0.6b", 8, 12_000, 128, "offline", 2),
    lengths="12000+900+40+3000+17+7000+2000+600",
    dp=2,
)
"""Each of two GPUs attends for requests of its own; one request is long."""
BATCHING = tuple(EngineCase(LLAMA, batch, 1024, driver="batching") for batch in (1, 16))
FA3_ARMS, INFER_ARMS, HF_ARMS = SIDE_BY_SIDE.values()
NOW, EAGER, OURS_FUSED, ONE_LAUNCH, LAYER = FA3_ARMS
FA2, FA3, PLANNED = INFER_ARMS
HF, HF_ONCE = HF_ARMS
GUARDED = "sglang-guarded"
HOST, PROFILER = ("host",), ("profiler",)

STUDY = Study(
    name="engine_step",
    question="What is a faster kernel or schedule worth to a user of SGLang, a step?",
    grids=(
        Grid(METADATA, FA3_ARMS, timers=HOST, rounds=3),
        Grid(TRACED, FA3_ARMS, timers=PROFILER),
        Grid(SCHEDULE, FA3_ARMS, timers=HOST, rounds=3),
        Grid(SCHEDULE[:1], FA3_ARMS, timers=PROFILER),
        Grid(KERNELS, INFER_ARMS, timers=HOST, rounds=3),
        Grid(SERVED, (FA2, PLANNED), timers=HOST, rounds=3),
        Grid(KERNELS[1:], INFER_ARMS, timers=PROFILER),
        Grid(RANKS_LLAMA, (NOW,), timers=HOST),
        *(Grid((GROUPS,), (arm,), timers=HOST) for arm in (NOW, LAYER, GUARDED)),
        Grid(BATCHING, HF_ARMS, timers=HOST, rounds=2),
        *(Grid(OFFLINE, (arm,), timers=HOST, rounds=2) for arm in (FA2, PLANNED)),
        Grid(METADATA[:3:2], FA3_ARMS, timers=HOST, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-677adb93",
    ceilings=(),
)
