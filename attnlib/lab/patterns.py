"""Known patterns of a slow attention step: what shows each one in a trace, its fix, and the gain.

A pattern is a function from a trace and a step to the evidence, or None; what is said of it is in
data/patterns.yaml, under the name of the function. Gains are ratios of times without and with the
fix, recorded by the studies and kept in data/gains.json (`studies.gains`).
Times are microseconds per step.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
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
SCAN, INDEX = re.compile("DeviceScanKernel|scan_innermost"), re.compile("index|gather")
LARGE_GROUP, WIDE_TILE = 4, 128
PLANNED = ("fa2", "fa3", "cuda-cores", "batch-attention", "batch-pod", "mla-fa2", "mla-fa3")
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
WIDE_TABLE, LEAST_COPY_US = 32768, 5.0
TRITON_BLOCKS = 4
"""Blocks of vLLM's Triton kernel that an SM of Hopper runs at once, by their registers."""
SIZES = "head_dim page_size batch_size kv_len".split()
STATED = ["heads", *SIZES, "dtype", "kv_dtype"]
"""The facts of a layer that a caller can state."""


@dataclass(frozen=True)
class Evidence:
    """What shows a pattern in a step, and the microseconds that it takes at most."""

    text: str
    us: float


@dataclass(frozen=True)
class Pattern:
    """A pattern; `since` says which releases have it and where that was read.

    `gain` is its key in data/gains.json, empty if no record supports the fix. `needs` are what a
    trace must have to show it, of `diagnosis.NEEDS`.
    """

    name: str
    shows: Callable[[Trace, Step], Evidence | None]
    fix: str
    since: str
    notebook: str
    gain: str = ""
    needs: Sequence[str] = ()


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
    return EITHER if FAMILIES[family].decodes or tile_rows(span) == 16 else UNKNOWN


def ran(step: Step, what: str) -> list[Span]:
    """The kernels of an attention family, or of a role beside attention (`role_of`)."""
    return [s for s in step.work if what in (family_of(s.name), role_of(s.name))]


def _kernels(spans: Sequence[Span], more: str = "") -> Evidence | None:
    """Kernel, count per step and sizes; None without a kernel."""
    if not spans:
        return None
    sizes = {"grid": spans[0].grid, "block": spans[0].block}
    shape = [f", {name} {'x'.join(map(str, size))}" for name, size in sizes.items() if size]
    text = f"{spans[0].name} {len(spans)} times per step{''.join(shape)}{more}"
    return Evidence(text, sum(span.length_us for span in spans))


def fa3_decodes(trace: Trace, step: Step) -> Evidence | None:
    """FlashInfer's Hopper prefill kernel runs decode."""
    return _kernels(ran(step, "fa3") if step.kind != VERIFY else [])


def schedule_per_layer(trace: Trace, step: Step) -> Evidence | None:
    """FlashAttention-3 prepares its schedule for every layer, or every second call of a cascade."""
    prepared = ran(step, "prepare")
    if 2 * len(prepared) < len(ran(step, "flash-attn-3")):  # of several steps in one
        return None
    return _kernels(prepared[1:], ", after one that would be enough")


def metadata_op_by_op(trace: Trace, step: Step) -> Evidence | None:
    """A scan and an index kernel in one run of elementwise kernels before the first attention."""
    evidence = None
    for is_operator, spans in groupby(step.ahead, lambda span: bool(OPERATORS.search(span.name))):
        run = list(spans)
        names = [span.name for span in run]
        if is_operator and any(map(SCAN.search, names)) and any(map(INDEX.search, names)):
            kinds = ", ".join(dict.fromkeys(names))
            text = f"{len(run)} launches before the first layer: {kinds}"
            evidence = Evidence(text, run[-1].end_us - run[0].start_us)
    return evidence


def fa2_unsplit(trace: Trace, step: Step) -> Evidence | None:
    """fa2 decodes without splitting a request, with few blocks.

    FlashInfer's plan splits while two blocks per SM hold all parts. A plan for a graph always
    merges, and its grid is padded. The one call of a cut step may lack its merge.
    """
    calls = ran(step, "fa2") if step.kind != VERIFY else []
    if not calls or not calls[0].grid or planned_on_gpu(step) or (step.at_end and not calls[1:]):
        return None
    tiles, *heads = calls[0].grid
    if (step.batch_size or tiles) == 1:  # one request delays no other
        return None
    room, blocks = 2 * trace.num_sms, (step.batch_size or tiles) * math.prod(heads)
    spare = step.batch_size != tiles and (not step.batch_size or blocks < room)
    if blocks > 2 * room or ran(step, "merge") and spare:
        return None
    return _kernels(calls, f", on {trace.num_sms} SMs; it costs time if lengths differ")


def triton_unsplit(trace: Trace, step: Step) -> Evidence | None:
    """vLLM's Triton kernel has no segments: a block reads all tokens of its request.

    With segments (3D) the grid has a third axis, and a kernel reduces them. Where there are more
    blocks than run at once, other requests fill the time of the longest one.
    """
    calls = [*ran(step, "triton-unified"), *ran(step, "triton-paged")]
    if not calls or not calls[0].grid or ran(step, "merge"):
        return None
    blocks = math.prod(calls[0].grid)
    if math.prod(calls[0].grid[2:]) > 1 or blocks >= TRITON_BLOCKS * trace.num_sms:
        return None
    if blocks < trace.num_sms:
        return _kernels(calls, f", fewer blocks than the {trace.num_sms} SMs")
    return _kernels(calls, f", on {trace.num_sms} SMs; it costs time if lengths differ")


