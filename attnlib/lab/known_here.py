"""What the records say of a known problem at the very call that was asked, or at calls like it."""

from collections.abc import Iterable
from dataclasses import replace

import pandas as pd

from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.mla.case import MlaCase
from ..measure.stats import geometric_mean
from ..run.look_up import plain
from ..select.known import Found, Here, Problem, sizes
from ..select.situation import card_named
from .advised_times import NEAR
from .known_sizes import CALLS, nearest_sizes

ALIKE = 3
"""Nearest calls that speak for one that is not on record, where they agree on whether a problem
costs time. On MLA calls left out of the records of an H100, SGLang's cap of splits: they agree at
93 of 100 and are then right at 99 of 100; of the 16 at which they disagree 9 are slower by it."""


def with_records(
    answers: Iterable[Found],
    call: DecodeCase | MlaCase,
    card: str,
) -> list[Found]:
    """The answers, each with what the records of a card, or of all where none is named, say of the
    call (`Found.here`)."""
    return [replace(answer, here=here(answer.problem, call, card)) for answer in answers]


def here(problem: Problem, call: DecodeCase | MlaCase, card: str) -> Here | None:
    """Of the call itself, else of the calls nearest to it, on the GPU where it costs most; None
    where neither is on record."""
    found = []
    recorded = sizes().get(problem.id, {}).get("sizes", ())
    gpus = problem.record.get("gpu", "").split()
    for gpu, size in zip(gpus, recorded, strict=True):
        is_of_card = card in ("", card_named(size["gpu"]))
        if is_of_card and size["unit"] == CALLS:
            # A call at which the problem just begins is like those at which it does not hold.
            rows = nearest_sizes(problem, gpu, call, everywhere=True)
            said = _on_gpu(rows, call)
            if said is not None:
                found.append(said)
    return min(found, key=lambda said: (said.nearest, -said.slowdown), default=None)


def _on_gpu(rows: pd.DataFrame, call: DecodeCase | MlaCase) -> Here | None:
    """What the records of one GPU say, of columns of `nearest_sizes`."""
    if not len(rows):
        return None
    wanted = plain(call)
    is_same = [plain(case) == wanted for case in rows.case]
    same = rows[is_same]
    if len(same):
        best = same.sort_values(["rounds", "ratio"]).iloc[-1]
        return Here(
            slowdown=float(best.slow_us / best.fast_us),
            margin=float(best.margin),
            gpu=best.gpu,
        )
    alike = rows[rows.distance <= NEAR].head(ALIKE)
    if len(alike) < ALIKE:
        return None
    return Here(
        slowdown=float(geometric_mean(alike.ratio)),
        margin=float(alike.margin.max()),
        gpu=alike.gpu.iloc[0],
        nearest=ALIKE,
        least=float(alike.ratio.min()),
        most=float(alike.ratio.max()),
    )
