"""FlashInfer's fa2 by its own plan and by ours, made on the GPU.

A wave is the requests that fill the GPU's slots, one block of each request and KV head in a slot.
Lengths are drawn by a seed that each layout has; a longest request is halved until K and V of its
batch fit `MOST_KV_BYTES`. Records of attention are of the planner before 2026-11-26, which chose
by another model.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd

from ..core.fa2.choice import PlanShape, choose
from ..core.gpu import FA2_CTAS
from ..core.spec import AttnSpec
from ..draw import charts, style
from ..kinds.decode.case import DecodeCase
from ..kinds.extend.case import ExtendCase
from ..kinds.lengths import sample_seq_lens
from ..kinds.plan.case import PlanCase
from ..run.study import Grid, Study
from .random_batches import SLOTS

HEADS = (
    *((32, 8), (28, 4), (64, 8), (16, 2), (8, 1)),
    *((40, 8), (14, 2), (5, 1), (32, 32), (128, 8)),
)
PAGE_SIZES = (16, 1, 64)
MOST_KV_BYTES = 8 * 2**30
LLAMA = AttnSpec(32, 8, 128, 16)


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
    return _fitted(DecodeCase(spec, *sizes[kind], seed=seed))


KINDS = (
    *("chat of 64", "one long", "past a wave", "agents"),
    *("chat of 256", "retrieval", "ragged", "four"),
)
OTHER_KINDS = ("a wave", "uniform", "one", "short")


def _spec(layout: int, turn: int) -> AttnSpec:
    return AttnSpec(*HEADS[layout], 128, PAGE_SIZES[(layout + turn) % len(PAGE_SIZES)])


SERVED = {
    (kind, layout): served(kind, _spec(layout, turn), seed=layout)
    for layout in range(len(HEADS))
    for turn, kind in enumerate(KINDS)
}
"""(kind, index of the layout) -> case: every kind of every layout."""
REALISTIC = tuple(SERVED.values())
SELDOM = {
    (kind, step): served(kind, _spec((5 * turn + step * 2) % 10, turn), seed=step)
    for turn, kind in enumerate(OTHER_KINDS)
    for step in range(5)
}
OTHERS = tuple(SELDOM.values())
KIND_OF = {case: kind for (kind, _), case in (SERVED | SELDOM).items()}
AGAIN = tuple(SERVED[kind, turn] for turn, kind in enumerate(KINDS))
"""Measured twice: every kind once, the layouts in turn."""

Q_LENS = (2, 4, 8, 16)
CACHED = ((64, 32768, "chat"), (32, 8192, "fixed"), (41, 65536, "one_long"), (4, 16384, "fixed"))
VERIFIED = (LLAMA, AttnSpec(28, 4, 128, 1), AttnSpec(64, 8, 128, 16))


def _verify(spec: AttnSpec, q_len: int, sizes: tuple[int, int, str], seed: int) -> ExtendCase:
    return ExtendCase(
        _fitted(DecodeCase(spec, *sizes, seed=seed)), "target_verify", q_len, mask="causal"
    )


VERIFIES = tuple(
    _verify(spec, q_len, sizes, seed)
    for (seed, spec), q_len, sizes in product(enumerate(VERIFIED), Q_LENS, CACHED)
)
OTHER_VERIFIES = tuple(
    _verify(
        AttnSpec(*HEADS[3 + step % 7], 128, PAGE_SIZES[step % 3]),
        *(Q_LENS[(step + step // 4) % 4], CACHED[step % 4], step),
    )
    for step in range(16)
)
"""Of the other layouts, each in turn."""

PLANS = {
    page_size: tuple(
        PlanCase(DecodeCase(replace(LLAMA, page_size=page_size), batch, 8192, "ragged"))
        for batch in (1, 8, 32, 128, 256, 1024)
    )
    for page_size in (16, 1)
}
BOTH = ("flashinfer-fa2", "flashinfer-fa2-planned")
RIVALS = (*BOTH, "flash-attn-3-precomputed")
SEVERAL = ("flashinfer-prefill-fa2", "flashinfer-prefill-fa2-planned")
PLANNING = ("fa2-plan-alone",)

STUDY = Study(
    name="fa2_plan",
    question="How much does FlashInfer's decode gain from a better plan, made on the GPU?",
    grids=(
        Grid(REALISTIC, RIVALS, rounds=3),
        Grid((*VERIFIES, *OTHER_VERIFIES), SEVERAL, rounds=4),
        Grid((*PLANS[16], *PLANS[1]), PLANNING, rounds=4),
        Grid(OTHERS, RIVALS, rounds=4),
        Grid(AGAIN, (), rounds=3, again=BOTH[:1]),
        Grid(VERIFIES[::6], (), rounds=4, again=SEVERAL[:1]),
        Grid((*REALISTIC[:8], SERVED["one long", 3]), BOTH, rounds=3, headline=True),
        Grid(VERIFIES[:4], SEVERAL, rounds=3, headline=True),
        Grid(PLANS[16][::2], PLANNING, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-c5533424",
    ceilings=("copy",),
)

PRESENT = "nvidia-h100-80gb-hbm3-e32c9749"
"""The machine with `PLANS` by the present planner."""


def chunks_of(case: DecodeCase, num_sms: int) -> dict[str, int]:
    """Tokens of a KV chunk by FlashInfer's plan and by ours."""
    lens = sample_seq_lens(case)
    shape = PlanShape.of(case.spec, lens, num_sms)
    choice = choose(shape, lens)
    return {"FlashInfer's plan": int(choice.chunks[-1]), "our plan": choice.chunk}


def schedule(lens: np.ndarray, chunk: int, kv_heads: int, slots: int) -> pd.DataFrame:
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
    lens, slots = sample_seq_lens(case), FA2_CTAS * num_sms
    longest = int(lens.argmax())
    works = {
        f"{name}: chunks of {chunk:,}": schedule(lens, chunk, case.spec.num_kv_heads, slots)
        for name, chunk in chunks_of(case, num_sms).items()
    }
    note = f"schedule, not a measurement: {case.label}, {num_sms} SMs of {FA2_CTAS} slots"
    words = ("tokens that a slot has read", "slot: half an SM")
    figure, axes = charts.panels([*works], (9.6, 5.0), note, words, share_y=True)
    for axis, work in zip(axes, works.values(), strict=True):
        colors = np.where(work.request % 2, style.SKY, style.PALE_BLUE)
        colors = np.where(work.request == longest, style.VERMILION, colors)
        height = np.where((work.request == longest) & (len(work) < 2 * slots), 3.0, 1.0)
        axis.barh(work.slot, work.end - work.start, height, work.start, color=colors)
        axis.set(xlim=(0, work.end.max() * 1.02), ylim=(slots + 1, -2))
        axis.grid(visible=False)
    return figure
