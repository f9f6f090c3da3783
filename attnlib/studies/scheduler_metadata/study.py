"""FlashAttention-3's scheduler metadata: in every layer, or once per step."""

from itertools import product

from ...core.spec import AttnSpec
from ...kinds.decode.case import DecodeCase
from ...kinds.step.case import StepCase
from ...run.study import Grid, Study


def _qwen_step(layers: int, batch: int, kv_len: int, page: int) -> StepCase:
    """Layers of Qwen3-32B on one GPU of four, as in SGLang's pull request."""
    return StepCase(DecodeCase(AttnSpec(16, 2, 128, page), batch, kv_len, "ragged"), layers)


STEPS_64 = tuple(
    _qwen_step(64, batch, kv_len, page)
    for batch, kv_len, page in product((1, 4, 16, 64, 128), (512, 2048, 8192, 32768), (1, 64))
)
STEPS_32_80 = tuple(
    _qwen_step(layers, batch, kv_len, 64)
    for layers, batch, kv_len in product((32, 80), (1, 16, 128), (2048, 8192))
)
STEPS_EAGER = tuple(_qwen_step(64, batch, 2048, 64) for batch in (1, 16, 64, 128))
PREPARES = tuple(_qwen_step(1, batch, 2048, 64) for batch in (1, 4, 16, 64, 128))
EACH_OR_ONCE = ("flash-attn-3-step-each", "flash-attn-3-step-once")

STUDY = Study(
    name="scheduler_metadata",
    question="What does it save to prepare FA3's schedule once a step, not once a layer?",
    grids=(
        Grid(STEPS_EAGER, EACH_OR_ONCE, timers=("eager",), rounds=4, isolated=True),
        Grid(STEPS_EAGER, (), timers=("eager",), rounds=2, isolated=True, again=EACH_OR_ONCE),
        Grid(STEPS_64, EACH_OR_ONCE, rounds=4),
        Grid(STEPS_32_80, EACH_OR_ONCE, rounds=4),
        Grid(STEPS_64[::5], (), rounds=4, again=EACH_OR_ONCE[1:]),
        Grid(PREPARES, ("flash-attn-3-prepare",), rounds=4),
        Grid(STEPS_64[::12], EACH_OR_ONCE, rounds=3, headline=True),
        Grid(PREPARES, ("flash-attn-3-prepare",), rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-c9736401",
    ceilings=("copy", "launch"),
)
