"""Known patterns of a slow attention step: what shows each one in a trace, its fix, and the gain.

A pattern is a function from a trace and a step to the evidence, or None; what is said of it is in
data/patterns.yaml, under the name of the function, and in the entries of data/known that are the
same cause; `fix_gains` has what a fix saves.
Times are microseconds per step.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np
import yaml

from ..core.backends.table import FAMILIES, family_of, role_of
from ..core.call_text import Lens
from ..core.layer import parse_layer
from ..core.schedule.caps import DEFAULT, splits_under
from ..core.schedule.facts import SchedulerFacts
from ..core.spec import LATENT_DIM, ROPE_DIM
from ..measure.marks import SGLANG, VERIFY
from ..measure.spans import SIZE, Span, busy_us, find_gaps
from ..measure.steps import EITHER, UNKNOWN, Step
from ..measure.trace_file import Trace
from ..select.known import PROBLEMS, Problem
from .fix_gains import LENS

DATA = Path(__file__).resolve().parents[1] / "data"
TILE = re.compile(
    r"KernelTraits(?:<\(flashinfer::MaskMode\)\d, (?:\(unsigned int\))?|.*?ELj)" + SIZE
)
OPERATORS = re.compile(r"elementwise|DeviceScan|scan_innermost|^Memcpy DtoD|gather_kernel|^Memset")
SCAN = re.compile("DeviceScanKernel|scan_innermost")
INDEX = re.compile("index|gather")
WRITES = re.compile("index_put|index_copy")
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
PLAN_SPANS = {"Memcpy HtoD", OUR_PLAN}
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
FEW_BLOCKS_US = 20.0
"""A shorter kernel gains nothing by more blocks: their merge takes time too."""
LONGER = 1.05
"""The longest request over the shortest, up to which no request delays the others."""
LEAST_LAYERS = 4
"""Launches from which work counts as repeated in every layer."""

LENGTH = attrgetter("length_us")


@dataclass(frozen=True)
class Evidence:
    """What shows a pattern in a step, and the microseconds that it takes at most.

    `fix` is that of this kernel, empty where that of the pattern holds.
    """

    text: str
    us: float
    fix: str = ""


@dataclass(frozen=True)
class Pattern:
    """A pattern; `known` are the known problems that it is, of which releases and links are told.

    `fix` is empty where those say it. `since` and `see` say the same of a pattern that is none.
    `gain` is its key in data/gains.json, empty if no record supports the fix.
    """

    name: str
    shows: Callable[[Trace, Step], Evidence | None]
    fix: str
    known: tuple[Problem, ...] = ()
    since: str = ""
    see: tuple[str, ...] = ()
    gain: str = ""


def tile_rows(span: Span) -> int:
    """Rows of the tile of FlashInfer's fa2, from the kernel's template; 0 if it is not named."""
    return _tile_rows(span.symbol)


@cache
def _tile_rows(symbol: str) -> int:
    """As `tile_rows`; to search a long name takes a while, and few names stand in a trace."""
    match = TILE.search(symbol)
    if match:
        return int(match[1])
    return 0


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


def _kernels(
    spans: Sequence[Span],
    more: str = "",
    *,
    fix: str = "",
) -> Evidence | None:
    """Kernel, count per step and sizes; None without a kernel."""
    if not spans:
        return None
    first = spans[0]
    text = f"{first.name} {len(spans)} times per step"
    for name, size in (("grid", first.grid), ("block", first.block)):
        if size:
            text += f", {name} {'x'.join(map(str, size))}"
    return Evidence(
        text=text + more,
        us=_total_us(spans),
        fix=fix,
    )


def _total_us(spans: Sequence[Span]) -> float:
    return sum(span.length_us for span in spans)


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
    redundant = prepared[1:]
    if not redundant:
        return None
    count = f"{len(redundant)} of the {len(prepared)} launches per step are redundant"
    return Evidence(f"{redundant[0].name}: {count}", _total_us(redundant))


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
    if blocks >= trace.num_sms and _are_alike(step):
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
    if _are_alike(step):
        return None
    return _kernels(calls, f", on {trace.num_sms} SMs; it costs time if lengths differ")


def wide_tiles(trace: Trace, step: Step) -> Evidence | None:
    """fa2 in a CUDA graph runs tiles of 128 query rows for a few queries per request."""
    if not step.in_graph:
        return None
    wide = [span for span in ran(step, "fa2") if tile_rows(span) >= WIDE_TILE]
    return _kernels(wide)


def cuda_cores_large_group(trace: Trace, step: Step) -> Evidence | None:
    """CUDA cores decode a layer with four or more query heads per KV head."""
    calls = []
    for span in ran(step, "cuda-cores"):
        if len(span.block) > 1:
            calls.append(span)
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
    longest = max(waits, key=LENGTH)
    text = f"{sizes} bytes to the host before attention, and a wait in {longest.name}"
    return Evidence(text, busy_us(waits))


def host_plans(trace: Trace, step: Step) -> Evidence | None:
    """FlashInfer's plan is copied to the GPU before the first layer, which waits for it."""
    planned = []
    for span in step.attention:
        if family_of(span.name) in PLANNED:
            planned.append(span)
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
    if not step.in_graph or step.begins or not PLAN_SPANS & trace.names:
        return None
    calls = ran(step, "fa2")
    if not calls or any(span.name in PLAN_SPANS for span in step.ahead):
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


