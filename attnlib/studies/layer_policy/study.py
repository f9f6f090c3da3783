"""Which backend decodes fastest in any layer, as an engine finds the caches: cold.

Between two layers of a model its weights pass through the L2, so what a policy learns from is timed
by `graph-cold`; every sixth case is timed warm too. A layer's rates are shared by all layers of its
group size, head_dim, page size and dtypes: each of these has a few values here.
"""

from typing import Any

from ...core.spec import AttnSpec
from ...kinds.decode.case import DecodeCase
from ...run.study import Grid, Study
from ..backend_policy.study import drawn_cases

FP8 = "float8_e4m3fn"
LAYERS = tuple(
    AttnSpec(*sizes)
    for sizes in (
        *((32, 32, 128, 16), (16, 16, 128, 64), (16, 8, 128, 1), (32, 16, 128, 64)),
        (24, 8, 128, 16),
        *((32, 8, 128, 16), (16, 4, 128, 1), (40, 8, 128, 64), (12, 2, 128, 16)),
        *((28, 4, 128, 1), (64, 8, 128, 16), (8, 1, 128, 64), (64, 4, 128, 16)),
        *((32, 8, 64, 16), (64, 8, 64, 1), (16, 4, 256, 16), (8, 1, 256, 64)),
        *((32, 8, 128, 16, "bfloat16", FP8), (8, 1, 128, 64, "bfloat16", FP8)),
        (32, 8, 128, 16, FP8, FP8),
    )
)
DISTRIBUTIONS = ("fixed", "ragged", "skewed", "chat", "one_long")
CASES = drawn_cases(LAYERS, 24, "learnt cold", DISTRIBUTIONS)
RELEASE = "0.7.2"
"""What SGLang 0.5.23 pins."""
FLASHINFER = ("flashinfer-fa2", "flashinfer-fa2-planned", "flashinfer-fa3", "flashinfer-cuda-cores")
ONCE = ("fa3-precomputed",)
"""FlashAttention-3 as engines run it."""
OTHERS = ("fa3", *ONCE)
"""Also with a schedule in every call."""
COLD, WARM = ("graph-cold",), ("graph",)


def on_both(
    cases: tuple[DecodeCase, ...], others: tuple[str, ...] = OTHERS, **options: Any
) -> tuple[Grid, Grid]:
    """Grids of FlashInfer's backends, which have a release, and of FlashAttention-3's."""
    return Grid(cases, FLASHINFER, (RELEASE,), **options), Grid(cases, others, **options)


STUDY = Study(
    name="layer_policy",
    question="Which backend decodes fastest in any layer, with caches as cold as an engine's?",
    grids=(
        *on_both(CASES, timers=COLD),
        *on_both(CASES[::6], timers=WARM),
        *on_both(CASES[::24], timers=COLD, headline=True),
    ),
    reference_machine="nvidia-h200-89dc5463",
    ceilings=("copy", "read", "launch"),
)
