"""The policy of a GPU's own records: from its studies to `policy.Policy`."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ...core.policy.plans import can_plan
from ...core.policy.policy import Kernel, Point, Policy, kernel_of
from ...core.policy.times import KNOTS, START, Calls, Gpu, Load, Rates, planned_load, predict
from ...core.spec import AttnSpec
from ...kinds.decode.case import DecodeCase
from ...kinds.lengths import sample_seq_lens
from ...run import store
from ...run.frame import decode_rows
from ...run.frame import times as median_times
from ...run.study import record_machine
from .. import STUDIES

TAUGHT_BY = ("layer_policy", "more_layers", "other_layers", "other_kernels")
"""L2 cold, a release that engines pin."""
PULL, SMOOTH = 0.05, 0.3
"""Weights in a fit of a rate's log distance from `START`, and of latency's from its neighbours."""


def current() -> Policy:
    """The policy of `records()`."""
    return policy_of(records())


def records() -> pd.DataFrame:
    """Frames of `TAUGHT_BY` of this GPU, or as published; RuntimeError where one has none."""
    frames = []
    for name in TAUGHT_BY:
        machine = record_machine(STUDIES[name])
        if machine not in store.machines(name):
            raise RuntimeError(
                f"a measured policy needs records of {name} on {machine}, there are none: "
                f"python -m attnlib measure {name}"
            )
        frames.append(store.load(name, machine))
    return pd.concat(frames, ignore_index=True)


class Ran(NamedTuple):
    """A case: its lengths [bs] int64, and times (us) by backend."""

    case: DecodeCase
    lens: np.ndarray
    us: dict[str, float]


class Taught(NamedTuple):
    """What a frame teaches: its cases, in which of them (by place) each kernel of a backend ran,
    and what a policy says of all.

    `fitted` keeps rates, and us by them, by backend and places: most layers run few of the kernels.
    """

    ran: list[Ran]
    kernels: dict[tuple[str, Kernel], list[int]]
    gpu: Gpu
    told: dict[str, Any]
    fitted: dict[tuple[str, tuple[int, ...]], tuple[Rates, list[float]]]

    @property
    def times(self) -> dict[DecodeCase, dict[str, float]]:
        """Microseconds of each case by backend."""
        return {each.case: each.us for each in self.ran}


def policy_of(frame: pd.DataFrame) -> Policy:
    """The policy that all decode cases of `frame` teach; errors as `taught`."""
    return policy_from(taught(frame))


def taught(frame: pd.DataFrame) -> Taught:
    """What the decode cases of `frame` teach.

    Several GPUs of a kind may teach, each by cases of its own. Raises ValueError for rows of a GPU
    that must not be compared, for GPUs of two kinds, or where no row is ok.
    """
    rows = advising(frame)
    if rows.empty:
        raise ValueError("frame must hold a decode case that ran ok, it has none")
    # GPUs of a kind may differ here, nothing else that moves times.
    store.require_comparable(rows.assign(gpu_id=rows.gpu))
    first, times = rows.iloc[0], dict[DecodeCase, dict[str, float]]()
    for _, part in rows.groupby("gpu_id"):
        times |= case_times(part)
    ran = [Ran(case, sample_seq_lens(case).astype(np.int64), us) for case, us in times.items()]
    gpu = Gpu(int(first.num_sms), float(first.l2_mib) if first.timer == "graph" else 0.0)
    told = {"gpu": str(first.gpu), "gpu_id": ", ".join(sorted(rows.gpu_id.unique()))}
    told |= {"study": ", ".join(rows.study.unique()), "timer": str(first.timer)}
    kernels: dict[tuple[str, Kernel], list[int]] = {}
    for at, (case, _, by_name) in enumerate(ran):
        for name in by_name:
            if can_plan(name, case.spec):
                kernels.setdefault((name, kernel_of(name, case.spec)), []).append(at)
    return Taught(ran, kernels, gpu, told | {"releases": _releases(rows)}, {})


def policy_from(known: Taught, *, without: AttnSpec | None = None) -> Policy:
    """The policy of all that was taught, or of all layers but one."""
    left = [each.case.spec == without for each in known.ran]
    predicted: list[dict[str, float]] = [{} for _ in left]
    rates, points = dict[str, dict[Kernel, Rates]](), dict[AttnSpec, tuple[Point, ...]]()
    for (name, kernel), places in known.kernels.items():
        if kept := tuple(at for at in places if not left[at]):
            rates.setdefault(name, {})[kernel], told = _fitted(known, name, kept)
            for at, by_rates in zip(kept, told, strict=True):
                predicted[at][name] = by_rates
    for (case, lens, us), by_name in zip(known.ran, predicted, strict=True):
        if by_name:
            brief = len(lens), round(float(lens.mean()), 1), int(lens.max())
            point = Point(*brief, {name: us[name] for name in by_name}, by_name)
            points[case.spec] = (*points.get(case.spec, ()), point)
    return Policy(**known.told, **asdict(known.gpu), points=points, rates=rates)


def _fitted(known: Taught, name: str, kept: tuple[int, ...]) -> tuple[Rates, list[float]]:
    """Rates of a backend's kernel by the cases at these places, and the us of each by them."""
    if (name, kept) not in known.fitted:
        ran = [known.ran[at] for at in kept]
        loads = [planned_load(name, r.case.spec, r.lens.tobytes(), known.gpu) for r in ran]
        rates = fit(loads, [each.us[name] for each in ran])
        known.fitted[name, kept] = rates, [round(us, 3) for us in predict(rates, loads).tolist()]
    return known.fitted[name, kept]


