"""A `Profile`: what one callable ran, how long, with which gaps, and the host beside it.

`profiling.profile` takes one. Host and wall time are of untraced calls, because tracing slows the
host; what ran comes from the trace. Kernels are as long traced as untraced; gaps of code that waits
for its host are not, so the share of time in which the GPU is busy is its traced time over the
untraced wall time.
"""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ..measure.spans import NO_CALL, Gap, Span, busy_us, find_gaps, gpu_work, operators
from ..report.cards import Card, as_html, as_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

TIMES = ("us", "us each", "shortest", "longest")


@dataclass(frozen=True, eq=False, repr=False)
class Profile:
    """What `calls` calls of one callable ran, microseconds a call unless a name says otherwise.

    `device` is `cuda` where the rows are kernels, copies and fills of the GPU, `cpu` where they are
    operators of the host, and `note` says why. `host_us` are untraced samples of the time until a
    call returns, `wall_us` the untraced time a call when calls follow each other. `ran` is how
    often the callable itself was called: with `cuda_graph` it is captured once and then replayed.
    """

    name: str
    device: str
    note: str
    machine: dict[str, str]
    threads: int
    torch_version: str
    taken_at: str
    calls: int
    ran: int
    cuda_graph: bool
    spans: tuple[Span, ...]
    host_us: tuple[float, ...]
    wall_us: float
    packed_trace: bytes

    @cached_property
    def work(self) -> tuple[Span, ...]:
        """What the profile is of: GPU work, or operators; by start, over all calls."""
        return (gpu_work if self.device == "cuda" else operators)(self.spans)

    @property
    def time_us(self) -> float:
        """Kernel times, or the operators' own times, added up."""
        return sum(span.self_us for span in self.work) / self.calls

    @property
    def busy_us(self) -> float:
        """Time in which at least one of them ran."""
        return busy_us(self.work) / self.calls

    @property
    def launches(self) -> float:
        """Kernels, copies and fills a call; of a CPU profile the operators."""
        return len(self.work) / self.calls

    @property
    def host_launches(self) -> float:
        """Launches that the host made a call: one for a whole CUDA graph; 0 for operators."""
        return len({span.launch for span in self.work if span.kind != "operator"}) / self.calls

    @property
    def graph_launches(self) -> float:
        """Of the host's launches, those of CUDA graphs."""
        return len({span.launch for span in self.work if span.in_graph}) / self.calls

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Times in which none ran, over all calls, as traced; `call` is -1 between two calls."""
        return find_gaps(self.work)

    @property
    def gap_us(self) -> float:
        """Gaps within a call, added up, as traced."""
        return sum(gap.length_us for gap in self.gaps if gap.call != NO_CALL) / self.calls

    @property
    def busy_share(self) -> float:
        """Part of the time in which the GPU was busy: traced busy time over untraced wall time.

        Of a CPU profile the part of the traced calls that operators take; the rest is Python's.
        """
        if self.device == "cuda":
            return self.busy_us / self.wall_us
        return self.busy_us / (self.busy_us + self.gap_us) if self.work else 0.0

    def table(self) -> pd.DataFrame:
        """A row a kernel (or CPU operator), longest first: launches and time a call, us a launch.

        An operator's time is its own, without that of the operators it calls. Names are without
        template arguments, and kernels of one name share a row.
        """
        import pandas as pd

        rows = pd.DataFrame(
            [(span.name, span.self_us) for span in self.work], columns=["name", "us"]
        )
        grouped = rows.groupby("name", sort=False).us
        count, total = grouped.size(), grouped.sum()
        table = pd.DataFrame(
            {
                self.launch_word: count / self.calls,
                "us": total / self.calls,
                "share": total / total.sum(),
                "us each": total / count,
                "shortest": grouped.min(),
                "longest": grouped.max(),
            }
        )
        table = table.sort_values("us", ascending=False, kind="stable").round(3)
        return table.rename_axis(self.row_word).reset_index()

    @property
    def row_word(self) -> str:
        """What a row of the table is: `kernel` or `CPU operator`."""
        return "kernel" if self.device == "cuda" else "CPU operator"

    @property
    def launch_word(self) -> str:
        """How often it ran is called: `launches` or `calls`."""
        return "launches" if self.device == "cuda" else "calls"

    def timeline(self, call: int | None = None) -> Figure:
        """One call drawn to scale, a lane a stream: by default the one of median length.

        The figure is closed for pyplot, so that a notebook shows it once; `report.style.save`
        writes it as PNG or SVG. ValueError for a call that was not profiled.
        """
        from ..report.timeline import draw_timeline

        if call is not None and not 0 <= call < self.calls:
            raise ValueError(f"call must be 0..{self.calls - 1}, got {call}")
        chosen = self._median_call() if call is None else call
        spans = [span for span in self.spans if span.call == chosen]
        return draw_timeline(spans, title=f"{self.name}: {self.headline}", footer=self.origin)

    def _median_call(self) -> int:
        """The call whose time from the host's start to its last work's end is the median one."""
        starts = [span.start_us for span in self.spans if span.kind == "call"]
        ends = starts.copy()
        for span in self.spans:
            if span.call != NO_CALL:
                ends[span.call] = max(ends[span.call], span.end_us)
        order = sorted(range(self.calls), key=lambda call: ends[call] - starts[call])
        return order[len(order) // 2]

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the Chrome trace, for Perfetto or chrome://tracing; returns its absolute path.

        The file is whole or as it was: it is written beside itself and then renamed. `.gz` is
        compressed. OSError if the folder is not there or not writable.
        """
        path = Path(path)
        text = gzip.decompress(self.packed_trace)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        try:
            unfinished.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        return path.resolve()

    @property
    def headline(self) -> str:
        """What ran, in a line."""
        if self.device == "cpu":
            return f"{self.launches:g} CPU operators a call, no kernels"
        return f"{self.launches:g} kernels a call, {self.time_us:,.1f} us on the GPU"

    @property
    def origin(self) -> str:
        """Where it comes from: machine, torch, day, how often it ran."""
        where = self.machine["gpu"] or f"CPU, {self.threads} threads"
        how = "replayed as a CUDA graph" if self.cuda_graph else "called"
        return (
            f"{where}, torch {self.torch_version}, {self.taken_at[:10]}, {how} {self.calls} times"
        )

    def facts(self) -> list[tuple[str, str]]:
        """What the table does not hold, label and value, ready to be read."""
        gpu = self.device == "cuda"
        every = "until the GPU is done" if gpu else "on average"
        host = f"{median(self.host_us):,.1f} us until a call returns (median)"
        about = _gpu_facts(self) if gpu else _cpu_facts(self)
        return [*about, ("untraced", f"{host}, {self.wall_us:,.1f} us a call {every}")]

    def _card(self) -> Card:
        table = self.table()
        words = table.assign(
            **{
                self.launch_word: table[self.launch_word].map("{:g}".format),
                "share": (100 * table.share).map("{:.1f} %".format),
                **{name: table[name].map("{:,.2f}".format) for name in TIMES},
            }
        )
        return Card(
            title=f"{self.name}: {self.headline}",
            notes=[self.note] if self.note else [],
            facts=self.facts(),
            table=words,
            caption=f"{self.row_word}s of a call, times in microseconds",
            footer=f"{self.origin}; the callable itself ran {self.ran} times",
            bars=table.share.tolist(),
        )

    def _repr_html_(self) -> str:
        return as_html(self._card())

    def __repr__(self) -> str:
        return as_text(self._card())


