"""Known patterns of a slow attention step, a row of `PATTERNS` each: what shows it in a step of a
trace, its mend, and what records say the mend gains. Times are microseconds of a step.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import pandas as pd

from ..core.backends.table import FAMILIES, ROLE_OF, family_of
from ..measure.spans import Span, busy_us, find_gaps
from ..measure.steps import DECODE, PREFILL, UNKNOWN, Step
from ..measure.trace_file import Trace
from ..run import store
from ..run.frame import CUDA_CORES, FA2, FA3, decode_rows, over
from ..studies import STUDIES
from ..studies.decode_metadata.tables import FUSED, OPS, metadata_rows
from ..studies.engine_modes.tables import plans
from ..studies.fa2_plan.tables import decode_rows as fa2_rows
from ..studies.fa2_plan.tables import gains, step_table
from ..studies.fa3_decode_regression import launch_modes
from ..studies.scheduler_metadata.tables import savings

Evidence = tuple[str, float] | None
"""What shows a pattern in a step, and the microseconds that it takes of it at most."""
Shows = Callable[[Trace, Step], Evidence]
Gain = Callable[[pd.DataFrame], pd.DataFrame]
TILE = re.compile(r"KernelTraits(?:<\(flashinfer::MaskMode\)\d, (?:\(unsigned int\))?|.*?ELj)(\d+)")
OPERATORS = re.compile(r"elementwise|DeviceScan|scan_innermost|^Memcpy DtoD|gather_kernel|^Memset")
SCAN_AND_INDEX = re.compile("DeviceScanKernel|scan_innermost"), re.compile("index|gather")
LARGE_GROUP, WIDE_TILE = 4, 128
HOPPER = re.compile("H100|H200|H20|H800")
SIZES = "head_dim page_size batch_size kv_len".split()
STATED = ["heads", *SIZES, "dtype", "kv_dtype"]
"""What a shape may say."""


@dataclass(frozen=True)
class Pattern:
    """A pattern. `since` says from which release until which, and where that is known from.

    `gain` makes of a study's records a row per case, `ratio` of times without the mend and with it.
    """

    name: str
    shows: Shows
    mend: str
    since: str
    notebook: str
    study: str = ""
    gain: Gain = pd.DataFrame
    form: str = "a call {} times as long without the mend"


def tile_rows(span: Span) -> int:
    """Rows of the tile of FlashInfer's fa2, by the kernel's template; 0 if it does not say."""
    found = TILE.search(span.symbol)
    return int(found[1]) if found else 0


def kind_of(span: Span) -> str:
    """Decode or prefill, for what kind of step a kernel speaks; empty if it is no attention."""
    if not (family := family_of(span.name)):
        return ""
    if FAMILIES[family].decodes or tile_rows(span) == 16:
        return DECODE
    return PREFILL if tile_rows(span) else UNKNOWN


def ran(step: Step, what: str) -> list[Span]:
    """The kernels of a family of attention, or of what runs beside it (`ROLE_OF` of the table)."""
    return [s for s in step.work if what in (family_of(s.name), ROLE_OF.get(s.name))]


def _told(spans: Sequence[Span], words: str = "") -> Evidence:
    """Which kernel, how often, of which sizes; None without one."""
    if not spans:
        return None
    grid, block = ("x".join(map(str, size)) for size in (spans[0].grid, spans[0].block))
    told = f"{spans[0].name} {len(spans)} times a step, grid {grid}, block {block}{words}"
    return told, sum(span.length_us for span in spans)


def _kernels(what: str, when: Callable[[Trace, Step, Span], object] = lambda *_: True) -> Shows:
    """What shows a pattern by the kernels of a family that are so."""
    return lambda trace, step: _told([s for s in ran(step, what) if when(trace, step, s)])


def _op_by_op(trace: Trace, step: Step) -> Evidence:
    """A scan and an index kernel in one run of elementwise kernels before the first attention."""
    found: Evidence = None
    for alike, spans in groupby(step.ahead, lambda span: bool(OPERATORS.search(span.name))):
        run = list(spans)
        names = [span.name for span in run]
        if alike and all(any(map(words.search, names)) for words in SCAN_AND_INDEX):
            told = f"{len(run)} launches before the first layer: {', '.join(dict.fromkeys(names))}"
            found = told, run[-1].end_us - run[0].start_us
    return found


def _unsplit(trace: Trace, step: Step) -> Evidence:
    """Decode by fa2 that merges nothing, or has no tile to spare, and few blocks.

    FlashInfer's plan splits while two blocks an SM hold all parts. A graph's plan always merges,
    and its grid is padded.
    """
    calls = ran(step, "fa2") if step.kind == DECODE else []
    if not calls or not calls[0].grid:
        return None
    tiles, *heads = calls[0].grid
    room, blocks = 2 * trace.num_sms, (step.batch_size or tiles) * math.prod(heads)
    spare = step.batch_size != tiles and (not step.batch_size or blocks < room)
    if blocks > 2 * room or ran(step, "merge") and spare:
        return None
    call = f"{calls[0].length_us:,.0f} us a call"
    return _told(calls, f", on {trace.num_sms} SMs, {call}; it costs where lengths differ")


def _lengths_copied(trace: Trace, step: Step) -> Evidence:
    """Under the step's mark, where no sampled tokens are: a copy to the host and a wait for it."""
    copies = [span for span in step.marked if span.name == "Memcpy DtoH"]
    begin = trace.launched_us.get(copies[0].launch, math.inf) if copies else math.inf
    waits = [wait for wait in step.waits if wait.start_us >= begin]
    if not waits:
        return None
    sizes = ", ".join(str(span.copied_bytes) for span in copies)
    return f"{sizes} bytes to the host before attention, and a wait", busy_us(waits)


