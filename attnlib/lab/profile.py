"""Profile any callable: its kernels, the gaps between them, and the host's time beside the GPU's.

Host and wall time are of untraced calls, because tracing slows the host; what ran comes from the
trace. Kernels are as long traced as untraced; gaps of code that waits for its host are not, so the
share of time in which the GPU is busy is its traced time over the untraced wall time.
"""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from ..core.backends.table import RECORDED
from ..core.spec import require_int, require_word
from ..measure.files import write_whole
from ..measure.progress import progress_bar
from ..measure.spans import NO_CALL, Gap, Span, busy_us, find_gaps, gpu_work, operators
from ..run.store import data_root
from .cards import SHORT, Card, Shown, in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .timeline import Timeline

DEVICES = ("auto", "cuda", "cpu")
CALLS = 10
WARM_UP = 3
NO_GPU = {"gpu": "", "gpu_id": "cpu"}
NOT_RECORDED = {"note", "spans", "packed_trace"}
RECORDED_KINDS = ("kernel", "memcpy", "memset")
FORMATS = dict.fromkeys(("us", "us each", "shortest", "longest"), SHORT)
BLIND = (
    "torch.profiler saw no CUDA call, not even its own: is CUPTI in use by another tool? "
    "device='cpu' shows the operators"
)


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Shown):
    """What `calls` calls of one callable ran, microseconds per call unless a name says otherwise.

    The rows are kernels, copies and fills if `device` is `cuda`, operators of the host if `cpu`:
    `note` says why. `host_us` are untraced samples of the time until a call returns, `wall_us` is
    the untraced time per call of many. `ran` counts calls of the callable itself. `packed_trace` is
    the Chrome trace, compressed. `call` is the callable and its arguments in words, empty for one
    without a name; `versions` are the releases of the libraries. To be shown it needs no torch.
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
    call: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @cached_property
    def work(self) -> tuple[Span, ...]:
        """What the profile is of: GPU work, or operators; by start, over all calls."""
        return gpu_work(self.spans) if self.is_of_gpu else operators(self.spans)

    @property
    def is_of_gpu(self) -> bool:
        """Whether the rows are GPU work, not operators of the host."""
        return self.device == "cuda"

    @property
    def time_us(self) -> float:
        """Kernel times, or the operators' own, added up."""
        return sum(span.self_us for span in self.work) / self.calls

    @property
    def busy_us(self) -> float:
        """Time in which at least one of them ran."""
        return busy_us(self.work) / self.calls

    @property
    def launches(self) -> float:
        """Kernels, copies and fills per call; of a CPU profile the operators."""
        return len(self.work) / self.calls

    @property
    def host_launches(self) -> float:
        """Launches that the host made per call: one for a whole CUDA graph; 0 for operators."""
        launches = {span.launch for span in self.work if span.kind != "operator"}
        return len(launches) / self.calls

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Times within a call in which none ran, over all calls, as traced."""
        return tuple(gap for gap in find_gaps(self.work) if gap.call != NO_CALL)

    @property
    def gap_us(self) -> float:
        """Gaps within a call, added up, as traced."""
        return sum(gap.length_us for gap in self.gaps) / self.calls

    @property
    def row_word(self) -> str:
        """What a row of the table is."""
        return "kernel" if self.is_of_gpu else "CPU operator"

    @property
    def launch_word(self) -> str:
        """How often it ran is called."""
        return "launches" if self.is_of_gpu else "calls"

    def table(self) -> pd.DataFrame:
        """A row per kernel name (or CPU operator), longest first; `us` per call, others per launch.

        An operator's time is its own, without that of the operators it calls. Names are without
        template arguments.
        """
        rows = [(span.name, span.self_us) for span in self.work]
        work = pd.DataFrame(rows, columns=[self.row_word, "us"])
        us = work.groupby(self.row_word, sort=False).us
        columns = {
            self.launch_word: us.size() / self.calls,
            "us": us.sum() / self.calls,
            "share": us.sum() / work.us.sum(),
            "us each": us.sum() / us.size(),
            "shortest": us.min(),
            "longest": us.max(),
        }
        table = pd.DataFrame(columns)
        return table.sort_values("us", ascending=False, kind="stable").round(3).reset_index()

    def timeline(self, call: int = 0, beside: Profile | None = None) -> Figure:
        """One call as a figure: a row per kernel (or CPU operator), a bar per launch, gaps shaded.

        Parameters
        ----------
        call : int, optional
            Its number, from 0.
        beside : Profile, optional
            Another profile, such as a recorded one, whose call of this number is drawn below over
            the same time axis. Both begin with their first kernel.

        Raises
        ------
        TypeError
            For a `beside` that is no profile.
        ValueError
            For a number of no profiled call, for a call that ran nothing, and for a profile of GPU
            work beside one of CPU operators.

        Examples
        --------
        >>> from attnlib.lab.profile import load_profile
        >>> own, recorded = load_profile("metadata_fused"), load_profile("metadata_op_by_op")
        >>> figure = own.timeline(beside=recorded)
        >>> [axis.get_title(loc="left") for axis in figure.axes]
        ['fused, call 0', 'op by op, call 0']
        """
        from .timeline import draw_timelines

        if beside is None:
            return draw_timelines([self._work_of(call)], self.origin)
        if not isinstance(beside, Profile):
            raise TypeError(f"beside must be a Profile, got {type(beside).__name__}")
        if beside.is_of_gpu != self.is_of_gpu:
            raise ValueError(f"beside must be of {self.row_word}s, got {beside.row_word}s")
        both = [self._work_of(call), beside._work_of(call)]
        return draw_timelines(both, f"above: {self.origin}\nbelow: {beside.origin}")

    def _work_of(self, call: int) -> Timeline:
        """What one call ran; errors as of `timeline`."""
        from .timeline import Timeline

        require_int("call", call, least=0, most=self.calls - 1)
        spans = [span for span in self.work if span.call == call]
        if not spans:
            raise ValueError(f"call must be one that ran a {self.row_word}, got {call}")
        return Timeline(f"{self.name}, call {call}", spans)

    def save(self, path: Path) -> Path:
        """Write the profile without its trace as JSON, for `profile(..., recorded=...)`.

        ValueError for one of a callable without a name, which could stand for any other.
        """
        if not self.call:
            raise ValueError("a recorded profile must be of a callable with a name, got a lambda")
        form: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            if field.name not in NOT_RECORDED:
                form[field.name] = getattr(self, field.name)
        form["spans"] = [_form_of(span) for span in self.spans if span.kind in RECORDED_KINDS]
        text = json.dumps(form, separators=(",", ":"))
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, f"{text}\n".encode())

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the Chrome trace, for Perfetto, compressed if `.gz`; returns its absolute path.

        OSError if it cannot be written; the file is then as it was. ValueError for a recorded
        profile, which has no trace.
        """
        if not self.packed_trace:
            raise ValueError("a recorded profile has no trace: profile the call on a GPU")
        path = Path(path)
        trace = self.packed_trace
        if path.suffix != ".gz":
            trace = gzip.decompress(trace)
        return write_whole(path, trace).resolve()

    @property
    def origin(self) -> str:
        """Where it comes from: machine, torch, day, how often it ran."""
        where = self.machine["gpu"] or f"CPU, {self.threads} threads"
        how = "replayed as a CUDA graph" if self.cuda_graph else "called"
        day = self.taken_at[:10]
        return f"{where}, torch {self.torch_version}, {day}, {how} {self.calls} times"

    def card(self) -> Card:
        """The table, and what it does not hold."""
        table = self.table()
        share = (100 * table.share).map("{:.1f} %".format)
        ran = f"{self.launches:g} CPU operators a call, no kernels"
        if self.is_of_gpu:
            ran = f"{self.launches:g} kernels a call, {self.time_us:,.1f} us on the GPU"
        return Card(
            title=f"{self.name}: {ran}",
            notes=[self.note] if self.note else [],
            facts=self._gpu_facts() if self.is_of_gpu else self._cpu_facts(),
            table=in_words(table.assign(share=share), FORMATS | {self.launch_word: "g"}),
            caption=f"{self.row_word}s of a call, times in microseconds",
            footer=f"{self.origin}; the callable itself ran {self.ran} times",
            bars=table.share.tolist(),
        )

    @property
    def _untraced(self) -> str:
        """Host and wall time in words."""
        host = f"{median(self.host_us):,.1f} us until a call returns (median)"
        return f"{host}, {self.wall_us:,.1f} us a call"

    def _cpu_facts(self) -> list[tuple[str, str]]:
        untraced = ("untraced", f"{self._untraced} on average")
        if not self.work:  # of Python alone nothing was traced
            return [untraced]
        return [
            ("operators", f"{self.time_us:,.1f} us, as traced"),
            ("between operators", f"{self.gap_us:,.1f} us of Python and others, as traced"),
            untraced,
        ]

    def _gpu_facts(self) -> list[tuple[str, str]]:
        gaps = f"{self.gap_us:,.1f} us in {len(self.gaps) / self.calls:g} gaps, as traced"
        if self.gaps:
            longest = max(self.gaps, key=lambda gap: gap.length_us)
            gaps += f"; longest {longest.length_us:,.1f} us, {longest.after} to {longest.before}"
        launched = f"{self.host_launches:g} by the host"
        graphs = {span.launch for span in self.work if span.in_graph}
        if graphs:
            launched += f", {len(graphs) / self.calls:g} of them of a CUDA graph"
        gpu_waits = median(self.host_us) > self.busy_us
        slower = "the GPU waits for the host" if gpu_waits else "the host is ahead"
        share = self.busy_us / self.wall_us
        return [
            ("launches", f"{self.launches:g} kernels, copies and fills; {launched}"),
            ("GPU", f"{self.time_us:,.1f} us of kernels, busy for {self.busy_us:,.1f} us"),
            ("between kernels", gaps),
            ("GPU busy", f"{100 * share:.0f} % of the untraced time: {slower}"),
            ("untraced", f"{self._untraced} until the GPU is done"),
        ]