def wide_tiles(trace: Trace, step: Step) -> Evidence | None:
    """fa2 in a CUDA graph runs tiles of 128 query rows for a few queries per request."""
    wide = [s for s in ran(step, "fa2") if step.in_graph and tile_rows(s) >= WIDE_TILE]
    return _kernels(wide)


def cuda_cores_large_group(trace: Trace, step: Step) -> Evidence | None:
    """CUDA cores decode a layer with four or more query heads per KV head."""
    return _kernels([s for s in ran(step, "cuda-cores") if s.block[1:2] >= (LARGE_GROUP,)])


def lengths_copied(trace: Trace, step: Step) -> Evidence | None:
    """A copy to the host under the step's mark, and a wait for it, before attention."""
    copies = [span for span in step.marked if span.name == "Memcpy DtoH"]
    begin = trace.launched_us.get(copies[0].launch, math.inf) if copies else math.inf
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
    text = f"copies to the GPU, a plan among them: {len(copies)}; the GPU idles before the first "
    return Evidence(f"{text}layer, and the plan is a part of that", step.idle_ahead_us)


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
    calls, names = ran(step, "flash-attn-3"), {span.name for span in step.work}
    if not calls or SCHEDULES & names or COMBINE not in names or step.begins:
        return None
    where = "in this step" if SCHEDULES & trace.names else "in this trace: another may write it"
    return _kernels(calls, f", requests are split, no kernel writes the schedule {where}")


def old_plan(trace: Trace, step: Step) -> Evidence | None:
    """fa2 is replayed from a graph, and no plan reaches the GPU since the step before.

    Only where a plan was seen in another step: a trace may lack copies.
    """
    calls = ran(step, "fa2") if step.in_graph and not step.begins else []
    if not calls or not PLANS & trace.names or any(span.name in PLANS for span in step.ahead):
        return None
    return _kernels(calls, ", no copy of a plan and no planning kernel before it in this step")


def outside_graph(trace: Trace, step: Step) -> Evidence | None:
    """Attention is launched kernel by kernel, and the GPU idles between them."""
    if step.in_graph or not trace.has_launches:
        return None
    idle = sum(gap.length_us for gap in find_gaps(step.body))
    text = "attention launched one by one; the GPU idles between kernels"
    return Evidence(text, idle) if idle > GRAPH_GAP_US * len(step.body) else None


SHOWS: dict[str, Callable[[Trace, Step], Evidence | None]] = {
    "fa3_decodes": fa3_decodes,
    "schedule_per_layer": schedule_per_layer,
    "metadata_op_by_op": metadata_op_by_op,
    "fa2_unsplit": fa2_unsplit,
    "triton_unsplit": triton_unsplit,
    "wide_tiles": wide_tiles,
    "cuda_cores_large_group": cuda_cores_large_group,
    "lengths_copied": lengths_copied,
    "host_plans": host_plans,
    "whole_table_copied": whole_table_copied,
    "old_schedule": old_schedule,
    "old_plan": old_plan,
    "outside_graph": outside_graph,
}
"""Key in data/patterns.yaml -> what shows the pattern."""
PATTERNS = tuple(
    Pattern(shows=SHOWS[key], **row)
    for key, row in yaml.safe_load((DATA / "patterns.yaml").read_text()).items()
)
"""In the order of data/patterns.yaml."""


@cache
def gains() -> dict[str, Any]:
    """data/gains.json: key -> study, gpu, rows (shape and ratio); empty if it is missing."""
    return json.loads(GAINS.read_text()) if GAINS.exists() else {}


def gained(pattern: Pattern, shape: Mapping[str, Any], us: float) -> str:
    """What the records of shapes like `shape` say that the fix saves of `us` per step."""
    entry = gains().get(pattern.gain)
    if entry is None:
        return "no records of the fix"
    rows: list[dict[str, Any]] = entry["rows"]
    at: list[str] = []
    varying = [n for n in STATED if n in rows[0] and len({row[n] for row in rows}) > 1]
    for name in (name for name in varying if name in shape):
        given = shape[name]  # the same word, or a number within a factor of two
        if isinstance(given, str):
            rows = [row for row in rows if row[name] == given]
        else:
            rows = [row for row in rows if abs(math.log2(row[name] / given)) <= 1]
        if not rows:
            return f"no records like {', '.join([*at, f'{name} {shape[name]}'])}; {entry['gpu']}"
        at.append(f"{name} {shape[name]}")
    if "kv_len" in shape:  # where the lengths are open, so is the gain
        sizes = [name for name in SIZES if name in rows[0] and name in shape]
        distances = [sum(abs(math.log2(row[n] / shape[n])) for n in sizes) for row in rows]
        rows = [row for row, far in zip(rows, distances, strict=True) if far == min(distances)]
    ratios = sorted(row["ratio"] for row in rows)
    where = f" like {', '.join(at)}" if at else ""
    unknown = [name for name in varying if name not in shape]
    where += f"; the trace does not give {', '.join(unknown)}" if unknown else ""
    count = f"{len(rows)} recorded shape{'s' if len(rows) > 1 else ''}{where}; {entry['gpu']}"
    if median(ratios) <= 1:
        return f"nothing to gain: {median(ratios):.2f} times the time with the fix, {count}"
    saved = [us * (1 - 1 / ratio) for ratio in (ratios[0], median(ratios), ratios[-1])]
    least, middle, most = (f"{max(0.0, value):,.1f}" for value in saved)
    spread = f"{least} to {most} us, median {middle}" if len(rows) > 1 else f"{middle} us"
    return f"saves {spread} of {us:,.1f} us per step, by {count}"
