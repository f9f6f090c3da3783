"""The policy of a GPU's own records: from its studies to `policy.Policy`."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ...core.policy.plans import can_plan, plan
from ...core.policy.policy import Kernel, Point, Policy, kernel_of
from ...core.policy.times import KNOTS, START, Calls, Gpu, Load, Rates, load_of, predict
from ...core.spec import AttnSpec
from ...kinds.decode.case import DecodeCase
from ...kinds.lengths import sample_seq_lens
from ...run import store
from ...run.frame import decode_rows
from ...run.frame import times as median_times
from ...run.study import record_machine
from .. import STUDIES

TAUGHT_BY = ("layer_policy", "more_layers", "other_layers")
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


class Taught(NamedTuple):
    """What a frame teaches: times (us) by backend of its cases, the same by backend and kernel, and
    what a policy says of them."""

    times: dict[DecodeCase, dict[str, float]]
    kernels: dict[tuple[str, Kernel], list[tuple[DecodeCase, float]]]
    gpu: Gpu
    told: dict[str, Any]


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
    gpu = Gpu(int(first.num_sms), float(first.l2_mib) if first.timer == "graph" else 0.0)
    told = {"gpu": str(first.gpu), "gpu_id": ", ".join(sorted(rows.gpu_id.unique()))}
    told |= {"study": ", ".join(rows.study.unique()), "timer": str(first.timer)}
    kernels: dict[tuple[str, Kernel], list[tuple[DecodeCase, float]]] = {}
    for case, by_name in times.items():
        for name, us in by_name.items():
            if can_plan(name, case.spec):
                kernels.setdefault((name, kernel_of(name, case.spec)), []).append((case, us))
    return Taught(times, kernels, gpu, told | {"releases": _releases(rows)})


def policy_from(known: Taught, *, without: AttnSpec | None = None) -> Policy:
    """The policy of all that was taught, or of all layers but one."""
    rates = dict[str, dict[Kernel, Rates]]()
    predicted = dict[DecodeCase, dict[str, float]]()
    for (name, kernel), every in known.kernels.items():
        measured = [(case, us) for case, us in every if case.spec != without]
        if not measured:
            continue
        rates.setdefault(name, {})[kernel], told = learn(name, tuple(measured), known.gpu)
        for (ran, _), by_rates in zip(measured, told, strict=True):
            predicted.setdefault(ran, {})[name] = by_rates
    points = dict[AttnSpec, tuple[Point, ...]]()
    for case, by_name in predicted.items():
        run_us = {name: known.times[case][name] for name in by_name}
        point = Point(*_brief(case), run_us, by_name)
        points[case.spec] = (*points.get(case.spec, ()), point)
    return Policy(**known.told, **asdict(known.gpu), points=points, rates=rates)


# A report asks for the same policy in every table and figure.
@lru_cache(maxsize=2**12)
def learn(
    name: str, measured: tuple[tuple[DecodeCase, float], ...], gpu: Gpu
) -> tuple[Rates, tuple[float, ...]]:
    """Rates of a backend's kernel by measured cases and their us, and the us of each by them."""
    loads = [_load(name, case, gpu) for case, _ in measured]
    rates = fit(loads, [us for _, us in measured])
    return rates, tuple(round(us, 3) for us in predict(rates, loads).tolist())


# A case is planned once, whichever layers are left out.
@lru_cache(maxsize=2**14)
def _load(name: str, case: DecodeCase, gpu: Gpu) -> Load:
    lens = sample_seq_lens(case)
    return load_of(plan(name, case.spec, lens, num_sms=gpu.num_sms), case.spec, lens, gpu)


@lru_cache(maxsize=2**12)
def _brief(case: DecodeCase) -> tuple[int, float, int]:
    lens = sample_seq_lens(case)
    return len(lens), round(float(np.mean(lens)), 1), int(np.max(lens))


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

    found = np.exp(least_squares(left, first, method="lm").x).tolist()
    told = dict(zip(START, found, strict=False))
    return Rates(**told, token_ns=tuple(1e3 * us for us in found[known:]))


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