def profile(
    fn: Callable[..., object],
    *args: Any,
    calls: int = CALLS,
    warmup: int = WARM_UP,
    device: str = "auto",
    cuda_graph: bool = False,
    name: str = "",
    recorded: str = "",
) -> Profile:
    """Profile `fn(*args)`: its kernels, the gaps between them, the host's time beside the GPU's.

    Parameters
    ----------
    fn : callable
        Runs `warmup` + 2 x `calls` times, and once more under the profiler with any warm-up.
    *args : any
        Its arguments.
    calls, warmup : int
        Calls for the clock (1 or more) and as many traced ones; calls before them (0 or more).
    device : {"auto", "cuda", "cpu"}
        `auto` shows kernels or, where `fn` runs none, its CPU operators.
    cuda_graph : bool, default False
        Capture `fn` once, and profile the replays.
    name : str, optional
        The title; by default the name of `fn`.
    recorded : str, optional
        A profile in data/profiles that is returned in place of a run where no CUDA GPU is here. It
        must be of this call, by the names of `fn` and the types and shapes of its arguments.

    Returns
    -------
    Profile
        Times in microseconds per call; of the current device, others as far as they ended.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        For a wrong argument, for a recorded profile of another call, and for what cannot be had
        here, such as kernels without a GPU.

    Examples
    --------
    >>> import attnlib, torch
    >>> taken = attnlib.profile(torch.relu, torch.ones(8), device="cpu")
    >>> sorted(taken.table()["CPU operator"])
    ['aten::clamp_min', 'aten::relu']
    """
    import torch

    _require(fn, calls, warmup, device)
    if recorded and not torch.cuda.is_available():
        taken = load_profile(recorded)
        _require_recorded(
            taken,
            recorded,
            asked=call_words(fn, args),
            device=device,
            cuda_graph=cuda_graph,
        )
        return dataclasses.replace(taken, name=name or taken.name)
    return _profiled(
        partial(fn, *args),
        words=call_words(fn, args),
        name=name or getattr(fn, "__name__", type(fn).__name__),
        calls=calls,
        warmup=warmup,
        device=device,
        cuda_graph=cuda_graph,
    )


