"""What the cap of splits costs SGLang's FlashAttention-3: layouts, batches of traffic, and rivals.

SGLang since 0.5.16 (sglang-kernel 0.4.5) counts the query rows of all requests in its cap of splits
(`core.schedule.caps`), so a long request is split less in a larger batch. Measured are calls over a
page table as wide as the configured context:

- `TRAFFIC`: decode steps of servers, simulated over published traces (`studies.splits.traffic`);
- `NAMED`: batches said by hand, some of requests that are all alike, over every layout;
- `PAGES_64`, `PAGES_16`: some of the named batches with the pages that rivals take.

The rule, by the model: a batch of requests of different lengths loses splits where the longest has
more tokens than about 70 / (query heads per KV head x query tokens) times the mean. The L2 is warm.
A machine of several GPUs has measured each case on one of them, so tables take the machines of one
kind of GPU together and judge each on its own (`load_all`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from ...core.gpu import HOPPER_SMS
from ...core.schedule.caps import num_splits as num_splits  # notebooks call it here
from ...core.schedule.caps import splits_under
from ...core.schedule.facts import SchedulerFacts, latent_facts, layer_facts
from ...core.spec import AttnSpec, MlaSpec
from ...engines import capture
from ...measure.calls.decode.case import DecodeCase
from ...measure.calls.extend.case import ExtendCase, sample_extend_lens
from ...measure.calls.lengths import sample_seq_lens
from ...measure.calls.mla.case import MlaCase, sample_mla_lens
from ...measure.stats import FASTER, SLOWER
from ...run import store
from ...run.figures import charts, style
from ...run.frame import good_rows, over, round_pairs, side_rows
from ...run.study import Grid, Study
from .traffic import batches

CONTEXT = 131_072
LONG_CONTEXT = 204_800
HEAD_DIM = 128
NOW = "0.4.10"
CHANGED = "0.4.5"
BEFORE = "0.4.4"
"""Releases of sglang-kernel: of SGLang 0.5.23, 0.5.16 and 0.5.15."""


@dataclass(frozen=True)
class Layout:
    """Heads of a layer on one GPU, and the query tokens of a request. `kv_heads` 0 is MLA."""

    heads: int
    kv_heads: int
    q_len: int = 1

    @property
    def name(self) -> str:
        """Such as `MLA 16 heads, 4 query tokens`."""
        name = f"{self.heads}/{self.kv_heads}"
        if self.is_latent:
            name = f"MLA {self.heads} heads"
        if self.q_len > 1:
            name += f", {self.q_len} query tokens"
        return name

    @property
    def is_latent(self) -> bool:
        """Whether it is MLA."""
        return self.kv_heads == 0

    @property
    def group(self) -> int:
        """Query rows that share the keys of a token: query heads per KV head x query tokens."""
        kv_heads = self.kv_heads or 1
        return self.heads // kv_heads * self.q_len

    @property
    def backend(self) -> str:
        """The backend of SGLang's FlashAttention-3 that runs it."""
        if self.is_latent:
            return "sglang-flash-attn-3-mla"
        if self.q_len > 1:
            return "sglang-flash-attn-3-extend"
        return "sglang-flash-attn-3"

    def case(
        self,
        lengths: str,
        *,
        page_size: int = 1,
        context: int = CONTEXT,
    ) -> MlaCase | DecodeCase | ExtendCase:
        """A call over requests of these lengths."""
        tokens = [int(length) for length in lengths.split("+")]
        sizes: dict[str, Any] = {
            "batch_size": len(tokens),
            "kv_len": max(tokens),
            "lengths": lengths,
            "context": context,
        }
        if self.is_latent:
            latent = MlaSpec(self.heads, page_size=page_size)
            return MlaCase(latent, q_len=self.q_len, **sizes)
        spec = AttnSpec(self.heads, self.kv_heads, HEAD_DIM, page_size)
        cached = DecodeCase(spec, **sizes)
        if self.q_len == 1:
            return cached
        return ExtendCase(cached, "target_verify", self.q_len, "causal")