def _outside_graph(trace: Trace, step: Step) -> Evidence:
    words = "attention launched one by one; the GPU idles between kernels"
    return None if step.in_graph else (words, sum(gap.length_us for gap in find_gaps(step.body)))


def _slower(backend: str) -> Gain:
    return lambda frame: over(decode_rows(frame, release="0.6.3"), backend, FA2)


def _over(table: Gain, column: str, base: str) -> Gain:
    """Of a study's table one column over another."""
    return lambda frame: table(frame).assign(ratio=lambda found: found[column] / found[base])


def _tiles(frame: pd.DataFrame) -> pd.DataFrame:
    found = plans(frame).query(f"backend == 'fa2' and `tile for a graph` == {WIDE_TILE}")
    return found[found["tile for eager"] < WIDE_TILE]


REGRESSION = "02_reproduce_the_fa3_decode_regression", "fa3_decode_regression"
PLAN = "11_plan_flashinfer_on_the_gpu", "fa2_plan"
PATTERNS = (
    Pattern(
        "fa3 of FlashInfer decodes",
        _kernels("fa3"),
        "ask for backend fa2, or take FlashInfer 0.6.4 or later; FP8 queries have only fa3",
        "auto of FlashInfer 0.6.0 to 0.6.3; for FP8 queries to 0.7.2.post1, the last that was read",
        *REGRESSION,
        _slower(FA3),
    ),
    Pattern(
        "FlashAttention-3's schedule is prepared in every layer",
        lambda trace, step: _told(ran(step, "prepare")[1:], ", after one that would do"),
        "get_scheduler_metadata once a step, given to every layer",
        "SGLang before 0.5.11 (#21104), later with DP attention; not in data/rules",
        "06_one_prepare_instead_of_one_per_layer",
        "scheduler_metadata",
        lambda frame: savings(frame).assign(ratio=lambda found: found.saved),
        "{} us a step saved, at 16/2 heads",
    ),
    Pattern(
        "metadata op by op",
        _op_by_op,
        "one fused launch: SGLang's, or attnlib.core.build_decode_metadata",
        "SGLang before 0.5.10 (#20778); not in data/rules",
        "05_what_does_decode_metadata_cost",
        "decode_metadata",
        lambda frame: over(metadata_rows(frame), OPS, FUSED),
        "metadata alone {} times as long without the mend",
    ),
    Pattern(
        "fa2 splits no request",
        _unsplit,
        "a plan that splits long requests (Fa2Planner), or FlashAttention-3",
        "every FlashInfer release that was read, to 0.7.2.post1; not in data/rules",
        *PLAN,
        lambda frame: gains(fa2_rows(frame[frame.lengths != "fixed"])).rename(
            columns={"gain": "ratio"}
        ),
        "a call of mixed lengths {} times as long without the mend",
    ),
    Pattern(
        "tiles of 128 rows for a few queries",
        _kernels("fa2", lambda _, step, s: step.in_graph and tile_rows(s) >= WIDE_TILE),
        "plan without use_cuda_graph, or uniform_q_len from FlashInfer 0.7.2.post1 on",
        "FlashInfer's plan for a graph, to 0.7.2.post1; not in data/rules",
        "15_one_backend_for_every_mode",
        "engine_modes",
        _tiles,
    ),
    Pattern(
        "CUDA cores decode large groups",
        _kernels("cuda-cores", lambda _, step, s: s.block[1:2] >= (LARGE_GROUP,)),
        "use_tensor_cores=True",
        "every release: the caller asks for it; SGLang does below groups of 4",
        *REGRESSION,
        _slower(CUDA_CORES),
    ),
    Pattern(
        "XQA on Hopper",
        _kernels("xqa", lambda trace, step, s: HOPPER.search(trace.gpu)),
        "another backend of vLLM: --attention-config.backend FLASH_ATTN",
        "the backend FLASHINFER of vLLM 0.25.0 to 0.33.0, the last that was read",
        "01_which_backend_really_runs",
    ),
    Pattern(
        "lengths are copied to the host in every step",
        _lengths_copied,
        "plan from lengths that the host knows, or on the GPU (Fa2Planner)",
        "FlashInfer's plan() copies indptr from the GPU in every release that was read",
        *PLAN,
        _over(step_table, "copied", "planned"),
        "a step's attention {} times as long without the mend",
    ),
    Pattern(
        "attention outside the CUDA graph",
        _outside_graph,
        "capture decode whole (SGLang's default; FULL_DECODE_ONLY of vLLM)",
        "any release: a setting",
        *REGRESSION,
        _over(partial(launch_modes, release="0.6.3"), "fa2 eager", "fa2"),
    ),
)


