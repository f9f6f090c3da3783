"""Cases of an engine's captured steps: a user's own traffic, to measure and to judge by.

    found, left_out = cases(capture.read("steps.jsonl"))  # of `core.engines.capture`
    Study("my_traffic", "Which backend?", (Grid(tuple(found), ("flashinfer-fa2",)),))

`python -m attnlib measure steps.jsonl` measures them at once.
"""

from collections import Counter
from collections.abc import Iterable

from ..core.engines.capture import Step
from ..core.spec import require_word
from .decode.case import DecodeCase
from .extend.case import ExtendCase

MODES = ("decode", "extend", "mixed")
"""Of steps that say all that a case needs; those of a verification lack the drafts."""


def case_of(step: Step) -> DecodeCase | ExtendCase:
    """The call of a layer in `step`: the captured lengths, drawn pages and values.

    Raises ValueError with the reason if it is none of ours.
    """
    require_word("mode", step.mode, MODES)
    if not step.lengths:
        raise ValueError("lengths must be known to the host, got none")
    longest = max(map(int, step.lengths.split("+")))
    cached = DecodeCase(step.spec, step.batch_size, longest, step.lengths)
    if step.mode == "decode":
        return cached
    queries = max(map(int, step.q_lengths.split("+"))) if step.q_lengths else 1
    return ExtendCase(cached, "prefill_paged", queries, q_lengths=step.q_lengths)


def cases(
    steps: Iterable[Step],
) -> tuple[Counter[DecodeCase | ExtendCase], Counter[str]]:
    """How many steps each case stands for, and how many were left out for each reason."""
    found: Counter[DecodeCase | ExtendCase] = Counter()
    left_out: Counter[str] = Counter()
    for step in steps:
        try:
            found[case_of(step)] += 1
        except ValueError as error:
            left_out[f"{step.mode}: {error}"] += 1
    return found, left_out
