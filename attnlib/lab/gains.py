"""Gains of fixes, for `diagnose`: ratios of times without and with a fix, from the records.

`write` puts them into data/gains.json, so that a diagnosis needs no study and no pandas.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.lengths import sample_seq_lens
from ..measure.files import write_whole
from ..measure.spans import Kernel
from ..run import store
from ..run.frame import CUDA_CORES, FA2, FA3, decode_rows, good_rows, over
from ..studies import STUDIES
from ..studies.engine.engine_step import PREPARE
from ..studies.random_batches import PLANNED
from ..studies.step.case import EACH, ONCE
from .fix_gains import LONGEST

Entry = dict[str, Any]
PREFILL = "flashinfer-prefill-fa2"
UNIFORM = "flashinfer-prefill-fa2-uniform"
PATH = Path(__file__).resolve().parents[1] / "data" / "gains.json"
MODES_MACHINE = "nvidia-h200-f9835d78"
"""Of the records of `engine_modes` that have the uniform plan."""
SHAPE_COLUMNS = [
    "heads",
    "head_dim",
    "page_size",
    "batch_size",
    "kv_len",
    LONGEST,
    "dtype",
    "kv_dtype",
]


def write(path: Path = PATH) -> Path:
    """Write all gains; returns the file."""
    text = json.dumps(tables(), indent=None, separators=(",", ":"))
    return write_whole(path, (text.replace('"rows":', '\n"rows":') + "\n").encode())


def tables() -> dict[str, Entry]:
    """Key of a gain -> study, GPU, and rows with a shape and the ratio without / with the fix."""
    slow = decode_rows(_load("fa3_decode_regression"), release="0.6.3")
    metadata = _load("decode_metadata")
    is_plain = (metadata.builder == "decode") & ~metadata.swa.eq(True)
    decode = good_rows(metadata[is_plain])
    schedule = _load("scheduler_metadata")
    plans = _load("fa2_plan")
    is_mixed = plans.heads.notna() & (plans.lengths != "fixed")
    mixed = good_rows(plans[is_mixed])
    modes = store.load("engine_modes", MODES_MACHINE)
    extends = good_rows(modes[modes["mode"].notna()])
    return {
        "fa3": _entry("fa3_decode_regression", slow, over(slow, FA3, FA2)),
        "cuda cores": _entry("fa3_decode_regression", slow, over(slow, CUDA_CORES, FA2)),
        "metadata": _entry(
            "decode_metadata", decode, over(decode, "metadata-eager", "metadata-fused")
        ),
        "schedule": _entry("scheduler_metadata", schedule, _prepares(schedule)),
        "plan": _entry("fa2_plan", mixed, over(mixed, FA2, PLANNED)),
        "uniform_q_len": _entry("engine_modes", extends, over(extends, PREFILL, UNIFORM)),
    }


def _load(name: str) -> pd.DataFrame:
    return store.load(name, STUDIES[name].reference_machine)


def _mean_tokens(table: pd.DataFrame) -> list[int]:
    """KV tokens of a request in the mean, a row each; only those of decode calls differ."""
    means = []
    for case, longest in zip(table.case, table.kv_len, strict=True):
        is_decode = isinstance(case, DecodeCase)
        means.append(round(sample_seq_lens(case).mean()) if is_decode else longest)
    return means


def _prepares(frame: pd.DataFrame) -> pd.DataFrame:
    """GPU time of the schedule's kernels with one per layer over one per step, per case."""
    steps = good_rows(frame[frame.layers.notna()])
    us = steps.kernels.map(_prepare_us)
    steps = steps.assign(us=us)
    wide = steps.pivot_table("us", "case", "backend", "median", sort=False)
    ratio = wide[EACH] / wide[ONCE]
    cases = steps.drop_duplicates("case").set_index("case").loc[ratio.index]
    return cases.assign(ratio=ratio).reset_index()


def _prepare_us(kernels: Sequence[Kernel]) -> float:
    """GPU time of the kernels that write a schedule, us per call."""
    return sum(kernel.gpu_us for kernel in kernels if kernel.name.startswith(PREPARE))


def _entry(study: str, rows: pd.DataFrame, table: pd.DataFrame) -> Entry:
    """A gain: the shapes of a table of ratios that are finite, and where they were measured."""
    table = table[np.isfinite(table.ratio)]
    if "kv_len" in table:
        table = table.assign(longest=table.kv_len, kv_len=_mean_tokens(table))
    shown = table[[name for name in SHAPE_COLUMNS if name in table]]
    shown = shown.assign(ratio=table.ratio.round(3))
    return {
        "study": study,
        "gpu": rows.gpu.iloc[0],
        "rows": json.loads(shown.to_json(orient="records")),
    }
