"""The kernels of a text that people paste in place of a trace, by family; it has no steps."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ..core.backends.table import FAMILIES, family_of, role_of
from ..measure.kernel_sums import TORCH, KernelSum, KernelSums, read_sums
from ..select.known import PROBLEMS
from .cards import Card, Shown
from .step_rows import ATTENTION
from .trace_known import releases_of

MAY_BE = {"fa3": "flashinfer-fa3-decode-auto"}
"""Kernel family -> the known problem that it is where it decodes, which sums do not tell."""
NO_STEPS = (
    "It has sums of kernels and no steps: decode and prefill are one; known patterns and idle time "
    "are unseen. A trace has them: export_chrome_trace, or nsys export --type sqlite."
)


@dataclass(frozen=True, eq=False, repr=False)
class KernelTotals(Shown):
    """The kernels of a text, each with all its launches."""

    sums: KernelSums

    def table(self) -> pd.DataFrame:
        """A row per kernel, most time first: what it is, launches, microseconds and share."""
        total_us = sum(kernel.us for kernel in self.sums.kernels) or 1.0
        return pd.DataFrame([_row(kernel, total_us) for kernel in self.sums.kernels])

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "text": self.sums.path,
            "origin": self.sums.source,
            "kernels": self.table().to_dict("records"),
            "unseen": self.unseen(),
        }

    def unseen(self) -> list[str]:
        """What such a text cannot show."""
        notes = [*self._may_be(), NO_STEPS]
        cut = sum(kernel.is_cut for kernel in self.sums.kernels)
        if cut and self.sums.source == TORCH:
            how = "max_name_column_width=500"
            notes.append(f"The table cut {cut} names, which may hide attention: {how}.")
        elif cut:
            notes.append(f"The table cut {cut} names, which may hide attention: --format csv.")
        return notes

    def _may_be(self) -> Iterator[str]:
        """What to ask where a kernel may be a known problem."""
        families = {family_of(kernel.name) for kernel in self.sums.kernels}
        for family, name in MAY_BE.items():
            if family in families:
                problem = PROBLEMS[name]
                slow = f"that is known to be slow ({releases_of([problem])})"
                ask = f"explain --library {problem.component}==RELEASE, or advise"
                yield f"If {family} decodes here, {slow}: ask {ask}. [{name}]"

    def card(self) -> Card:
        """What is attention or beside it, then all kernels."""
        table = self.table()
        known = table[table["is"] != ""]
        names = []
        for name in known["is"]:
            if name.startswith(ATTENTION):
                names.append(name)
        found = ", ".join(dict.fromkeys(names)) or "no attention of the known kernels"
        return Card(
            title=f"{self.sums.path}: {len(table)} kernels, no steps; {found}",
            notes=self.unseen(),
            facts=[],
            table=known.round(3),
            caption="attention, and what is beside it: all launches together",
            footer=self.sums.source,
            more=[("all kernels by time", table.round(3))],
        )


def read_totals(path: str | os.PathLike[str]) -> KernelTotals | None:
    """The kernels of a text; None for another file, such as a trace."""
    sums = read_sums(Path(path))
    return KernelTotals(sums) if sums else None


def _row(kernel: KernelSum, total_us: float) -> dict[str, Any]:
    family = family_of(kernel.name)
    return {
        "kernel": kernel.name,
        "is": f"{ATTENTION} ({family})" if family else role_of(kernel.name),
        "of": FAMILIES[family].library if family else "",
        "launches": kernel.launches,
        "us": kernel.us,
        "us a launch": kernel.us / max(1, kernel.launches),
        "share": kernel.us / total_us,
    }
