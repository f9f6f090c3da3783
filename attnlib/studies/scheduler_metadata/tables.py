"""Tables of the study `scheduler_metadata`: a step whose every layer prepares FA3's schedule, and
one that prepares it once.

A saving pairs the two ways round by round, in microseconds a step, with Student's t interval over
rounds. The prepare kernel's own time is that of the kernel alone in a graph, at the same batch
size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from ...measure.stats import paired_gap
from ...run.frame import decode_rows, paired_times
from ...run.record import Record

EACH, ONCE, PREPARE = "fa3-step-each", "fa3-step-once", "fa3-prepare"
STEP = ["layers", "page_size", "kv_len", "batch_size"]
TIMES = ("each", "once", "saved", "low", "high")
PARTS = {
    "prepare_varlen_num_blocks_kernel": "prepare",
    "FlashAttnFwdSm90": "attention",
    "FlashAttnFwdCombine": "combine",
    "vectorized_elementwise_kernel": "zeroing",
}
"""Kernel in the trace -> what it does. FA3 zeroes its tile counter with an elementwise kernel where
no combine kernel does it."""
NEEDED_SHARE = 0.9
"""Of (layers - 1) x prepare: what was expected to be saved at least."""
SGLANG_SAVES_US = 215.0
"""What SGLang's #21104 says that 64 layers save."""


def savings(frame: pd.DataFrame, *, timer: str = "graph") -> pd.DataFrame:
    """What a step saves, a row a case: each and once in us, saved with low and high, gain in %.

    `share` is the saving over (layers - 1) x `prepare`; NaN where that kernel was not measured.
    """
    rows, alone = decode_rows(frame, timer=timer), prepare_us(frame)
    found = [
        {**_step_of(layers, case), **_saving(each, once)}
        for layers, group in rows.groupby("layers")
        for case, each, once in paired_times(group, EACH, ONCE)
    ]
    names = [*STEP, "each", "once", "saved", "low", "high", "rounds"]
    table = pd.DataFrame(found, columns=names).sort_values(STEP, ignore_index=True)
    table = table.astype({name: int for name in (*STEP, "rounds")} | dict.fromkeys(TIMES, float))
    table["prepare"] = table.batch_size.map(alone).astype(float)
    table["share"] = table.saved / ((table.layers - 1) * table.prepare)
    return table.assign(gain=100 * table.saved / table.each)


def prepare_us(frame: pd.DataFrame) -> pd.Series:
    """Time of the prepare kernel alone in a graph, by batch size: median over rounds."""
    rows = decode_rows(frame)
    return rows[rows.backend == PREPARE].groupby("batch_size").run_us.median()


def savings_table(frame: pd.DataFrame, layers: int = 64, *, timer: str = "graph") -> pd.DataFrame:
    """`savings` of steps with so many layers, rounded for reading."""
    table = savings(frame, timer=timer)
    table = table[table.layers == layers].reset_index(drop=True)
    shown = table[[*STEP[1:], "each", "once", "saved"]].round(0)
    shown["95 %"] = [
        f"{row.low:.0f} to {row.high:.0f}" if row.low == row.low else "one round"
        for row in table.itertuples()
    ]
    shown["gain, %"] = table.gain.round(1)
    return shown if timer == "eager" else shown.assign(share=table.share.round(2))


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """By layers and whether FA3 may split: steps, how many got faster for sure, saving, share."""
    table = savings(frame)
    table = table.assign(zeroing=np.where(table.kv_len <= one_split_up_to(frame), "yes", "no"))
    grouped = table.assign(sure=table.low > 0).groupby(["layers", "zeroing"])
    found = {
        "steps": grouped.size(),
        "faster": grouped.sure.sum(),
        "least saved": grouped.saved.min().round(0),
        "median saved": grouped.saved.median().round(0),
        "most saved": grouped.saved.max().round(0),
        "least share": grouped.share.min().round(2),
        "median share": grouped.share.median().round(2),
        "most share": grouped.share.max().round(2),
    }
    return pd.DataFrame(found).reset_index()


def one_split_up_to(frame: pd.DataFrame) -> int:
    """The longest kv_len whose steps zero the counter by a kernel of its own; 0 if none does."""
    zeroing = frame.backend.eq(ONCE) & frame.kernels.str.contains("vectorized_elementwise")
    return int(frame[zeroing].kv_len.max()) if zeroing.any() else 0