MLA = Layout(heads=128, kv_heads=0)
MLA_TP8 = Layout(heads=16, kv_heads=0)
MLA_VERIFY = Layout(heads=16, kv_heads=0, q_len=4)
"""DeepSeek-V3's attention: all heads on a GPU (DP attention); a GPU of eight; four drafts there."""
MLA_LAYOUTS = (MLA, MLA_TP8, MLA_VERIFY)
GROUPED = (
    Layout(heads=32, kv_heads=8),
    Layout(heads=16, kv_heads=2),
    Layout(heads=8, kv_heads=1),
    Layout(heads=16, kv_heads=1),
)
"""Llama-3.1-8B; a GPU of 4 and of 8 of Llama-3.1-70B; one of 4 of Qwen3-235B."""
VERIFY = (
    Layout(heads=32, kv_heads=8, q_len=4),
    Layout(heads=8, kv_heads=1, q_len=4),
    Layout(heads=16, kv_heads=1, q_len=4),
)
LAYOUTS = (*MLA_LAYOUTS, *GROUPED, *VERIFY)


def alike(count: int, tokens: int) -> list[int]:
    """`count` requests of `tokens` tokens."""
    return [tokens] * count


def log_normal(
    count: int,
    median: int,
    sigma: float,
) -> list[int]:
    """The quantiles of a log-normal distribution, evenly spaced, in an order drawn by a seed."""
    normal = NormalDist(math.log(median), sigma)
    quantiles = []
    for number in range(count):
        share = (number + 0.5) / count
        log_tokens = normal.inv_cdf(share)
        quantiles.append(round(math.exp(log_tokens)))
    draw = random.Random(count)
    return sorted(quantiles, key=lambda _: draw.random())


def lengths_text(lens: Iterable[int]) -> str:
    """Lengths as a case has them: `33+1+60`."""
    return "+".join(str(tokens) for tokens in lens)


K = 1024
MLA_BATCHES = {
    "64 log-normal 4k": log_normal(64, 4 * K, 0.9),
    "128 log-normal 2k": log_normal(128, 2 * K, 0.9),
    "48 log-normal 12k": log_normal(48, 12 * K, 0.9),
    "8 x 32k + 56 x 2k": alike(8, 32 * K) + alike(56, 2 * K),
    "1 x 64k + 31 x 2k": alike(1, 64 * K) + alike(31, 2 * K),
    "1 x 32k + 15 x 4k": alike(1, 32 * K) + alike(15, 4 * K),
    "32 x 8k": alike(32, 8 * K),
    "64 x 4k": alike(64, 4 * K),
    "96 x 4k": alike(96, 4 * K),
    "128 x 2k": alike(128, 2 * K),
}
GROUPED_BATCHES = {
    "1 x 200k + 64 x 8k": alike(1, 200_000) + alike(64, 8 * K),
    "1 x 64k + 127 x 2k": alike(1, 64 * K) + alike(127, 2 * K),
    "8 x 64k + 120 x 2k": alike(8, 64 * K) + alike(120, 2 * K),
    "255 chat + 1 x 64k": log_normal(255, 1200, 1.0) + alike(1, 64 * K),
    "1 x 100k + 39 x 0.5k": alike(1, 100_000) + alike(39, 512),
    "48 log-normal 12k": log_normal(48, 12 * K, 0.9),
    "256 x 1k": alike(256, K),
}
VERIFY_BATCHES = {
    "1 x 64k + 31 x 2k": alike(1, 64 * K) + alike(31, 2 * K),
    "128 x 2k": alike(128, 2 * K),
}
NAMED_BATCHES = MLA_BATCHES | GROUPED_BATCHES | VERIFY_BATCHES
NAMES = {lengths_text(lens): name for name, lens in NAMED_BATCHES.items()}
"""Lengths as cases write them -> the batch's name."""
RIVAL_BATCHES = (
    "64 log-normal 4k",
    "128 log-normal 2k",
    "8 x 32k + 56 x 2k",
    "1 x 64k + 31 x 2k",
    "96 x 4k",
)
GROUPED_RIVAL_BATCHES = (
    "1 x 64k + 127 x 2k",
    "255 chat + 1 x 64k",
    "1 x 100k + 39 x 0.5k",
    "256 x 1k",
)
MLA_RIVALS = ("flashmla-dense", "flashinfer-mla-fa2", "flashinfer-mla-fa3")
TRITON = "sglang-triton-mla"
GROUPED_RIVALS = ("vllm-flash-attn-3", "flash-attn-3-precomputed")
"""vLLM's build as vLLM calls it in CUDA graphs, with a cap of 32; upstream's (tokenspeed-fa3)."""


