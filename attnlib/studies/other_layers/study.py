"""The layers of a second judge, learnt from since, as `more_layers` are.

They judged a policy once, under the name of `unseen_layers` (LOG.md, 2026-11-23): drawn by a seed,
with their batches, before any of their times was seen.
"""

import random

from ...core.spec import AttnSpec
from ...run.study import Study
from ..layer_policy.study import FP8, cold_grids, drawn_cases
from ..layer_policy.study import LAYERS as TAUGHT
from ..more_layers.study import LAYERS as TAUGHT_TOO

HEADS = (
    *((32, 32), (40, 40), (16, 16), (8, 8), (32, 16), (16, 8), (8, 4), (24, 8), (12, 4)),
    *((32, 8), (16, 4), (8, 2), (40, 8), (20, 4), (10, 2), (5, 1), (48, 8), (24, 4), (12, 2)),
    *((28, 4), (14, 2), (64, 8), (32, 4), (16, 2), (8, 1), (96, 8), (12, 1)),
    *((64, 4), (32, 2), (16, 1), (128, 8)),
)
"""Of usual models, and of these on one GPU of two, four or eight."""
KINDS = (
    (15, 128, ()),
    (2, 64, ()),
    (2, 256, ()),
    (2, 128, ("bfloat16", FP8)),
    (1, 128, (FP8, FP8)),
)
"""How many layers of which head_dim and dtypes."""
FORMER = (
    *((32, 32, 16), (16, 8, 1), (24, 8, 16), (32, 8, 1), (40, 8, 16)),
    *((12, 2, 16), (28, 4, 1), (8, 1, 16), (16, 2, 64), (64, 4, 16)),
)
"""Heads and pages of head_dim 128 that an earlier policy was learnt from."""
SEEN = {*TAUGHT, *TAUGHT_TOO, *(AttnSpec(qo, kv, 128, page) for qo, kv, page in FORMER)}
"""Layers that a policy was learnt from."""


def drawn_layers(seed: str, seen: set[AttnSpec]) -> tuple[AttnSpec, ...]:
    """Of each kind other heads, each with one page size that nobody saw."""
    draw, found = random.Random(seed), list[AttnSpec]()
    for count, head_dim, dtypes in KINDS:
        usual = ([AttnSpec(*h, head_dim, p, *dtypes) for p in (1, 16, 64)] for h in HEADS)
        unseen = [[spec for spec in pages if spec not in seen] for pages in usual]
        found += map(draw.choice, draw.sample([pages for pages in unseen if pages], count))
    return tuple(found)


SEED = "unseen layers, second draw"
LAYERS = drawn_layers(SEED, SEEN)
CASES = drawn_cases(LAYERS, 10, SEED)
ROUNDS = 3

STUDY = Study(
    name="other_layers",
    question="Which backend decodes fastest in yet other layers, cold?",
    grids=cold_grids(CASES, rounds=ROUNDS),
    reference_machine="nvidia-h200-dc0c050a",
    ceilings=("copy", "read", "launch"),
)