def _gpu_facts(taken: Profile) -> list[tuple[str, str]]:
    inner = [gap for gap in taken.gaps if gap.call != NO_CALL]
    gaps = f"{taken.gap_us:,.1f} us in {len(inner) / taken.calls:g} gaps, as traced"
    if inner:
        longest = max(inner, key=lambda gap: gap.length_us)
        gaps += f"; longest {longest.length_us:,.1f} us, {longest.after} to {longest.before}"
    launched = f"{taken.host_launches:g} by the host"
    if taken.graph_launches:
        launched += f", {taken.graph_launches:g} of them of a CUDA graph"
    slower = (
        "the GPU waits for the host"
        if median(taken.host_us) > taken.busy_us
        else "the host is ahead"
    )
    return [
        ("launches", f"{taken.launches:g} kernels, copies and fills; {launched}"),
        ("GPU", f"{taken.time_us:,.1f} us of kernels, busy for {taken.busy_us:,.1f} us"),
        ("between kernels", gaps),
        ("GPU busy", f"{100 * taken.busy_share:.0f} % of the untraced time: {slower}"),
    ]


def _cpu_facts(taken: Profile) -> list[tuple[str, str]]:
    return [
        ("operators", f"{taken.time_us:,.1f} us, as traced"),
        ("between operators", f"{taken.gap_us:,.1f} us of Python and others, as traced"),
    ]