def cases_over(
    layouts: Iterable[Layout],
    named: Iterable[list[int]],
    **options: int,
) -> tuple[Any, ...]:
    """The calls of every layout over every batch; a context of 204,800 where one needs it."""
    cases = []
    for layout in layouts:
        for lens in named:
            context = CONTEXT if max(lens) <= CONTEXT else LONG_CONTEXT
            case = layout.case(
                lengths_text(lens),
                context=context,
                **options,
            )
            cases.append(case)
    return tuple(cases)


def traffic_cases(layout: Layout, steps: int) -> tuple[Any, ...]:
    """The first `steps` decode steps of every trace and number of requests in flight."""
    first = [batch for batch in batches() if batch.step < steps]
    return tuple(layout.case(batch.lengths) for batch in first)


def by_caps(
    backend: str,
    cases: tuple[Any, ...],
    caps: Iterable[str],
    **options: Any,
) -> Grid:
    """A backend of SGLang's, of today's release, over these cases by each cap."""
    names = tuple(capped(backend, cap) for cap in caps)
    return Grid(
        cases=cases,
        backends=names,
        releases=(NOW,),
        **options,
    )


def capped(backend: str, cap: str) -> str:
    """The name of a backend under a cap of splits."""
    return backend if cap == "default" else f"{backend}@{cap}"


ALL_CAPS = ("default", "upstream", "bounded")
TWO_CAPS = ("default", "bounded")
TRAFFIC_STEPS = {
    MLA: 7,
    MLA_VERIFY: 7,
    VERIFY[1]: 2,
    VERIFY[2]: 2,
    GROUPED[2]: 1,
    GROUPED[3]: 1,
}
"""Layout -> decode steps of each trace and number in flight; 16 batches a step."""
RIVAL_LENGTHS = [MLA_BATCHES[name] for name in RIVAL_BATCHES]
GROUPED_RIVAL_LENGTHS = [GROUPED_BATCHES[name] for name in GROUPED_RIVAL_BATCHES]
NAMED_CASES: dict[Layout, tuple[Any, ...]] = {}
PAGES_64: dict[Layout, tuple[Any, ...]] = {}
PAGES_16: dict[Layout, tuple[Any, ...]] = {}
for _layout in MLA_LAYOUTS:
    NAMED_CASES[_layout] = cases_over([_layout], MLA_BATCHES.values())
    PAGES_64[_layout] = cases_over([_layout], RIVAL_LENGTHS, page_size=64)
for _layout in GROUPED:
    NAMED_CASES[_layout] = cases_over([_layout], GROUPED_BATCHES.values())
for _layout in GROUPED[1:]:
    PAGES_16[_layout] = cases_over([_layout], GROUPED_RIVAL_LENGTHS, page_size=16)
for _layout in VERIFY:
    NAMED_CASES[_layout] = cases_over([_layout], VERIFY_BATCHES.values())
OF_OLDER_RELEASES = (*MLA_LAYOUTS, GROUPED[3], VERIFY[2])
"""Layouts whose named batches `BEFORE` and `CHANGED` are measured over."""
SHORT_PREFILL = MlaCase(
    MlaSpec(32, page_size=1),
    batch_size=512,
    kv_len=2048,
    q_len=16,
)
"""A prefill of many short segments, #46's kind: a higher cap would make its partial outputs large,
so `bounded` leaves it the default."""


