"""What the cap of splits costs SGLang's FlashAttention-3: layouts, batches of traffic, and rivals.

SGLang since 0.5.16 (sglang-kernel 0.4.5) counts the query rows of all requests in its cap of splits
(`core.schedule.caps`), so a long request is split less in a larger batch. Measured are calls over a
page table as wide as the configured context:

- `TRAFFIC`: decode steps of servers, simulated over published traces (`kinds.traffic`);
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
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from ..core.schedule.caps import num_splits
from ..core.schedule.facts import SchedulerFacts
from ..core.schedule.splits import plan_splits
from ..core.spec import LATENT_DIM, ROPE_DIM, AttnSpec, MlaSpec
from ..draw import charts, style
from ..kinds.decode.case import DecodeCase
from ..kinds.extend.case import ExtendCase, sample_extend_lens
from ..kinds.lengths import sample_seq_lens
from ..kinds.mla.case import MlaCase, sample_mla_lens
from ..kinds.traffic import Traffic, batches
from ..measure.stats import FASTER, SLOWER
from ..run import store
from ..run.frame import good_rows, over, side_rows
from ..run.study import Grid, Study

CONTEXT, LONG_CONTEXT = 131_072, 204_800
HEAD_DIM = 128
NOW, CHANGED, BEFORE = "0.4.10", "0.4.5", "0.4.4"
"""Releases of sglang-kernel: of SGLang 0.5.23, 0.5.16 and 0.5.15."""
SMS = 132
"""Multiprocessors of an H100 or H200, whose splits the model gives."""


@dataclass(frozen=True)
class Layout:
    """Heads of a layer on one GPU, and the query tokens of a request. `kv_heads` 0 is MLA."""

    heads: int
    kv_heads: int
    q_len: int = 1

    @property
    def name(self) -> str:
        """Such as `MLA 16 heads, 4 query tokens`."""
        layer = f"{self.heads}/{self.kv_heads}" if self.kv_heads else f"MLA {self.heads} heads"
        return layer + (f", {self.q_len} query tokens" if self.q_len > 1 else "")

    @property
    def group(self) -> int:
        """Query rows that share the keys of a token: query heads per KV head x query tokens."""
        return self.heads // max(1, self.kv_heads) * self.q_len

    @property
    def backend(self) -> str:
        """The backend of SGLang's FlashAttention-3 that runs it."""
        if not self.kv_heads:
            return "sglang-flash-attn-3-mla"
        return "sglang-flash-attn-3-extend" if self.q_len > 1 else "sglang-flash-attn-3"

    def case(
        self, lengths: str, *, page_size: int = 1, context: int = CONTEXT
    ) -> MlaCase | DecodeCase | ExtendCase:
        """A call over requests of these lengths."""
        tokens = [int(length) for length in lengths.split("+")]
        sizes: dict[str, Any] = {
            "batch_size": len(tokens),
            "kv_len": max(tokens),
            "lengths": lengths,
            "context": context,
        }
        if not self.kv_heads:
            return MlaCase(MlaSpec(self.heads, page_size=page_size), q_len=self.q_len, **sizes)
        spec = AttnSpec(self.heads, self.kv_heads, HEAD_DIM, page_size)
        cached = DecodeCase(spec, **sizes)
        if self.q_len == 1:
            return cached
        return ExtendCase(cached, "target_verify", self.q_len, "causal")


MLA, MLA_TP8, MLA_VERIFY = Layout(128, 0), Layout(16, 0), Layout(16, 0, 4)
"""DeepSeek-V3's attention: all heads on a GPU (DP attention); a GPU of eight; four drafts there."""
GROUPED = (Layout(32, 8), Layout(16, 2), Layout(8, 1), Layout(16, 1))
"""Llama-3.1-8B; a GPU of 4 and of 8 of Llama-3.1-70B; one of 4 of Qwen3-235B."""
VERIFY = (Layout(32, 8, 4), Layout(8, 1, 4), Layout(16, 1, 4))
LAYOUTS = (MLA, MLA_TP8, MLA_VERIFY, *GROUPED, *VERIFY)


