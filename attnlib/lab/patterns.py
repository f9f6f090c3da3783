"""Known patterns of a slow attention step: what shows each in a trace, its mend, and what records
say the mend gains. A row of `PATTERNS` per pattern; times are microseconds of a step, the median.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import pandas as pd

from ..core.backends.table import ROLE_OF, family_of
from ..core.spec import AttnSpec
from ..measure.spans import Span, busy_us
from ..measure.steps import Step
from ..measure.trace_file import Trace
from ..run import store
from ..run.frame import CUDA_CORES, FA2, FA3, decode_rows, over
from ..select.explain import explain
from ..select.libraries import AUTO, LIBRARIES
from ..studies import STUDIES

Shape = Mapping[str, Any]
TRAITS = re.compile(r"KernelTraits<\(flashinfer::MaskMode\)(\d), (?:\(unsigned int\))?(\d+)")
MANGLED_TRAITS = re.compile(r"KernelTraitsILNS_8MaskModeE(\d)ELj(\d+)E")
OPERATORS = re.compile(r"elementwise|DeviceScan|scan_innermost|^Memcpy DtoD|gather_kernel|^Memset")
SCANS, INDEXING = re.compile("DeviceScanKernel|scan_innermost"), re.compile("index|gather")
LARGE_GROUP, WIDE_TILE = 4, 128
HOPPERS = ("H100", "H200", "H20", "H800", "GH200")
STATED = "heads head_dim page_size batch_size kv_len layers dtype kv_dtype q_len".split()
"""What a shape may say; the trace tells some of it, the user may tell more."""


@dataclass(frozen=True)
class Evidence:
    """What shows a pattern, and what it takes of a step at most; NaN where a trace cannot tell."""

    words: str
    cost_us: float


@dataclass(frozen=True)
class Gain:
    """What records of a study say: `table` makes of them a row per case with a column `value`."""

    study: str
    table: Callable[[pd.DataFrame], pd.DataFrame]
    form: str


@dataclass(frozen=True)
class Pattern:
    """A pattern: `shows` finds it in the decode and verification steps of a trace, or not.

    `since` says from which release until which, and where that is known from.
    """

    name: str
    shows: Callable[[Trace, Sequence[Step]], Evidence | None]
    mend: str
    since: Callable[[], str]
    notebook: str
    gain: Gain | None = None


def tile_rows(span: Span) -> int:
    """Rows of the tile of FlashInfer's fa2, by the kernel's template; 0 if it does not say."""
    found = TRAITS.search(span.symbol) or MANGLED_TRAITS.search(span.symbol)
    return int(found[2]) if found else 0


def of_family(step: Step, family: str) -> list[Span]:
    """The attention kernels of a family."""
    return [span for span in step.attention if family_of(span.name) == family]


def of_role(step: Step, role: str) -> list[Span]:
    """The kernels beside attention that do this (`HELPERS` of the table)."""
    return [span for span in step.work if ROLE_OF.get(span.name) == role]


def _time(spans: Sequence[Span]) -> float:
    return sum(span.length_us for span in spans)


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def _family(family: str, trace: Trace, steps: Sequence[Step]) -> Evidence | None:
    ran = [found for step in steps if (found := of_family(step, family))]
    if not ran:
        return None
    words = f"{ran[0][0].name} in {len(ran)} of {len(steps)} decode steps, {len(ran[0])} a step"
    return Evidence(words, _median([_time(found) for found in ran]))


def _xqa(trace: Trace, steps: Sequence[Step]) -> Evidence | None:
    return _family("xqa", trace, steps) if any(name in trace.gpu for name in HOPPERS) else None


def _prepared_in_each_layer(trace: Trace, steps: Sequence[Step]) -> Evidence | None:
    ran = [found for step in steps if len(found := of_role(step, "prepare")) > 1]
    if not ran:
        return None
    words = f"{ran[0][0].name} {len(ran[0])} times a step, once would do"
    return Evidence(words, _median([_time(found[1:]) for found in ran]))


def _op_by_op(trace: Trace, steps: Sequence[Step]) -> Evidence | None:
    """A scan and an index kernel in one run of elementwise kernels before the first attention."""
    ran = [found for step in steps if (found := _operators(step.ahead))]
    if not ran or len(ran) < len(steps) / 2:
        return None
    length = [found[-1].end_us - found[0].start_us for found in ran]
    names = ", ".join(dict.fromkeys(span.name for span in ran[0]))
    return Evidence(f"{len(ran[0])} launches before the first layer: {names}", _median(length))


def _operators(ahead: Sequence[Span]) -> list[Span]:
    runs: list[list[Span]] = [[]]
    for span in ahead:
        if OPERATORS.search(span.name):
            runs[-1].append(span)
        elif runs[-1]:
            runs.append([])
    wanted = (SCANS, INDEXING)
    whole = [run for run in runs if all(any(w.search(s.name) for s in run) for w in wanted)]
    return whole[-1] if whole else []


def _unsplit(trace: Trace, steps: Sequence[Step]) -> Evidence | None:
    """fa2 that merges nothing, or has as many blocks as requests, and few of them."""
    ran = []
    for step in steps:
        calls = of_family(step, "fa2")
        if calls and calls[0].grid and trace.num_sms:
            blocks = math.prod(calls[0].grid)
            alone = not of_role(step, "merge") or calls[0].grid[0] == step.batch_size
            if alone and blocks <= 2 * trace.num_sms:
                ran.append((blocks, calls))
    if not ran:
        return None
    blocks, calls = ran[0]
    words = f"{blocks} blocks on {trace.num_sms} SMs, a request is not split; "
    words += f"the longest call takes {max(span.length_us for span in calls):,.0f} us"
    return Evidence(words, _median([_time(calls) for _, calls in ran]))


def _wide_tiles(trace: Trace, steps: Sequence[Step]) -> Evidence | None:
    ran = [
        found
        for step in steps
        if step.in_graph
        and (found := [s for s in of_family(step, "fa2") if tile_rows(s) >= WIDE_TILE])
    ]
    if not ran:
        return None
    words = f"fa2 with tiles of {tile_rows(ran[0][0])} rows in a CUDA graph, {len(ran[0])} a step"
    return Evidence(words, _median([_time(found) for found in ran]))


def _large_groups(trace: Trace, steps: Sequence[Step]) -> Evidence | None:
    found = _family("cuda-cores", trace, steps)
    groups = {s.block[1] for step in steps for s in of_family(step, "cuda-cores") if s.block}
    if not found or max(groups, default=0) < LARGE_GROUP:
        return None
    return Evidence(f"{found.words}; {max(groups)} query heads share a KV head", found.cost_us)


def _lengths_copied(trace: Trace, steps: Sequence[Step]) -> Evidence | None:
    """Under the step's mark, where no sampled tokens are: a copy to the host and a wait for it."""
    ran = []
    for step in steps:
        copies = [span for span in step.marked if span.name == "Memcpy DtoH"]
        begin = trace.launched_us.get(copies[0].launch, math.inf) if copies else math.inf
        if waits := [wait for wait in step.waits if wait.start_us >= begin]:
            ran.append((copies, busy_us(waits)))
    if not ran or len(ran) < len(steps) / 2:
        return None
    sizes = ", ".join(str(span.copied_bytes) for span in ran[0][0])
    words = (
        f"copied to the host before attention in {len(ran)} of {len(steps)} steps: {sizes} bytes"
    )
    return Evidence(f"{words}, then a wait", _median([waited for _, waited in ran]))


