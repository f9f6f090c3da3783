"""Rates of a GPU for `core.fa2.choice`, learned from its own chunk sweeps.

A sweep is one batch under one chunk after another. Rates are sought at random, and the candidate
stays whose choices lose least; the model's error counts a little, so that what no choice depends on
is not lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd

from ...core.fa2.choice import Key, PlanShape, Rates, cuts_of, predicted_us, us_of
from ...core.gpu import FA2_RATES, Fa2Rates
from ...kinds.lengths import sample_plan_lens
from ...kinds.plan.case import PlanCase
from ...run import store
from ...run.frame import good_rows
from ...run.study import Sweep, mode, record_machine
from .. import STUDIES

STUDY = "fa2_chunks"
SWEPT = "fa2-chunk"
"""The backend that sweeps are of; of chunk 0 it runs the planner's own choice."""
FIRST: Key = 16
"""All constants are learned for it, and the other keys take those that they do not learn."""
START = Fa2Rates(4500, 40, 40, 6e-4, 1.4, 9.5, 0.03, 0.14, 0.14, 90, 1.6, 50)
"""Where its search starts, whatever `FA2_RATES` holds by now: near an H200's."""
ALL = tuple(field.name for field in fields(Fa2Rates) if field.name != "cached_mib")
OWN = ("memory_gbps", "block_gbps", "block_tokens", "merge_us", "cut_us")
"""What every other key learns."""
LEAST_SWEEPS = 4
GENERATIONS, POPULATION = 100, 192
WIDEST, NARROWEST = 0.3, 0.03
"""Standard deviation of a constant's logarithm in the first generation and in the last."""
MOVED = 0.4
"""Share of the constants that a candidate changes."""
PULL = 0.002
"""Weight of a constant's log distance from where its search started, squared: without it a few
sweeps teach what the next ones deny."""
ERROR = 0.16, 0.04
"""Weights of the median and of the mean of the model's error, as logs."""
NEAR = 1.2
"""The model's error counts where a chunk takes at most so many times the best one's time."""
DIGITS = 3
"""Of a learned constant: a choice never hangs on a fourth."""


@dataclass(frozen=True, eq=False)
class ChunkSweep:
    """A batch of `lens` [bs] tokens: `run_us` [n] under each of `chunks` [n]; `case` has chunk 0,
    and `own_us` is its time: that of the planner's own choice."""

    case: PlanCase
    shape: PlanShape
    lens: np.ndarray
    chunks: np.ndarray
    run_us: np.ndarray
    own_us: float = np.nan

    @property
    def key(self) -> Key:
        """Of the kernels that ran."""
        shape = self.shape
        plain = (shape.head_dim, shape.kv_bytes) == (128, 2)
        return shape.tile if plain else (shape.tile, shape.head_dim, shape.kv_bytes)

    def predicted_us(self, rates: Fa2Rates) -> np.ndarray:
        """Predicted microseconds [n]."""
        return predicted_us(replace(self.shape, given_rates=rates), self.lens, self.chunks)


def records(progress: Any = None) -> pd.DataFrame:
    """The study's frame of the published machine; on a GPU, of that one, after what its sweeps
    lack was measured (`progress` is a tqdm-like factory)."""
    study = STUDIES[STUDY]
    if mode() == "live":
        grids = tuple(grid for grid in study.grids if grid.backends == (SWEPT,))
        Sweep(progress=progress).measure(replace(study, grids=grids, ceilings=()))
    return store.load(STUDY, record_machine(study))


def sweeps(frame: pd.DataFrame) -> list[ChunkSweep]:
    """The chunk sweeps among the rows of a frame, medians over rounds, in the order of the rows.

    Raises ValueError for rows that must not be compared, and where there is no sweep.
    """
    rows = good_rows(frame[frame.backend == SWEPT])
    if rows.empty:
        raise ValueError(f"frame must hold records of {SWEPT} that ran ok, it has none")
    store.require_comparable(rows)
    batch = rows.case.map(lambda case: replace(case, chunk=0))
    return [_sweep(group) for _, group in rows.groupby(batch, sort=False)]


def _sweep(rows: pd.DataFrame) -> ChunkSweep:
    case = replace(rows.case.iloc[0], chunk=0)
    lens = sample_plan_lens(case)
    us = rows.run_us.groupby(rows.case.map(lambda case: case.chunk)).median()
    own, us = us.get(0, np.nan), us.drop(0, errors="ignore")
    shape = PlanShape.of(case.spec, lens, int(rows.num_sms.iloc[0]), case.q_len)
    return ChunkSweep(case, shape, lens, us.index.to_numpy(np.int64), us.to_numpy(), own)


def rates(sweeps: Sequence[ChunkSweep]) -> dict[Key, Fa2Rates]:
    """The rates of each key that was swept; the same sweeps give the same rates.

    Raises ValueError for a key of fewer than `LEAST_SWEEPS`, and where `FIRST` is not swept.
    """
    groups = {FIRST: [], **by_key(sweeps)}
    for key, group in groups.items():
        if len(group) < LEAST_SWEEPS:
            raise ValueError(
                f"sweeps must hold {LEAST_SWEEPS} or more of rates {key}, it has {len(group)}"
            )
    first = fit(groups.pop(FIRST), START, ALL)
    return {FIRST: first} | {key: fit(group, first, OWN) for key, group in groups.items()}


