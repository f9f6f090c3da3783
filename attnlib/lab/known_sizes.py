"""By how much a known problem slows a call: ratios from the records, for each entry with `record`.

`write` puts them into data/known/sizes.json, so that `explain` needs no study and no pandas. The
calls are those on record at which the entry itself holds, so its condition is held to the records.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.extend.case import ExtendCase
from ..measure.calls.mla.case import MlaCase
from ..measure.files import write_whole
from ..measure.stats import LEAST_ROUNDS, SLOWER
from ..run import store
from ..run.frame import good_rows, over, side_rows
from ..run.look_up import nearest_calls, sizes_of
from ..select.known import PROBLEMS, SIZES_FILE, Problem, found
from ..select.situation import situation_from
from ..studies.metadata.case import MetadataCase
from ..studies.serving import served
from .known_calls import written

ATTENTION_CASES = (DecodeCase, MlaCase, ExtendCase)
STEP_KINDS = ("engine", "step")
"""Kinds of cases that are a whole step of a model."""
METADATA_UNIT = "metadata calls, one per step"
"""Preparing a step, not attention: its times are told, least and most."""
CALLS = "calls"
"""Attention calls."""
SHOWN = ["case", "ratio", "margin", "rounds", "slow_us", "fast_us", "gpu"]
"""What is told of one recorded call."""
TIMER_ORDER = ("graph", "graph-cold", "graph-behind", "host", "ahead", "profiler", "eager")
"""Of several timers on record the first is taken."""


def write(path: Path = SIZES_FILE) -> Path:
    """Write all sizes; returns the file."""
    text = json.dumps(tables(), indent=1)
    return write_whole(path, (text + "\n").encode())


def tables() -> dict[str, Any]:
    """Id of a problem -> its sizes, one for each kind of GPU on record."""
    return {name: size_of(problem) for name, problem in PROBLEMS.items() if problem.record}


def size_of(problem: Problem) -> dict[str, Any]:
    """The sizes of one problem; ValueError where no record has it."""
    record = problem.record
    sizes = []
    for gpu in record["gpu"].split():
        ratios = ratios_of(problem, gpu)
        if not len(ratios):
            raise ValueError(f"{problem.id}: no record of {record['study']} on {gpu} has it")
        sizes.append(_summary(ratios))
    if "loaded" in record:
        return {"sizes": sizes, "loaded": _under_load(record["loaded"])}
    return {"sizes": sizes}


def _under_load(model: str) -> dict[str, Any]:
    """What the default of a loaded server loses, over the loads whose requests differ in length
    and that have a verdict."""
    frame = served.load_all()
    table = served.speedups(frame, model)
    table = table[table.rounds >= LEAST_ROUNDS]
    table = table[~table.case.isin(served.CONTROLS)]
    rows = frame[frame.case.isin(table.case)]
    (gpu,) = rows.gpu.unique()
    return {
        "model": model,
        "gpu": gpu,
        "cases": len(table),
        "least": round(float(table.speedup.min()), 4),
        "most": round(float(table.speedup.max()), 4),
    }


def ratios_of(
    problem: Problem,
    gpu: str,
    shared: tuple[Any, ...] = (),
    *,
    everywhere: bool = False,
) -> pd.DataFrame:
    """Time with the problem over time without, a row per recorded call at which it holds.

    `shared` leaves only the calls that have it (`alike`). With `everywhere` the calls at which the
    problem does not hold are there, too: of such a call both times are those of one kernel.
    """
    record = problem.record
    slow, fast = record["pair"]
    tables = []
    for machine in store.machines(record["study"]):
        if gpu not in machine:
            continue
        rows = store.load(record["study"], machine)
        if shared:
            is_alike = {case: alike(case) == shared for case in rows.case.unique()}
            rows = rows[rows.case.map(is_alike).astype(bool)]
        rows = _of_pair(rows, problem)
        if not everywhere:
            rows = _at_which_it_holds(rows, problem)
        for timer in TIMER_ORDER:
            timed = good_rows(rows, timer)
            sides = {*timed.backend} | {*(timed.backend + "==" + timed.release)}
            if {slow, fast} <= sides:
                table = over(timed, slow, fast)
                table = table.assign(gpu=timed.gpu.iloc[0])
                for column, side in (("slow_us", slow), ("fast_us", fast)):
                    times = side_rows(timed, side).groupby("case", sort=False).run_us.median()
                    table[column] = table.case.map(times)
                tables.append(table)
                break
    if not tables:
        return pd.DataFrame()
    return pd.concat(tables, ignore_index=True)


def nearest_sizes(
    problem: Problem,
    gpu: str,
    call: DecodeCase | MlaCase,
    *,
    everywhere: bool = False,
) -> pd.DataFrame:
    """The recorded calls of a call's mode, heads and query tokens at which a problem holds.

    The nearest to the call is the first. Columns are those of `SHOWN` and `distance`; empty where
    no call of them has it. `everywhere` as of `ratios_of`.
    """
    ratios = ratios_of(problem, gpu, alike(call), everywhere=everywhere)
    if not len(ratios):
        return ratios
    sizes = pd.DataFrame([sizes_of(each) for each in ratios.case])
    return nearest_calls(call, ratios[SHOWN].join(sizes))


def alike(case: Any) -> tuple[Any, ...]:
    """What calls share whose sizes speak for each other: mode, heads and query tokens; empty for a
    case that is no such call."""
    if isinstance(case, DecodeCase):
        return "decode", case.spec.heads
    if isinstance(case, MlaCase):
        return "mla", case.spec.num_qo_heads, case.q_len
    return ()


def _of_pair(rows: pd.DataFrame, problem: Problem) -> pd.DataFrame:
    """The rows of both sides of the problem's record, and that it wants."""
    record = problem.record
    sides = []
    for side in record["pair"]:
        sides.append(side.partition("==")[0])
    rows = rows[rows.backend.isin(sides)]
    for column, value in record.get("where", {}).items():
        values = value if isinstance(value, list) else [value]
        rows = rows[rows[column].isin(values)]
    return rows