def _outside_graph(trace: Trace, steps: Sequence[Step]) -> Evidence | None:
    eager = [step for step in steps if not step.in_graph]
    if not eager:
        return None
    idle = [s.body[-1].end_us - s.body[0].start_us - busy_us(s.body) for s in eager]
    words = f"attention of {len(eager)} of {len(steps)} decode steps launched one by one"
    return Evidence(f"{words}; the GPU idles between kernels", _median([max(0.0, t) for t in idle]))


def _chosen(library: str, backend: str, policy: str = AUTO, **spec: Any) -> list[str]:
    """The releases of a library that decode with `backend` on Hopper, by `data/rules`."""
    layer = AttnSpec(32, 8, 128, 16, **spec)
    ask = partial(explain, layer, mode="decode", gpu="sm90", policy=policy, env={})
    releases = LIBRARIES[library].releases
    return [r for r in releases if ask(library=f"{library}=={r}").kernel == backend]


def _fa3_since() -> str:
    plain, fp8 = _chosen("flashinfer", "fa3"), "float8_e4m3fn"
    still = [r for r in _chosen("flashinfer", "fa3", dtype=fp8) if r not in plain]
    return f"auto of FlashInfer {plain[0]} to {plain[-1]}; with FP8 queries still in {still[-1]}"


def _xqa_since() -> str:
    read = ", ".join(_chosen("vllm", "xqa", "FLASHINFER"))
    return f"vLLM's FlashInfer backend, in {read}; older releases were not read"


def _ratio(above: str, below: str, release: str, frame: pd.DataFrame) -> pd.DataFrame:
    found = over(decode_rows(frame, release=release), above, below)
    return found.assign(value=found.ratio)


def _saved(frame: pd.DataFrame) -> pd.DataFrame:
    from ..studies.scheduler_metadata.tables import savings

    found = savings(frame)
    return found.assign(value=found.saved, heads="16/2")


def _fused(frame: pd.DataFrame) -> pd.DataFrame:
    from ..studies.decode_metadata.tables import FUSED, OPS, metadata_rows

    found = over(metadata_rows(frame), OPS, FUSED)
    return found.assign(value=found.ratio)


def _tiles(frame: pd.DataFrame) -> pd.DataFrame:
    from ..studies.engine_modes.tables import plans

    found = plans(frame)
    found = found[(found.backend == "fa2") & (found["tile for a graph"] == WIDE_TILE)]
    return found.assign(value=found.ratio)[found["tile for eager"] < WIDE_TILE]