def by_key(sweeps: Sequence[ChunkSweep]) -> dict[Key, list[ChunkSweep]]:
    """Sweeps of each key, in their order."""
    groups: dict[Key, list[ChunkSweep]] = {}
    for sweep in sweeps:
        groups.setdefault(sweep.key, []).append(sweep)
    return groups


def fit(sweeps: Sequence[ChunkSweep], start: Fa2Rates, names: Sequence[str]) -> Fa2Rates:
    """The constants `names` that lose least, not far from `start`, the others as there."""
    draw, least, losses_by = np.random.default_rng(0), np.inf, losses_of(sweeps)
    first = best = np.log([getattr(start, name) for name in names])
    for width in np.geomspace(WIDEST, NARROWEST, GENERATIONS):
        moved = draw.random((POPULATION, len(names))) < MOVED
        steps = moved * draw.normal(0, width, moved.shape)
        steps[0] = 0
        values = np.exp(best + steps).T[:, :, None]
        losses = losses_by(replace(start, **dict(zip(names, values, strict=True))))
        losses += PULL * ((best + steps - first) ** 2).sum(1)
        at = losses.argmin()
        if losses[at] < least:
            least, best = losses[at], best + steps[at]
    found = (float(f"{value:.{DIGITS}g}") for value in np.exp(best))
    return replace(start, **dict(zip(names, found, strict=True)))


def losses_of(sweeps: Sequence[ChunkSweep]) -> Callable[[Fa2Rates], np.ndarray]:
    """What the choices of m candidates lose, [m]: in the mean, at worst, and a little of the
    model's error."""
    cuts = np.hstack([cuts_of(sweep.shape, sweep.lens, sweep.chunks) for sweep in sweeps])
    run_us = np.concatenate([sweep.run_us for sweep in sweeps])
    near = np.concatenate([sweep.run_us < NEAR * sweep.run_us.min() for sweep in sweeps])
    # [sweeps, most chunks], the last chunk as often as it takes
    ends = np.cumsum([len(sweep.chunks) for sweep in sweeps])
    begins, most = np.array([0, *ends[:-1]]), max(len(sweep.chunks) for sweep in sweeps)
    places = np.minimum(begins[:, None] + np.arange(most), ends[:, None] - 1)
    swept, least = run_us[places], run_us[places].min(-1)

    def losses(candidates: Fa2Rates) -> np.ndarray:
        us = us_of(cuts, candidates)
        chosen = np.take_along_axis(swept, us[:, places].argmin(-1).T, -1)
        lost, errors = np.log(chosen / least[:, None]), np.abs(np.log(us / run_us))[:, near]
        worst = np.sort(lost, axis=0)[-max(3, len(lost) // 30) :]
        much = ERROR[0] * np.median(errors, -1) + ERROR[1] * errors.mean(-1)
        return np.mean(lost, axis=0) + 0.2 * worst.mean(0) + much

    return losses


def regret(sweeps: Sequence[ChunkSweep], rates: Rates) -> pd.DataFrame:
    """A row per sweep of what `rates` choose: case, key, chosen, best, their times in us, ratio."""
    found = []
    for sweep in sweeps:
        told = sweep.predicted_us(sweep.shape.rates_in(rates))
        at, best = told.argmin(), sweep.run_us.argmin()
        row = {"case": sweep.case, "key": sweep.key}
        row |= {"chosen": sweep.chunks[at], "best": sweep.chunks[best]}
        found.append(row | {"chosen_us": sweep.run_us[at], "best_us": sweep.run_us[best]})
    return pd.DataFrame(found).assign(ratio=lambda rows: rows.chosen_us / rows.best_us)


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """Of `regret`: how many sweeps each key has, their geometric mean ratio and the worst."""
    ratio = found.ratio.groupby(found.key.map(str), sort=False)
    table = ratio.agg(sweeps="size", mean=lambda r: np.exp(np.log(r).mean()), worst="max")
    return table.reset_index()


def compared(sweeps: Sequence[ChunkSweep], rates: Rates) -> pd.DataFrame:
    """`summary` of these rates, and mean and worst of those that `core.gpu` holds beside it."""
    ours, held = (summary(regret(sweeps, each)) for each in (rates, FA2_RATES))
    return ours.assign(core_mean=held["mean"], core_worst=held.worst)


def cross_validated(sweeps: Sequence[ChunkSweep]) -> pd.DataFrame:
    """`regret` of each half of the sweeps, as it is chosen for by rates of the other half.

    Keys that have too few sweeps for two halves are left out; empty where all are.
    """
    groups = [group for group in by_key(sweeps).values() if len(group) >= 2 * LEAST_SWEEPS]
    halves = [[sweep for group in groups for sweep in group[start::2]] for start in (0, 1)]
    pairs = zip(halves, halves[::-1], strict=True) if groups else ()
    return pd.concat([pd.DataFrame(), *(regret(half, rates(other)) for half, other in pairs)])


def source(rates: Rates) -> str:
    """The entries of `FA2_RATES` for these rates, as they stand in `core/gpu.py`."""
    lines = []
    for key, each in rates.items():
        told = ", ".join(f"{value:g}" for value in astuple(each))
        line = f"    {key}: Fa2Rates({told}),"
        cut = f"    {key}: Fa2Rates(\n        *({told})\n    ),"
        lines.append(line if len(line) <= 100 else cut)
    return "\n".join(lines)
