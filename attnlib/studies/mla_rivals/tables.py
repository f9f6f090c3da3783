"""The tables of MLA over either cache by what engines run; times are microseconds of one call.

`case` is the one over a bfloat16 cache, so that all kernels of a shape pair up. The L2 is cold
unless `timer` says otherwise. A comparison is judged as one table, with Holm's intervals.
"""

from pathlib import Path

import pandas as pd

from ...run.frame import good_rows, intervals, over, tally, times, whole_counts
from ..sparse_mla.tables import SHAPE, SHORT, in_format
from .study import RIVALS

NAMES = tuple(RIVALS.values())
BASE, FLASH_ATTENTION, PREFILL, _, FLASHINFER_FP8, FLASHMLA_FP8 = NAMES
PAIRS = (
    *((name, BASE) for name in (FLASH_ATTENTION, PREFILL, FLASHINFER_FP8)),
    *((FLASHMLA_FP8, name) for name in (FLASH_ATTENTION, PREFILL)),
    (FLASHINFER_FP8, FLASHMLA_FP8),
)
"""What `pair_counts` compares: rivals over one format, formats in one library and as engines
choose."""
FORMATS = ("bf16", "FP8")
COLD = "graph-cold"
L2 = {COLD: "cold", "graph": "warm"}
TRACES = Path(__file__).resolve().parents[3] / "data" / "traces"
COUNTED = TRACES / "flashmla_fp8_counters.csv"
_PEAK = "pct_of_peak_sustained_elapsed"
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COUNTERS = {
    "gpu__time_duration.sum": ("time, us", 1e3),
    f"gpu__dram_throughput.avg.{_PEAK}": ("memory, % of peak", 1),
    f"lts__throughput.avg.{_PEAK}": ("L2, % of peak", 1),
    f"sm__pipe_tensor_cycles_active.avg.{_PEAK}": ("tensor cores, % of peak", 1),
    f"l1tex__data_pipe_lsu_wavefronts.avg.{_PEAK}": (
        "data pipe of L1 and shared memory, % of peak",
        1,
    ),
    f"sm__pipe_alu_cycles_active.avg.{_PEAK}": ("ALU, % of peak", 1),
    f"sm__pipe_fma_cycles_active.avg.{_PEAK}": ("FMA, % of peak", 1),
    "dram__bytes_read.sum": ("read from memory, MB", 1e6),
    "l1tex__m_l1tex2xbar_write_bytes_mem_dshared.sum": ("written to another SM, MB", 1e6),
    "smsp__average_warp_latency_per_inst_issued.ratio": ("cycles a warp takes an instruction", 1),
    _STALL.format("barrier"): ("of these: at a barrier", 1),
    _STALL.format("long_scoreboard"): ("of these: for global or L1 loads", 1),
    _STALL.format("wait"): ("of these: fixed latency", 1),
    _STALL.format("math_pipe_throttle"): ("of these: for a busy ALU, FMA or tensor pipe", 1),
}
"""Nsight Compute's name -> ours, and what it is divided by."""


def rival_rows(frame: pd.DataFrame, timer: str = COLD) -> pd.DataFrame:
    """The good rows of one timer; `backend` is the name in `RIVALS`."""
    rows = good_rows(frame[frame.top_k.notna()], timer)
    own = [RIVALS[key] for key in zip(rows.kv_format, rows.backend, strict=True)]
    cases = [in_format(case, "bfloat16") for case in rows.case]
    return whole_counts(rows.assign(backend=own, case=cases).drop(columns=["heads", "kv_format"]))


def side_by_side(frame: pd.DataFrame, timer: str = COLD) -> pd.DataFrame:
    """Time of each kernel at each shape."""
    table = times(rival_rows(frame, timer)).filter(items=[*SHAPE, *NAMES])
    return table.round(1).rename(columns=SHORT)


def formats(frame: pd.DataFrame, timer: str = COLD) -> pd.DataFrame:
    """The fastest kernel over FP8 (by median) over the fastest over bf16, each sparse shape.

    `ratio` is of rounds that both have, which the medians are not where rounds were left out.
    """
    rows = rival_rows(frame, timer)
    rows = rows[rows.top_k > 0]
    table = times(rows).set_index("case")
    parts, told = [], table[SHAPE]
    for word in FORMATS:
        own = table.filter(items=[name for name in NAMES if name.endswith(word)])
        best = own.idxmin(axis=1)
        parts.append(rows[rows.backend == rows.case.map(best)].assign(backend=word))
        told = told.assign(**{word: best.str.split(",").str[0], f"{word}, us": own.min(axis=1)})
    found = over(pd.concat(parts), *reversed(FORMATS)).set_index("case")
    told = told.round(1).assign(ratio=found.ratio.round(2), interval=intervals(found))
    verdicts = {"rounds": found.rounds, "FP8 is": found.verdict}
    return told.assign(**verdicts).reset_index(drop=True).rename(columns=SHORT)


def format_counts(frame: pd.DataFrame) -> pd.DataFrame:
    """`formats` counted, by L2 and requests."""
    parts = []
    for timer, word in L2.items():
        table = formats(frame, timer).rename(columns={"FP8 is": "verdict"})
        parts.append(table.assign(L2=word + ", " + table.batch.astype(str) + " requests"))
    return tally(pd.concat(parts, ignore_index=True), "L2")


def pair_counts(frame: pd.DataFrame, timer: str = COLD) -> pd.DataFrame:
    """Kernel over kernel, counted over the sparse shapes, by requests."""
    rows = rival_rows(frame, timer)
    rows, parts = rows[rows.top_k > 0], []
    for pair in PAIRS:
        found = over(rows, *pair)
        names = " over ".join(pair) + ", batch " + found.batch_size.astype(str)
        parts.append(found.assign(kernels=names))
    return tally(pd.concat(parts, ignore_index=True), "kernels")


def left_out(frame: pd.DataFrame) -> pd.DataFrame:
    """The shapes with records that are left out: the GPU was throttled.

    `at the power limit`: of these, those whose GPU was at it at the end.
    """
    rows = whole_counts(frame[frame.top_k.notna() & ~frame.repeat])
    rows = rows.assign(
        records=1, left_out=rows.throttled, capped=rows.throttled & rows.power_capped
    )
    table = rows.groupby(SHAPE)[["records", "left_out", "capped"]].sum()
    names = {"left_out": "left out", "capped": "at the power limit"}
    table = table[table.left_out > 0].sort_values("left_out", ascending=False)
    return table.rename(columns=names).reset_index().rename(columns=SHORT)


def counters() -> pd.DataFrame:
    """Where the time of FlashMLA's FP8 kernel goes: one call as Nsight Compute counted it.

    128 heads, top-k 2,048, 64 requests of 32,768 tokens, one H200, caches flushed before.
    """
    row = pd.read_csv(COUNTED, skiprows=[1], thousands=",").iloc[0]
    told = {word: row[name] / per for name, (word, per) in COUNTERS.items()}
    return pd.DataFrame({"counter": told.keys(), "value": told.values()}).round(1)