def _at_which_it_holds(rows: pd.DataFrame, problem: Problem) -> pd.DataFrame:
    """The rows of the calls at which the problem holds."""
    holds = {case: holds_at(problem, case) for case in rows.case.unique()}
    is_chosen = np.array([holds[case] for case in rows.case], dtype=bool)
    return rows[is_chosen]


def holds_at(problem: Problem, case: Any) -> bool:
    """Whether the problem holds at a recorded call, with what its example says of the rest."""
    if not isinstance(case, ATTENTION_CASES):
        return True
    situation = situation_from({**problem.example, **written(case)})
    answer = found(problem, situation)
    return answer is not None and not answer.missing


def _summary(ratios: pd.DataFrame) -> dict[str, Any]:
    """What is told of the ratios of one kind of GPU."""
    ratio = ratios.ratio[np.isfinite(ratios.ratio)]
    summary = {
        "gpu": ", ".join(sorted({*ratios.gpu})),
        "cases": len(ratio),
        "unit": _unit(ratios.case.iloc[0]),
        "median": round(float(ratio.median()), 3),
        "least": round(float(ratio.min()), 3),
        "most": round(float(ratio.max()), 3),
        "judged": int((ratios.rounds >= LEAST_ROUNDS).sum()),
        "slower": int((ratios.verdict == SLOWER).sum()),
    }
    if summary["unit"] == METADATA_UNIT:
        for side in ("slow_us", "fast_us"):
            times = ratios.loc[ratio.index, side]
            summary[side] = [
                round(float(times.min()), 1),
                round(float(times.max()), 1),
            ]
        summary["calls"] = _metadata_calls(ratios)
    return summary


def _metadata_calls(ratios: pd.DataFrame) -> list[list[float]]:
    """Requests of each recorded call, and its times (us) with the problem and without."""
    rows = []
    for row in ratios.itertuples():
        times = [round(float(row.slow_us), 1), round(float(row.fast_us), 1)]
        rows.append([row.case.batch_size, *times])
    return sorted(rows)


def _unit(case: Any) -> str:
    """What was timed, in the plural."""
    if isinstance(case, MetadataCase):
        return METADATA_UNIT
    return "steps" if case.kind in STEP_KINDS else CALLS