def kernels_per_step(records: Iterable[Record]) -> pd.DataFrame:
    """Kernels of a step by the trace, launches each: a row a way, number of layers and zeroing."""
    found = pd.DataFrame([_launches(record) for record in _steps(records)])
    kinds = [name for name in PARTS.values() if name in found.columns]
    keys = ["layers", "way", *kinds]
    counted = found[keys].fillna(0).astype({name: int for name in kinds}).value_counts(sort=False)
    return counted.rename("records").reset_index().sort_values(keys, ignore_index=True)


def time_by_kernel(records: Iterable[Record], *, layers: int = 64) -> pd.DataFrame:
    """Microseconds a step by kernel, of a trace; `sum` of them, the `step` untraced, `hidden`.

    `hidden` is sum - step: how long two kernels ran at once, less the gaps between kernels, so
    that a negative one is time in which none ran. Median over rounds; graph timer.
    """
    rows = [_times(record) for record in _steps(records) if record.item.case.layers == layers]
    found = pd.DataFrame(rows).fillna(0.0)
    table = found.groupby([*STEP[1:], "way"]).median()
    kinds = [name for name in PARTS.values() if name in table.columns]
    table["sum"] = table[kinds].sum(axis=1)
    table["hidden"] = table["sum"] - table["step"]
    return table[[*kinds, "sum", "step", "hidden"]].reset_index()


def accounts(records: Iterable[Record], *, layers: int = 64) -> pd.DataFrame:
    """Where the saving comes from and goes, us a step: a row a case, parts that sum to `saved`.

    `prepare` is what its kernels took less; `zeroing` is what that kernel takes more; `hidden` is
    what ran behind other kernels and so could not be saved; `others` is attention and combine.
    """
    table = time_by_kernel(records, layers=layers).set_index([*STEP[1:], "way"])
    each, once = (table.xs(way, level="way") for way in ("each", "once"))
    change = each - once
    zeroing = change.get("zeroing", 0.0 * change["step"])
    found = pd.DataFrame({"prepare": change["prepare"], "zeroing": zeroing})
    found["hidden"] = -change["hidden"]
    found["others"] = change["step"] - found.sum(axis=1)
    return found.assign(saved=change["step"]).reset_index()


def accounts_summary(records: Iterable[Record], *, layers: int = 64) -> pd.DataFrame:
    """`accounts` by kv_len: the median over batch and page sizes."""
    found = accounts(records, layers=layers)
    kinds = ["prepare", "zeroing", "hidden", "others", "saved"]
    return found.groupby("kv_len")[kinds].median().round(0).reset_index()


def _step_of(layers: float, case: dict[str, Any]) -> dict[str, int]:
    return {"layers": int(layers), **{name: int(case[name]) for name in STEP[1:]}}


def _saving(each: list[float], once: list[float]) -> dict[str, float]:
    gap = paired_gap(each, once)
    return {
        "each": float(np.median(each)),
        "once": float(np.median(once)),
        "saved": gap.mean,
        "low": gap.low,
        "high": gap.high,
        "rounds": gap.pairs,
    }


def _steps(records: Iterable[Record]) -> Iterator[Record]:
    """Records of a step in a graph, either way, that are ok and not throttled."""
    for record in records:
        right = record.status == "ok" and not record.throttled and record.item.timer == "graph"
        if right and record.item.backend in (EACH, ONCE):
            yield record


def _names(record: Record) -> dict[str, Any]:
    case, way = record.item.case, record.item.backend.removeprefix("fa3-step-")
    step = {name: getattr(case.decode, name) for name in ("kv_len", "batch_size")}
    return {"layers": case.layers, "page_size": case.decode.spec.page_size, **step, "way": way}


def _launches(record: Record) -> dict[str, Any]:
    return _names(record) | {PARTS[k["name"]]: k["launches"] for k in record.kernels}


def _times(record: Record) -> dict[str, Any]:
    parts = {PARTS[kernel["name"]]: kernel["gpu_us"] for kernel in record.kernels}
    return {**_names(record), **parts, "step": float(np.median(record.run_us))}