def few_blocks(trace: Trace, step: Step) -> Evidence | None:
    """An attention kernel leaves half of the SMs without a block.

    Of fa2 and of vLLM's Triton there are patterns of their own, which say more.
    """
    if fa2_unsplit(trace, step) or triton_unsplit(trace, step):
        return None
    few: dict[str, list[Span]] = defaultdict(list)
    for span in step.attention:
        is_few = 2 * math.prod(span.grid) <= trace.num_sms
        if span.grid and is_few and span.length_us >= FEW_BLOCKS_US:
            few[span.name].append(span)
    if not few:
        return None
    calls = max(few.values(), key=_total_us)
    blocks = math.prod(calls[0].grid)
    family = FAMILIES.get(family_of(calls[0].name))
    return _kernels(
        calls,
        f": {blocks} blocks, fewer than the {trace.num_sms} SMs",
        fix=family.splits_by if family else "",
    )


def same_in_every_layer(trace: Trace, step: Step) -> Evidence | None:
    """Page tables or indices are made again between the layers, by launches that are all alike.

    FlashAttention-3's schedule has a pattern of its own. A kernel that writes by index, such as
    that of the cache, has other data in each layer.
    """
    layers = max(Counter(span.name for span in step.attention).values())
    launches: dict[tuple[str, tuple[int, ...]], list[Span]] = defaultdict(list)
    for span in step.body:
        reads_index = INDEX.search(span.name) and not WRITES.search(span.symbol)
        is_operator = OPERATORS.search(span.name) and reads_index
        if is_operator or role_of(span.name) == "metadata":
            launches[span.name, span.grid].append(span)
    if not launches:
        return None
    most = max(launches.values(), key=_total_us)
    if len(most) < LEAST_LAYERS - 1 or len(most) < (layers - 1) / 2:
        return None
    more = f" between {layers} layers; once is enough for what is of the step, not of a layer"
    return _kernels(most, more)


