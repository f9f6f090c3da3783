"""Known patterns of a slow attention step: what shows each one in a trace, its fix, and the gain.

A pattern is a function from a trace and a step to the evidence, or None; what is said of it is in
data/patterns.yaml, under the name of the function. Gains are ratios of times without and with the
fix, recorded by the studies and kept in data/gains.json (`lab.gains`).
Times are microseconds per step.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from ..core.backends.table import FAMILIES, family_of, role_of
from ..measure.spans import SIZE, Span, busy_us, find_gaps
from ..measure.steps import EITHER, UNKNOWN, VERIFY, Step
from ..measure.trace_file import Trace

DATA = Path(__file__).resolve().parents[1] / "data"
GAINS = DATA / "gains.json"
TILE = re.compile(
    r"KernelTraits(?:<\(flashinfer::MaskMode\)\d, (?:\(unsigned int\))?|.*?ELj)" + SIZE
)
OPERATORS = re.compile(r"elementwise|DeviceScan|scan_innermost|^Memcpy DtoD|gather_kernel|^Memset")
SCAN = re.compile("DeviceScanKernel|scan_innermost")
INDEX = re.compile("index|gather")
LARGE_GROUP = 4
"""Query heads per KV head from which the CUDA cores are slower than the tensor cores."""
WIDE_TILE = 128
"""Query rows of a tile that decode and verification leave mostly empty."""
PLANNED = (
    "fa2",
    "fa3",
    "cuda-cores",
    "batch-attention",
    "batch-pod",
    "mla-fa2",
    "mla-fa3",
)
"""Families whose plan FlashInfer makes on the host."""
OUR_PLAN = "plan_kernel"
PLANS = {"Memcpy HtoD", OUR_PLAN}
"""What brings a plan to the GPU."""
SCHEDULES = {"prepare_varlen_num_blocks_kernel", "step_metadata_kernel"}
COMBINE = "FlashAttnFwdCombine"
"""What writes FlashAttention-3's schedule, and what merges the requests that it splits."""
GRAPH_GAP_US = 1.0
"""Idle time per kernel above that of every graph in data/traces (0.05 to 0.4)."""
WAITING = 0.2
"""Idle time before a step over its busy time, from which the GPU is said to wait."""
COLUMNS_PER_BLOCK = {
    "_fused_metadata_kernel_ps1_no_swa": 256,
    "_fused_metadata_kernel_general": 128,
    "_fused_decode_metadata_kernel": 128,
}
"""SGLang's metadata kernels -> the least columns of a block; the grid is requests x blocks."""
WIDE_TABLE = 32768
"""Columns of a page table from which its copy takes time, however short the requests are."""
LEAST_COPY_US = 5.0
TRITON_BLOCKS = 4
"""Blocks of vLLM's Triton kernel that an SM of Hopper runs at once, by their registers."""
SIZES = ("head_dim", "page_size", "batch_size", "kv_len")
STATED = ("heads", *SIZES, "dtype", "kv_dtype")
"""The facts of a layer that a caller can state."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Evidence:
    """What shows a pattern in a step, and the microseconds that it takes at most."""

    text: str
    us: float


@dataclass(frozen=True)
class Pattern:
    """A pattern; `since` says which releases have it and where that was read.

    `gain` is its key in data/gains.json, empty if no record supports the fix.
    """

    name: str
    shows: Callable[[Trace, Step], Evidence | None]
    fix: str
    since: str
    notebook: str
    gain: str = ""


def tile_rows(span: Span) -> int:
    """Rows of the tile of FlashInfer's fa2, from the kernel's template; 0 if it is not named."""
    match = TILE.search(span.symbol)
    return int(match[1]) if match else 0


def kind_of(span: Span) -> str:
    """The kind of step that an attention kernel proves, unknown if it serves prefill too; empty
    for other kernels."""
    family = family_of(span.name)
    if not family:
        return ""
    is_decode = FAMILIES[family].decodes or tile_rows(span) == 16
    return EITHER if is_decode else UNKNOWN


def ran(step: Step, what: str) -> list[Span]:
    """The kernels of an attention family, or of a role beside attention (`role_of`)."""
    found = []
    for span in step.work:
        if what in (family_of(span.name), role_of(span.name)):
            found.append(span)
    return found


def _kernels(spans: Sequence[Span], more: str = "") -> Evidence | None:
    """Kernel, count per step and sizes; None without a kernel."""
    if not spans:
        return None
    first = spans[0]
    text = f"{first.name} {len(spans)} times per step"
    for name, size in (("grid", first.grid), ("block", first.block)):
        if size:
            text += f", {name} {'x'.join(map(str, size))}"
    us = sum(span.length_us for span in spans)
    return Evidence(text + more, us)


def fa3_decodes(trace: Trace, step: Step) -> Evidence | None:
    """FlashInfer's Hopper prefill kernel runs decode."""
    if step.kind == VERIFY:  # several queries per request: what the kernel is made for
        return None
    return _kernels(ran(step, "fa3"))


