"""FlashAttention-3's scheduler metadata: computed in every layer, or once per step.

A saving pairs the two ways round by round, in microseconds per step.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import product

import pandas as pd

from ...core.spec import AttnSpec
from ...measure.calls.decode.case import DecodeCase
from ...measure.spans import Kernel
from ...run import frame as frames
from ...run import store
from ...run.figures import charts, style
from ...run.frame import decode_rows
from ...run.study import Grid, Study
from .case import EACH, ONCE, StepCase

MISMATCHES = store.PUBLISHED / "captures" / "metadata_mismatch.json"
"""What `tests/support/mismatch.py` recorded on a GPU."""


def _qwen_step(layers: int, batch: int, kv_len: int, page: int) -> StepCase:
    """Layers of Qwen3-32B on one GPU of four, as in SGLang's pull request."""
    spec = AttnSpec(num_qo_heads=16, num_kv_heads=2, head_dim=128, page_size=page)
    return StepCase(DecodeCase(spec, batch, kv_len, "ragged"), layers)


BATCHES = (1, 4, 16, 64, 128)
LENGTHS = (512, 2048, 8192, 32768)
PAGES = (1, 64)
STEPS_64 = []
for _batch, _kv_len, _page in product(BATCHES, LENGTHS, PAGES):
    STEPS_64.append(_qwen_step(64, _batch, _kv_len, _page))
STEPS_32_80 = []
_SIZES = product((32, 80), (1, 16, 128), (2048, 8192))
for _layers, _batch, _kv_len in _SIZES:
    STEPS_32_80.append(_qwen_step(_layers, _batch, _kv_len, page=64))
STEPS_EAGER = (
    _qwen_step(64, batch=1, kv_len=2048, page=64),
    _qwen_step(64, batch=16, kv_len=2048, page=64),
    _qwen_step(64, batch=64, kv_len=2048, page=64),
    _qwen_step(64, batch=128, kv_len=2048, page=64),
)
STEPS_AGAIN = (
    _qwen_step(64, batch=1, kv_len=512, page=1),
    _qwen_step(64, batch=1, kv_len=8192, page=64),
    _qwen_step(64, batch=4, kv_len=2048, page=1),
    _qwen_step(64, batch=4, kv_len=32768, page=64),
    _qwen_step(64, batch=16, kv_len=8192, page=1),
    _qwen_step(64, batch=64, kv_len=512, page=64),
    _qwen_step(64, batch=64, kv_len=32768, page=1),
    _qwen_step(64, batch=128, kv_len=2048, page=64),
)
STEPS_LIVE = (
    _qwen_step(64, batch=1, kv_len=512, page=1),
    _qwen_step(64, batch=4, kv_len=8192, page=1),
    _qwen_step(64, batch=64, kv_len=512, page=1),
    _qwen_step(64, batch=128, kv_len=8192, page=1),
)
WAYS = (EACH, ONCE)
_eager = partial(Grid, timers=("eager",), isolated=True)

