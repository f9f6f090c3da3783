"""FlashInfer's fa2 by its own plan and by ours, made on the GPU.

A wave is the requests that fill the GPU's slots, one block of each request and KV head in a slot.
Lengths are drawn by a seed that each layout has; a longest request is halved until K and V of its
batch fit `MOST_KV_BYTES`. The records are read alone: those of attention are of the planner before
2026-11-26, which chose by another model.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pandas as pd

from ...core.spec import AttnSpec
from ...measure.calls.decode.case import DecodeCase
from ...run.frame import good_rows
from ...run.study import Study
from ..random_batches import SLOTS

HEADS = (
    (32, 8),
    (28, 4),
    (64, 8),
    (16, 2),
    (8, 1),
    (40, 8),
    (14, 2),
    (5, 1),
    (32, 32),
    (128, 8),
)
PAGE_SIZES = (16, 1, 64)
MOST_KV_BYTES = 8 * 2**30


def _fitted(case: DecodeCase) -> DecodeCase:
    """`case`, its longest request halved until the batch fits."""
    while case.cost.kv_bytes > MOST_KV_BYTES:
        case = replace(case, kv_len=case.kv_len // 2)
    return case


def served(kind: str, spec: AttnSpec, seed: int = 0) -> DecodeCase:
    """The batch of `kind` that people serve, of a layer, or one that they seldom do."""
    wave = SLOTS // spec.num_kv_heads
    draw = random.Random(f"one long {spec.heads}")
    waves = draw.randint(wave, 2 * wave)
    sizes: dict[str, tuple[int, int, str]] = {
        "chat of 64": (64, 32768, "chat"),
        "chat of 256": (256, 32768, "chat"),
        "retrieval": (32, 65536, "retrieval"),
        "agents": (24, 100000, "agents"),
        "one long": (1 + waves, 100000, "one_long"),
        "past a wave": (int(1.1 * wave) + 1, 2048, "fixed"),
        "ragged": (int(1.5 * wave), 4096, "ragged"),
        "four": (4, 16384, "fixed"),
        "a wave": (wave, 2048, "fixed"),
        "uniform": (32, 4096, "fixed"),
        "one": (1, 30000, "fixed"),
        "short": (64, 200, "ragged"),
    }
    batch, kv_len, lengths = sizes[kind]
    case = DecodeCase(
        spec,
        batch_size=batch,
        kv_len=kv_len,
        lengths=lengths,
        seed=seed,
    )
    return _fitted(case)


KINDS = (
    "chat of 64",
    "one long",
    "past a wave",
    "agents",
    "chat of 256",
    "retrieval",
    "ragged",
    "four",
)
OTHER_KINDS = ("a wave", "uniform", "one", "short")


def _spec(layout: int, turn: int) -> AttnSpec:
    place = (layout + turn) % len(PAGE_SIZES)
    return AttnSpec(
        *HEADS[layout],
        head_dim=128,
        page_size=PAGE_SIZES[place],
    )


SERVED: dict[tuple[str, int], DecodeCase] = {}
"""(kind, index of the layout) -> case: every kind of every layout."""
for _layout in range(len(HEADS)):
    for _turn, _kind in enumerate(KINDS):
        _layer = _spec(_layout, _turn)
        SERVED[_kind, _layout] = served(_kind, _layer, seed=_layout)
SELDOM: dict[tuple[str, int], DecodeCase] = {}
"""(kind, step) -> case: the other kinds, of five layouts each."""
for _turn, _kind in enumerate(OTHER_KINDS):
    for _step in range(5):
        _layout = (5 * _turn + 2 * _step) % len(HEADS)
        _layer = _spec(_layout, _turn)
        SELDOM[_kind, _step] = served(_kind, _layer, seed=_step)

KIND_OF: dict[DecodeCase, str] = {}
for (_kind, _), _case in (SERVED | SELDOM).items():
    KIND_OF[_case] = _kind
FA2, PLANNED = "flashinfer-fa2", "flashinfer-fa2-planned"
BOTH = (FA2, PLANNED)
PLANNING = ("fa2-plan-alone",)

STUDY = Study(
    name="fa2_plan",
    question="How much does FlashInfer's decode gain from a better plan, made on the GPU?",
    reference_machine="nvidia-h200-c5533424",
    retired=(
        "its records are of earlier planners; `attnlib measure plan_rivals` and `random_batches` "
        "compare the present one"
    ),
)

PRESENT = "nvidia-h100-80gb-hbm3-e32c9749"
"""The machine with launches that plan alone, by the present planner."""


def planning_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What a plan on the GPU takes, page arrays included: a row per batch size, us."""
    rows = good_rows(frame[frame.backend.isin(PLANNING)])
    table: dict[int, dict[str, float]] = {}
    for (batch, page), part in rows.groupby(["batch_size", "page_size"]):
        line = table.setdefault(batch, {})
        line[f"pages of {page}, us"] = part.run_us.median()
    wide = pd.DataFrame(table).T
    return wide.rename_axis("requests").reset_index()
