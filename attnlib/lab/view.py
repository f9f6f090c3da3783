"""The view of one case: how fast each backend ran it, beside which ceiling, which kernels, and why.

A share is the time at the ceiling over the time taken. The ceiling is the longer of two: the bytes
that must move at the copy bandwidth, the useful FLOPs at the matmul rate, both measured on the same
GPU in the same study.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..core.backends import unavailable, unsupported
from ..core.backends.table import BACKENDS, FAMILIES, entry_of, installed_version
from ..core.call_text import Lens, shortened
from ..core.spec import AttnSpec
from ..measure.calls.cases import read_case
from ..measure.calls.cost import Ceilings
from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.form import NamedCase
from ..measure.calls.mla.case import MlaCase
from ..run import store
from ..run.frame import ceilings, intervals, over
from ..select.known import Found, in_brief
from .cards import NO_VALUE, Card, Shown, in_words
from .known_calls import ASKED, known_at
from .source import (
    AXES,
    FLASHINFER_PACKAGE,
    LIVE,
    SAID_BY_TEXT,
    ChosenCase,
    Source,
    choose,
    find_case,
    layer_named,
    live_source,
    measure_missing,
    require_kinds,
    wishes_said,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW_INCHES = 0.42
FORMATS = {
    "us": ",.1f",
    "plan, us": ",.0f",
    "kernels a call": "g",
    "launches a call": "g",
    "ratio": ".2f",
    "rounds": "d",
    "share": ".0%",
    "margin": ".1%",
}
"""How a column is rounded for reading."""
OVER_CEILING = (
    "A share above 100 %: the ceiling is of a copy, which reads and writes; attention mostly reads."
)
COMPARED_COLUMNS = [
    "backend",
    "against",
    "ratio",
    "low",
    "high",
    "rounds",
    "verdict",
    "margin",
]


@dataclass(frozen=True, eq=False, repr=False)
class View(Shown):
    """One case, by the records of its source."""

    choice: ChosenCase

    @property
    def source(self) -> Source:
        """Who serves it."""
        return self.choice.source

    @property
    def backends(self) -> list[str]:
        """The backends that were chosen."""
        return self.choice.arguments["backends"]

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The records of the chosen backends, a row each."""
        rows = self.choice.rows
        return rows[rows.backend.isin(self.backends)]

    @cached_property
    def good(self) -> pd.DataFrame:
        """Those that are ok and were not throttled: a row per backend and round."""
        is_ok = self.rows.status == "ok"
        return self.rows[is_ok & ~self.rows.throttled.astype(bool)]

    @cached_property
    def times(self) -> pd.DataFrame:
        """A row per backend: median time (us), what ran, launches, plan (us), rounds, share.

        A backend without a good record has NaN for its time, and its status for what ran.
        """
        return pd.DataFrame([self._times_of(name) for name in self.backends])

    def _times_of(self, name: str) -> dict[str, Any]:
        """The row of `times` of a backend."""
        rows = self.rows[self.rows.backend == name]
        good = self.good[self.good.backend == name]
        us = float(good.run_us.median())
        row = {
            "backend": name,
            "us": us,
            "ran": rows.status.iloc[-1] if len(rows) else "not on record",
            "launches": math.nan,
            "plan_us": float(good.plan_us.median()),
            "rounds": len(good),
            "share": self.floor_us / us,
        }
        if len(good):
            families = {*good.kernel_family} - {""}
            row["ran"] = ", ".join(sorted(families)) or NO_VALUE
            kernels = good.kernels.iloc[-1]
            row["launches"] = sum(kernel.launches for kernel in kernels) or math.nan
        return row

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """A row per kernel of a backend's newest good record: launches and us per call, name."""
        newest = self.good.drop_duplicates("backend", keep="last").sort_values("backend")
        table = [
            (row.backend, kernel.launches, kernel.gpu_us, kernel.name)
            for row in newest.itertuples()
            for kernel in row.kernels
        ]
        return pd.DataFrame(table, columns=["backend", "launches", "us", "kernel"])

    @cached_property
    def comparison(self) -> pd.DataFrame:
        """A row per backend that shares rounds with `against`: ratio, interval, verdict."""
        against = self.choice.arguments["against"]
        tables = []
        for name in self.backends:
            if name != against:
                table = over(self.good, name, against)
                tables.append(table.assign(backend=name, against=against))
        tables = [table for table in tables if len(table)]
        if not tables:
            return pd.DataFrame(columns=COMPARED_COLUMNS)
        return pd.concat(tables, ignore_index=True)[COMPARED_COLUMNS]

    @cached_property
    def limit(self) -> Ceilings | str:
        """The ceilings that the records hold, or why there are none."""
        try:
            return ceilings(self.source.frame, needed=["copy"])
        except ValueError as error:
            return str(error)

    @cached_property
    def bounds_us(self) -> dict[str, float]:
        """Microseconds that bytes and FLOPs take at the ceilings on record."""
        if isinstance(self.limit, str):
            return {}
        cost = self.choice.case.cost
        bytes_us = cost.io_bytes / (self.limit.copy_gbps * 1e3)
        flops_us = cost.flops / (self.limit.matmul_tflops * 1e6)
        bounds = {"bytes": bytes_us, "FLOPs": flops_us}
        return {name: us for name, us in bounds.items() if math.isfinite(us)}

    @property
    def floor_us(self) -> float:
        """The time at the ceiling, NaN without ceilings."""
        return max(self.bounds_us.values(), default=math.nan)

    @cached_property
    def machine(self) -> dict[str, Any]:
        """The newest record's columns about its machine; empty without a record."""
        frame = self.source.frame
        return frame.iloc[-1].to_dict() if len(frame) else {}

    @cached_property
    def version(self) -> str:
        """The release that was chosen, or the FlashInfer that ran; else the empty string."""
        if named := self.choice.arguments["release"]:
            return named
        if self.source.is_live:
            return installed_version(FLASHINFER_PACKAGE)
        seen = store.provenance(self.source.records, self.source.machine)["versions"]
        return " or ".join(seen.get(FLASHINFER_PACKAGE, ()))

    @property
    def release(self) -> str:
        """The same in words, with its library."""
        package = self.choice.package
        library = "FlashInfer" if package == FLASHINFER_PACKAGE else package
        return f", {library} {self.version}" if self.version else ""

    @property
    def gpu(self) -> str:
        """The GPU's name, or CPU."""
        return self.machine.get("gpu") or "CPU"

    @property
    def where(self) -> str:
        """The layer, release and GPU."""
        return f"{self.choice.arguments['model']}{self.release}, {self.gpu}"

    @property
    def served(self) -> str:
        """Whose numbers these are, in a sentence."""
        days = sorted({started[:10] for started in self.rows.started_at})
        if not days:
            return "Measures here; not on record yet."
        when = " to ".join(dict.fromkeys((days[0], days[-1])))
        gpu = f"{self.gpu} {self.machine['gpu_id']}"
        if self.source.is_live:
            return f"Measured here: {gpu}{self.release}, {when}."
        whose = f"Records of study {self.source.records}: {gpu}{self.release}, measured {when}."
        if self.rows.settle_us.any():
            return whose
        return f"{whose} Timers did not wait for a steady clock."

    @property
    def facts(self) -> dict[str, str]:
        """What the case must cost, and at which ceilings."""
        cost = self.choice.case.cost
        facts = {
            "must move": f"{cost.io_bytes / 1e6:,.4g} MB",
            "useful work": f"{cost.flops / 1e9:,.4g} GFLOP",
        }
        if isinstance(self.limit, Ceilings):
            copy, matmul = self.limit.copy_gbps, self.limit.matmul_tflops
            facts["ceilings, measured"] = f"copy {copy:,.0f} GB/s"
            if "FLOPs" in self.bounds_us:
                facts["ceilings, measured"] += f", bf16 matmul {matmul:,.0f} TFLOP/s"
            longest = max(self.bounds_us, key=self.bounds_us.__getitem__)
            facts["time at the ceiling"] = f"{self.floor_us:,.1f} us, by {longest}"
        return facts

    @property
    def notes(self) -> list[str]:
        """What to mind: wishes not met, failures with reasons, what is missing or left out."""
        failed = self.rows[self.rows.status != "ok"]
        reasons = failed.backend + ": " + failed.status + ": " + failed.reason
        notes = [*self.choice.notes.values(), *sorted({*reasons}), *self.known_notes]
        absent = [name for name in self.backends if name not in {*self.rows.backend}]
        if absent and len(self.rows):
            notes.append(f"Not on record for these choices: {', '.join(absent)}.")
        if throttled := int(self.rows.throttled.sum()):
            notes.append(f"{throttled} records of a throttled GPU are left out.")
        if isinstance(self.limit, str):
            if len(self.good):
                notes.append("No share of a ceiling: none was measured beside these records.")
            return notes
        if "FLOPs" not in self.bounds_us:
            notes.append("No matmul ceiling on record: the ceiling is that of the bytes.")
        if self.choice.case.cost.io_bytes <= self.machine["l2_mib"] * 2**20:
            notes.append("The bytes fit the L2 cache, which is faster than the copy ceiling.")
        elif (self.times.share > 1).any():
            notes.append(OVER_CEILING)
        return notes

    @cached_property
    def known(self) -> dict[str, list[Found]]:
        """Backend -> the known problems that hold for it and its release at this call."""
        known = {}
        newest = self.good.drop_duplicates("backend", keep="last")
        for row in newest.itertuples():
            known[row.backend] = known_at(
                self.choice.case,
                row.backend,
                release=row.release or self._release_seen(row.backend),
                gpu=row.gpu,
                timer=row.timer,
                kernel=row.kernel_family,
            )
        return known

    def _release_seen(self, backend: str) -> str:
        """The one release of a backend's library that a study's machine had, else empty."""
        if backend not in ASKED:
            return ""
        distribution = entry_of(backend).distribution
        if self.source.is_live:
            return installed_version(distribution)
        versions = store.provenance(self.source.records, self.source.machine)["versions"]
        seen = versions.get(distribution, ())
        return seen[0] if len(seen) == 1 else ""

    @property
    def known_notes(self) -> list[str]:
        """A line per known problem, with the backends that have it."""
        backends: dict[str, list[str]] = {}
        for name, answers in self.known.items():
            for answer in answers:
                backends.setdefault(in_brief(answer), []).append(name)
        return [f"{', '.join(names)}: {words}" for words, names in backends.items()]

    def figure(self) -> Figure:
        """Time of each backend, a dot per round, the fastest first, and the ceiling.

        ValueError without a time.
        """
        from ..run.figures import charts, style

        table = self.times.dropna(subset="us").sort_values("us", ignore_index=True)
        if table.empty:
            raise ValueError("view must hold a backend that was measured ok, it has none")
        marks = "a mark is a round"
        if self.bounds_us:
            marks += ", the line the time at the ceiling"
        # The footer's first line is the GPU: its release goes there.
        footer = style.source_of(self.good).replace("\n", f"{self.release}\n", 1)
        figure, (axis,) = charts.panels(
            [""],
            (7.2, charts.FURNITURE_INCHES + ROW_INCHES * len(table)),
            footer,
            (f"time of one call, us ({marks})", ""),
            title=f"{self.where}\n{shortened(self.choice.case.label)}",
        )
        place = {name: row for row, name in enumerate(table.backend)}
        placed = self.good.assign(place=self.good.backend.map(place))
        looks = style.family_looks(FAMILIES, self.good.kernel_family)
        charts.dots(axis, placed, "run_us", "place", by="kernel_family", looks=looks)
        longest = self.kernels.sort_values("us").drop_duplicates("backend", keep="last")
        kernels = dict(zip(longest.backend, longest.kernel.map(charts.shorten), strict=True))
        labels = []
        for name, family in zip(table.backend, table.ran, strict=True):
            labels.append(f"{name}\n{kernels.get(name, family)}")
        charts.categories(axis, "y", labels)
        axis.tick_params(axis="y", labelsize="small")
        axis.set_xlim(left=0)
        if self.bounds_us:
            axis.axvline(self.floor_us, **style.RULE)
        return figure

    def image(self) -> str:
        """The figure as an HTML image that carries its bytes, and its numbers as alt text."""
        import matplotlib.pyplot as plt

        file, figure = io.BytesIO(), self.figure()
        figure.savefig(file, format="png")
        plt.close(figure)
        measured = self.times.dropna(subset="us")
        times = ", ".join(f"{row.backend} {row.us:,.1f} us" for row in measured.itertuples())
        words = html.escape(f"Time of one call{self.release}: {times}", quote=True)
        code = base64.b64encode(file.getvalue()).decode()
        return f"<img alt='{words}' style='max-width: 100%' src='data:image/png;base64,{code}'>"

    def card(self) -> Card:
        """The view as a card."""
        pairs = self.comparison.sort_values("ratio", kind="stable")
        compared = {
            "time of / time of": pairs.backend + " / " + pairs.against,
            "ratio": pairs.ratio,
            "95 % CI": intervals(pairs),
            "rounds": pairs.rounds,
            "verdict": pairs.verdict,
            "margin": pairs.margin,
        }
        fastest = self.times.sort_values("us", kind="stable")
        footer = f"{self.gpu}{self.release}; us is microseconds"
        if self.bounds_us:
            footer += "; share is the time at the ceiling over the time taken"
        shown = fastest if self.bounds_us else fastest.drop(columns="share")
        times = shown.rename(columns={"launches": "kernels a call", "plan_us": "plan, us"})
        kernels = self.kernels.rename(columns={"launches": "launches a call"})
        return Card(
            title=f"{self.where}: {shortened(self.choice.case.label)}",
            notes=[self.served, *self.notes],
            facts=[*self.facts.items()],
            table=in_words(times, FORMATS),
            caption=f"Time of one call on {self.gpu}{self.release}: median over fresh processes",
            bars=fastest.share.fillna(0).tolist() if self.bounds_us else [],
            footer=f"{footer}.",
            more=(
                ("Compared, paired round by round", in_words(pd.DataFrame(compared), FORMATS)),
                ("Kernels of one call, from the trace", in_words(kernels, FORMATS)),
            ),
            code=self.choice.call,
        )


