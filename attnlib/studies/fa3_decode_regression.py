"""FlashInfer's fa3 decode vs. fa2: how much slower, for which shapes, and in which releases.

Times are those of the timer `graph`, in microseconds, unless a table says otherwise.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import pandas as pd

from ..core.spec import AttnSpec
from ..measure.calls.decode.case import DecodeCase
from ..measure.stats import SLOWER
from ..run.figures import charts, style
from ..run.frame import (
    AUTO,
    CUDA_CORES,
    FA2,
    FA3,
    GRAPH_AUTO,
    LABELS,
    SHAPE,
    decode_rows,
    intervals,
    over,
    times,
)
from ..run.study import Grid, Study

BEFORE = "0.5.3"
REGRESSED = "0.6.3"
FIXED = "0.6.4"
NEWEST = "0.7.2.post1"
AROUND = (BEFORE, REGRESSED, FIXED, NEWEST)
AFFECTED = ("0.6.0", "0.6.1", "0.6.2", "0.6.3")
HEADS = (
    (32, 8),
    (16, 2),
    (8, 1),
    (32, 32),
)
EAGER = ("eager",)
PAIR = (FA2, FA3)
PINNED = (*PAIR, CUDA_CORES)
ALL_MODES = (*PINNED, AUTO, GRAPH_AUTO)
FIX_PROOF = (FA2, AUTO, GRAPH_AUTO)
KV_LIMIT_BYTES = 16 * 2**30
"""Cache size limit of the wide grid: larger caches take seconds per record to settle."""
H100_MACHINE = "nvidia-h100-80gb-hbm3-ea9d21dc"
"""The GPU with the headline shapes on an H100."""


def decode_case(
    heads: tuple[int, int],
    page_size: int,
    batch_size: int,
    kv_len: int,
) -> DecodeCase:
    """A bf16 case with head_dim 128."""
    spec = AttnSpec(*heads, head_dim=128, page_size=page_size)
    return DecodeCase(spec, batch_size, kv_len)


HEADLINE = (
    decode_case((32, 8), 1, 1, 4096),
    decode_case((32, 8), 16, 16, 8192),
    decode_case((32, 8), 16, 128, 4096),
    decode_case((16, 2), 1, 16, 8192),
    decode_case((16, 2), 16, 1, 32768),
    decode_case((8, 1), 16, 64, 8192),
    decode_case((32, 32), 16, 4, 8192),
)
LONG = tuple(case for case in HEADLINE if case.kv_len >= 8192)
"""The shapes for a claim about "long" sequences whose source gives no length."""

PAGE_SIZES = (1, 16)
BATCHES = (1, 4, 16, 64, 128)
LENGTHS = (1024, 4096, 16384, 65536, 131072)


def _wide() -> tuple[DecodeCase, ...]:
    """Every shape whose cache is not too large."""
    cases = []
    for sizes in product(HEADS, PAGE_SIZES, BATCHES, LENGTHS):
        case = decode_case(*sizes)
        if case.cost.kv_bytes <= KV_LIMIT_BYTES:
            cases.append(case)
    return tuple(cases)


WIDE = _wide()
_AGAIN = {
    (32, 8): (
        (1, 1, 1024),
        (1, 16, 1024),
        (1, 128, 1024),
        (16, 4, 4096),
        (16, 64, 4096),
    ),
    (16, 2): (
        (1, 1, 16384),
        (1, 16, 16384),
        (1, 128, 16384),
        (16, 4, 16384),
        (16, 64, 16384),
    ),
    (8, 1): (
        (1, 1, 16384),
        (1, 16, 16384),
        (1, 128, 16384),
        (16, 4, 16384),
        (16, 64, 16384),
    ),
    (32, 32): (
        (1, 1, 16384),
        (1, 16, 16384),
        (16, 1, 4096),
        (16, 16, 4096),
    ),
}
"""Heads -> page size, batch size and kv_len of the cases that are measured twice."""


def _again() -> tuple[DecodeCase, ...]:
    """The A/A cases."""
    cases = []
    for heads, sizes in _AGAIN.items():
        for size in sizes:
            cases.append(decode_case(heads, *size))
    return tuple(cases)


AGAIN = _again()

_slow = partial(Grid, releases=(REGRESSED,), rounds=4)

STUDY = Study(
    name="fa3_decode_regression",
    question="How much slower is FlashInfer's fa3 decode than fa2, and since when?",
    grids=(
        Grid(HEADLINE, ALL_MODES, releases=(REGRESSED,), rounds=3, headline=True),
        Grid(HEADLINE, FIX_PROOF, releases=(FIXED,), rounds=3, headline=True),
        _slow(HEADLINE, ALL_MODES),
        Grid(
            HEADLINE,
            backends=(*FIX_PROOF, FA3),
            releases=(BEFORE, FIXED, NEWEST),
            rounds=4,
        ),
        _slow(HEADLINE, PAIR, timers=EAGER, again=PAIR),
        _slow(WIDE, PAIR),
        _slow(AGAIN, (), again=PAIR),
    ),
    reference_machine="nvidia-h200-30af7b45",
    bisect_machine="nvidia-h200-ea91ec76",
)


def headline(frame: pd.DataFrame, release: str) -> pd.DataFrame:
    """Time of every mode, and fa3 / fa2 with its interval and verdict, a row per case."""
    rows = decode_rows(frame, release=release)
    modes = [FA2, FA3, AUTO, CUDA_CORES]
    us = times(rows)[["case", *modes]]
    table = over(rows, FA3, FA2).merge(us, on="case")
    shown = table[[*SHAPE, *modes]]
    shown = shown.rename(columns=LABELS).round(1)
    shown["fa3 / fa2"] = table.ratio.round(2)
    shown["95 % CI"] = intervals(table)
    shown["verdict"] = table.verdict
    shown["rounds"] = table.rounds
    return shown


def slowdown_grid(frame: pd.DataFrame, release: str) -> pd.DataFrame:
    """fa3 / fa2 of every case of a release, with its verdict."""
    table = over(
        rows=decode_rows(frame, release=release),
        a=FA3,
        b=FA2,
    )
    return table[[*SHAPE, "ratio", "verdict"]]


def slowdown_by_heads(frame: pd.DataFrame, release: str) -> pd.DataFrame:
    """Slowdown of fa3 over fa2: a row per head count, the largest median first, and one for all."""
    grid = slowdown_grid(frame, release)
    parts = dict(iter(grid.groupby("heads")))
    medians = grid.groupby("heads").ratio.median()
    first = sorted(parts, key=lambda heads: -medians[heads])
    lines = []
    for heads in (*first, "all"):
        part = parts.get(heads, grid)
        line = {
            "heads": heads,
            "shapes": len(part),
            "slowdown, median": part.ratio.median(),
            "least": part.ratio.min(),
            "most": part.ratio.max(),
            "significantly slower": int((part.verdict == SLOWER).sum()),
        }
        lines.append(line)
    return pd.DataFrame(lines)


def slowdown_chart(frame: pd.DataFrame, release: str, *, page_size: int) -> charts.Figure:
    """Slowdown of fa3 over context length: a panel per head count, a line per batch size."""
    grid = slowdown_grid(frame, release)
    grid = grid[grid.page_size == page_size]
    records = decode_rows(frame, release=release)
    has_pages = records.page_size == page_size
    records = records[has_pages & records.backend.isin(PAIR)]
    by_heads = grid.groupby("heads").ratio.median().sort_values()
    figure, axes = charts.panels(
        [f"{heads} heads" for heads in by_heads.index],
        (8.4, 3.3),
        records,
        ("tokens of each (log)", "slowdown of fa3 over fa2 (log)"),
        title=f"FlashInfer {release}, one decode call, pages of {page_size} tokens",
        share_y=True,
    )
    for axis, heads in zip(axes, by_heads.index, strict=True):
        axis.axhline(1, **style.RULE)
        of_heads = grid[grid.heads == heads]
        for batch_size, look in style.looks(BATCHES).items():
            part = of_heads[of_heads.batch_size == batch_size]
            part = part.sort_values("kv_len")
            axis.plot(
                part.kv_len,
                part.ratio,
                color=look.color,
                marker=look.marker,
                label=f"{batch_size} requests" if batch_size > 1 else "1 request",
            )
        style.log_axes(axis, "x", "y")
        axis.set_xticks([1024, 8192, 65536], ["1k", "8k", "64k"])
    axes[0].legend(fontsize=7.5, loc="upper left")
    return figure