def schedule_per_layer(trace: Trace, step: Step) -> Evidence | None:
    """FlashAttention-3 prepares its schedule for every layer, or every second call of a cascade."""
    prepared = ran(step, "prepare")
    if 2 * len(prepared) < len(ran(step, "flash-attn-3")):  # of several steps in one
        return None
    return _kernels(prepared[1:], ", after one that would be enough")


def metadata_op_by_op(trace: Trace, step: Step) -> Evidence | None:
    """A scan and an index kernel in one run of elementwise kernels before the first attention."""
    evidence = None
    for is_operator, spans in groupby(step.ahead, _is_operator):
        run = list(spans)
        names = [span.name for span in run]
        has_scan = any(map(SCAN.search, names))
        has_index = any(map(INDEX.search, names))
        if is_operator and has_scan and has_index:
            kinds = ", ".join(dict.fromkeys(names))
            text = f"{len(run)} launches before the first layer: {kinds}"
            evidence = Evidence(text, run[-1].end_us - run[0].start_us)
    return evidence


def _is_operator(span: Span) -> bool:
    return bool(OPERATORS.search(span.name))


def fa2_unsplit(trace: Trace, step: Step) -> Evidence | None:
    """fa2 decodes without splitting a request, with few blocks.

    FlashInfer's plan splits while two blocks per SM hold all parts. A plan for a graph always
    merges, and its grid is padded. The one call of a cut step may lack its merge.
    """
    calls = ran(step, "fa2")
    if step.kind == VERIFY or not calls or not calls[0].grid or planned_on_gpu(step):
        return None
    if step.at_end and len(calls) == 1:
        return None
    tiles, *heads = calls[0].grid
    requests = step.batch_size or tiles
    if requests == 1:  # one request delays no other
        return None
    room = 2 * trace.num_sms
    blocks = requests * math.prod(heads)
    if blocks > 2 * room:
        return None
    may_split = not step.batch_size or blocks < room
    if ran(step, "merge") and step.batch_size != tiles and may_split:
        return None
    return _kernels(calls, f", on {trace.num_sms} SMs; it costs time if lengths differ")


def triton_unsplit(trace: Trace, step: Step) -> Evidence | None:
    """vLLM's Triton kernel has no segments: a block reads all tokens of its request.

    With segments (3D) the grid has a third axis, and a kernel reduces them. Where there are more
    blocks than run at once, other requests fill the time of the longest one.
    """
    calls = ran(step, "triton-unified") + ran(step, "triton-paged")
    if not calls or not calls[0].grid or ran(step, "merge"):
        return None
    grid = calls[0].grid
    blocks = math.prod(grid)
    has_segments = math.prod(grid[2:]) > 1
    if has_segments or blocks >= TRITON_BLOCKS * trace.num_sms:
        return None
    if blocks < trace.num_sms:
        return _kernels(calls, f", fewer blocks than the {trace.num_sms} SMs")
    return _kernels(calls, f", on {trace.num_sms} SMs; it costs time if lengths differ")


