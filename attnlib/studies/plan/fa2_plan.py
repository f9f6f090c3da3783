"""FlashInfer's fa2 by its own plan and by ours, made on the GPU.

A wave is the requests that fill the GPU's slots, one block of each request and KV head in a slot.
Lengths are drawn by a seed that each layout has; a longest request is halved until K and V of its
batch fit `MOST_KV_BYTES`. The records are read alone: those of attention are of the planner before
2026-11-26, which chose by another model.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import numpy as np
import pandas as pd

from ...core.fa2.choice import PlanShape, choose
from ...core.gpu import FA2_CTAS
from ...core.spec import AttnSpec
from ...measure.calls.decode.case import DecodeCase
from ...measure.calls.lengths import sample_seq_lens
from ...run.figures import charts, style
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
    waves = random.Random(f"one long {spec.heads}").randint(wave, 2 * wave)
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
    return _fitted(DecodeCase(spec, batch, kv_len, lengths, seed=seed))


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
    page_size = PAGE_SIZES[(layout + turn) % len(PAGE_SIZES)]
    return AttnSpec(*HEADS[layout], head_dim=128, page_size=page_size)


SERVED: dict[tuple[str, int], DecodeCase] = {}
"""(kind, index of the layout) -> case: every kind of every layout."""
for _layout in range(len(HEADS)):
    for _turn, _kind in enumerate(KINDS):
        SERVED[_kind, _layout] = served(_kind, _spec(_layout, _turn), seed=_layout)
SELDOM: dict[tuple[str, int], DecodeCase] = {}
"""(kind, step) -> case: the other kinds, of five layouts each."""
for _turn, _kind in enumerate(OTHER_KINDS):
    for _step in range(5):
        _layout = (5 * _turn + 2 * _step) % len(HEADS)
        SELDOM[_kind, _step] = served(_kind, _spec(_layout, _turn), seed=_step)

KIND_OF: dict[DecodeCase, str] = {}
for (_kind, _), _case in (SERVED | SELDOM).items():
    KIND_OF[_case] = _kind
FA2, PLANNED = "flashinfer-fa2", "flashinfer-fa2-planned"
BOTH = (FA2, PLANNED)
SEVERAL = ("flashinfer-prefill-fa2", "flashinfer-prefill-fa2-planned")
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


def chunks_of(case: DecodeCase, num_sms: int) -> dict[str, int]:
    """Tokens of a KV chunk by FlashInfer's plan and by ours."""
    lens = sample_seq_lens(case)
    shape = PlanShape.of(case.spec, lens, num_sms)
    choice = choose(shape, lens)
    return {"FlashInfer's plan": int(choice.chunks[-1]), "our plan": choice.chunk}


def schedule(
    lens: np.ndarray,
    chunk: int,
    kv_heads: int,
    slots: int,
) -> pd.DataFrame:
    """Blocks of a plan, each in the first slot that is free, in the grid's order.

    A block takes as long as it has tokens: `start` and `end` count those. Nothing is measured.
    """
    free = [(0, slot) for slot in range(slots)]
    rows = []
    for head in range(kv_heads):
        for request, length in enumerate(lens):
            for begin in range(0, int(length), chunk):
                start, slot = heapq.heappop(free)
                end = start + min(chunk, int(length) - begin)
                rows.append((head, request, slot, start, end))
                heapq.heappush(free, (end, slot))
    return pd.DataFrame(rows, columns=["head", "request", "slot", "start", "end"])


def slots_chart(case: DecodeCase, num_sms: int) -> charts.Figure:
    """Blocks on the slots of a GPU by FlashInfer's plan and by ours: a bar per block.

    The longest request has a colour of its own. Drawn by `schedule`: nothing is measured.
    """
    lens = sample_seq_lens(case)
    slots = FA2_CTAS * num_sms
    longest = int(lens.argmax())
    works = {}
    for name, chunk in chunks_of(case, num_sms).items():
        title = f"{name}: chunks of {chunk:,}"
        works[title] = schedule(lens, chunk, case.spec.num_kv_heads, slots)
    note = f"schedule, not a measurement: {case.label}, {num_sms} SMs of {FA2_CTAS} slots"
    words = ("tokens that a slot has read", "slot: half an SM")
    size = (9.6, 5.0)
    figure, axes = charts.panels(list(works), size, note, words, share_y=True)
    for axis, work in zip(axes, works.values(), strict=True):
        is_longest = work.request == longest
        is_sparse = len(work) < 2 * slots
        colors = np.where(work.request % 2, style.SKY, style.PALE_BLUE)
        colors = np.where(is_longest, style.VERMILION, colors)
        height = np.where(is_longest & is_sparse, 3.0, 1.0)
        width = work.end - work.start
        axis.barh(work.slot, width, height, left=work.start, color=colors)
        axis.set_xlim(0, work.end.max() * 1.02)
        axis.set_ylim(slots + 1, -2)
        axis.grid(visible=False)
    return figure