def split_cap(trace: Trace, step: Step) -> Evidence | None:
    """SGLang's build of FlashAttention-3 caps the splits of a request by the rows of all.

    By the model of its rule (`core.schedule.facts`), for a width of the longest request, or of the
    mean length where a caller does not tell each: the true width is at least that. A merge runs if
    and only if the cap is above 1. Of told lengths a request must lose splits.
    """
    calls = ran(step, "flash-attn-3")
    facts = _facts_of(trace, step)
    if step.mark.engine != SGLANG or not calls or facts is None:
        return None
    earlier = replace(facts, build="sglang-0.4.4").split_cap
    merges = any(span.name == COMBINE for span in step.work)
    if facts.split_cap >= earlier or merges == (facts.split_cap == 1):
        return None
    caps = f": at most {facts.split_cap} splits of a request, {earlier} by the rule before; "
    tokens = _told_tokens(step)
    if not tokens:
        mean = f"{facts.batch_size} requests of {facts.max_seqlen_k:,} tokens in the mean"
        return _kernels(calls, f"{caps}{mean}, and it costs time if one is far longer")
    now = _most_splits(facts, tokens, DEFAULT)
    then = _most_splits(facts, tokens, str(earlier))
    if now >= then:
        return None
    longest = f"the longest of {len(tokens)} requests has {max(tokens):,} tokens"
    return _kernels(calls, f"{caps}{longest} and gets {now} splits, {then} by that rule")


def _told_tokens(step: Step) -> tuple[int, ...]:
    """The tokens of each request, as a caller tells them of a batch of this size; else none."""
    if LENS not in step.layer:
        return ()
    tokens = Lens.read(step.layer[LENS]).tokens
    if len(tokens) == step.batch_size:
        return tokens
    return ()


def _are_alike(step: Step) -> bool:
    """Whether a caller tells the tokens of each request, and none is far longer than another."""
    tokens = _told_tokens(step)
    return bool(tokens) and max(tokens) <= LONGER * min(tokens)


def _most_splits(facts: SchedulerFacts, tokens: Sequence[int], cap: str) -> int:
    """The splits of the request that gets most under a cap, by the model."""
    q_lens = np.full(len(tokens), facts.max_seqlen_q)
    splits = splits_under(facts, np.array(tokens), q_lens, cap)
    return int(splits.max())


def _facts_of(trace: Trace, step: Step) -> SchedulerFacts | None:
    """A call of this step as SGLang's FlashAttention-3 sees it.

    None without heads and lengths, and for a call that FlashAttention-3 refuses.
    """
    layer = step.layer
    mean = round(step.mean_kv_len or layer.get("kv_len", 0))
    kv_len = max(_told_tokens(step), default=mean)
    if "heads" not in layer or not kv_len or not step.batch_size or not trace.num_sms:
        return None
    heads = parse_layer(str(layer["heads"]))
    head_dim = layer.get("head_dim", heads.head_dim)
    is_mla = head_dim == LATENT_DIM + ROPE_DIM
    try:
        return SchedulerFacts(
            batch_size=step.batch_size,
            num_qo_heads=heads.num_qo_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=ROPE_DIM if is_mla else head_dim,
            head_dim_v=LATENT_DIM if is_mla else head_dim,
            max_seqlen_q=max(1, step.mark.query_tokens // step.batch_size),
            max_seqlen_k=kv_len,
            num_sms=trace.num_sms,
            page_size=layer.get("page_size", 1),
            causal=True,
            varlen_q=True,
            build="sglang",
        )
    except ValueError:  # a head_dim or a length that FlashAttention-3 has no kernel for
        return None


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
    few_blocks,
    same_in_every_layer,
    split_cap,
)
"""What shows each pattern; the name of the function is the pattern's key in data/patterns.yaml."""


def _read_patterns() -> tuple[Pattern, ...]:
    """All patterns, in the order of data/patterns.yaml."""
    shows = {function.__name__: function for function in SHOWS}
    rows = yaml.safe_load((DATA / "patterns.yaml").read_text())
    patterns = []
    for key, row in rows.items():
        known = []
        for name in row.get("known", ()):
            known.append(PROBLEMS[name])
        pattern = Pattern(
            name=row["name"],
            shows=shows[key],
            fix=row.get("fix", ""),
            known=tuple(known),
            since=row.get("since", ""),
            see=tuple(row.get("see", ())),
            gain=row.get("gain", ""),
        )
        patterns.append(pattern)
    return tuple(patterns)


PATTERNS = _read_patterns()