def view(
    model: str | DecodeCase | MlaCase = "",
    *,
    tp: int = 1,
    heads: str = "",
    head_dim: int = 0,
    records: str = "",
    machine: str = "",
    release: str | None = None,
    timer: str | None = None,
    variant: str | None = None,
    page_size: int | None = None,
    lengths: str | None = None,
    batch: int | None = None,
    kv_len: int | None = None,
    backends: Sequence[str] | None = None,
    against: str | None = None,
    rounds: int | None = None,
) -> View:
    """The view of one decode call of a layer: how fast each backend ran it, and which kernels.

    Parameters
    ----------
    model : str, DecodeCase or MlaCase, optional
        The call, as a case or as its text (`heads=32/8 head_dim=128 page=16 lens=8192x16`); or a
        model, by default Llama-3.1-8B.
    tp : int, default 1
        GPUs that share the heads of a model.
    heads : str, optional
        The layer in place of a model, such as `8/1`.
    head_dim : int, optional
        Of that layer.
    records : str, optional
        A study whose records serve it, or `live` to measure on this GPU. By default `live` in live
        mode, else what holds the case.
    machine : str, optional
        A folder of data/records, or a part of its name (`h100`).
    release : str, optional
        Release of the library that the study compares.
    timer : str, optional
        `graph`, `graph-cold`, `eager` or `profiler`.
    variant : str, optional
        Other words of the text, such as `dtype=bfloat16 kv_dtype=float8_e4m3fn`.
    page_size : int, optional
        Tokens of a page.
    lengths : str, optional
        How lengths are drawn, or each one (`33+1+60`).
    batch, kv_len : int, optional
        Requests, and tokens of the longest.
    backends : sequence of str, optional
        Which backends are shown.
    against : str, optional
        With which one they are compared.
    rounds : int, optional
        How many rounds to measure, `live` only.

    Returns
    -------
    View
        Shown by a notebook. Times are microseconds, medians over rounds.

    Raises
    ------
    ValueError, RuntimeError
        With what an argument may be, given those before it; why nothing can be measured here.

    Examples
    --------
    >>> import attnlib
    >>> seen = attnlib.view("heads=32/8 head_dim=128 page=16 lens=8192x16", machine="h200")
    >>> seen.comparison.set_index("backend").verdict["flashinfer-fa3"]
    'slower'
    """
    return _viewed(dict(locals()))


