"""Traces of servers, read as a stream: of torch.profiler (`.json`, `.json.gz`) or Nsight Systems
(`.sqlite`, by `nsys export --type sqlite`), whose rows become the same events. Needs no torch.

Marks are annotations that SGLang (`step[DECODE bs=4]`) and vLLM (`execute_context_0(0)_...`) put
around a forward pass. Times are microseconds from the first event of a length.
"""

import gzip
import json
import os
import re
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TextIO

from .marks import BEGINS
from .spans import BY_START, GPU_WORK, LAUNCHES, MOST_NAME, Event, Span, work_span

CHUNK = 1 << 20
"""Characters read at a time."""
MOST_CHARACTERS = 1 << 24
"""Most characters that a single event, or what precedes them all, may take."""
SYNCHRONIZE = "Synchronize"
MOST_OF_CALL = 100
"""Characters of the name of a call of the CUDA API."""
CALL_US = 5.0
"""A shorter call of the CUDA API is not looked at, unless it is a synchronization."""
VERSION = re.compile(r"_(?:ptsz|v\d{1,9})$")
"""What Nsight Systems writes behind the name of a call."""
EVENTS = re.compile(r'"traceEvents"\s*:\s*(?=\[)')
DEVICES = re.compile(r'"deviceProperties"\s*:\s*(?=\[)')
BETWEEN = re.compile(r"[\s,]*")
DECODER = json.JSONDecoder(strict=False)
COPIES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD"}
"""CUPTI's kinds of copies."""
BROKEN = (
    # cut short or damaged
    EOFError,
    zlib.error,
    gzip.BadGzipFile,
    sqlite3.Error,
    UnicodeError,
    json.JSONDecodeError,
    # of another form
    RecursionError,
    KeyError,
    TypeError,
    AttributeError,
)
"""What reading a file raises that is not a whole trace."""
MOST = 2**53
"""Above every time of a trace."""
COUNTS = ("device", "correlation", "graph id", "bytes")
CUPTI = "CUPTI_ACTIVITY_KIND_"
CAPTURE = "--trace cuda,nvtx --cuda-graph-trace=node"
Spans = Sequence[Span]
Gpus = dict[Any, tuple[str | None, int | None]]
"""Number of a GPU -> its name and count of SMs."""
TABLES = {
    f"{CUPTI}KERNEL": "kernel",
    f"{CUPTI}MEMCPY": "gpu_memcpy",
    f"{CUPTI}MEMSET": "gpu_memset",
    f"{CUPTI}RUNTIME": "cuda_runtime",
    "NVTX_EVENTS": "user_annotation",
}
"""Table of an export -> the category that torch.profiler has for it."""
CATEGORIES = (*GPU_WORK, *LAUNCHES, "user_annotation")
"""Of the events that are looked at."""
READ = (*TABLES, f"{CUPTI}GRAPH_TRACE", "StringIds", "TARGET_INFO_GPU")
"""Tables of an export that are read."""


@dataclass(frozen=True)
class Trace:
    """What one GPU of a trace ran, by start, and in which calls the host was meanwhile.

    `work` are kernels, copies and fills. `calls` are those of the CUDA API, without the short ones;
    `waits` those of them that return when the GPU is done: synchronizations, and copies that last
    until they are done (of pageable memory), which are named with the copy. `launched_us` maps a
    launch to the moment the host made it. `gpu` is "" and `num_sms` 0 where the file lacks them.
    """

    path: str
    source: str
    gpu: str
    num_sms: int
    gpus: int
    work: Spans
    calls: Spans
    waits: Spans
    marks: Spans
    launched_us: Mapping[int, float]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all work."""
        return frozenset(span.name for span in self.work)

    @cached_property
    def calls_until_us(self) -> list[float]:
        """For each call the latest end of it and of those before it."""
        return list(accumulate([call.end_us for call in self.calls], max))

    @cached_property
    def has_launches(self) -> bool:
        """Whether it has the calls of the CUDA API that launched most of its work."""
        launched = sum(span.launch in self.launched_us for span in self.work)
        return 2 * launched > len(self.work)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace; ValueError in one line for another file, or one cut short or without kernels.

    OSError where it cannot be read. Memory grows with the kernels that it holds, not with its size.
    """
    path = Path(path)
    with path.open("rb") as file:
        begins = file.read(16)
    try:
        if begins == b"SQLite format 3\0":
            address = f"{path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(address, uri=True)) as base:
                return _read_nsys(path, base)
        opened = gzip.open if begins.startswith(b"\x1f\x8b") else open
        with opened(path, "rt", encoding="utf-8", errors="replace") as text:
            return _read_chrome(path, text)
    except BROKEN as error:
        raise ValueError(f"{path} must be a whole trace: {error}") from None


