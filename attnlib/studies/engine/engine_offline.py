"""Time per output token of SGLang 0.5.23's `Engine` (torch 2.14.1), a process for each arm."""

from dataclasses import replace

from ...run.study import Study
from .case import EngineCase
from .engine_now import CONTEXT, SERVED
from .engine_step import FA2, LAYER, LLAMA, NOW, PLANNED, RETIRED, SPLITS

CAPTURED = (
    "552+415+384+345+160+1137+179+105+3610+297+134+1340+1641+1444+1317+284+1941+828+460+211+406+959"
    "+1774+2325+403+2204+921+459+509+701+180+1536+1142+1130+258+2889+761+615+2720+2089"
)
"""Lengths of the largest decode step in data/captures/engine.jsonl."""
STEP = EngineCase(
    LLAMA,
    40,
    3610,
    lengths=CAPTURED,
    context=CONTEXT,
)
_STEPS = (*SERVED, STEP)
CASES = tuple(replace(case, driver="offline") for case in _STEPS)
RANKS = (
    EngineCase("qwen3-half", 1, 1024, output_len=128, driver="offline", tp=2),
    EngineCase("qwen3-half", 16, 1024, output_len=128, driver="offline", tp=2),
)
"""Over two GPUs with an all-reduce; each has the shapes of one of four that serve Qwen3-32B."""
STUDY = Study(
    name="engine_offline",
    question="What does a user of SGLang's own scheduler gain, per output token?",
    reference_machine="nvidia-h100-80gb-hbm3-8bd84b45",
    retired=RETIRED,
)
RANKS_OF = {
    "0.5.11, H200": ("engine_step", "nvidia-h200-04fdf2a2"),
    "0.5.23, H100": ("engine_offline", "nvidia-h100-80gb-hbm3-dbe0f241"),
}
"""SGLang and GPU of the records of `RANKS` -> their study and machine."""
COMPARED = (
    (SPLITS, NOW, CASES),
    (PLANNED, NOW, CASES),
    (PLANNED, SPLITS, CASES),
    (PLANNED, FA2, CASES),
    (NOW, LAYER, RANKS),
)
"""For `engine_step.savings`."""
