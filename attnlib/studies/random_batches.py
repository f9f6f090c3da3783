"""Batches drawn at random: which decode backend is fastest when nobody chose the shapes.

Layers are those of usual models, on one GPU or split over several; batch sizes and lengths are even
over their logarithms. `STUDY` is the last draw (22 layers, 220 batches), measured on a GPU that had
measured none of the others. Four earlier draws are on record as the same study on four other GPUs:
`load_all` returns all five. The L2 is cold, as between the layers of a model.
"""

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pandas as pd

from ..core.spec import AttnSpec
from ..measure.calls.decode.case import DecodeCase
from ..measure.stats import FASTER, NOT_SLOWER, geometric_mean, mean_interval
from ..run import store
from ..run.frame import CUDA_CORES, FA2, FA3, good_rows, over
from ..run.study import Grid, Study

FP8 = "float8_e4m3fn"
SIZES = (
    (16, 8, 128, 64),
    (10, 2, 128, 1),
    (20, 4, 128, 64),
    (12, 2, 128, 64),
    (40, 40, 128, 1),
    (64, 8, 128, 64),
    (16, 4, 128, 64),
    (12, 1, 128, 64),
    (32, 32, 128, 64),
    (8, 8, 128, 16),
    (24, 8, 128, 64),
    (32, 4, 128, 64),
    (16, 2, 128, 16),
    (96, 8, 128, 64),
    (8, 2, 128, 1),
    (24, 4, 64, 16),
    (20, 4, 64, 64),
    (32, 2, 256, 64),
    (24, 4, 256, 16),
    (8, 4, 128, 16, "bfloat16", FP8),
    (24, 8, 128, 1, "bfloat16", FP8),
    (16, 8, 128, 1, FP8, FP8),
)
"""Query heads, KV heads, head_dim, page size and dtypes of the layers, drawn by `SEED`."""
SEED = "unseen layers, third draw"
LIVE_SIZES = (
    (16, 8, 128, 64),
    (12, 2, 128, 64),
    (16, 4, 128, 64),
    (8, 8, 128, 16),
    (16, 2, 128, 16),
    (24, 4, 64, 16),
    (24, 4, 256, 16),
    (16, 8, 128, 1, FP8, FP8),
)
LAYERS = tuple(AttnSpec(*sizes) for sizes in SIZES)
BATCHES = (1, 256)
KV_LENS = (64, 65536)
"""The least and the most that is drawn."""
KINDS = ("fixed", "ragged", "skewed", "chat", "one_long")
MOST_KV_BYTES = 4 * 2**30
LEAST_KV_BYTES = 2**18
"""512 copies of a cache below 256 KiB do not fill an L2 of 60 MiB twice, so it cannot be cold."""
SLOTS = 264
"""Blocks of fa2 that an H200 runs at once: past requests x KV heads = 264 its plan cuts nothing."""
PLANNED = "flashinfer-fa2-planned"
FLASH_ATTENTION = "flash-attn-3-precomputed"
FLASHINFER = (FA2, PLANNED, FA3, CUDA_CORES)
BACKENDS = (*FLASHINFER, FLASH_ATTENTION)
COLD = "graph-cold"
MOST_LOSS = 0.02
"""Of speed, in a table that asks whether our plan is `not slower`."""


def drawn_cases(
    specs: tuple[AttnSpec, ...],
    count: int,
    seed: str,
) -> tuple[DecodeCase, ...]:
    """`count` different random cases of each spec that fit the memory and can be timed cold."""
    cases: dict[DecodeCase, None] = {}
    for number, spec in enumerate(specs, 1):
        draw = random.Random(f"{seed} {spec!r}")
        while len(cases) < number * count:
            batch = _even_over_logarithms(draw, *BATCHES)
            kv_len = _even_over_logarithms(draw, *KV_LENS)
            longest = DecodeCase(spec, batch, kv_len)
            case = replace(longest, lengths=draw.choice(KINDS))
            fits = longest.cost.kv_bytes <= MOST_KV_BYTES
            if fits and case.cost.kv_bytes >= LEAST_KV_BYTES:
                cases[case] = None
    return tuple(cases)


def _even_over_logarithms(draw: random.Random, low: int, high: int) -> int:
    return round(low * (high / low) ** draw.random())


def first_of_each_layer(cases: Iterable[DecodeCase]) -> dict[AttnSpec, DecodeCase]:
    """Layer -> the first of its cases."""
    first: dict[AttnSpec, DecodeCase] = {}
    for case in cases:
        first.setdefault(case.spec, case)
    return first


