"""Which kernel each release's `auto` runs for decode, with 16-bit and FP8 tensors."""

import pandas as pd

from ..core.spec import AttnSpec
from ..measure.calls.decode.case import DecodeCase
from ..run.frame import AUTO
from ..run.study import Grid, Study
from .fa3_decode_regression import AFFECTED, AROUND, BEFORE, FIXED, REGRESSED

FP8 = "float8_e4m3fn"
BACKENDS = (AUTO,)


def _case(dtype: str, kv_dtype: str) -> DecodeCase:
    spec = AttnSpec(
        num_qo_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=16,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    return DecodeCase(spec, batch_size=16, kv_len=8192)


BF16 = (_case("bfloat16", "bfloat16"),)
RESOLUTION_CASES = (
    *BF16,
    _case("float16", "float16"),
    _case("bfloat16", FP8),
    _case(FP8, FP8),
)

STUDY = Study(
    name="auto_resolution",
    question="Which kernel does FlashInfer's `auto` run for decode, release by release?",
    grids=(
        Grid(RESOLUTION_CASES, (AUTO,), AROUND),
        Grid(BF16, (AUTO,), AFFECTED),
        Grid(
            cases=BF16,
            backends=(AUTO,),
            releases=(BEFORE, REGRESSED, FIXED),
            headline=True,
        ),
    ),
    reference_machine="nvidia-h200-bbfefd08",
    ceilings=(),
)


def kernel_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The kernel that `auto` ran and its time: a row per dtypes, a column per release."""
    is_around = frame.release.isin(AROUND)
    rows = frame[is_around & frame.backend.isin(BACKENDS)]
    table: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows.itertuples():
        said = f"{row.kernel_family}, {row.run_us:.0f} us" if row.status == "ok" else row.status
        line = table.setdefault((row.dtype, row.kv_dtype), {})
        line[row.release] = said
    wide = pd.DataFrame(table).T[list(AROUND)]
    return wide.rename_axis(["query", "cache"]).reset_index()