def _read_chrome(path: Path, text: TextIO) -> Trace:
    head = text.read(CHUNK)
    if not head:
        raise ValueError(f"{path} must be a trace, it is empty")
    start = EVENTS.search(head)
    while not start:
        more = text.read(CHUNK)
        head += more
        if not more or len(head) > MOST_CHARACTERS:
            raise ValueError(
                f"{path} must be a Chrome trace of torch.profiler (.json, .json.gz) or an export "
                f"by nsys export --type sqlite; it begins with {head[:24]!r}"
            )
        start = EVENTS.search(head)
    gpus = _devices(head[: start.start()])
    events = _events(
        path,
        text,
        head[start.end() + 1 :],
        gpus,
    )
    return _kept(path, "torch.profiler", gpus, events)


def _devices(text: str) -> Gpus:
    """The GPUs that this part of a file describes."""
    header = DEVICES.search(text)
    if not header:
        return {}
    devices, _ = DECODER.raw_decode(text, header.end())
    return _gpus(devices, "numSms")


def _gpus(devices: Iterable[Event], sms: str) -> Gpus:
    """Names and counts of SMs; `sms` is the key of the latter."""
    gpus = {}
    for device in devices:
        number = device.get("id")
        gpus[number] = (device.get("name"), device.get(sms))
    return gpus


def _events(
    path: Path,
    text: TextIO,
    buffer: str,
    gpus: Gpus,
) -> Iterator[Event]:
    """The events of a Chrome trace, one after the other; `buffer` begins within their list.

    A file may describe its GPUs behind them (SGLang's merged ranks); they are put into `gpus`.
    """
    place = 0
    count = 0
    while True:
        place = next(BETWEEN.finditer(buffer, place)).end()
        if buffer.startswith("]", place):
            gpus |= _devices(buffer[place:] + text.read(MOST_CHARACTERS))
            return
        try:
            event, place = DECODER.raw_decode(buffer, place)
        except ValueError as error:
            more = text.read(CHUNK)
            if not more or len(buffer) > MOST_CHARACTERS:
                words = f"{path} ends within its events, after {count:,}: is it whole?"
                raise ValueError(words) from error
            buffer = buffer[place:] + more
            place = 0
        else:
            count += 1
            yield event if isinstance(event, dict) else {}


def _read_nsys(path: Path, base: sqlite3.Connection) -> Trace:
    base.row_factory = sqlite3.Row
    base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_CHARACTERS)
    tables = _tables(path, base)
    whole_graphs = f"SELECT * FROM {CUPTI}GRAPH_TRACE LIMIT 1"  # noqa: S608 - our own name
    if f"{CUPTI}GRAPH_TRACE" in tables and base.execute(whole_graphs).fetchone():
        raise ValueError(f"{path} has CUDA graphs as a whole: capture with {CAPTURE}")
    if f"{CUPTI}KERNEL" not in tables:
        raise ValueError(f"{path} has no kernels: capture with {CAPTURE}")
    strings = [*base.execute("SELECT id, value FROM StringIds")]
    names = {row["id"]: row["value"] for row in strings}
    if len(names) < len(strings):
        raise TypeError("StringIds must have each id once")
    gpus: Gpus = {}
    if "TARGET_INFO_GPU" in tables:
        rows = base.execute("SELECT * FROM TARGET_INFO_GPU")
        gpus = _gpus(map(dict, rows), "smCount")
    events = _nsys_events(base, tables, names)
    return _kept(path, "Nsight Systems", gpus, events)


def _tables(path: Path, base: sqlite3.Connection) -> set[str]:
    """The names of an export's tables; ValueError for a view in the place of one.

    A view is a query, which may never end.
    """
    tables = set()
    for row in base.execute("SELECT name, sql FROM sqlite_master"):
        name = row["name"]
        is_table = str(row["sql"]).upper().startswith("CREATE TABLE")
        if name in READ and not is_table:
            raise ValueError(f"{path} must hold {name} as a table, it is a view")
        tables.add(name)
    return tables


