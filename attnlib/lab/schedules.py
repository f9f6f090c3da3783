"""Schedules of one decode call by several builds: who reads what when, by models. No GPU, no torch.

The splits are exact: the models of `core.schedule` and `core.fa2` are held to the libraries' own.
When a worker does its part is list scheduling (`studies.splits.list_schedule`), not a measurement.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..core.call_text import runs
from ..core.fa2.choice import BLOCK_TOKENS, PlanShape, choose
from ..core.gpu import FA2_CTAS, HOPPER_SMS
from ..core.schedule.caps import num_splits
from ..core.schedule.splits import plan_splits
from ..core.spec import ceil_div
from ..run.figures.style import PALE_BLUE, SKY, VERMILION
from ..select.known import in_brief
from ..studies.splits import split_cap
from ..studies.splits.list_schedule import Work, in_turn, tiles_in_time
from ..studies.splits.split_cap import CONTEXT, Layout
from .cards import Card, Shown
from .known_calls import known_at

FA3 = "FlashAttention-3"
FA2 = "FlashInfer's fa2"
KERNELS = (FA3, FA2)
CARD = "NVIDIA H100"
"""Whose known problems are asked for. Its models hold for an H200 too: both have 132 SMs."""
PANEL = (396, 264)
"""Width and height of the SMs of one build, in pixels of the picture."""
GAP, HEAD, FOOT = 40, 34, 34
ROOM_FOR_ZERO = 16
"""Pixels of an axis from which its 0 has room before its end."""
IDLE = "rgba(128, 128, 128, .18)"


@dataclass(frozen=True)
class Build:
    """A build of a kernel, and how it splits.

    `library` is the build as `SchedulerFacts` names it, `cap` its cap of splits (`core.schedule`);
    of fa2 `ours` says whose plan it is. `package` is the release that has known problems, if any.
    """

    name: str
    kernel: str
    library: str = ""
    cap: str = "default"
    page_size: int = 1
    release: str = ""

    def backend(self, layout: Layout) -> str:
        """The backend whose known problems are this build's."""
        if self.kernel == FA2:
            return "flashinfer-fa2"
        if self.library == "vllm":
            return "vllm-flash-attn-3"
        return layout.backend


SGLANG = "SGLang 0.5.23"
BOUNDED = "SGLang 0.5.23, bounded"
OWN_PLAN = "FlashInfer 0.7.2"
OUR_PLAN = "FlashInfer 0.7.2, our plan"
BUILDS = (
    Build("SGLang 0.5.15", FA3, "sglang-0.4.4", release="0.4.4"),
    Build(SGLANG, FA3, "sglang", release="0.4.10"),
    Build(BOUNDED, FA3, "sglang", cap="bounded"),
    Build("vLLM 0.33.0", FA3, "vllm", cap="32", page_size=16, release="0.33.0"),
    Build("FlashAttention-3, upstream", FA3, "upstream"),
    Build(OWN_PLAN, FA2, release="0.7.2.post1"),
    Build(OUR_PLAN, FA2, cap="ours"),
)
USUAL = {FA3: (SGLANG, BOUNDED), FA2: (OWN_PLAN, OUR_PLAN)}
"""The two builds that are shown first."""


class Worker(NamedTuple):
    """What takes the parts of a call, one at a time."""

    word: str
    one: str
    limit: str


WORKERS = {
    FA3: Worker("SM", one="an SM", limit="most splits of a request"),
    FA2: Worker("slot", one="a slot (half an SM)", limit="tokens of a chunk"),
}


@dataclass(frozen=True, eq=False)
class Schedule:
    """One call by one build: the splits of each request [bs], and who reads what when."""

    build: Build
    splits: np.ndarray
    cap: str
    work: Work
    problems: tuple[str, ...]

    @property
    def without_work(self) -> int:
        """SMs or slots that read nothing."""
        return self.work.workers - len(np.unique(self.work.worker))


