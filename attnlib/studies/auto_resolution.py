"""Which kernel each release's `auto` runs for decode, with 16-bit and FP8 tensors."""

import pandas as pd

from ..core.gpu import REFERENCE
from ..core.spec import AttnSpec
from ..kinds.decode.case import DecodeCase
from ..run.frame import AUTO, release_order
from ..run.study import Grid, Study
from ..select import Choice, explain
from .fa3_decode_regression import AFFECTED, AROUND

FP8 = "float8_e4m3fn"
DTYPES = (("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", FP8), (FP8, FP8))
RESOLUTION_CASES = tuple(
    DecodeCase(AttnSpec(32, 8, 128, 16, *dtypes), 16, 8192) for dtypes in DTYPES
)
BF16 = RESOLUTION_CASES[:1]

STUDY = Study(
    name="auto_resolution",
    question="Which kernel does FlashInfer's `auto` run for decode, release by release?",
    grids=(
        Grid(RESOLUTION_CASES, (AUTO,), AROUND),
        Grid(BF16, (AUTO,), AFFECTED),
        Grid(BF16, (AUTO,), AROUND[:3], headline=True),
    ),
    reference_machine="nvidia-h200-bbfefd08",
    ceilings=(),
)


def auto(spec: AttnSpec, release: str, gpu: str) -> Choice:
    """The choice of FlashInfer's own rule for decode; environment variables are ignored."""
    return explain(spec, mode="decode", gpu=gpu, library=f"flashinfer=={release}", env={})


def resolution(frame: pd.DataFrame) -> pd.DataFrame:
    """The rule, the wrapper's own word and the kernel that ran, by dtype and release."""
    rows = frame[frame.backend == AUTO]
    rows = rows.assign(place=rows.release.map(release_order(frame).index))
    rows = rows.sort_values(["dtype", "kv_dtype", "place"], ignore_index=True)
    rules = [auto(row.case.spec, row.release, REFERENCE) for row in rows.itertuples()]
    return pd.DataFrame(
        {
            "query": rows.dtype,
            "kv": rows.kv_dtype,
            "release": rows.release,
            "rule": [rule.backend for rule in rules],
            "wrapper says": rows.reported_backend,
            "ran": rows.kernel_family.where(rows.status == "ok", rows.status),
            "kernel": rows.kernels.map(lambda kernels: kernels[0].name if kernels else ""),
            "run_us": rows.run_us.round(1),
        }
    )