def alike(count: int, tokens: int) -> list[int]:
    """`count` requests of `tokens` tokens."""
    return [tokens] * count


def log_normal(count: int, median: int, sigma: float) -> list[int]:
    """The quantiles of a log-normal distribution, evenly spaced, in an order drawn by a seed."""
    normal = NormalDist(math.log(median), sigma)
    quantiles = [round(math.exp(normal.inv_cdf((i + 0.5) / count))) for i in range(count)]
    draw = random.Random(count)
    return sorted(quantiles, key=lambda _: draw.random())


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
NAMES = {
    "+".join(map(str, lens)): name
    for named in (MLA_BATCHES, GROUPED_BATCHES, VERIFY_BATCHES)
    for name, lens in named.items()
}
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
    layouts: Iterable[Layout], named: Iterable[list[int]], **options: int
) -> tuple[Any, ...]:
    """The calls of every layout over every batch; a context of 204,800 where one needs it."""
    cases = []
    for layout in layouts:
        for lens in named:
            context = CONTEXT if max(lens) <= CONTEXT else LONG_CONTEXT
            cases.append(layout.case("+".join(map(str, lens)), context=context, **options))
    return tuple(cases)


def rival_lengths() -> list[list[int]]:
    """The batches of latent attention that rivals are measured over."""
    return [MLA_BATCHES[name] for name in RIVAL_BATCHES]


def traffic_cases(layout: Layout, steps: int) -> tuple[Any, ...]:
    """The first `steps` decode steps of every trace and number of requests in flight."""
    return tuple(layout.case(batch.lengths) for batch in batches() if batch.step < steps)


def grids_of(layout: Layout, cases: tuple[Any, ...], caps: Iterable[str]) -> Grid:
    """SGLang's FlashAttention-3 of today over these cases, by each cap, in three rounds."""
    names = tuple(capped(layout.backend, cap) for cap in caps)
    return Grid(cases, names, (NOW,), rounds=3)


def capped(backend: str, cap: str) -> str:
    """The name of a backend under a cap of splits."""
    return backend if cap == "default" else f"{backend}@{cap}"


ALL_CAPS, TWO_CAPS = ("default", "upstream", "bounded"), ("default", "bounded")
MLA_LAYOUTS = (MLA, MLA_TP8, MLA_VERIFY)
TRAFFIC_STEPS = {MLA: 7, MLA_VERIFY: 7, VERIFY[1]: 2, VERIFY[2]: 2, GROUPED[2]: 1, GROUPED[3]: 1}
"""Layout -> decode steps of each trace and number in flight; 16 batches a step."""
NAMED_CASES = {
    layout: cases_over([layout], named.values())
    for layouts, named in (
        (MLA_LAYOUTS, MLA_BATCHES),
        (GROUPED, GROUPED_BATCHES),
        (VERIFY, VERIFY_BATCHES),
    )
    for layout in layouts
}
PAGES_64 = {layout: cases_over([layout], rival_lengths(), page_size=64) for layout in MLA_LAYOUTS}
PAGES_16 = {
    layout: cases_over(
        [layout], [GROUPED_BATCHES[name] for name in GROUPED_RIVAL_BATCHES], page_size=16
    )
    for layout in GROUPED[1:]
}
SHORT_PREFILL = MlaCase(MlaSpec(32, page_size=1), batch_size=512, kv_len=2048, q_len=16)
"""A prefill of many short segments, #46's kind: a higher cap would make its partial outputs large,
so `bounded` leaves it the default."""