def wide_tiles(trace: Trace, step: Step) -> Evidence | None:
    """fa2 in a CUDA graph runs tiles of 128 query rows for a few queries per request."""
    if not step.in_graph:
        return None
    return _kernels([span for span in ran(step, "fa2") if tile_rows(span) >= WIDE_TILE])


def cuda_cores_large_group(trace: Trace, step: Step) -> Evidence | None:
    """CUDA cores decode a layer with four or more query heads per KV head."""
    calls = [span for span in ran(step, "cuda-cores") if len(span.block) > 1]
    # The second axis of a block is the group.
    return _kernels([span for span in calls if span.block[1] >= LARGE_GROUP])


def lengths_copied(trace: Trace, step: Step) -> Evidence | None:
    """A copy to the host under the step's mark, and a wait for it, before attention."""
    copies = [span for span in step.marked if span.name == "Memcpy DtoH"]
    if not copies:
        return None
    begin = trace.launched_us.get(copies[0].launch, math.inf)
    waits = [wait for wait in step.waits if wait.start_us >= begin]
    if not waits:
        return None
    sizes = ", ".join(str(span.copied_bytes) for span in copies)
    return Evidence(f"{sizes} bytes to the host before attention, and a wait", busy_us(waits))


def host_plans(trace: Trace, step: Step) -> Evidence | None:
    """FlashInfer's plan is copied to the GPU before the first layer, which waits for it."""
    planned = [span for span in step.attention if family_of(span.name) in PLANNED]
    copies = [span for span in step.ahead if span.name == "Memcpy HtoD"]
    if not planned or not copies or planned_on_gpu(step) or step.at_end:
        return None
    if step.idle_ahead_us < WAITING * step.busy_us:
        return None
    if lengths_copied(trace, step):  # which says why the host is late
        return None
    text = (
        f"copies to the GPU, a plan among them: {len(copies)}; "
        "the GPU idles before the first layer, and the plan is a part of that"
    )
    return Evidence(text, step.idle_ahead_us)


def planned_on_gpu(step: Step) -> bool:
    """Whether `core.fa2` planned this step: by length, without the host."""
    return any(span.name == OUR_PLAN for span in step.work)


def whole_table_copied(trace: Trace, step: Step) -> Evidence | None:
    """SGLang's metadata kernel has blocks for the whole configured context of each request."""
    for span in step.ahead:
        if span.name not in COLUMNS_PER_BLOCK or len(span.grid) < 2:
            continue
        columns = span.grid[1] * COLUMNS_PER_BLOCK[span.name]
        if columns >= WIDE_TABLE and span.length_us >= LEAST_COPY_US:
            return _kernels([span], f": {columns:,} or more page-table columns per request")
    return None


def old_schedule(trace: Trace, step: Step) -> Evidence | None:
    """FlashAttention-3 splits requests, and no schedule was written since the step before."""
    calls = ran(step, "flash-attn-3")
    names = {span.name for span in step.work}
    is_split = COMBINE in names
    if step.begins or not calls or not is_split or SCHEDULES & names:
        return None
    where = "in this step" if SCHEDULES & trace.names else "in this trace: another may write it"
    return _kernels(calls, f", requests are split, no kernel writes the schedule {where}")


def old_plan(trace: Trace, step: Step) -> Evidence | None:
    """fa2 is replayed from a graph, and no plan reaches the GPU since the step before.

    Only where a plan was seen in another step: a trace may lack copies.
    """
    if not step.in_graph or step.begins or not PLANS & trace.names:
        return None
    calls = ran(step, "fa2")
    if not calls or any(span.name in PLANS for span in step.ahead):
        return None
    return _kernels(calls, ", no copy of a plan and no planning kernel before it in this step")