@dataclass(frozen=True, eq=False, repr=False)
class Schedules(Shown):
    """One call by every build of a kernel; `shown` are the two builds of the picture."""

    layout: Layout
    lens: tuple[int, ...]
    kernel: str
    shown: tuple[str, ...]
    each: tuple[Schedule, ...]

    @property
    def longest(self) -> int:
        """The index of the longest request."""
        return int(np.argmax(self.lens))

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row per build, the one that ends first at the top; times are in tokens."""
        lines = []
        for one in self.each:
            line = {
                "build": one.build.name,
                "limit": one.cap,
                "splits of the longest": int(one.splits[self.longest]),
                "splits of all": int(one.splits.sum()),
                "without work": one.without_work,
                "idle": f"{one.work.idle:.0%}",
                "last one ends at": one.work.last,
            }
            lines.append(line)
        table = pd.DataFrame(lines)
        return table.sort_values(
            "last one ends at",
            kind="stable",
            ignore_index=True,
        )

    def card(self) -> Card:
        """The table, and the known problems of these builds at this call."""
        worker = WORKERS[self.kernel]
        last = f"last {worker.word} ends at, tokens"
        names = {
            "limit": worker.limit,
            "without work": f"{worker.word}s without work",
            "idle": f"{worker.word}s idle",
            "last one ends at": last,
        }
        table = self.table.rename(columns=names)
        table[last] = [f"{tokens:,}" for tokens in table[last]]
        notes = []
        for one in self.each:
            for text in one.problems:
                notes.append(f"{one.build.name}: {text}")
        return Card(
            title=f"{self.kernel}: {self.layout.name}, {_in_short(self.lens)}",
            notes=notes or ["No known problem of these builds holds at this call."],
            facts=[],
            table=table,
            caption="By build:",
            footer="Splits are exact. Who reads when is a model of 132 SMs, not a measurement.",
        )

    def picture(self) -> str:
        """The SMs of the two builds side by side, as SVG: what each reads when."""
        by_name = {one.build.name: one for one in self.each}
        pair = [by_name[name] for name in self.shown]
        last = max(one.work.last for one in pair)
        width, height = PANEL
        panels = []
        left = 24
        for one in pair:
            panels.append(self._panel(one, left, last))
            left += width + GAP
        said = "; ".join(self._words(one) for one in pair)
        box = f"0 0 {left} {HEAD + height + FOOT}"
        return (
            f"<svg viewBox='{box}' role='img' aria-label='{html.escape(said)}' "
            "style='width: 100%; max-width: 62rem; font: 12px sans-serif' fill='currentColor' "
            f"xmlns='http://www.w3.org/2000/svg'>{''.join(panels)}</svg>"
        )

    def _words(self, one: Schedule) -> str:
        splits = int(one.splits[self.longest])
        plural = "" if splits == 1 else "s"
        worker = WORKERS[self.kernel].word
        return (
            f"{one.build.name}: longest request in {splits} split{plural}, "
            f"{worker}s {one.work.idle:.0%} idle"
        )

    def _panel(self, one: Schedule, left: int, last: int) -> str:
        """One build: a row per SM, a path per colour, the longest request on top."""
        width, height = PANEL
        is_longest = one.work.request == self.longest
        is_odd = one.work.request % 2 == 1
        paths = []
        for color, chosen in (
            (PALE_BLUE, ~is_longest & ~is_odd),
            (SKY, ~is_longest & is_odd),
            (VERMILION, is_longest),
        ):
            path = _path(one.work, chosen, last)
            paths.append(f"<path fill='{color}' d='{path}'/>")
        worker = WORKERS[self.kernel]
        name, _, rest = self._words(one).partition(": ")
        end = one.work.last / last * width
        anchor = "end" if end > width / 2 else "start"
        zero = "0" if end > ROOM_FOR_ZERO else ""
        bottom = HEAD + height
        return (
            f"<text x='{left}' y='13' font-weight='bold'>{html.escape(name)}</text>"
            f"<text x='{left}' y='28'>{html.escape(rest)}</text>"
            f"<g transform='translate({left} {HEAD})'>"
            f"<rect width='{width}' height='{height}' fill='{IDLE}'/>{''.join(paths)}</g>"
            f"<text x='{left - 5}' y='{bottom}' transform='rotate(-90 {left - 5} {bottom})'>"
            f"{one.work.workers} {worker.word}s</text>"
            f"<text x='{left}' y='{bottom + 14}'>{zero}</text>"
            f"<text x='{left + end:.0f}' y='{bottom + 14}' text-anchor='{anchor}'>"
            f"ends at {one.work.last:,}</text>"
            f"<text x='{left}' y='{bottom + 29}'>tokens that {worker.one} has read; "
            "orange: the longest request, blues: the others</text>"
        )


def schedules(
    layout: Layout,
    lens: Sequence[int],
    *,
    kernel: str = FA3,
    shown: Sequence[str] = (),
) -> Schedules:
    """A call over requests of `lens` tokens by every build of a kernel that runs the layout.

    `shown` are the builds of the picture, by default the usual two. ValueError for MLA with fa2.
    """
    if kernel == FA2 and layout.is_latent:
        raise ValueError(f"layout must be query/KV heads with {FA2}, got {layout.name}")
    lengths = split_cap.lengths_text(lens)
    case = layout.case(lengths, context=max(CONTEXT, *lens))
    by_kernel = _by_fa3 if kernel == FA3 else _by_fa2
    each = []
    for build in BUILDS:
        if build.kernel == kernel:
            each.append(by_kernel(case, layout, build))
    return Schedules(
        layout=layout,
        lens=tuple(lens),
        kernel=kernel,
        shown=tuple(shown) or USUAL[kernel],
        each=tuple(each),
    )


def _by_fa3(case: Any, layout: Layout, build: Build) -> Schedule:
    """By a build of FlashAttention-3."""
    facts = replace(
        split_cap.facts_of(case),
        build=build.library,
        page_size=build.page_size,
    )
    cap = num_splits(facts, build.cap) or facts.split_cap
    capped = replace(facts, num_splits=cap)
    q_lens, lens = split_cap.lengths_of(case)
    plan = plan_splits(capped, lens, q_lens)
    return Schedule(
        build=build,
        splits=plan.num_splits,
        cap=str(cap),
        work=tiles_in_time(plan),
        problems=_problems(case, layout, build),
    )


def _by_fa2(case: Any, layout: Layout, build: Build) -> Schedule:
    """By a plan of fa2: blocks of one chunk each, head by head, in the grid's order."""
    q_lens, lens = split_cap.lengths_of(case)
    spec = getattr(case, "cached", case).spec
    shape = PlanShape.of(spec, lens, HOPPER_SMS, int(q_lens.max()))
    choice = choose(shape, lens)
    if build.cap == "ours":
        chunk = choice.chunk
    else:
        chunk = int(choice.chunks[-1])
    splits = ceil_div(lens, chunk)
    requests = np.repeat(np.arange(len(lens)), splits)
    first = np.cumsum(splits) - splits
    part = np.arange(len(requests)) - first[requests]
    left = lens[requests] - part * chunk
    tokens = np.minimum(chunk, left) + int(BLOCK_TOKENS)
    copies = layout.kv_heads * shape.q_tiles
    work = in_turn(
        np.tile(requests, copies),
        np.tile(tokens, copies),
        HOPPER_SMS * FA2_CTAS,
    )
    return Schedule(
        build=build,
        splits=splits,
        cap=f"{chunk:,}",
        work=work,
        problems=_problems(case, layout, build),
    )


