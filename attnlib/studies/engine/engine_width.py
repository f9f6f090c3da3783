"""What the configured context costs a decode step inside SGLang 0.5.16 and 0.5.17.

Both pin torch 2.11.0 and sglang-kernel 0.4.5; `context_width` has the metadata kernels alone. By
the timer `host` a kernel can hide while the host prepares the graph's launch, by `ahead` none can.
"""

from __future__ import annotations

import pandas as pd

from ...run import store
from ...run.study import Study
from .engine_now import RAGGED
from .engine_step import FUSED, NOW, ONE_LAUNCH, RETIRED, saved_table, savings

STUDY = Study(
    name="engine_width",
    question="What does the configured context cost a step inside SGLang?",
    reference_machine="nvidia-h200-72f2fe22",
    retired=RETIRED,
)
COMPARED = (
    (FUSED, NOW, (RAGGED,)),
    (ONE_LAUNCH, NOW, (RAGGED,)),
)
"""For `engine_step.savings`."""
TIMERS = {"ahead": "asynchronous", "host": "synchronous"}
"""Timers, and how the engine's host schedules the step."""


def width_table(machine: str = "") -> pd.DataFrame:
    """What our metadata saves of a step with a wide page table, on one GPU.

    All rows have 128 requests, and SGLang's own metadata is what they are compared with.
    """
    frame = store.load(STUDY.name, machine or STUDY.reference_machine)
    tables = []
    for timer, words in TIMERS.items():
        table = saved_table(savings(frame, COMPARED, timer))
        table = table.drop(columns=["against", "requests"])
        tables.append(table.assign(scheduling=words))
    return pd.concat(tables, ignore_index=True)