def advising(frame: pd.DataFrame) -> pd.DataFrame:
    """The decode rows to advise an engine by: L2 cold where that was measured, as between layers,
    else warm; `timer` says which."""
    return decode_rows(frame, timer="graph-cold" if "graph-cold" in set(frame.timer) else "graph")


def fit(loads: Sequence[Load], run_us: Sequence[float]) -> Rates:
    """Rates whose predicted logs lie nearest those of `run_us` in the least squares.

    Knots beyond the busiest moment of all calls are left out. ValueError without calls.
    """
    from scipy.optimize import least_squares

    if not loads or len(loads) != len(run_us):
        raise ValueError(
            f"run_us must have a time for each of one or more loads, got {len(run_us)} for "
            f"{len(loads)}"
        )
    most = max(float(load.busy.max()) for load in loads)
    calls = Calls(loads, min(sum(knot <= most for knot in KNOTS) + 1, len(KNOTS)))
    times, known = np.asarray(run_us, float), len(START)
    tokens = [load.tokens.sum() for load in loads]
    latency = np.median(np.maximum(times - START["start_us"], 1) / tokens)
    first = np.log([*START.values(), *[latency] * calls.between.shape[-1]])

    def left(x: np.ndarray) -> np.ndarray:
        pulled, steps = PULL * (x - first)[:known], SMOOTH * np.diff(x[known:])
        return np.concatenate([np.log(calls.run_us(x) / times), pulled, steps])

    def slopes(x: np.ndarray) -> np.ndarray:
        return np.concatenate([log_slopes(calls, x), *still])

    still = PULL * np.eye(known, len(first)), SMOOTH * np.diff(np.eye(len(first)), axis=0)[known:]
    found = np.exp(least_squares(left, first, slopes, method="lm").x).tolist()
    told = dict(zip(START, found, strict=False))
    return Rates(**told, token_ns=tuple(1e3 * us for us in found[known:]))


def log_slopes(calls: Calls, x: np.ndarray) -> np.ndarray:
    """Derivatives [calls, rates] of the logs of `calls.run_us(x)`."""
    start, merge, item, split, gbps = np.exp(x[: len(START)])
    latency, traffic = np.exp(calls.between @ x[len(START) :]), calls.moved / (gbps * 1e3)
    alone, over = (1 - calls.overlap) / np.hypot(latency, traffic), latency > traffic
    of_latency = calls.tokens * latency * (alone * latency + calls.overlap * over)
    of_traffic = calls.tokens * traffic * (alone * traffic + calls.overlap * ~over)
    levels = np.column_stack([-of_traffic, of_latency[:, None] * calls.between])
    spent = np.add.reduceat(levels, np.unique(calls.call, return_index=True)[1])
    merging = merge * calls.merged, item * calls.items, split * (calls.splits - 1)
    us = np.column_stack([np.full(len(spent), start), *merging, spent])
    return us / calls.run_us(x)[:, None]


def case_times(rows: pd.DataFrame) -> dict[DecodeCase, dict[str, float]]:
    """Each case's median time of every backend that ran it, in us."""
    wide = median_times(rows).set_index("case")[sorted(rows.backend.unique())].round(3)
    told = zip(wide.index, wide.to_dict("records"), strict=True)
    return {case: {n: us for n, us in row.items() if us == us} for case, row in told}


def _releases(rows: pd.DataFrame) -> dict[str, str]:
    """Release by backend; ValueError for a backend measured in two."""
    found = rows[["backend", "release"]].drop_duplicates()
    if twice := found[found.backend.duplicated()].backend.tolist():
        raise ValueError(f"frame must hold one release of each backend, it has two of {twice[0]}")
    return {row.backend: row.release for row in found.itertuples() if row.release}
