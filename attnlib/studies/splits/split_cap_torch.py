"""Whether the release of PyTorch changes a call's time: the question behind `split_cap`'s releases.

sglang-kernel 0.4.4 and 0.4.5 are built for PyTorch 2.11, 0.4.10 for 2.14.1, so `split_cap` compares
them under the PyTorch that each pins. Here the same binaries, which load under both, are timed
under both: rounds 0 to 2 ran with PyTorch 2.11, rounds 3 to 5 with 2.14.1.
"""

from __future__ import annotations

import pandas as pd

from ...run.frame import over
from ...run.study import Grid, Study
from .split_cap import GROUPED, MLA, PAGES_16, PAGES_64

ROUNDS = 3
"""Of each release of PyTorch."""
UPSTREAM = "flash-attn-3-precomputed"
FLASHMLA = "flashmla-dense"
STUDY = Study(
    name="split_cap_torch",
    question="Does the release of PyTorch change the time of a call?",
    grids=(
        Grid(
            PAGES_16[GROUPED[2]],
            (UPSTREAM,),
            rounds=2 * ROUNDS - 1,  # the last was cut off
        ),
        Grid(
            PAGES_64[MLA],
            (FLASHMLA,),
            rounds=2 * ROUNDS,
            headline=True,
        ),
    ),
    reference_machine="nvidia-h100-80gb-hbm3-96093870",
    ceilings=(),
)


def torch_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Time under PyTorch 2.14.1 over time under 2.11, a row per call."""
    is_later = frame["round"] >= ROUNDS
    sides = frame.assign(
        release=is_later.map({False: "2.11", True: "2.14.1"}),
        round=frame["round"] % ROUNDS,
    )
    tables = []
    for backend in (UPSTREAM, FLASHMLA):
        table = over(sides, f"{backend}==2.14.1", f"{backend}==2.11")
        tables.append(table.assign(backend=backend))
    columns = [
        "backend",
        "heads",
        "num_qo_heads",
        "batch_size",
        "ratio",
        "low",
        "high",
        "verdict",
    ]
    table = pd.concat(tables, ignore_index=True)
    shown = table.columns.intersection(columns, sort=False)
    return table[shown].round(3)