CASES = drawn_cases(LAYERS, 10, SEED)
FIRST = first_of_each_layer(CASES)
AGAIN = tuple(FIRST.values())
LIVE = tuple(FIRST[AttnSpec(*sizes)] for sizes in LIVE_SIZES)
RELEASE = ("0.7.2",)
_cold = partial(Grid, timers=(COLD,))

STUDY = Study(
    name="random_batches",
    question="Which backend decodes fastest, for batches that were drawn at random?",
    grids=(
        _cold(CASES, FLASHINFER, releases=RELEASE, rounds=2),
        _cold(CASES, (FLASH_ATTENTION,), rounds=2),
        _cold(AGAIN, (), releases=RELEASE, rounds=2, again=(FA2,)),
        _cold(LIVE, FLASHINFER, releases=RELEASE, headline=True),
        _cold(LIVE, (FLASH_ATTENTION,), headline=True),
    ),
    reference_machine="nvidia-h200-ee19d27f",
    ceilings=("copy",),
)


def load_all(study: str = STUDY.name) -> pd.DataFrame:
    """The good records of a study on all GPUs, with the columns `machine` and `past_slots`."""
    frames = []
    for machine in store.machines(study):
        records = store.load(study, machine)
        rows = good_rows(records, COLD)
        frames.append(rows.assign(machine=machine))
    if not frames:
        raise FileNotFoundError(f"no records of study {study!r}: publish some, or take ours")
    return _with_slots(pd.concat(frames, ignore_index=True))


def _with_slots(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the column `past_slots`: whether requests x KV heads fill the GPU."""
    blocks = table.batch_size * table.num_kv_heads
    return table.assign(past_slots=blocks > SLOTS)


def ratios(
    rows: pd.DataFrame,
    a: str,
    b: str,
    *,
    not_slower: float = 0.0,
) -> pd.DataFrame:
    """Backend a / backend b of each batch of `load_all`, judged GPU by GPU (`over`)."""
    tables = []
    for machine, part in rows.groupby("machine", sort=False):
        table = over(
            rows=part,
            a=a,
            b=b,
            not_slower=not_slower,
        )
        tables.append(table.assign(machine=machine))
    return _with_slots(pd.concat(tables, ignore_index=True))


def gain_summary(
    rows: pd.DataFrame, rivals: tuple[str, ...] = (FA2, FLASH_ATTENTION)
) -> pd.DataFrame:
    """Time of each rival / time of our plan of fa2 over batches: a row per rival and part of them.

    `not slower` is the share of batches in which ours is shown to be at most 2 % slower: by the
    batch's own 95 % interval, and by Holm's steps over the table, which takes three rounds.
    `95 % CI of the mean` is a bootstrap over the batches (`mean_interval`). `plan, us` is the
    median of what the rival's plan takes on the host. The plan of ours is the one of the records'
    date.
    """
    lines = []
    for rival in rivals:
        judged = ratios(
            rows=rows,
            a=PLANNED,
            b=rival,
            not_slower=MOST_LOSS,
        )
        table = judged.assign(ratio=1 / judged.ratio)
        of_rival = rows[rows.backend == rival]
        plan_us = of_rival.plan_us.median()
        parts = {
            "all": table,
            f"past {SLOTS} blocks": table[table.past_slots],
            f"up to {SLOTS} blocks": table[~table.past_slots],
        }
        for part, chosen in parts.items():
            line = {
                "rival": rival,
                "batches": part,
                **_line(chosen),
                "plan, us": plan_us,
            }
            lines.append(line)
    return pd.DataFrame(lines).round(3)


def _line(table: pd.DataFrame) -> dict[str, object]:
    """Mean, median, tails and the worst batch of ratios above 1 where ours is faster."""
    if table.empty:
        return {"count": 0}
    ratio = table.ratio
    gains = ratio > 1.05
    loses = ratio < 1 - MOST_LOSS
    not_slower = table.high <= 1 + MOST_LOSS
    shown = table.verdict.isin((FASTER, NOT_SLOWER))
    low, high = mean_interval(ratio)
    return {
        "count": len(table),
        "geometric mean": float(geometric_mean(ratio)),
        "95 % CI of the mean": f"{low:.3f} to {high:.3f}",
        "median": ratio.median(),
        "gains > 5 %": f"{gains.mean():.1%}",
        "loses > 2 %": f"{loses.mean():.1%}",
        "not slower": f"{not_slower.mean():.1%}",
        "by Holm": f"{shown.mean():.1%}",
        "best": ratio.max(),
        "worst": ratio.min(),
        "worst batch": table.case[ratio.idxmin()].label,
    }
