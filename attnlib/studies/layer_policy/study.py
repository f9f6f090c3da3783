"""Which backend decodes fastest in any layer, as an engine finds the caches: cold.

Between two layers of a model its weights pass through the L2, so what a policy learns from is timed
by `graph-cold`; every sixth case is timed warm too. Rates are shared by all layers that run a
kernel: of a head_dim and dtypes, on CUDA cores of a group size too.
"""

import random
from typing import Any

from ...core.spec import AttnSpec
from ...kinds.cost import decode_cost
from ...kinds.decode.case import DecodeCase
from ...run.study import Grid, Study

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
BATCHES, KV_LENS = (1, 256), (64, 65536)
KV_BYTES_LIMIT = 4 * 2**30
LEAST_COLD = 2**18
"""Of a smaller cache no 512 copies, as many as a replay takes, fill an L2 of 60 MiB twice."""


def drawn_cases(specs: tuple[AttnSpec, ...], count: int, seed: str) -> tuple[DecodeCase, ...]:
    """`count` cases of each spec at random places, no two alike, that can be timed cold.

    Batch sizes and lengths are even over their logarithms; none is round.
    """
    found: dict[DecodeCase, None] = {}
    for number, spec in enumerate(specs, 1):
        # As these layers were written when they were drawn: later fields say nothing new of them.
        written = repr(spec).replace(", sinks=False", "")
        draw = random.Random(f"{seed} {written}")
        while len(found) < number * count:
            batch, kv_len = (
                round(low * (high / low) ** draw.random()) for low, high in (BATCHES, KV_LENS)
            )
            case = DecodeCase(spec, batch, kv_len, draw.choice(DISTRIBUTIONS))
            longest = decode_cost(DecodeCase(spec, batch, kv_len)).kv_bytes
            if longest <= KV_BYTES_LIMIT and decode_cost(case).kv_bytes >= LEAST_COLD:
                found[case] = None
    return tuple(found)


CASES = drawn_cases(LAYERS, 24, "learnt cold")
RELEASE = "0.7.2"
"""What SGLang 0.5.23 pins."""
FLASHINFER = ("flashinfer-fa2", "flashinfer-fa2-planned", "flashinfer-fa3", "flashinfer-cuda-cores")
ONCE = ("flash-attn-3-precomputed",)
"""FlashAttention-3 as engines run it."""
OTHERS = ("flash-attn-3", *ONCE)
"""Also with a schedule in every call."""
COLD, WARM = ("graph-cold",), ("graph",)


def on_both(
    cases: tuple[DecodeCase, ...], others: tuple[str, ...] = OTHERS, **options: Any
) -> tuple[Grid, Grid]:
    """Grids of FlashInfer's backends, which have a release, and of FlashAttention-3's."""
    return Grid(cases, FLASHINFER, (RELEASE,), **options), Grid(cases, others, **options)


def cold_grids(
    cases: tuple[DecodeCase, ...], others: tuple[str, ...] = ONCE, *, rounds: int, live: int = 30
) -> tuple[Grid, ...]:
    """`cases` cold, every tenth of them twice (A/A), and each `live`-th for a notebook."""
    twice = Grid(cases[::10], (), (RELEASE,), timers=COLD, rounds=rounds, again=FLASHINFER[:1])
    few = on_both(cases[::live], others, timers=COLD, headline=True)
    return (*on_both(cases, others, timers=COLD, rounds=rounds), twice, *few)


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
