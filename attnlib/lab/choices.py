"""What was chosen: a model's case, who answers, which backends; and the call that says so."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..core.spec import MlaSpec
from ..kinds.decode.case import DecodeCase
from ..kinds.mla.case import MlaCase
from .shapes import spec_of

AXES = ("release", "timer", "variant", "page_size", "lengths", "batch", "kv_len")
"""What makes a case of a model, in the order in which one narrows the next."""
LIVE = "live"
"""The source that measures on this GPU."""
ROUNDS = 3
"""As many as the studies have: with one there is no interval."""

LINE, INDENT = 88, "    "


@dataclass(frozen=True)
class Choices:
    """One view's choices, all of them made.

    `records` is the study that serves, or `live`. `release` is FlashInfer's, empty for the one that
    is installed; backends of other libraries have none. `against` is the backend that the others
    are compared with. `rounds` counts in live mode only: fresh processes that must have measured
    all of `backends`.
    """

    model: str
    records: str
    release: str
    timer: str
    variant: str
    page_size: int
    lengths: str
    batch: int
    kv_len: int
    backends: tuple[str, ...]
    against: str
    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        if not self.backends:
            raise ValueError("backends must name at least one backend, got none")
        if self.against not in self.backends:
            raise ValueError(
                f"against must be one of the backends {', '.join(self.backends)}, "
                f"got {self.against!r}"
            )
        if isinstance(self.rounds, bool) or not isinstance(self.rounds, int) or self.rounds < 1:
            raise ValueError(f"rounds must be an integer >= 1, got {self.rounds!r}")

    @property
    def case(self) -> DecodeCase | MlaCase:
        """The case; ValueError for a shape that cannot be."""
        spec = spec_of(self.model, variant=self.variant, page_size=self.page_size)
        kind = MlaCase if isinstance(spec, MlaSpec) else DecodeCase
        return kind(spec, self.batch, self.kv_len, self.lengths)

    @property
    def call(self) -> str:
        """The Python call that gives this view again."""
        unsaid = ("model", *(() if self.records == LIVE else ("rounds",)))
        said = [f.name for f in fields(self) if f.name not in unsaid]
        arguments = [repr(self.model), *(f"{name}={getattr(self, name)!r}" for name in said)]
        return f"attnlib.view(\n{_filled(arguments)})"


def _filled(arguments: list[str]) -> str:
    """As many arguments a line as fit: a name with spaces in it is never broken."""
    lines = [INDENT]
    for argument in arguments:
        if len(lines[-1]) + len(argument) >= LINE:
            lines.append(INDENT)
        lines[-1] += f"{argument}, "
    return "".join(f"{line.rstrip()}\n" for line in lines)