def _grids() -> tuple[Grid, ...]:
    """Traffic, named batches, older releases, rivals, and what a live notebook measures."""
    grids = []
    for layout, steps in TRAFFIC_STEPS.items():
        cases = traffic_cases(layout, steps)
        grids.append(by_caps(layout.backend, cases, ALL_CAPS, rounds=3))
    for layout, cases in NAMED_CASES.items():
        grids.append(by_caps(layout.backend, cases, ALL_CAPS, rounds=3))
    for layout in OF_OLDER_RELEASES:
        grid = Grid(
            NAMED_CASES[layout],
            (layout.backend,),
            releases=(BEFORE, CHANGED),
            rounds=3,
        )
        grids.append(grid)
    for layout, cases in PAGES_64.items():
        grids.append(by_caps(layout.backend, cases, TWO_CAPS, rounds=3))
    for cases in PAGES_64.values():
        grids.append(Grid(cases, MLA_RIVALS, rounds=3))
    for layout in (MLA, MLA_TP8):
        cases = cases_over([layout], RIVAL_LENGTHS)
        grids.append(Grid(cases, (TRITON,)))  # one round: no verdict
    for layout, cases in PAGES_16.items():
        grids.append(by_caps(layout.backend, cases, TWO_CAPS, rounds=3))
    for cases in PAGES_16.values():
        grids.append(Grid(cases, GROUPED_RIVALS, rounds=3))
    grids.append(by_caps(MLA.backend, (SHORT_PREFILL,), ALL_CAPS, rounds=3))
    live = NAMED_CASES[MLA][:1]
    grids.append(by_caps(MLA.backend, live, TWO_CAPS, headline=True))
    return tuple(grids)


STUDY = Study(
    name="split_cap",
    question="What does the cap of splits cost SGLang's FlashAttention-3, and who is faster today?",
    grids=_grids(),
    reference_machine="nvidia-h100-80gb-hbm3-ad5c90f2",
    bisect_machine="nvidia-h100-80gb-hbm3-ad5c90f2",
    ceilings=(),
)


LOSES_FROM = 70
"""Query rows per KV head x longest / mean length from which a batch loses splits, by the model.

Of requests of different lengths: those that are alike lose none, and few short ones may not."""
TRAFFIC = {batch.lengths: batch for batch in batches()}


def load_all(gpu: str = "h100") -> pd.DataFrame:
    """The good records of all machines of a kind of GPU, with the columns that tables need.

    `machine`, `layout` (a name), `batch` (the name of a batch said by hand), `trace` and
    `in_flight` (of traffic, else empty and 0), and `rows`: query rows per KV head x longest / mean.
    FileNotFoundError if there are none.
    """
    known = store.machines(STUDY.name)
    machines = [name for name in known if gpu in name]
    if not machines:
        raise FileNotFoundError(f"no records of study {STUDY.name!r} on {gpu!r}: measure some")
    frames = []
    for name in machines:
        rows = good_rows(store.load(STUDY.name, name))
        frames.append(rows.assign(machine=name))
    return _with_lookups(pd.concat(frames, ignore_index=True))


def layout_of(case: Any) -> Layout:
    """The layout of a case of this study."""
    return Layout(
        heads=case.spec.num_qo_heads,
        kv_heads=getattr(case.spec, "num_kv_heads", 0),
        q_len=getattr(case, "q_len", 1),
    )


def lengths_of(case: Any) -> tuple[np.ndarray, np.ndarray]:
    """Query tokens and tokens of each request, both [bs] int32."""
    if isinstance(case, ExtendCase):
        return sample_extend_lens(case)
    if isinstance(case, MlaCase):
        lens = sample_mla_lens(case)
        return np.full_like(lens, case.q_len), lens
    lens = sample_seq_lens(case)
    return np.ones_like(lens), lens