def _nsys_events(
    base: sqlite3.Connection,
    tables: set[str],
    names: Mapping[Any, str],
) -> Iterator[Event]:
    """The rows of an export as events, table by table."""
    for table, category in TABLES.items():
        if table not in tables:
            continue
        rows = base.execute(f"SELECT * FROM {table}")  # noqa: S608 - our own name
        for row in map(dict, rows):
            # A mark of a moment, and a range that never ended, have no end.
            if category != "user_annotation" or row["end"] is not None:
                yield _event(row, category, names)


def _event(
    row: Event,
    category: str,
    names: Mapping[Any, str],
) -> Event:
    """A row of an export as torch.profiler would write it; Nsight Systems counts nanoseconds."""
    ids = []
    for key in ("demangledName", "nameId", "textId"):
        ids.append(row.get(key))
    known = [each for each in ids if each is not None]
    number = known[0] if known else None
    if number is not None and number not in names:
        raise TypeError(f"StringIds must have id {number!r}, the name of a {category}")
    name = row.get("text") or names.get(number, "")
    if category == "gpu_memcpy":
        name = COPIES.get(row.get("copyKind", 0), "Memcpy")
    elif category == "gpu_memset":
        name = "Memset"
    args = {
        "device": row.get("deviceId"),
        "stream": row.get("streamId"),
        "correlation": row.get("correlationId"),
        "graph id": row.get("graphNodeId"),
        "bytes": row.get("bytes"),
    }
    for size in ("grid", "block"):
        counts = [row.get(f"{size}{axis}") for axis in "XYZ"]
        args[size] = counts if None not in counts else ()
    start = _number(row, "start")
    thread = row.get("globalPid") or row.get("globalTid") or 0
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "args": args,
        "pid": f"[{thread >> 24}]",
        "ts": start / 1e3,
        "dur": (_number(row, "end") - start) / 1e3,
    }


class _Kept:
    """What is looked at of a trace's events, by process: correlation ids are its own."""

    def __init__(self) -> None:
        self.work: dict[tuple[str, Any], list[Span]] = defaultdict(list)
        """By process and GPU."""
        self.calls: dict[str, list[Span]] = defaultdict(list)
        self.marks: dict[str, list[Span]] = defaultdict(list)
        self.launched_us: dict[str, dict[int, float]] = defaultdict(dict)
        self.graphs: dict[str, set[int]] = defaultdict(set)
        """Launches of CUDA graphs."""

    def take(
        self,
        event: Event,
        start: float,
        length: float,
    ) -> None:
        """Keep an event of a category that is known; its times are microseconds."""
        category = event["cat"]
        name = event["name"][:MOST_NAME]
        args = event.get("args") or {}
        pid = event.get("pid")
        process = ""
        # Where a file has several, which ran or launched it (SGLang's `[TP0] 7`).
        if isinstance(pid, str) and pid.startswith("["):
            process, _, _ = pid.partition("]")
        launch = args.get("correlation")
        if category in GPU_WORK:
            device = args.get("device", pid)
            self.work[process, device].append(work_span(event, start))
        elif category in LAUNCHES:
            call = Span(
                kind="call",
                name=VERSION.sub("", name[:MOST_OF_CALL]),
                start_us=start,
                length_us=length,
                self_us=length,
                launch=-1 if launch is None else launch,
            )
            self.take_call(process, call)
        elif category == "user_annotation" and name.startswith(BEGINS):
            mark = Span(
                kind="mark",
                name=name,
                start_us=start,
                length_us=length,
                self_us=length,
            )
            self.marks[process].append(mark)

    def take_call(self, process: str, call: Span) -> None:
        """Keep a call of the CUDA API, and what it launched."""
        is_wait = SYNCHRONIZE in call.name
        if is_wait or call.length_us >= CALL_US:
            self.calls[process].append(call)
        if call.launch >= 0 and not is_wait:
            self.launched_us[process][call.launch] = call.start_us
            if "GraphLaunch" in call.name:
                self.graphs[process].add(call.launch)


