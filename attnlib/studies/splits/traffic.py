"""Decode batches as a server meets them, simulated over published request traces. No torch.

`data/traffic/README.md` says which traces, and how the batches were drawn from them.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BATCHES = Path(__file__).resolve().parents[2] / "data" / "traffic" / "batches.csv"
TRACES = (
    "kimi-conversation",
    "kimi-synthetic",
    "azure-conversation",
    "azure-code",
)
"""Names of the traces: the service that was traced, then its workload."""
IN_FLIGHT = (16, 32, 64, 128)
STEPS = 7
"""Decode steps of each trace and number of requests in flight."""


@dataclass(frozen=True)
class Traffic:
    """One decode step of `trace` with `in_flight` requests: the `step`-th that was taken.

    `lengths` are the tokens of each request, as cases write them: `33+1+60`.
    """

    trace: str
    in_flight: int
    step: int
    lengths: str

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(self.tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of each request."""
        return tuple(int(length) for length in self.lengths.split("+"))


@cache
def batches() -> tuple[Traffic, ...]:
    """The decode steps that studies measure: `STEPS` of each trace and each of `IN_FLIGHT`.

    They are `decode_steps(trace, in_flight, STEPS)`, kept in `data/traffic/batches.csv`.

    Examples
    --------
    >>> len(batches()), batches()[0].trace, batches()[0].in_flight
    (112, 'kimi-conversation', 16)
    """
    with BATCHES.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    steps = []
    for row in rows:
        step = Traffic(
            trace=row["trace"],
            in_flight=int(row["in_flight"]),
            step=int(row["step"]),
            lengths=row["lengths"],
        )
        steps.append(step)
    return tuple(steps)