def _problems(case: Any, layout: Layout, build: Build) -> tuple[str, ...]:
    """The known problems of a build's release that hold at this call, a line each."""
    if not build.release:
        return ()
    found = known_at(
        case,
        build.backend(layout),
        release=build.release,
        gpu=CARD,
        timer="graph",
        kernel="fa2" if build.kernel == FA2 else "",
    )
    return tuple(in_brief(answer) for answer in found)


def _path(work: Work, chosen: np.ndarray, last: int) -> str:
    """Rectangles of the chosen work, as a path of SVG."""
    width, height = PANEL
    row = height / work.workers
    length = work.end - work.begin
    left = work.begin[chosen] / last * width
    wide = np.maximum(length[chosen] / last * width, 0.2)
    top = work.worker[chosen] * row
    corners = np.stack([left, top, wide], axis=1)
    parts = []
    for x, y, w in corners.tolist():
        parts.append(f"M{x:.1f} {y:.0f}h{w:.1f}v{row:.0f}h-{w:.1f}z")
    return "".join(parts)


def _in_short(lens: Sequence[int]) -> str:
    """Lengths in a title."""
    text = runs(lens)
    if len(text) <= 60:
        return f"lens={text}"
    return f"{len(lens)} requests of {min(lens):,} to {max(lens):,} tokens"