def outside_graph(trace: Trace, step: Step) -> Evidence | None:
    """Attention is launched kernel by kernel, and the GPU idles between them."""
    if step.in_graph or not trace.has_launches:
        return None
    idle_us = sum(gap.length_us for gap in find_gaps(step.body))
    if idle_us <= GRAPH_GAP_US * len(step.body):
        return None
    return Evidence("attention launched one by one; the GPU idles between kernels", idle_us)


SHOWS = (
    fa3_decodes,
    schedule_per_layer,
    metadata_op_by_op,
    fa2_unsplit,
    triton_unsplit,
    wide_tiles,
    cuda_cores_large_group,
    lengths_copied,
    host_plans,
    whole_table_copied,
    old_schedule,
    old_plan,
    outside_graph,
)
"""What shows each pattern; the name of the function is the pattern's key in data/patterns.yaml."""


def _read_patterns() -> tuple[Pattern, ...]:
    """All patterns, in the order of data/patterns.yaml."""
    shows = {function.__name__: function for function in SHOWS}
    rows = yaml.safe_load((DATA / "patterns.yaml").read_text())
    patterns = []
    for key, row in rows.items():
        patterns.append(Pattern(shows=shows[key], **row))
    return tuple(patterns)


PATTERNS = _read_patterns()


@cache
def gains() -> Row:
    """data/gains.json: key -> study, gpu, rows (shape and ratio); empty if it is missing."""
    return json.loads(GAINS.read_text()) if GAINS.exists() else {}


def gained(pattern: Pattern, shape: Row, us: float) -> str:
    """What the records of shapes like `shape` say that the fix saves of `us` per step."""
    entry = gains().get(pattern.gain)
    if entry is None:
        return "no records of the fix"
    rows: list[Row] = entry["rows"]
    varying = [name for name in STATED if _varies(name, rows)]
    known = [name for name in varying if name in shape]
    unknown = [name for name in varying if name not in shape]
    alike: list[str] = []
    for name in known:
        rows = [row for row in rows if _is_alike(row[name], shape[name])]
        alike.append(f"{name} {shape[name]}")
        if not rows:
            return f"no records like {', '.join(alike)}; {entry['gpu']}"
    if "kv_len" in shape:  # where the lengths are open, so is the gain
        rows = _nearest(rows, shape)
    count = f"{len(rows)} recorded shape"
    if len(rows) > 1:
        count += "s"
    if alike:
        count += f" like {', '.join(alike)}"
    if unknown:
        count += f"; the trace does not give {', '.join(unknown)}"
    return _saved(us, [row["ratio"] for row in rows], f"{count}; {entry['gpu']}")


def _varies(name: str, rows: list[Row]) -> bool:
    """Whether recorded shapes have a fact, and not all the same one."""
    return name in rows[0] and len({row[name] for row in rows}) > 1


def _is_alike(recorded: Any, given: Any) -> bool:
    """Whether a fact is the same word, or a number within a factor of two."""
    if isinstance(given, str):
        return recorded == given
    return abs(math.log2(recorded / given)) <= 1


def _nearest(rows: list[Row], shape: Row) -> list[Row]:
    """The recorded shapes whose sizes are nearest to those of `shape`, by factors of two."""
    sizes = [name for name in SIZES if name in rows[0] and name in shape]
    apart = []
    for row in rows:
        factors = [row[name] / shape[name] for name in sizes]
        apart.append(sum(abs(math.log2(factor)) for factor in factors))
    least = min(apart)
    return [row for row, far in zip(rows, apart, strict=True) if far == least]


def _saved(us: float, ratios: Sequence[float], count: str) -> str:
    """What is saved of `us` by fixes of these ratios of times, without / with the fix."""
    middle = median(ratios)
    if middle <= 1:
        return f"nothing to gain: {middle:.2f} times the time with the fix, {count}"
    ends = (min(ratios), max(ratios), middle)
    least, most, usual = (f"{max(0.0, us * (1 - 1 / ratio)):,.1f}" for ratio in ends)
    saved = f"{least} to {most} us, median {usual}" if len(ratios) > 1 else f"{usual} us"
    return f"saves {saved} of {us:,.1f} us per step, by {count}"
