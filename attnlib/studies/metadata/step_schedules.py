"""What FlashAttention-3's schedules cost a step: one launch for all layers, or one in each.

Times are what a step's metadata adds behind another kernel, attention left out. `metadata-fused` is
our metadata without a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ...measure.spans import Kernel
from ...run.frame import good_rows, savings
from ...run.study import Grid, Study
from .case import DECODE_MODELS, EACH, ONCE, VERIFY_MODELS, MetadataCase, ways

TOKENS = 4
"""Drafts that a request verifies."""
DECODE = (
    MetadataCase("decode", 1, 64, 8192),
    MetadataCase("decode", 128, 64, 8192),
    MetadataCase("decode", 1024, 64, 8192),
    MetadataCase("decode", 128, 1, 8192),
)
VERIFY = (
    MetadataCase("decode", 1, 64, 8192, seq_len_delta=TOKENS),
    MetadataCase("decode", 128, 64, 8192, seq_len_delta=TOKENS),
    MetadataCase("decode", 1024, 64, 8192, seq_len_delta=TOKENS),
)
FUSED = "metadata-fused"
OF_DECODE = ways(DECODE_MODELS)
OF_VERIFY = ways(VERIFY_MODELS)
BEHIND = ("graph-behind",)

STUDY = Study(
    name="step_schedules",
    question="What do FlashAttention-3's schedules cost a step?",
    grids=(
        Grid(
            DECODE,
            (FUSED, *OF_DECODE),
            timers=BEHIND,
            rounds=4,
            headline=True,
        ),
        Grid(VERIFY, (FUSED, *OF_VERIFY), timers=BEHIND, rounds=4),
    ),
    reference_machine="nvidia-h200-affeb91f",
    ceilings=(),
)
SHOWN = {
    "gpt-oss-120b": "gpt-oss-120b, decode",
    "deepseek-v3": "DeepSeek-V3, decode",
    "llama-3.1-8b-verify": "Llama-3.1-8B, verification",
}
"""Models as a table names them."""


def step_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Metadata and schedules of a step, a row per model and batch: in each layer, in one launch.

    `launches in each layer` are all kernels of the trace, metadata included; one launch is one.
    """
    rows = good_rows(frame, *BEHIND)
    launches = rows.assign(launches=rows.kernels.map(_launches))
    lines = []
    for model, label in SHOWN.items():
        each = f"{EACH}-{model}"
        mine = launches[launches.backend == each]
        of_model = mine.groupby("case", sort=False).launches.median()
        for saved in savings(rows, each, f"{ONCE}-{model}").itertuples():
            line = {
                "step": label,
                "requests": saved.batch_size,
                "page size": saved.page_size,
                "launches in each layer": int(of_model[saved.case]),
                "us in each layer": saved.base_us,
                "us in one launch": saved.new_us,
                "us saved": saved.saved,
                "95 % CI": f"{saved.low:.1f} to {saved.high:.1f}",
            }
            lines.append(line)
    return pd.DataFrame(lines).round(1)


def _launches(kernels: Sequence[Kernel]) -> int:
    """Kernels of a step."""
    return round(sum(kernel.launches for kernel in kernels))
