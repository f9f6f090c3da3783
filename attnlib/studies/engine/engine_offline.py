"""Time per output token of SGLang 0.5.23's `Engine` (torch 2.14.1), a process for each arm."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from ...run import store
from ...run.figures import charts, style
from ...run.study import Study
from .case import EngineCase
from .engine_now import CONTEXT, SERVED
from .engine_step import (
    ARM_WORDS,
    FA2,
    LAYER,
    LLAMA,
    NOW,
    PLANNED,
    RETIRED,
    SPLITS,
    saved_table,
    savings,
)

CAPTURED = (
    "552+415+384+345+160+1137+179+105+3610+297+134+1340+1641+1444+1317+284+1941+828+460+211+406+959"
    "+1774+2325+403+2204+921+459+509+701+180+1536+1142+1130+258+2889+761+615+2720+2089"
)
"""Lengths of the largest decode step in data/captures/engine.jsonl."""
LENGTHS = {
    "chat": "chat",
    "retrieval": "retrieval",
    "one_long": "one long request",
    CAPTURED: "captured",
}
"""Lengths of a case -> words."""
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
ROOM = 15
"""Percent beside the first and the last mark of the chart, for their numbers."""


def ranks_table() -> pd.DataFrame:
    """What the schedule once per step saves over two GPUs, a row per engine and batch."""
    tables = []
    for engine, source in RANKS_OF.items():
        table = savings(store.load(*source), COMPARED)
        tables.append(table.assign(release=engine))
    return saved_table(pd.concat(tables, ignore_index=True))


def served() -> pd.DataFrame:
    """The savings per output token of every lengths that are served (`engine_step.savings`), with
    `lengths` in words."""
    frame = store.load(STUDY.name, STUDY.reference_machine)
    table = savings(frame, COMPARED)
    return table.assign(lengths=table.lengths.map(LENGTHS))


def served_chart() -> charts.Figure:
    """The share of a token's time that each arm saves, with its interval: a panel per lengths."""
    frame = store.load(STUDY.name, STUDY.reference_machine)
    table = served()
    figure, axes = charts.panels(
        list(LENGTHS.values()),
        (8.4, 2.6),
        frame,
        ("saved, %", ""),
        title="SGLang 0.5.23, time per output token: right of 0 is faster",
        share_y=True,
    )
    names = [f"{ARM_WORDS[arm]} over\n{ARM_WORDS[base]}" for arm, base, _ in COMPARED[:-1]]
    ends = (table.gain.min() - ROOM, table.gain.max() + ROOM)
    for axis, lengths in zip(axes, LENGTHS.values(), strict=True):
        for place, (arm, base, _) in enumerate(COMPARED[:-1]):
            pair = (table.arm == arm) & (table.base == base) & (table.lengths == lengths)
            for row in table[pair].itertuples():
                share = 100 / row.step_us
                interval = [share * row.low, share * row.high]
                axis.plot(interval, [place, place], **style.RULE)
                axis.plot(row.gain, place, marker="o", color=style.BLUE)
                axis.annotate(
                    f"{row.gain:.0f} %",
                    (row.gain, place),
                    xytext=(0, 5),
                    textcoords="offset points",
                    ha="center",
                    **style.SMALL,
                )
        axis.axvline(0, **style.RULE)
        axis.set_xlim(ends)
    charts.categories(axes[0], "y", names)
    return figure
