"""A study of a user's own traffic: the steps that an engine's plugin captured, on every backend."""

import re
import shlex
from pathlib import Path

from ..core.engines import capture
from ..kinds.captured import cases
from ..kinds.decode.case import DecodeCase
from ..run.study import Grid, Study

DECODES = ("flashinfer-fa2", "flashinfer-fa2-planned", "flashinfer-fa3", "fa3")
EXTENDS = ("flashinfer-prefill-fa2", "flashinfer-prefill-fa3")


def study_of(path: Path) -> tuple[Study, str]:
    """The study `captured_<name of the file>`, and the steps that it leaves out with their reasons.

    ValueError if no step of the file can be a case.
    """
    found, left_out = cases(capture.read(path))
    told = "; ".join(f"{count} steps, {reason}" for reason, count in left_out.most_common())
    if not found:
        raise ValueError(f"{path} must hold a step that can be a case, got {told or 'none'}")
    decodes = tuple(case for case in found if isinstance(case, DecodeCase))
    extends = tuple(case for case in found if not isinstance(case, DecodeCase))
    sets = ((decodes, DECODES, "graph"), (extends, EXTENDS, "profiler"))
    grids = tuple(
        Grid(chosen, backends, timers=(timer,), rounds=3, headline=True)
        for chosen, backends, timer in sets
        if chosen
    )
    name = "captured_" + re.sub(r"[^a-z0-9]+", "_", path.stem.lower()).strip("_")
    question = f"Which backend is fastest on the steps of {path.name}?"
    command = f"python -m attnlib measure {shlex.quote(str(path))}"
    return Study(name, question, grids, command=command), told