STUDY = Study(
    name="split_cap",
    question="What does the cap of splits cost SGLang's FlashAttention-3, and who is faster today?",
    grids=(
        *(grids_of(each, traffic_cases(each, n), ALL_CAPS) for each, n in TRAFFIC_STEPS.items()),
        *(grids_of(layout, cases, ALL_CAPS) for layout, cases in NAMED_CASES.items()),
        *(
            Grid(cases, (layout.backend,), (BEFORE, CHANGED), rounds=3)
            for layout, cases in NAMED_CASES.items()
            if layout in (*MLA_LAYOUTS, VERIFY[2], GROUPED[3])
        ),
        *(grids_of(layout, cases, TWO_CAPS) for layout, cases in PAGES_64.items()),
        *(Grid(cases, MLA_RIVALS, rounds=3) for cases in PAGES_64.values()),
        *(
            Grid(cases_over([each], rival_lengths()), (TRITON,))  # one round: no verdict
            for each in (MLA, MLA_TP8)
        ),
        *(grids_of(layout, cases, TWO_CAPS) for layout, cases in PAGES_16.items()),
        *(Grid(cases, GROUPED_RIVALS, rounds=3) for cases in PAGES_16.values()),
        Grid(
            (SHORT_PREFILL,),
            tuple(capped(MLA.backend, cap) for cap in ALL_CAPS),
            (NOW,),
            rounds=3,
        ),
        Grid(
            NAMED_CASES[MLA][:1],
            tuple(capped(MLA.backend, cap) for cap in TWO_CAPS),
            (NOW,),
            headline=True,
        ),
    ),
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
    machines = [name for name in store.machines(STUDY.name) if gpu in name]
    if not machines:
        raise FileNotFoundError(f"no records of study {STUDY.name!r} on {gpu!r}: measure some")
    frames = [good_rows(store.load(STUDY.name, name)).assign(machine=name) for name in machines]
    rows = pd.concat(frames, ignore_index=True)
    return rows.assign(**{name: rows.case.map(found) for name, found in _LOOKUPS.items()})


def layout_of(case: Any) -> Layout:
    """The layout of a case of this study."""
    spec = case.spec
    return Layout(spec.num_qo_heads, getattr(spec, "num_kv_heads", 0), getattr(case, "q_len", 1))


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
    spec, latent = case.spec, isinstance(case, MlaCase)
    q_lens, lens = lengths_of(case)
    width = getattr(case, "cached", case).context or int(lens.max())
    return SchedulerFacts(
        batch_size=len(lens),
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=1 if latent else spec.num_kv_heads,
        head_dim=ROPE_DIM if latent else spec.head_dim,
        head_dim_v=LATENT_DIM if latent else spec.head_dim,
        max_seqlen_q=int(q_lens.max()),
        max_seqlen_k=-(-width // spec.page_size) * spec.page_size,
        num_sms=SMS,
        page_size=spec.page_size,
        causal=True,
        varlen_q=True,
        build="sglang",
    )


def splits_of(case: Any, cap: str) -> np.ndarray:
    """Splits of each request [bs] int64 under a cap, by the model."""
    facts = facts_of(case)
    q_lens, lens = lengths_of(case)
    chosen = num_splits(facts, cap) or facts.split_cap
    return plan_splits(replace(facts, num_splits=chosen), lens, q_lens).num_splits


def loses_splits(case: Any) -> bool:
    """Whether a request has fewer splits by the default cap than by upstream's."""
    return bool((splits_of(case, "default") < splits_of(case, "upstream")).any())


def sides_of(rows: pd.DataFrame, layout: Layout, a: str, b: str = "bounded") -> pd.DataFrame:
    """Time by cap `a` over time by cap `b`, judged GPU by GPU: a row per case of a layout.

    A cap may be of another release: `default==0.4.4`. Columns are those of `over` and `load_all`,
    and `slowdown`: the median over rounds of the ratio, which one bad round does not move, where
    `ratio` is their geometric mean. ValueError if no case has both sides.
    """
    names = [_side(layout.backend, cap) for cap in (a, b)]
    tables = []
    for _, part in rows[rows.layout == layout.name].groupby("machine", sort=False):
        tables.append(over(part, *names).assign(slowdown=_median_ratios(part, *names)))
    tables = [table for table in tables if len(table)]
    if not tables:
        raise ValueError(f"rows must have {names[0]} and {names[1]} of a case, they have not")
    table = pd.concat(tables, ignore_index=True)
    return table.assign(**{name: table.case.map(found) for name, found in _LOOKUPS.items()})


def traffic_table(rows: pd.DataFrame, *, by_trace: bool = False) -> pd.DataFrame:
    """What the default cap costs over traffic: a row per layout, or per layout and trace.

    `slowdown` is the time by the default cap over the time by `bounded`. `slower` and `faster`
    count verdicts on the default. A GPU that did not measure a layout has no row of it.
    """
    lines = []
    measured = {*rows.layout[rows.trace != ""]}
    for layout in (each for each in TRAFFIC_STEPS if each.name in measured):
        judged = sides_of(rows, layout, "default")
        judged = judged[judged.trace != ""]
        groups = judged.groupby("trace", sort=False) if by_trace else [("all", judged)]
        lines += [_traffic_line(layout, str(trace), part) for trace, part in groups]
    table = pd.DataFrame(lines)
    return table if by_trace else table.drop(columns="trace")


def named_table(rows: pd.DataFrame, layouts: Iterable[Layout]) -> pd.DataFrame:
    """Median us by each cap over the named batches, and the slowdown by the default; worst first.

    `slowdown` is default / bounded, the geometric mean over rounds, with its 95 % interval.
    `splits` are those of the longest request, by the model.
    """
    lines = []
    for layout in layouts:
        for _, row in sides_of(_pages_of_one(rows), layout, "default").iterrows():
            if not row.batch:
                continue
            mine = rows[(rows.case == row.case) & (rows.release == NOW)]
            times = mine.groupby("backend").run_us.median()
            names = {cap: capped(layout.backend, cap) for cap in ALL_CAPS}
            caps = {cap: times[name] for cap, name in names.items() if name in times}
            line = {"layout": layout.name, "batch": row.batch, **_rounded(caps)}
            line |= {"slowdown": round(row.ratio, 2), "95 % CI": _interval(row)}
            longest = int(np.argmax(lengths_of(row.case)[1]))
            for cap in TWO_CAPS:
                line[f"splits, {cap}"] = int(splits_of(row.case, cap)[longest])
            lines.append(line | {"verdict": row.verdict})
    return pd.DataFrame(lines).sort_values("slowdown", ascending=False, ignore_index=True)


def alike_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Batches of requests that are all alike: time by `bounded` over the default, a row each."""
    lines = []
    for layout in LAYOUTS:
        table = sides_of(_pages_of_one(rows), layout, "bounded", "default")
        for _, row in table[table.rows == layout.group].iterrows():
            line = {"layout": layout.name, "batch": row.batch, "bounded / default": row.ratio}
            lines.append(line | {"95 % CI": _interval(row, 3), "verdict": row.verdict})
    return pd.DataFrame(lines).round(3)


def release_table(rows: pd.DataFrame, layout: Layout) -> pd.DataFrame:
    """Time by 0.4.4, 0.4.5 and 0.4.10 over `bounded` of 0.4.10: a row per named batch."""
    tables = []
    for release in (BEFORE, CHANGED, NOW):
        sides = f"default=={release}", f"bounded=={NOW}"
        table = sides_of(_pages_of_one(rows), layout, *sides)
        tables.append(table[table.batch != ""].set_index("batch").ratio.rename(release))
    return pd.concat(tables, axis=1).dropna().round(2).reset_index()


def rival_table(rows: pd.DataFrame, layouts: Iterable[Layout]) -> pd.DataFrame:
    """Median us of SGLang's FlashAttention-3, by both caps, and of its rivals over the same calls.

    A row per layout, page size and batch; `best` is the fastest. Medians are of one GPU each, as
    all backends of a call are.
    """
    chosen = rows[rows.layout.isin([layout.name for layout in layouts]) & (rows.batch != "")]
    chosen = chosen[~chosen.release.isin((BEFORE, CHANGED)) & ~chosen.backend.str.contains("@up")]
    keys = [chosen.layout, chosen.page_size.rename("page"), chosen.batch]
    names = chosen.backend.map(_short).rename("backend")
    table = chosen.groupby([*keys, names], sort=False).run_us.median().unstack()
    rivals = table.columns.difference(["default", "bounded"])
    table = table[table[rivals].notna().any(axis=1)].round(1)
    return table.assign(best=table.idxmin(axis=1)).reset_index()


def memory_table(rows: pd.DataFrame) -> pd.DataFrame:
    """MiB that a call allocates at most, by each cap: the named batches that take most, and the
    prefill of short segments."""
    mine = rows[rows.backend.str.startswith("sglang-flash") & (rows.release == NOW)]
    mine = mine[(mine.batch != "") | (mine.case == SHORT_PREFILL)]
    mine = mine.assign(batch=mine.batch.where(mine.batch != "", "prefill of short segments"))
    peak = mine.groupby(["layout", "batch", mine.backend.map(_short)]).peak_bytes.max().unstack()
    table = (peak[list(ALL_CAPS)].dropna() / 2**20).round(0).astype(int)
    return table.sort_values("upstream", ascending=False).reset_index()


def cost_chart(rows: pd.DataFrame) -> charts.Figure:
    """Where splits are lost and what it costs: a dot per batch, of traffic and said by hand."""
    layouts = list(TRAFFIC_STEPS)
    figure, axes = charts.panels(
        ["grouped queries", "latent attention (MLA)"],
        (10, 4),
        rows,
        ("query rows per KV head x longest / mean request (log)", "slowdown by the default (log)"),
        title="Time of a call by SGLang's cap of splits over time by the bounded cap",
        share_y=True,
    )
    looks = style.looks([layout.name for layout in layouts])
    for axis, latent in zip(axes, (False, True), strict=True):
        axis.axvline(LOSES_FROM, **style.RULE)
        axis.axhline(1, **style.RULE)
        mine = [layout for layout in layouts if (layout.kv_heads == 0) == latent]
        table = pd.concat([sides_of(rows, layout, "default") for layout in mine])
        shown = {name: look for name, look in looks.items() if name in set(table.layout)}
        charts.dots(axis, table, "rows", "slowdown", by="layout", looks=shown)
        style.log_axes(axis, "x", "y")
        axis.legend(fontsize=7)
    return figure


def _traffic_line(layout: Layout, trace: str, part: pd.DataFrame) -> dict[str, Any]:
    lost = part.case.map(loses_splits).mean()
    counts = {word: int((part.verdict == word).sum()) for word in (SLOWER, FASTER)}
    return {
        "layout": layout.name,
        "trace": trace,
        "batches": len(part),
        "lose splits": f"{lost:.0%}",
        "slowdown, median": round(part.slowdown.median(), 2),
        "90th percentile": round(part.slowdown.quantile(0.9), 2),
        "worst": round(part.slowdown.max(), 2),
        "best": round(part.slowdown.min(), 2),
        **counts,
    }


def _median_ratios(rows: pd.DataFrame, a: str, b: str) -> pd.Series:
    """The median over rounds of time by `a` over time by `b`, in the order of `over`."""
    times = [side_rows(rows, side)[["case", "round", "run_us"]] for side in (a, b)]
    paired = times[0].merge(times[1], on=["case", "round"], suffixes=("_a", "_b"))
    ratios = (paired.run_us_a / paired.run_us_b).groupby(paired.case, sort=False).median()
    return over(rows, a, b).case.map(ratios)


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
    return backend.partition("@")[2] or "default"


def _rows_of(case: Any) -> float:
    lens = lengths_of(case)[1]
    return float(layout_of(case).group * lens.max() / lens.mean())


def _lengths_text(case: Any) -> str:
    return str(getattr(case, "cached", case).lengths)


def _traffic_of(case: Any) -> Traffic | None:
    return TRAFFIC.get(_lengths_text(case))


def _trace_of(case: Any) -> str:
    found = _traffic_of(case)
    return found.trace if found else ""


def _in_flight_of(case: Any) -> int:
    found = _traffic_of(case)
    return found.in_flight if found else 0


_LOOKUPS = {
    "layout": lambda case: layout_of(case).name,
    "batch": lambda case: NAMES.get(_lengths_text(case), ""),
    "trace": _trace_of,
    "in_flight": _in_flight_of,
    "rows": _rows_of,
}
"""Column of a table -> what makes it of a case."""


def _interval(row: Any, decimals: int = 2) -> str:
    return f"{row.low:.{decimals}f} to {row.high:.{decimals}f}"


def _rounded(times: dict[str, float]) -> dict[str, float]:
    return {f"{name}, us": round(us, 1) for name, us in times.items()}
