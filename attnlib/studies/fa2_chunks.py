"""One batch under one KV chunk after another: what the planner's choice is judged by."""

from dataclasses import replace

import numpy as np

from ..core.fa2.choice import CHUNK_STEP, PlanShape
from ..core.fa2.library import MIN_CHUNK
from ..kinds.decode.case import DecodeCase
from ..kinds.extend.case import ExtendCase
from ..kinds.plan.case import PlanCase, sample_plan_lens
from ..run.study import Grid, Study
from .fa2_plan import (
    ALL_LAYOUTS,
    KINDS,
    NUM_SMS,
    OTHER_VERIFIES,
    OTHERS,
    SMALL,
    VARIANT_CASES,
    VARIANTS,
    VERIFIES,
    in_turn,
    served,
)

MOST_CHUNKS, APART, LONGEST_CHUNK = 9, 1.12, 16384
CUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
LADDER = tuple(round(256 * 1.4**step) for step in range(13))
ALONE, SLACK = 0.01, 2048
"""A block that is alone reaches at most such a share of the memory's rate; tokens of slack."""


def sweep(case: DecodeCase | ExtendCase) -> tuple[PlanCase, ...]:
    """The planner's choice (chunk 0), and chunks that the grid has room for.

    Not those of which a block takes twice as long as all tokens must. No constant that the planner
    chooses by has a say here.
    """
    plan_case = (
        PlanCase(case.cached, case.q_len) if isinstance(case, ExtendCase) else PlanCase(case)
    )
    lens = sample_plan_lens(plan_case)
    shape = PlanShape.of(plan_case.spec, lens, NUM_SMS, plan_case.q_len)
    chunks = _chunks(int(lens.max()))
    fits = (-(-lens // chunks[:, None])).sum(1) * shape.q_tiles <= shape.max_blocks
    chunks = chunks[fits & (chunks <= 2 * ALONE * lens.sum() * shape.copies + SLACK)]
    places = np.unique(np.linspace(0, len(chunks) - 1, MOST_CHUNKS).round().astype(int))
    return tuple(replace(plan_case, chunk=chunk) for chunk in (0, *chunks[places].tolist()))


def _chunks(longest: int) -> np.ndarray:
    """Equal cuts of the longest request, and a geometric ladder where it is `APART` from them."""
    kept = [max(MIN_CHUNK, _whole(-(-longest // cut))) for cut in CUTS]
    for step in map(_whole, LADDER):
        far = all(max(step, n) >= min(step, n) * APART for n in kept)
        kept += [step] if far and step <= min(longest, LONGEST_CHUNK) else []
    return np.unique(np.array(kept, np.int64))


def _whole(tokens: int) -> int:
    return -(-tokens // CHUNK_STEP) * CHUNK_STEP


SWEPT_SERVED = in_turn(ALL_LAYOUTS, 5)
SWEPT_OTHERS = OTHERS[::4] + tuple(c for c in SMALL if c not in SWEPT_SERVED + OTHERS[::4])
SWEPT_VERIFIES = VERIFIES + OTHER_VERIFIES
SWEPT_VARIANTS = VARIANT_CASES[: 3 * len(KINDS)] + tuple(
    served(kind, replace(spec, num_qo_heads=28, num_kv_heads=4), seed=1)
    for spec in VARIANTS[:3]
    for kind in KINDS
)
"""Those that run other kernels: float16 runs bfloat16's."""
SWEEPS = {
    "decode": tuple(p for case in SWEPT_SERVED + SWEPT_OTHERS for p in sweep(case)),
    "several": tuple(p for case in SWEPT_VERIFIES for p in sweep(case)),
    "variants": tuple(p for case in SWEPT_VARIANTS for p in sweep(case)),
}

STUDY = Study(
    name="fa2_chunks",
    question="Which KV chunk is the best, and how near to it does the planner choose?",
    grids=(
        Grid(SWEEPS["decode"], ("fa2-chunk",), rounds=3),
        *(Grid(SWEEPS[name], ("fa2-chunk",)) for name in ("several", "variants")),
        Grid(tuple(p for c in SWEPT_SERVED[:3] for p in sweep(c)), ("fa2-chunk",), headline=True),
    ),
    reference_machine="nvidia-h200-0c2c16ae",
    ceilings=("copy",),
)
