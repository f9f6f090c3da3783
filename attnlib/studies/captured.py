"""A user's own traffic as a study: the steps that an engine's plugin captured, on every backend.

cases, left_out = captured.cases(capture.read("steps.jsonl"))  # of `engines.capture`
python -m attnlib measure steps.jsonl                          # measures them
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ..core.spec import require_word
from ..engines import capture
from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.extend.case import ExtendCase
from ..measure.calls.lengths import explicit_lengths
from ..run.study import Grid, Study

Case = DecodeCase | ExtendCase
MODES = ("decode", "extend", "mixed")
"""Modes whose captured steps hold all that a case needs; a verification lacks the drafts."""
DECODES = (
    "flashinfer-fa2",
    "flashinfer-fa2-planned",
    "flashinfer-fa3",
    "flashinfer-cuda-cores",
    "flash-attn-3",
    "flash-attn-3-precomputed",
)
EXTENDS = ("flashinfer-prefill-fa2", "flashinfer-prefill-fa3")


def case_of(step: capture.CapturedStep) -> Case:
    """The attention call of one layer in `step`: the captured lengths, drawn pages and values.

    Raises ValueError with the reason if it cannot be a case.
    """
    require_word("mode", step.mode, MODES)
    if not step.lengths:
        raise ValueError("lengths must be known to the host, got none")
    cached = DecodeCase(
        step.spec,
        step.batch_size,
        explicit_lengths(step.lengths).max().item(),
        step.lengths,
    )
    if step.mode == "decode":
        return cached
    queries = 1
    if step.q_lengths:
        queries = explicit_lengths(step.q_lengths).max().item()
    return ExtendCase(cached, "prefill_paged", queries, q_lengths=step.q_lengths)


def cases(
    steps: Iterable[capture.CapturedStep],
) -> tuple[Counter[Case], Counter[str]]:
    """How many steps each case stands for, and how many steps were left out for each reason."""
    counts: Counter[Case] = Counter()
    left_out: Counter[str] = Counter()
    for step in steps:
        try:
            counts[case_of(step)] += 1
        except ValueError as error:
            left_out[f"{step.mode}: {error}"] += 1
    return counts, left_out


def study_of(path: str | Path) -> tuple[Study, str]:
    """The study `captured_<name of the file>`, and the steps it leaves out with their reasons.

    ValueError if no step of the file can be a case.
    """
    path = Path(path)
    counts, left_out = cases(capture.read(path))
    omitted = "; ".join(f"{count} steps, {reason}" for reason, count in left_out.most_common())
    if not counts:
        raise ValueError(f"{path} must hold a step that can be a case, got {omitted or 'none'}")
    decodes = tuple(case for case in counts if isinstance(case, DecodeCase))
    extends = tuple(case for case in counts if isinstance(case, ExtendCase))
    in_graphs = Grid(
        decodes,
        DECODES,
        timers=("graph", "graph-cold"),
        rounds=4,
        headline=True,
        again=DECODES[:1],
    )
    eager = Grid(
        extends,
        EXTENDS,
        timers=("profiler",),
        rounds=4,
        headline=True,
        again=EXTENDS[:1],
    )
    words = re.sub(r"[^a-z0-9]+", "_", path.stem.lower())
    study = Study(
        name=f"captured_{words.strip('_')}",
        question=f"Which backend is fastest on the steps of {path.name}?",
        grids=(in_graphs, eager),
        command=f"python -m attnlib measure {shlex.quote(str(path))}",
    )
    return study, omitted
