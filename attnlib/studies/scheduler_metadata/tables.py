"""Tables of a step whose every layer prepares FA3's schedule, and of one that prepares it once.

A saving pairs the two ways round by round, in microseconds a step, with Student's t interval over
rounds.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from ...core.schedule.facts import SchedulerFacts
from ...core.schedule.splits import plan_splits
from ...run import frame as frames
from ...run.frame import decode_rows, intervals, launches, savings_in_words
from .study import EACH_OR_ONCE
from .vectors import COMMITTED, compare, read

EACH, ONCE = EACH_OR_ONCE
PREPARE = "flash-attn-3-prepare"
BATCHES, LENGTHS = (1, 4, 16, 64, 128), (512, 2048, 8192, 32768, 131072)
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
    """What a step saves, a row per case: each and once in us, saved with low and high, gain in %.

    `share` is the saving over (layers - 1) x `prepare`; NaN where that kernel was not measured.
    """
    rows, alone = decode_rows(frame, timer=timer), prepare_us(frame)
    table = frames.savings(rows, EACH, ONCE).rename(columns={"base_us": "each", "new_us": "once"})
    table = table.sort_values(STEP, ignore_index=True)[[*STEP, *TIMES, "rounds", "verdict"]]
    table["prepare"] = table.batch_size.map(alone).astype(float)
    table["share"] = table.saved / ((table.layers - 1) * table.prepare)
    return table.assign(gain=100 * table.saved / table.each)


def findings(frame: pd.DataFrame) -> str:
    """What the steps of each number of layers save, and the largest share that any has."""
    table = savings(frame)
    lines = [f"{layers} layers: {savings_in_words(own)}" for layers, own in table.groupby("layers")]
    least, most = table.share.min(), table.share.max()
    expected = f"share: {least:.2f} to {most:.2f}, expected at least {NEEDED_SHARE}"
    return "\n".join([*lines, expected])


def prepare_us(frame: pd.DataFrame) -> pd.Series:
    """Time of the prepare kernel alone in a graph, by batch size: median over rounds."""
    rows = decode_rows(frame)
    return rows[rows.backend == PREPARE].groupby("batch_size").run_us.median()


def savings_table(frame: pd.DataFrame, layers: int = 64, *, timer: str = "graph") -> pd.DataFrame:
    """`savings` of steps with so many layers, rounded for reading."""
    table = savings(frame, timer=timer)
    table = table[table.layers == layers].reset_index(drop=True)
    shown = table[[*STEP[1:], "each", "once", "saved"]].round(0)
    shown["interval"], shown["rounds"] = intervals(table, decimals=0), table.rounds
    shown["saved, %"] = table.gain.round(1)
    return shown if timer == "eager" else shown.assign(share=table.share.round(2))


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """By layers and whether FA3 may split: shapes, how many got faster for sure, saving, share."""
    table = savings(frame)
    table = table.assign(zeroing=np.where(table.kv_len <= one_split_up_to(frame), "yes", "no"))
    grouped = table.assign(sure=table.verdict == "faster").groupby(["layers", "zeroing"])
    found = {"shapes": grouped.size(), "faster": grouped.sure.sum()}
    for name, digits in {"saved": 0, "share": 2}.items():
        for word, value in (("least", "min"), ("median", "median"), ("most", "max")):
            found[f"{word} {name}"] = grouped[name].agg(value).round(digits)
    return pd.DataFrame(found).reset_index()


def one_split_up_to(frame: pd.DataFrame) -> int:
    """The longest kv_len whose steps zero the counter by a kernel of its own; 0 if none does."""
    zeroing = frame[frame.backend.eq(ONCE) & (launches(frame, "vectorized_elementwise") > 0)]
    return int(zeroing.kv_len.max()) if len(zeroing) else 0


def kernels_per_step(frame: pd.DataFrame) -> pd.DataFrame:
    """Launches of each kernel per step, as traced: a row per way, number of layers and zeroing."""
    found, kinds = _steps(frame, "launches")
    keys = ["layers", "way", *kinds]
    counted = found[keys].astype({name: int for name in kinds}).value_counts(sort=False)
    return counted.rename("records").reset_index().sort_values(keys, ignore_index=True)


def time_by_kernel(frame: pd.DataFrame, *, layers: int = 64) -> pd.DataFrame:
    """Microseconds per step by kernel, of a trace; `sum` of them, the `step` untraced, `overlap`.

    `overlap` is sum - step: how long two kernels ran at once, less the time in which none ran.
    Median over rounds; graph timer.
    """
    found, kinds = _steps(frame[frame.layers == layers], "gpu_us")
    table = found.groupby([*STEP[1:], "way"])[[*kinds, "run_us"]].median()
    table = table.rename(columns={"run_us": "step"})
    table["sum"] = table[kinds].sum(axis=1)
    table["overlap"] = table["sum"] - table["step"]
    return table[[*kinds, "sum", "step", "overlap"]].reset_index()


def accounts(frame: pd.DataFrame, *, layers: int = 64) -> pd.DataFrame:
    """Where the saving comes from, us per step: a row per case, parts that sum to `saved`.

    `hidden` ran behind other kernels and so could not be saved; `others` is attention and combine.
    """
    table = time_by_kernel(frame, layers=layers).set_index([*STEP[1:], "way"])
    each, once = (table.xs(way, level="way") for way in ("each", "once"))
    change = each - once
    found = change.reindex(columns=["prepare", "zeroing"], fill_value=0.0)
    found = found.assign(hidden=-change["overlap"])
    found["others"] = change["step"] - found.sum(axis=1)
    return found.assign(saved=change["step"]).reset_index()


def accounts_summary(frame: pd.DataFrame, *, layers: int = 64) -> pd.DataFrame:
    """`accounts` by kv_len: the median over batch and page sizes."""
    found = accounts(frame, layers=layers)
    kinds = ["prepare", "zeroing", "hidden", "others", "saved"]
    return found.groupby("kv_len")[kinds].median().round(0).reset_index()


def split_table(facts: SchedulerFacts) -> pd.DataFrame:
    """Splits of a request where all are as long as the table: kv_len down, batch size across."""

    def splits(batch: int, length: int) -> int:
        sized = replace(facts, batch_size=batch, max_seqlen_k=length)
        return int(plan_splits(sized, np.full(batch, length)).num_splits[0])

    caps = [replace(facts, batch_size=1, max_seqlen_k=length).split_cap for length in LENGTHS]
    found = {batch: [splits(batch, length) for length in LENGTHS] for batch in BATCHES}
    table = pd.DataFrame(found | {"cap": caps}, index=LENGTHS)
    return table.rename_axis(index="kv_len", columns="batch size")


def model_agreement() -> pd.DataFrame:
    """By kind of word, over all committed calls: how many, how many came out as the model chose,
    and how many contradict it.
    """
    _, calls = read(COMMITTED)
    judged = [compare(call, words) for call, words in calls if words is not None]
    words, alike = (
        pd.DataFrame(getattr(each, name) for each in judged).sum()
        for name in ("counts", "open_alike")
    )
    wrong = sum(sum(each.wrong.values()) for each in judged)
    table = pd.DataFrame({"calls": len(judged), "words": words, "as the model chose": alike})
    table["contradict it"] = pd.Series({"specified": wrong, "tie": 0, "rounding": 0})
    return table.loc[["specified", "tie", "rounding", "padding"]].astype("Int64")


def _steps(frame: pd.DataFrame, value: str) -> tuple[pd.DataFrame, list[str]]:
    """Steps in a graph, either way, with `value` of each part as traced; and which parts ran.
    Rounds that kept one way alone are left out."""
    rows = decode_rows(frame)
    rows = rows[rows.backend.isin((EACH, ONCE))]
    rows = rows[rows.groupby(["case", "round"], sort=False).backend.transform("nunique") == 2]
    traced = [{PARTS[each.name]: getattr(each, value) for each in ran} for ran in rows.kernels]
    parts = pd.DataFrame(traced, index=rows.index).fillna(0.0)
    found = rows.assign(way=rows.backend.str.removeprefix("flash-attn-3-step-")).join(parts)
    return found, [name for name in PARTS.values() if name in parts]