def call_words(fn: Callable[..., object], args: tuple[Any, ...]) -> str:
    """The callable and its arguments in words, such as `fused(int32 [3], int32 [3, 64])`.

    Empty for a callable without a name of its own, as a lambda is.
    """
    name = getattr(fn, "__name__", "")
    if name in ("", "<lambda>"):
        return ""
    if not args:
        return name
    return f"{name}({', '.join(map(_argument_words, args))})"


def _argument_words(value: Any) -> str:
    """Dtype and shape of a tensor; a number or text as it is; else the type."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}"
    if isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__


def _require_recorded(
    taken: Profile,
    recorded: str,
    *,
    asked: str,
    device: str,
    cuda_graph: bool,
) -> None:
    """ValueError unless a recorded profile is of the call that is asked for."""
    if asked != taken.call:
        got = asked or "a callable without a name"
        raise ValueError(f"recorded={recorded!r} is of the call {taken.call!r}, not of {got!r}")
    if device not in ("auto", taken.device):
        raise ValueError(f"recorded={recorded!r} is of device {taken.device!r}, not of {device!r}")
    if cuda_graph != taken.cuda_graph:
        how = f"cuda_graph={taken.cuda_graph}"
        raise ValueError(f"recorded={recorded!r} was taken with {how}, not with {cuda_graph}")


def _profiled(
    call: Callable[[], object],
    *,
    words: str,
    name: str,
    calls: int,
    warmup: int,
    device: str,
    cuda_graph: bool,
) -> Profile:
    """The profile of `call`; arguments and errors as of `profile`."""
    import torch

    from ..measure import machine, spans

    no_gpu = _why_no_gpu(device, cuda_graph)
    timed = _time_and_trace(
        call,
        name=name,
        calls=calls,
        warmup=warmup,
        cuda_graph=cuda_graph,
        gpu=not no_gpu,
    )
    if not no_gpu and not spans.saw_cuda(timed.events):
        raise RuntimeError(BLIND)
    recorded_spans = spans.read_spans(timed.events)
    on_gpu = bool(gpu_work(recorded_spans))
    if not on_gpu and (device == "cuda" or cuda_graph):
        option = "cuda_graph=True" if cuda_graph else "device='cuda'"
        raise RuntimeError(f"{option} needs an fn that uses the GPU, torch.profiler saw no kernel")
    why = no_gpu or "the callable used no GPU"
    return Profile(
        name=name,
        device="cuda" if on_gpu else "cpu",
        note="" if on_gpu else f"These are CPU operators, not kernels: {why}.",
        machine=machine.identify_gpu() if on_gpu else NO_GPU,
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        taken_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        calls=calls,
        ran=timed.ran,
        cuda_graph=cuda_graph,
        spans=recorded_spans,
        host_us=timed.host_us,
        wall_us=timed.wall_us,
        packed_trace=gzip.compress(json.dumps(timed.events).encode(), mtime=0),
        call=words,
        versions=machine.describe_versions(RECORDED),
    )


class _Timed(NamedTuple):
    """Times of untraced calls, the events of traced ones, and how often the callable ran."""

    host_us: tuple[float, ...]
    wall_us: float
    events: Any
    ran: int


def _time_and_trace(
    call: Callable[[], object],
    *,
    name: str,
    calls: int,
    warmup: int,
    cuda_graph: bool,
    gpu: bool,
) -> _Timed:
    """Warm `call` up, time `calls` of it, then trace as many."""
    from ..measure import timer, trace

    ran = count()

    def counted() -> None:
        next(ran)
        call()

    steps = warmup + 2 * calls
    bar = progress_bar(total=steps, unit="call", desc=f"profile {name}", delay=0.5)
    with closing(bar):
        for _ in range(warmup):
            counted()
            bar.update()
        subject = _captured(counted) if cuda_graph else counted
        host_us, wall_us = timer.time_loop(subject, calls, gpu=gpu)
        bar.update(calls)
        # Traced last, since tracing slows the host. One more call, if there is any warm-up, pays
        # for the profiler's start.
        settle = min(1, warmup)
        events = trace.trace_calls(subject, calls, gpu=gpu, settle=settle)
        bar.update(calls)
    return _Timed(host_us=host_us, wall_us=wall_us, events=events, ran=next(ran))


def _require(fn: object, calls: int, warmup: int, device: str) -> None:
    """TypeError or ValueError for a wrong argument of `profile`."""
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}: pass it, do not call it")
    require_int("calls", calls)
    require_int("warmup", warmup, least=0)
    require_word("device", device, DEVICES)


def load_profile(name: str) -> Profile:
    """A recorded profile by name; ValueError lists those that exist."""
    folder = data_root() / "profiles"
    path = folder / f"{name}.json"
    if not path.exists():
        names = sorted(file.stem for file in folder.glob("*.json"))
        raise ValueError(f"recorded must be one of {', '.join(names) or 'none'}, got {name!r}")
    form = json.loads(path.read_text())
    spans = [_span_of(span) for span in form.pop("spans")]
    form["host_us"] = tuple(form["host_us"])
    return Profile(
        **form,
        spans=tuple(spans),
        note=_recorded_note(form),
        packed_trace=b"",
    )


def _recorded_note(form: dict[str, Any]) -> str:
    """Which call, card and releases a recorded profile is of."""
    call = form["call"]
    gpu = f"{form['machine']['gpu']} ({form['machine']['gpu_id']})"
    day = form["taken_at"][:10]
    releases = [f"torch {form['torch_version']}"]
    for name, version in form["versions"].items():
        if name not in ("python", "torch", "cuda"):
            releases.append(f"{name} {version}")
    if not form["versions"]:
        releases.append("releases of other libraries not recorded")
    return f"Recorded: {call}, on {gpu}, {', '.join(releases)}, {day}; the call did not run here."


def _form_of(span: Span) -> dict[str, Any]:
    """A span as a recorded profile has it: without what is as by default."""
    form = asdict(span)
    for field in dataclasses.fields(Span):
        if form[field.name] == field.default:
            del form[field.name]
    return form


def _span_of(form: dict[str, Any]) -> Span:
    """A span of a recorded profile."""
    fields = dict(form)
    for name in ("grid", "block"):
        if name in form:
            fields[name] = tuple(form[name])
    return Span(**fields)


def _why_no_gpu(device: str, cuda_graph: bool) -> str:
    """Why no GPU activity is traced, or the empty string; an error if it was asked for."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return ""
    why = "no CUDA GPU is here (torch.cuda.is_available() is False)"
    if device == "cpu":
        why = "device='cpu' was asked for, and what a GPU did is not shown"
    elif not torch.backends.cuda.is_built():
        why = f"torch {torch.__version__} is built without CUDA"
    if device == "cuda":
        raise RuntimeError(f"device='cuda' cannot be had: {why}")
    if cuda_graph:
        raise ValueError(f"cuda_graph=True needs kernels to capture: {why}")
    return why


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """The replay of a CUDA graph of `call`; RuntimeError if it cannot be captured."""
    from ..measure.timer import capture, warm_up

    warm_up(call)
    try:
        return capture([call]).replay
    except Exception as error:
        words = str(error).strip().partition("\n")[0]
        raise RuntimeError(f"cuda_graph=True needs an fn that can be captured: {words}") from error
