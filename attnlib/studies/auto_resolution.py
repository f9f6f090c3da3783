"""Which kernel each release's `auto` runs for decode, with 16-bit and FP8 tensors."""

from ..core.spec import AttnSpec
from ..kinds.decode.case import DecodeCase
from ..run.frame import AUTO
from ..run.study import Grid, Study
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