STUDY = Study(
    name="scheduler_metadata",
    question="What does it save to compute FlashAttention-3's schedule once per step?",
    grids=(
        _eager(STEPS_EAGER, WAYS, rounds=4),
        _eager(STEPS_EAGER, (), rounds=2, again=WAYS),
        Grid(tuple(STEPS_64), WAYS, rounds=4),
        Grid(tuple(STEPS_32_80), WAYS, rounds=4),
        Grid(STEPS_AGAIN, (), rounds=4, again=(ONCE,)),
        Grid(STEPS_LIVE, WAYS, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-c9736401",
    ceilings=("copy",),
)
STEP = ["layers", "page_size", "kv_len", "batch_size"]
PARTS = {
    "prepare_varlen_num_blocks_kernel": "prepare",
    "FlashAttnFwdSm90": "attention",
    "FlashAttnFwdCombine": "combine",
    "vectorized_elementwise_kernel": "zeroing",
}
"""Kernel in the trace -> what it does. The tile counter is zeroed by prepare, by combine, or, where
neither runs, by an elementwise kernel."""


def mismatch_table() -> pd.DataFrame:
    """What happened when a schedule of one call was passed to another, the worst first.

    The records say what differed between the calls, whether the schedule has more splits than the
    call has buffers for, the error of the output against float64, and what the guard did.
    """
    lines = []
    for told in json.loads(MISMATCHES.read_text()):
        error = told["relative error"]
        refused = told["with guard"].startswith("refused")
        line = {
            "the calls differ in": told["differs"] or "nothing",
            "output without guard": told["without guard"].removeprefix("output "),
            "relative error": None if error is None else f"{error:.2g}",
            "more splits than buffers": told["overruns"] or "no",
            "guard": "refuses" if refused else "passes",
        }
        if error is None and told["without guard"] == "wrong":
            line["relative error"] = "not finite"
        lines.append(line)
    severity = {"wrong": 0, "refused by the library": 1, "right": 2}
    return pd.DataFrame(lines).sort_values(
        "output without guard",
        key=lambda outputs: outputs.map(severity),
        kind="stable",
        ignore_index=True,
    )


def savings(frame: pd.DataFrame, *, timer: str = "graph") -> pd.DataFrame:
    """What a step saves, a row per case: `each` and `once` in us (medians over rounds), saved with
    low and high, rounds, verdict, and gain in % of `each`."""
    table = frames.savings(decode_rows(frame, timer=timer), EACH, ONCE)
    table = table.rename(columns={"base_us": "each", "new_us": "once"})
    table = table.sort_values(STEP, ignore_index=True)
    columns = [*STEP, "each", "once", "saved", "low", "high", "rounds", "verdict"]
    return table[columns].assign(gain=100 * table.saved / table.each)


def time_by_kernel(frame: pd.DataFrame, *, layers: int = 64) -> pd.DataFrame:
    """Microseconds per step by kernel, as traced; their sum, the untraced step, and the overlap.

    `overlap` is sum - step: time in which two kernels ran at once, less the time in which none
    ran. Medians over rounds, in a CUDA graph.
    """
    rows = decode_rows(frame[frame.layers == layers])
    rows = rows[rows.backend.isin(WAYS)]
    parts = list(PARTS.values())
    us = rows.kernels.map(_us_by_part).tolist()
    traced = pd.DataFrame(us, index=rows.index, columns=parts)
    rows = rows.join(traced.fillna(0.0))
    rows["way"] = rows.backend.str.removeprefix("flash-attn-3-step-")
    rows = rows.rename(columns={"run_us": "step"})
    by_step = rows.groupby(["page_size", "kv_len", "batch_size", "way"])
    table = by_step[[*parts, "step"]].median()
    table.insert(len(parts), "sum", table[parts].sum(axis=1))
    table["overlap"] = table["sum"] - table["step"]
    return table.reset_index()


def _us_by_part(kernels: tuple[Kernel, ...]) -> dict[str, float]:
    return {PARTS[kernel.name]: kernel.gpu_us for kernel in kernels}


def savings_chart(frame: pd.DataFrame, page_size: int, layers: int = 64) -> charts.Figure:
    """Microseconds saved per step over kv_len, a dot per batch size.

    Bars are 95 % intervals over rounds; those of very long steps leave the picture.
    """
    shape = "layers == @layers and page_size == @page_size"
    rows = savings(frame).query(shape)
    drawn = decode_rows(frame).query(shape)
    drawn = drawn[drawn.backend.isin(WAYS)]
    title = f"One schedule per step: {layers} layers, page size {page_size}"
    words = ("kv_len, tokens", "saved, us a step")
    size = (3.8, 3.1)
    figure, (axis,) = charts.panels([title], size, drawn, words)
    lengths = sorted(rows.kv_len.unique())
    charts.categories(axis, "x", (f"{length:,}" for length in lengths))
    looks = style.looks(sorted(rows.batch_size.unique()))
    aside = charts.spread(rows.batch_size, 0.12 * (len(looks) - 1))
    rows["place"] = rows.kv_len.map(lengths.index) + aside
    charts.dots(
        axis,
        rows,
        "place",
        "saved",
        by="batch_size",
        looks=looks,
        interval="y",
    )
    axis.axhline(0, **style.RULE)
    axis.set_ylim(rows.saved.min() - 150, rows.saved.max() + 150)
    axis.legend(title="batch size", ncols=3, loc="lower left", frameon=True)
    return figure
