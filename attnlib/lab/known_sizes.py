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
from ..measure.stats import SLOWER
from ..run import store
from ..run.frame import good_rows, over
from ..select.known import PROBLEMS, SIZES, Problem, found
from ..select.situation import situation_from
from .known_calls import written

ATTENTION = (DecodeCase, MlaCase, ExtendCase)
STEPS = ("engine", "step")
"""Kinds of cases that are a whole step of a model."""
TIMER_ORDER = ("graph", "graph-cold", "host", "ahead", "profiler", "eager")
"""Of several timers on record the first is taken."""


def write(path: Path = SIZES) -> Path:
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
    return {"sizes": sizes}


def ratios_of(problem: Problem, gpu: str) -> pd.DataFrame:
    """Time with the problem over time without, a row per recorded call at which it holds."""
    record = problem.record
    slow, fast = record["pair"]
    tables = []
    for machine in store.machines(record["study"]):
        if gpu not in machine:
            continue
        rows = _chosen(store.load(record["study"], machine), problem)
        for timer in TIMER_ORDER:
            timed = good_rows(rows, timer)
            sides = {*timed.backend} | {*(timed.backend + "==" + timed.release)}
            if {slow, fast} <= sides:
                table = over(timed, slow, fast)
                tables.append(table.assign(gpu=timed.gpu.iloc[0]))
                break
    if not tables:
        return pd.DataFrame()
    return pd.concat(tables, ignore_index=True)


def _chosen(rows: pd.DataFrame, problem: Problem) -> pd.DataFrame:
    """The rows of the calls at which the problem holds, and that its record wants."""
    record = problem.record
    sides = [side.partition("==")[0] for side in record["pair"]]
    rows = rows[rows.backend.isin(sides)]
    for column, value in record.get("where", {}).items():
        rows = rows[rows[column] == value]
    holds = {case: holds_at(problem, case) for case in rows.case.unique()}
    is_chosen = np.array([holds[case] for case in rows.case], dtype=bool)
    return rows[is_chosen]


def holds_at(problem: Problem, case: Any) -> bool:
    """Whether the problem holds at a recorded call, with what its example says of the rest."""
    if not isinstance(case, ATTENTION):
        return True
    situation = situation_from({**problem.example, **written(case)})
    answer = found(problem, situation)
    return answer is not None and not answer.missing


def _summary(ratios: pd.DataFrame) -> dict[str, Any]:
    """What is told of the ratios of one kind of GPU."""
    ratio = ratios.ratio[np.isfinite(ratios.ratio)]
    is_step = ratios.case.iloc[0].kind in STEPS
    return {
        "gpu": ", ".join(sorted({*ratios.gpu})),
        "cases": len(ratio),
        "unit": "steps" if is_step else "calls",
        "median": round(float(ratio.median()), 3),
        "least": round(float(ratio.min()), 3),
        "most": round(float(ratio.max()), 3),
        "slower": int((ratios.verdict == SLOWER).sum()),
    }