def _kept(
    path: Path,
    source: str,
    gpus: Gpus,
    events: Iterable[Event],
) -> Trace:
    """The trace of the GPU that ran most; ValueError if none ran anything."""
    kept = _Kept()
    begin = None
    for event in events:
        if event.get("ph") != "X":
            continue
        name = event.get("name")
        args = event.get("args") or {}
        if not isinstance(name, str) or not isinstance(args, dict):
            raise TypeError(
                f"an event must have a name and args, got {name!r:.60} and {args!r:.60}"
            )
        if begin is None:
            begin = _number(event, "ts")
        if event.get("cat") not in CATEGORIES:
            continue
        start = round(_number(event, "ts") - begin, 3)
        length = _number(event, "dur")
        _require_counts(name, args)
        kept.take(event, start, length)
    everything = chain.from_iterable(kept.work.values())
    if not any(span.kind == "kernel" for span in everything):
        raise ValueError(
            f"{path} has no kernel of a GPU: profile with ProfilerActivity.CUDA, or nsys with "
            "--trace cuda, on the process that holds the GPU"
        )
    sizes = {place: len(spans) for place, spans in kept.work.items()}
    process, device = max(sizes, key=sizes.__getitem__)
    gpu, num_sms = _name_and_sms(gpus, device)
    work = _in_graphs(kept.work[process, device], kept.graphs[process])
    calls = _named(kept.calls[process], work)
    return Trace(
        path=path.name,
        source=source,
        gpu=gpu,
        num_sms=num_sms,
        gpus=len(kept.work),
        work=sorted(work, key=BY_START),
        calls=sorted(calls, key=BY_START),
        waits=sorted(filter(_is_wait, calls), key=BY_START),
        marks=sorted(kept.marks[process], key=BY_START),
        launched_us=kept.launched_us[process],
    )


def _named(calls: Iterable[Span], work: Iterable[Span]) -> list[Span]:
    """The calls; one that lasted until its copy was done has the copy's name behind its own."""
    copies = {}
    for span in work:
        if span.kind == "memcpy" and not span.in_graph:
            copies[span.launch] = span
    named = []
    for call in calls:
        copy = copies.get(call.launch)
        if copy and call.launch >= 0 and call.end_us >= copy.end_us:
            symbol = copy.symbol[:MOST_OF_CALL]
            call = replace(call, name=f"{call.name}: {symbol}")
        named.append(call)
    return named


def _is_wait(call: Span) -> bool:
    """Whether the host stood in it until the GPU was done: `_named` tells the copies."""
    return SYNCHRONIZE in call.name or ": " in call.name


def _in_graphs(
    work: Iterable[Span],
    replays: Set[int],
) -> list[Span]:
    """Work with `in_graph` set: older profilers tell a graph's kernels by their launch alone."""
    found = []
    for span in work:
        is_replayed = span.launch in replays and not span.in_graph
        found.append(replace(span, in_graph=True) if is_replayed else span)
    return found


def _name_and_sms(gpus: Gpus, device: Any) -> tuple[str, int]:
    """Name and SMs of a GPU, "" and 0 where the file lacks them; TypeError for other values."""
    gpu, num_sms = gpus.get(device, (None, None))
    gpu = "" if gpu is None else gpu
    num_sms = 0 if num_sms is None else num_sms
    is_count = type(num_sms) is int and num_sms >= 0
    if not isinstance(gpu, str) or not is_count:
        raise TypeError(f"a GPU must have a name and a count of SMs, got {gpu!r} and {num_sms!r}")
    whole = gpu[:MOST_NAME].encode(errors="replace")
    return whole.decode(), num_sms


def _number(owner: Mapping[str, Any], name: str) -> float:
    """A time of an event or row; TypeError unless it is a number from 0 to 2**53."""
    value: Any = owner.get(name)
    if type(value) not in (int, float) or not 0 <= value < MOST:
        raise TypeError(f"{name} of an event must be a number from 0 to 2**53, got {value!r:.60}")
    return value


def _require_counts(name: str, args: Mapping[str, Any]) -> None:
    """TypeError unless ids, bytes and sizes are whole numbers, where they are given."""
    grid = args.get("grid") or ()
    block = args.get("block") or ()
    sizes = [*grid, *block]
    counts = [args.get(key) for key in COUNTS] + sizes
    given = [count for count in counts if count is not None]
    are_whole = all(type(count) is int for count in given)
    if not are_whole or any(size < 0 for size in sizes if size is not None):
        listed = ", ".join(COUNTS)
        words = f"{listed}, grid and block of {name!r:.60} must be whole, sizes >= 0"
        raise TypeError(f"{words}, got {counts!r:.60}")