def _viewed(wishes: dict[str, Any]) -> View:
    """The view of the arguments of `view`."""
    said = said_beside(wishes)
    wishes = {**wishes, **said}
    require_kinds(wishes)
    if wishes["backends"] is not None and not wishes["backends"]:
        raise ValueError("backends must name one at least, got none; left out, all are shown")
    layer = {name: wishes[name] for name in ("model", "tp", "heads", "head_dim")}
    model = layer_named(**layer)
    choice = find_case(model, wishes["records"], wishes["machine"], wishes)
    if choice.notes.keys() & said.keys():
        raise ValueError(f"no record of this call; nearest: {choice.case.label}")
    if choice.notes:
        raise ValueError("; ".join(choice.notes.values()))
    rounds = wishes["rounds"]
    if choice.source.is_live:
        measure_missing(choice)
        choice = choose(live_source(model), model, wishes)
    elif rounds is not None:
        raise ValueError(f"rounds must be left out: records show all of theirs, got {rounds}")
    return View(choice)


def said_beside(wishes: dict[str, Any]) -> dict[str, Any]:
    """What the text of a call, or a case, says in place of a model; ValueError where an argument
    says it too."""
    said = wishes_said(wishes["model"])
    if said is None:
        return {}
    usual = {"tp": 1, "heads": "", "head_dim": 0}
    for name in SAID_BY_TEXT:
        given = wishes.get(name, usual.get(name))
        if name != "model" and given != usual.get(name):
            is_free = name in ("variant", *AXES) and name not in said
            if not is_free:
                raise ValueError(f"{name} must be left out with the text of a call, got {given!r}")
    return said


def measure_call(
    call: AttnSpec | NamedCase | str,
    lengths: Sequence[int] = (),
) -> View:
    """Measure one decode call on this GPU by all backends that can run it.

    `call` is a layer with the `lengths` of its requests, a case or the text of a call. ValueError
    for a call of MLA, or of another mode.
    """
    case: Any = call
    if isinstance(call, AttnSpec):
        case = DecodeCase(call, **Lens.of(lengths).fields)
    elif isinstance(call, str):
        case = read_case(call)
    if not isinstance(case, DecodeCase):
        raise ValueError(f"call must be of mode decode to be measured here, got {case.label!r}")
    can_run = []
    for name in BACKENDS:
        if not unavailable(name) and not unsupported(name, case.spec):
            can_run.append(name)
    return view(case, records=LIVE, backends=can_run)