def _eager(frame: pd.DataFrame) -> pd.DataFrame:
    from ..studies.fa3_decode_regression.tables import launch_modes

    found = launch_modes(frame, "0.6.3")
    return found.assign(value=found["fa2 eager"] / found.fa2).dropna(subset="value")


REGRESSION = "fa3_decode_regression"
PATTERNS = (
    Pattern(
        "fa3 of FlashInfer decodes",
        partial(_family, "fa3"),
        "ask for backend fa2, or take FlashInfer 0.6.4 or later",
        _fa3_since,
        "02_reproduce_the_fa3_decode_regression",
        Gain(REGRESSION, partial(_ratio, FA3, FA2, "0.6.3"), "fa3 takes {} times as long as fa2"),
    ),
    Pattern(
        "FlashAttention-3's schedule is prepared in every layer",
        _prepared_in_each_layer,
        "get_scheduler_metadata once a step, given to every layer",
        lambda: "SGLang before 0.5.11 (#21104), later with DP attention; not in data/rules",
        "06_one_prepare_instead_of_one_per_layer",
        Gain("scheduler_metadata", _saved, "{} us a step saved"),
    ),
    Pattern(
        "metadata op by op",
        _op_by_op,
        "one fused launch: SGLang's, or attnlib.core.build_decode_metadata",
        lambda: "SGLang before 0.5.10 (#20778); not in data/rules",
        "05_what_does_decode_metadata_cost",
        Gain("decode_metadata", _fused, "op by op takes {} times as long as fused"),
    ),
    Pattern(
        "fa2 splits no request",
        _unsplit,
        "a plan that splits long requests (Fa2Planner), or FlashAttention-3",
        lambda: "every FlashInfer release that was read, to 0.7.2.post1; not in data/rules",
        "08_which_backend_should_i_use",
    ),
    Pattern(
        "tiles of 128 rows for a few queries",
        _wide_tiles,
        "plan without use_cuda_graph, or uniform_q_len from FlashInfer 0.7.2 on",
        lambda: "FlashInfer's plan for a graph, to 0.7.2.post1; not in data/rules",
        "08_which_backend_should_i_use",
        Gain("engine_modes", _tiles, "planned for a graph it takes {} times as long as for eager"),
    ),
    Pattern(
        "CUDA cores decode large groups",
        _large_groups,
        "use_tensor_cores=True",
        lambda: "every release: the caller asks for it; SGLang does below groups of 4",
        "02_reproduce_the_fa3_decode_regression",
        Gain(REGRESSION, partial(_ratio, CUDA_CORES, FA2, "0.6.3"), "{} times as long as fa2"),
    ),
    Pattern(
        "XQA on Hopper",
        _xqa,
        "another backend of vLLM: --attention-config.backend FLASH_ATTN",
        _xqa_since,
        "01_which_backend_really_runs",
    ),
    Pattern(
        "lengths are copied to the host in every step",
        _lengths_copied,
        "plan from lengths that the host knows, or on the GPU (Fa2Planner)",
        lambda: "FlashInfer's plan() copies indptr from the GPU in every release that was read",
        "08_which_backend_should_i_use",
    ),
    Pattern(
        "attention outside the CUDA graph",
        _outside_graph,
        "capture decode whole (SGLang's default; FULL_DECODE_ONLY of vLLM)",
        lambda: "any release: a setting",
        "02_reproduce_the_fa3_decode_regression",
        Gain(REGRESSION, _eager, "launched eagerly one call of fa2 takes {} times as long"),
    ),
)


def gained(gain: Gain | None, shape: Shape) -> str:
    """What the records say at the shape, or nearest to it, and what of the shape is not known."""
    if gain is None:
        return "no records of the mend here"
    machine = STUDIES[gain.study].reference_machine
    try:
        frame = store.load(gain.study, machine)
    except FileNotFoundError as error:
        return f"no records of the mend here: {error}"
    table = gain.table(frame).dropna(subset="value")
    used = [name for name in STATED if name in table and table[name].nunique() > 1]
    at = []
    for name in (name for name in used if name in shape):
        table = _nearest(table, name, shape[name])
        at.append(f"{name} {table[name].iloc[0]}")
    low, high = table.value.min(), table.value.max()
    span = f"{low:.3g} to {high:.3g} (median {table.value.median():.3g})"
    lacks = [name for name in used if name not in shape]
    where = f"{len(table)} recorded shapes" + (f" nearest to it: {', '.join(at)}" if at else "")
    unknown = f"; the trace does not tell {', '.join(lacks)}" if lacks else ""
    return f"{gain.form.format(span)} over {where}{unknown}; {frame.gpu.iloc[0]}"


def _nearest(table: pd.DataFrame, name: str, value: Any) -> pd.DataFrame:
    """The rows that have `value`, or the number nearest to it by ratio; all for words not there."""
    if pd.api.types.is_numeric_dtype(table[name]):
        value = min(table[name], key=lambda each: abs(math.log(each / value)))
    found = table[table[name] == value]
    return found if len(found) else table
