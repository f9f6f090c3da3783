"""Our plan of fa2 beside its rivals, over batches that were drawn at random.

200 batches of 20 layers. A layer has KV heads of 1 to 32, a group of 1 to 16 and at most 128 query
heads, and is none of an earlier study; `drawn_cases` draws batch sizes, lengths and their kind.
head_dim is 128 and values are bfloat16: FlashInfer compiles for a minute per further one. The L2 is
cold. All backends take turns in one process, over the same tensors (A B B A). A plan's time is not
in a call's; on the host it is the record's `plan_us`. The planner's grid is sized for the longest
request of the batch. Tables are those of `random_batches`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import pandas as pd

from ..core.spec import AttnSpec
from ..run.figures import charts, style
from ..run.study import Grid, Study
from .random_batches import (
    COLD,
    FA2,
    FLASH_ATTENTION,
    PLANNED,
    drawn_cases,
    first_of_each_layer,
    gain_summary,
    ratios,
)

SIZES = (
    (96, 16, 128, 1),
    (16, 1, 128, 16),
    (8, 2, 128, 16),
    (2, 2, 128, 1),
    (12, 1, 128, 16),
    (96, 16, 128, 16),
    (64, 32, 128, 16),
    (64, 32, 128, 64),
    (24, 2, 128, 1),
    (32, 4, 128, 16),
    (48, 4, 128, 16),
    (3, 1, 128, 64),
    (2, 1, 128, 16),
    (3, 1, 128, 1),
    (24, 2, 128, 16),
    (112, 16, 128, 1),
    (56, 8, 128, 64),
    (4, 1, 128, 16),
    (8, 8, 128, 64),
    (1, 1, 128, 16),
)
"""Query heads, KV heads, head_dim and page size of the layers, drawn by `SEED`."""
LIVE_SIZES = (
    (96, 16, 128, 1),
    (96, 16, 128, 16),
    (48, 4, 128, 16),
    (112, 16, 128, 1),
)
SEED = "plan and rivals"
LAYERS = tuple(AttnSpec(*sizes) for sizes in SIZES)
CASES = drawn_cases(LAYERS, 10, SEED)
FIRST = first_of_each_layer(CASES)
AGAIN = tuple(FIRST.values())
LIVE = tuple(FIRST[AttnSpec(*sizes)] for sizes in LIVE_SIZES)
BATCH_ATTENTION = "flashinfer-batch-attention"
PAGES_OF_16 = ("flashinfer-xqa", "vllm-flash-attn-3", "vllm-triton")
"""Rivals that refuse the layers with pages of one token. The H100's records have none of them."""
FLASHINFER_ON_H200 = "0.7.2.post1"
FLASHINFER_ON_H100 = "0.6.13"
RIVALS = (FA2, BATCH_ATTENTION, FLASH_ATTENTION, *PAGES_OF_16)
BACKENDS = (*RIVALS, PLANNED)
WORDS = {
    FA2: "fa2 by FlashInfer's plan",
    BATCH_ATTENTION: "FlashInfer's BatchAttention",
    FLASH_ATTENTION: "FlashAttention-3, schedule made before",
    "flashinfer-xqa": "FlashInfer's XQA",
    "vllm-flash-attn-3": "vLLM's FlashAttention-3",
    "vllm-triton": "vLLM's Triton kernel",
}
"""Rivals as a reader knows them."""
_cold = partial(Grid, timers=(COLD,))

STUDY = Study(
    name="plan_rivals",
    question="Does fa2 by our plan lead its rivals, for batches that were drawn at random?",
    grids=(
        _cold(CASES, BACKENDS, rounds=2),
        _cold(AGAIN, (), rounds=2, again=(PLANNED,)),
        _cold(LIVE, BACKENDS, headline=True),
    ),
    reference_machine="nvidia-h200-a1283d40",
    ceilings=("copy",),
)


def speedup_table(rows: pd.DataFrame, rivals: Iterable[str] = RIVALS) -> pd.DataFrame:
    """Speedup of fa2 by our plan over each rival and part of the batches, the largest first.

    `rows` are of `random_batches.load_all`, of one GPU.
    """
    summary = gain_summary(rows, tuple(rivals))
    return pd.DataFrame(
        {
            "over": summary.rival.map(WORDS),
            "batches": summary.batches,
            "how many": summary["count"],
            "speedup, mean": summary["geometric mean"],
            "median": summary["median"],
            "5 % faster or more": summary["gains > 5 %"],
            "2 % slower or more": summary["loses > 2 %"],
        }
    ).sort_values("speedup, mean", ascending=False, ignore_index=True)


def speedup_chart(rows: pd.DataFrame, rivals: Iterable[str] = RIVALS) -> charts.Figure:
    """Speedup of fa2 by our plan in every batch, a line per rival, each sorted by itself."""
    names = tuple(rivals)
    drawn = rows[rows.backend.isin((*names, PLANNED))]
    figure, (axis,) = charts.panels(
        [f"{drawn.gpu.iloc[0]}: random batches, our plan of fa2"],
        (8.4, 3.6),
        drawn,
        ("batches, % (sorted)", "speedup over the other (log, cut at 3)"),
    )
    for name, look in style.looks(names).items():
        speedups = np.sort(ratios(drawn, name, PLANNED).ratio)
        share = np.linspace(0, 100, len(speedups))
        axis.plot(share, speedups, color=look.color, label=WORDS[name])
    axis.axhline(1, **style.RULE)
    axis.set_yscale("log")
    axis.set_ylim(0.5, 3)
    ticks = [0.5, 0.7, 1, 1.5, 2, 3]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.legend(fontsize=8)
    return figure
