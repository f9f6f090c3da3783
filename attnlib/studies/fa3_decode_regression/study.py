"""fa3 decode against fa2: a wide grid on the regressed release, headline cases on those around."""

from itertools import product

from ...core.spec import AttnSpec
from ...kinds.cost import decode_cost
from ...kinds.decode.case import DecodeCase
from ...run.study import Grid, Study

AT_ONCE_MACHINE = "nvidia-h200-bbfefd08"
"""The GPU of `auto_resolution`, and of this study's older records, whose samples did not wait."""

BEFORE, REGRESSED, FIXED, NEWEST = "0.5.3", "0.6.3", "0.6.4", "0.7.2.post1"
AROUND = (BEFORE, REGRESSED, FIXED, NEWEST)
AFFECTED = ("0.6.0", "0.6.1", "0.6.2", "0.6.3")
HEADS = ((32, 8), (16, 2), (8, 1), (32, 32))
PINNED = ("flashinfer-fa2", "flashinfer-fa3", "flashinfer-cuda-cores")
AUTO = ("flashinfer-auto",)
ALL_MODES = (*PINNED, *AUTO, "flashinfer-graph-auto")
FIX_PROOF = ("flashinfer-fa2", "flashinfer-auto", "flashinfer-graph-auto")
KV_LIMIT_BYTES = 16 * 2**30
"""Of the wide grid's cases: larger caches take seconds a record to settle."""


def _case(heads: tuple[int, int], page_size: int, batch_size: int, kv_len: int) -> DecodeCase:
    return DecodeCase(AttnSpec(*heads, head_dim=128, page_size=page_size), batch_size, kv_len)


HEADLINE = (
    _case((32, 8), 1, 1, 4096),
    _case((32, 8), 16, 16, 8192),
    _case((32, 8), 16, 128, 4096),
    _case((16, 2), 1, 16, 8192),
    _case((16, 2), 16, 1, 32768),
    _case((8, 1), 16, 64, 8192),
    _case((32, 32), 16, 4, 8192),
)
LONG = tuple(case for case in HEADLINE if case.kv_len >= 8192)
"""Those by which a claim about "long" sequences is judged; its source gives no length."""

_LENGTHS = (1024, 4096, 16384, 65536, 131072)
_GRID = [_case(*sizes) for sizes in product(HEADS, (1, 16), (1, 4, 16, 64, 128), _LENGTHS)]
WIDE = tuple(case for case in _GRID if decode_cost(case).kv_bytes <= KV_LIMIT_BYTES)
AGAIN = tuple(case for case in _GRID if decode_cost(case).kv_bytes <= 33 * 2**30)[::10]
"""Run against themselves; as many as an 80 GB GPU holds beside the oracle were to choose from."""
VARIANTS = (
    DecodeCase(AttnSpec(16, 4, 64, 64, "float16"), 16, 8192, "ragged"),
    DecodeCase(AttnSpec(16, 4, 256, 16), 16, 8192),
    *(
        DecodeCase(AttnSpec(32, 8, 128, 64), 64, 8192, name)
        for name in ("fixed", "ragged", "skewed")
    ),
)
"""Other head_dims, dtypes, page sizes and lengths, beyond the wide grid's."""

TRUST_MACHINE = "nvidia-h200-b6c8df1f"
"""The GPU of `measurement_trust`: another H200."""

STUDY = Study(
    name="fa3_decode_regression",
    question="How much slower is FlashInfer's fa3 decode than fa2, and since when?",
    grids=(
        Grid(HEADLINE, ALL_MODES, (REGRESSED,), rounds=3, headline=True),
        Grid(HEADLINE, FIX_PROOF, (FIXED,), rounds=3, headline=True),
        Grid(HEADLINE, ALL_MODES, (REGRESSED,), rounds=4),
        Grid(HEADLINE, (*FIX_PROOF, "flashinfer-fa3"), (BEFORE, FIXED, NEWEST), rounds=4),
        Grid(HEADLINE, PINNED[:2], (REGRESSED,), ("eager",), rounds=4, again=PINNED[:2]),
        Grid(WIDE, PINNED[:2], (REGRESSED,), rounds=4),
        Grid(AGAIN, (), (REGRESSED,), rounds=4, again=PINNED[:2]),
        Grid(VARIANTS, PINNED[:2], (REGRESSED, FIXED), rounds=4),
    ),
    reference_machine="nvidia-h200-30af7b45",
    bisect_machine="nvidia-h200-ea91ec76",
)
