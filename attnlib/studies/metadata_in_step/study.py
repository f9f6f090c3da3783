"""What a call of the metadata adds to a step: behind another kernel, and before the layers.

`graph` repeats a call, which overlaps the copy of itself before it; in `graph-behind` it follows a
kernel of another kind, as in a step.
"""

from itertools import product

from ...core.spec import AttnSpec
from ...kinds.decode.case import DecodeCase
from ...kinds.step.case import StepCase
from ...run.study import Grid, Study
from ..decode_metadata.study import DESIGNS, EAGER_OR_FUSED, METADATA, SGLANG, SGLANG_RELEASES

TIMERS = ("graph-behind", "graph")
STEP_METADATA = ("flash-attn-3-step-eager", "flash-attn-3-step-serial", "flash-attn-3-step-fused")
LLAMA_STEPS = tuple(
    StepCase(DecodeCase(AttnSpec(32, 8, 128, page), batch, 8192, "ragged"), 32)
    for batch, page in product((1, 32, 128, 512), (1, 16))
)
"""32 layers of Llama-3.1-8B."""

STUDY = Study(
    name="metadata_in_step",
    question="What does a call of the metadata add to a decode step?",
    grids=(
        Grid(METADATA, DESIGNS, timers=TIMERS, rounds=4, again=EAGER_OR_FUSED),
        Grid(METADATA, SGLANG, SGLANG_RELEASES, timers=TIMERS, rounds=4),
        Grid(METADATA, ("metadata-fused-alone",), rounds=4),
        Grid(LLAMA_STEPS, STEP_METADATA, rounds=4, again=STEP_METADATA[::2]),
        Grid(METADATA[:6], DESIGNS, timers=TIMERS, rounds=4, headline=True),
    ),
    reference_machine="nvidia-h200-54fb76dd",
    ceilings=("copy", "launch", "gather"),
)
