"""Gains of fixes, for `diagnose`: ratios of times without and with a fix, from the records.

`write` puts them into data/gains.json, so that a diagnosis needs no study and no pandas.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from ..kinds.step.case import EACH, ONCE
from ..measure.files import write_whole
from ..run import store
from ..run.frame import CUDA_CORES, FA2, FA3, decode_rows, good_rows, over
from . import STUDIES
from .engine_step import PREPARE
from .random_batches import PLANNED

PATH = Path(__file__).resolve().parents[1] / "data" / "gains.json"
COLUMNS = ["heads", "head_dim", "page_size", "batch_size", "kv_len", "dtype", "kv_dtype"]


def write(path: Path = PATH) -> Path:
    """Write all gains; returns the file."""
    text = json.dumps(tables(), indent=None, separators=(",", ":"))
    return write_whole(path, (text.replace('"rows":', '\n"rows":') + "\n").encode())


def tables() -> dict[str, Any]:
    """Key of a gain -> study, GPU, and rows with a shape and the ratio without / with the fix."""
    regression = _load("fa3_decode_regression")
    slow = decode_rows(regression, release="0.6.3")
    metadata = _load("decode_metadata")
    decode = good_rows(metadata[(metadata.builder == "decode") & ~metadata.swa.eq(True)])
    schedule = _load("scheduler_metadata")
    plans = _load("fa2_plan")
    mixed = good_rows(plans[plans.heads.notna() & (plans.lengths != "fixed")])
    modes = store.load("engine_modes", "nvidia-h200-f9835d78")
    uniform = good_rows(modes[modes["mode"].notna()])
    return {
        "fa3": _entry(slow, over(slow, FA3, FA2), "fa3_decode_regression"),
        "cuda cores": _entry(slow, over(slow, CUDA_CORES, FA2), "fa3_decode_regression"),
        "metadata": _entry(
            decode, over(decode, "metadata-eager", "metadata-fused"), "decode_metadata"
        ),
        "schedule": _entry(schedule, _prepares(schedule), "scheduler_metadata"),
        "plan": _entry(mixed, over(mixed, FA2, PLANNED), "fa2_plan"),
        "uniform_q_len": _entry(
            uniform,
            over(uniform, "flashinfer-prefill-fa2", "flashinfer-prefill-fa2-uniform"),
            "engine_modes",
        ),
    }


def _load(name: str) -> pd.DataFrame:
    return store.load(name, STUDIES[name].reference_machine)


def _prepares(frame: pd.DataFrame) -> pd.DataFrame:
    """GPU time of the schedule's kernels with one per layer over one per step, per case."""
    steps = good_rows(frame[frame.layers.notna()])
    us = steps.kernels.map(
        lambda kernels: sum(k.gpu_us for k in kernels if k.name.startswith(PREPARE))
    )
    wide = steps.assign(us=us).pivot_table("us", "case", "backend", "median", sort=False)
    ratio = wide[EACH] / wide[ONCE]
    cases = steps.drop_duplicates("case").set_index("case").loc[ratio.index]
    return cases.assign(ratio=ratio).reset_index()


def _entry(rows: pd.DataFrame, table: pd.DataFrame, study: str) -> dict[str, Any]:
    table = table.replace([float("inf")], float("nan")).dropna(subset="ratio")
    shown = table[[name for name in COLUMNS if name in table]].copy()
    shown["ratio"] = table.ratio.round(3)
    records = json.loads(shown.to_json(orient="records"))
    return {"study": study, "gpu": rows.gpu.iloc[0], "rows": records}