def gained(pattern: Pattern, shape: Mapping[str, Any]) -> str:
    """What the records say at the shape, or nearest to it, and what of the shape is not known."""
    if not pattern.study:
        return "no records of the mend here"
    try:
        frame = store.load(pattern.study, STUDIES[pattern.study].reference_machine)
    except FileNotFoundError as error:
        return f"no records of the mend here: {error}"
    table = pattern.gain(frame).dropna(subset="ratio")
    used = [name for name in STATED if name in table and table[name].nunique() > 1]
    at = []
    for name in (name for name in used if name in shape):
        near, number = table[name] == shape[name], pd.api.types.is_numeric_dtype(table[name])
        if number:
            far = (table[name] / float(shape[name])).map(math.log).abs()
            near = far == far.min()
        table = table[near] if near.any() else table
        at.append(f"{name} {table[name].iloc[0]}" if near.any() else f"no {name} {shape[name]!r}")
    low, middle, high = (f"{value:.3g}" for value in table.ratio.quantile([0, 0.5, 1]))
    told = pattern.form.format(f"{low} to {high} (median {middle})" if len(table) > 1 else low)
    told = told if table.ratio.max() > 1 else f"nothing to gain, {told}"
    near = f" nearest to it: {', '.join(at)}" if at else ""
    lacks = ", ".join(name for name in used if name not in shape)
    unknown = f"; the trace does not tell {lacks}" if lacks else ""
    shapes = f"{len(table)} recorded shape{'s' * (len(table) > 1)}"
    return f"{told} over {shapes}{near}{unknown}; {frame.gpu.iloc[0]}"