def facts_of(case: Any) -> SchedulerFacts:
    """The call of a case as SGLang's FlashAttention-3 of today sees it."""
    q_lens, lens = lengths_of(case)
    width = getattr(case, "cached", case).context or int(lens.max())
    describe = latent_facts if isinstance(case, MlaCase) else layer_facts
    return describe(
        case.spec,
        columns=-(-width // case.spec.page_size),
        batch_size=len(lens),
        max_seqlen_q=int(q_lens.max()),
        num_sms=HOPPER_SMS,
        causal=True,
        varlen_q=True,
        build="sglang",
    )


def splits_of(case: Any, cap: str) -> np.ndarray:
    """Splits of each request [bs] int64 under a cap, by the model."""
    q_lens, lens = lengths_of(case)
    return splits_under(
        facts=facts_of(case),
        seq_lens=lens,
        q_lens=q_lens,
        cap=cap,
    )


def loses_splits(case: Any) -> bool:
    """Whether a request has fewer splits by the default cap than by upstream's."""
    fewer = splits_of(case, "default") < splits_of(case, "upstream")
    return bool(fewer.any())


def sides_of(
    rows: pd.DataFrame,
    layout: Layout,
    a: str,
    b: str = "bounded",
) -> pd.DataFrame:
    """Time by cap `a` over time by cap `b`, judged GPU by GPU: a row per case of a layout.

    A cap may be of another release: `default==0.4.4`. Columns are those of `over` and `load_all`,
    and `slowdown`: the median over rounds of the ratio, which one bad round does not move, where
    `ratio` is their geometric mean. ValueError if no case has both sides.
    """
    name_a = _side(layout.backend, a)
    name_b = _side(layout.backend, b)
    mine = rows[rows.layout == layout.name]
    tables = []
    for _, part in mine.groupby("machine", sort=False):
        table = over(part, name_a, name_b)
        medians = _median_ratios(part, name_a, name_b)
        if len(table):
            slowdown = table.case.map(medians)
            tables.append(table.assign(slowdown=slowdown))
    if not tables:
        raise ValueError(f"rows must have {name_a} and {name_b} of a case, they have not")
    return _with_lookups(pd.concat(tables, ignore_index=True))


def captured_table(path: str | Path, layouts: Iterable[Layout] = ()) -> pd.DataFrame:
    """Which captured decode steps lose splits: a row each, with its own heads and with others.

    `path` is a file that a plugin of ours wrote (`ATTNLIB_SGLANG_CAPTURE`).
    """
    lines = []
    for step in capture.read(path):
        if step.mode != "decode" or not step.lengths:
            continue
        is_latent = step.kind == "mla"
        own = Layout(
            heads=step.num_qo_heads,
            kv_heads=0 if is_latent else step.num_kv_heads,
        )
        tokens = []
        for length in step.lengths.split("+"):
            tokens.append(int(length))
        line: dict[str, Any] = {
            "requests": step.batch_size,
            "longest": max(tokens),
        }
        for layout in dict.fromkeys((own, *layouts)):
            case = layout.case(step.lengths, page_size=step.page_size)
            whose = f"{layout.name} (captured)" if layout == own else layout.name
            line[f"{whose}: loses splits"] = loses_splits(case)
        lines.append(line)
    return pd.DataFrame(lines)


def traffic_table(
    rows: pd.DataFrame,
    *,
    by_trace: bool = False,
) -> pd.DataFrame:
    """What the default cap costs over traffic: a row per layout, or per layout and trace.

    `slowdown` is the time by the default cap over the time by `bounded`. `slower` and `faster`
    count verdicts on the default. A GPU that did not measure a layout has no row of it.
    """
    lines = []
    is_traffic = rows.trace != ""
    measured = set(rows.layout[is_traffic])
    for layout in TRAFFIC_STEPS:
        if layout.name not in measured:
            continue
        judged = sides_of(rows, layout, "default")
        judged = judged[judged.trace != ""]
        if not by_trace:
            lines.append(_traffic_line(layout, "all", judged))
            continue
        for trace, part in judged.groupby("trace", sort=False):
            lines.append(_traffic_line(layout, str(trace), part))
    table = pd.DataFrame(lines)
    if by_trace:
        return table
    return table.drop(columns="trace")


def named_table(rows: pd.DataFrame, layouts: Iterable[Layout]) -> pd.DataFrame:
    """Median us by each cap over the named batches, and the slowdown by the default; worst first.

    `slowdown` is default / bounded, the geometric mean over rounds, with its 95 % interval.
    `splits` are those of the longest request, by the model.
    """
    lines = []
    for layout in layouts:
        judged = sides_of(_pages_of_one(rows), layout, "default")
        named = judged[judged.batch != ""]
        for _, row in named.iterrows():
            is_call = (rows.case == row.case) & (rows.release == NOW)
            line = _named_line(layout, row, rows[is_call])
            lines.append(line)
    table = pd.DataFrame(lines)
    return table.sort_values("slowdown", ascending=False, ignore_index=True)


def _named_line(
    layout: Layout,
    row: pd.Series,
    of_call: pd.DataFrame,
) -> dict[str, Any]:
    """A line of `named_table`: its judged row, and the records of the call."""
    line = {"layout": layout.name, "batch": row.batch}
    times = of_call.groupby("backend").run_us.median()
    for cap in ALL_CAPS:
        name = capped(layout.backend, cap)
        if name in times:
            line[f"{cap}, us"] = round(times[name], 1)
    line["slowdown"] = round(row.ratio, 2)
    line["95 % CI"] = _interval(row)
    _, lens = lengths_of(row.case)
    longest = int(np.argmax(lens))
    for cap in TWO_CAPS:
        splits = splits_of(row.case, cap)
        line[f"splits, {cap}"] = int(splits[longest])
    line["verdict"] = row.verdict
    return line


def alike_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Batches of requests that are all alike: time by `bounded` over the default, a row each."""
    lines = []
    for layout in LAYOUTS:
        table = sides_of(
            rows=_pages_of_one(rows),
            layout=layout,
            a="bounded",
            b="default",
        )
        alike_ones = table[table.rows == layout.group]
        for _, row in alike_ones.iterrows():
            line = {
                "layout": layout.name,
                "batch": row.batch,
                "bounded / default": row.ratio,
                "95 % CI": _interval(row, decimals=3),
                "verdict": row.verdict,
            }
            lines.append(line)
    return pd.DataFrame(lines).round(3)


def release_table(rows: pd.DataFrame, layout: Layout) -> pd.DataFrame:
    """Time by 0.4.4, 0.4.5 and 0.4.10 over `bounded` of 0.4.10: a row per named batch."""
    tables = []
    for release in (BEFORE, CHANGED, NOW):
        table = sides_of(
            _pages_of_one(rows),
            layout,
            a=f"default=={release}",
            b=f"bounded=={NOW}",
        )
        named = table[table.batch != ""]
        ratios = named.set_index("batch").ratio
        tables.append(ratios.rename(release))
    wide = pd.concat(tables, axis=1)
    return wide.dropna().round(2).reset_index()


def rival_table(rows: pd.DataFrame, layouts: Iterable[Layout]) -> pd.DataFrame:
    """Median us of SGLang's FlashAttention-3, by both caps, and of its rivals over the same calls.

    A row per layout, page size and batch; `best` is the fastest. Medians are of one GPU each, as
    all backends of a call are.
    """
    names = [layout.name for layout in layouts]
    is_older = rows.release.isin((BEFORE, CHANGED))
    is_upstreams = rows.backend.str.contains("@up")
    is_named = rows.layout.isin(names) & (rows.batch != "")
    chosen = rows[is_named & ~is_older & ~is_upstreams]
    chosen = chosen.assign(
        page=chosen.page_size,
        backend=chosen.backend.map(_short),
    )
    groups = chosen.groupby(["layout", "page", "batch", "backend"], sort=False)
    table = groups.run_us.median().unstack()
    rivals = table.columns.difference(TWO_CAPS)
    has_rival = table[rivals].notna().any(axis=1)
    table = table[has_rival].round(1)
    best = table.idxmin(axis=1)
    return table.assign(best=best).reset_index()


def memory_table(rows: pd.DataFrame) -> pd.DataFrame:
    """MiB that a call allocates at most, by each cap: the named batches that take most, and the
    prefill of short segments."""
    is_sglangs = rows.backend.str.startswith("sglang-flash")
    is_prefill = rows.case == SHORT_PREFILL
    is_shown = is_prefill | (rows.batch != "")
    mine = rows[is_sglangs & is_shown & (rows.release == NOW)]
    batch = mine.batch.mask(is_prefill, "prefill of short segments")
    mine = mine.assign(
        batch=batch,
        backend=mine.backend.map(_short),
    )
    groups = mine.groupby(["layout", "batch", "backend"])
    peak = groups.peak_bytes.max().unstack()
    mib = peak[list(ALL_CAPS)].dropna() / 2**20
    table = mib.round(0).astype(int)
    return table.sort_values("upstream", ascending=False).reset_index()


def cost_chart(rows: pd.DataFrame) -> charts.Figure:
    """Where splits are lost and what it costs: a dot per batch, of traffic and said by hand."""
    layouts = list(TRAFFIC_STEPS)
    labels = (
        "query rows per KV head x longest / mean request (log)",
        "time by SGLang's cap / by bounded (log)",
    )
    figure, axes = charts.panels(
        ["grouped queries", "latent attention (MLA)"],
        (10, 4),
        rows,
        labels,
        title="Time of a call by SGLang's cap of splits over time by the bounded cap",
        share_y=True,
    )
    looks = style.looks([layout.name for layout in layouts])
    for axis, latent in zip(axes, (False, True), strict=True):
        axis.axvline(LOSES_FROM, **style.RULE)
        axis.axhline(1, **style.RULE)
        mine = [layout for layout in layouts if layout.is_latent == latent]
        tables = [sides_of(rows, layout, "default") for layout in mine]
        shown = {layout.name: looks[layout.name] for layout in mine}
        charts.dots(
            axis,
            pd.concat(tables),
            x="rows",
            y="slowdown",
            by="layout",
            looks=shown,
        )
        style.log_axes(axis, "x", "y")
        axis.legend(fontsize=7)
    return figure


def _traffic_line(
    layout: Layout,
    trace: str,
    part: pd.DataFrame,
) -> dict[str, Any]:
    lost = part.case.map(loses_splits).mean()
    is_slower = part.verdict == SLOWER
    is_faster = part.verdict == FASTER
    return {
        "layout": layout.name,
        "trace": trace,
        "batches": len(part),
        "lose splits": f"{lost:.0%}",
        "slowdown, median": round(part.slowdown.median(), 2),
        "90th percentile": round(part.slowdown.quantile(0.9), 2),
        "worst": round(part.slowdown.max(), 2),
        "least": round(part.slowdown.min(), 2),
        SLOWER: int(is_slower.sum()),
        FASTER: int(is_faster.sum()),
    }


def _median_ratios(
    rows: pd.DataFrame,
    a: str,
    b: str,
) -> pd.Series:
    """Of each case the median over rounds of time by `a` over time by `b`."""
    paired = round_pairs(side_rows(rows, a), side_rows(rows, b))
    ratios = paired.run_us_a / paired.run_us_b
    return ratios.groupby(paired.case, sort=False).median()


def _pages_of_one(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows.page_size == 1]


def _side(backend: str, cap: str) -> str:
    """The side of a table (`frame.over`) of a cap, of today's release unless it names one."""
    word, _, release = cap.partition("==")
    return f"{capped(backend, word)}=={release or NOW}"


def _short(backend: str) -> str:
    """A cap of SGLang's FlashAttention-3, or the rival's name."""
    if not backend.startswith("sglang-flash"):
        return backend
    _, _, cap = backend.partition("@")
    return cap or "default"


def _rows_of(case: Any) -> float:
    _, lens = lengths_of(case)
    group = layout_of(case).group
    return float(group * lens.max() / lens.mean())


def _lengths_text(case: Any) -> str:
    return str(getattr(case, "cached", case).lengths)


def _with_lookups(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the columns that tables look up by case."""
    lengths = rows.case.map(_lengths_text)
    traffic = [TRAFFIC.get(text) for text in lengths]
    return rows.assign(
        layout=[layout_of(case).name for case in rows.case],
        batch=[NAMES.get(text, "") for text in lengths],
        trace=[step.trace if step else "" for step in traffic],
        in_flight=[step.in_flight if step else 0 for step in traffic],
        rows=rows.case.map(_rows_of),
    )


def _interval(row: Any, decimals: int = 2) -> str:
    return f"{row.low:.{decimals}f} to {row.high:.{decimals}f}"
