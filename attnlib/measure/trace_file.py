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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from .spans import GPU_WORK, LAUNCHES, Span, work_span

CHUNK = 1 << 20
MOST_CHARACTERS = 1 << 24
"""Characters read at a time; and most that a single event, or what precedes them all, may take."""
MARKS = ("step[", "execute_")
EVENTS, DEVICES = (
    re.compile(rf'"{name}"\s*:\s*(?=\[)') for name in ("traceEvents", "deviceProperties")
)
BETWEEN = re.compile(r"[\s,]*")
DECODER = json.JSONDecoder(strict=False)
COPIES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD"}
"""CUPTI's kinds of copies."""
TORN = EOFError, zlib.error, gzip.BadGzipFile, sqlite3.Error, UnicodeError, json.JSONDecodeError
BROKEN = *TORN, RecursionError, KeyError, TypeError, AttributeError
"""What reading a file raises that is cut short, damaged or of another form."""
MOST = 2**53
"""Above every time of a trace."""
COUNTS = "device", "correlation", "graph id", "bytes"
CUPTI = "CUPTI_ACTIVITY_KIND_"
CAPTURE = "--trace cuda,nvtx --cuda-graph-trace=node"
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


@dataclass(frozen=True)
class Trace:
    """What one GPU of a trace ran, by start, and what the host waited for meanwhile.

    `work` are kernels, copies and fills; `waits` are calls that block the host. `launched_us` maps
    a launch to the moment the host made it. `gpu` is empty and `num_sms` 0 where no file says them.
    """

    path: str
    source: str
    gpu: str
    num_sms: int
    gpus: int
    work: Sequence[Span]
    waits: Sequence[Span]
    marks: Sequence[Span]
    launched_us: Mapping[int, float]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all work."""
        return frozenset(span.name for span in self.work)

    @cached_property
    def has_launches(self) -> bool:
        """Whether it has the calls of the CUDA API that launched most of its work."""
        return 2 * sum(span.launch in self.launched_us for span in self.work) > len(self.work)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace; ValueError in one line for a file that is none, is cut short or has no kernels.

    OSError where it cannot be read. Memory grows with the kernels that it holds, not with its size.
    """
    path = Path(path)
    with path.open("rb") as file:
        begins = file.read(16)
    try:
        if begins == b"SQLite format 3\0":
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base:
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
    while not (start := EVENTS.search(head)):
        more = text.read(CHUNK)
        head += more
        if not more or len(head) > MOST_CHARACTERS:
            raise ValueError(
                f"{path} must be a Chrome trace of torch.profiler (.json, .json.gz) or an export "
                f"by nsys export --type sqlite; it begins with {head[:24]!r}"
            )
    gpus = _devices(head[: start.start()])
    events = _events(path, text, head[start.end() + 1 :], gpus)
    return _kept(path, "torch.profiler", gpus, events)


def _devices(text: str) -> Gpus:
    """The GPUs that this part of a file describes."""
    header = DEVICES.search(text)
    devices = DECODER.raw_decode(text, header.end())[0] if header else []
    return {device.get("id"): (device.get("name"), device.get("numSms")) for device in devices}


def _events(path: Path, text: TextIO, buffer: str, gpus: Gpus) -> Iterator[dict[str, Any]]:
    """The events of a Chrome trace, one after the other; `buffer` begins within their list.

    A file may describe its GPUs behind them (SGLang's merged ranks); they are put into `gpus`.
    """
    place = count = 0
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
    base.row_factory = lambda cursor, row: dict(
        zip((column[0] for column in cursor.description), row, strict=True)
    )
    tables = {row["name"] for row in base.execute("SELECT name FROM sqlite_master")}
    whole_graphs = f"SELECT * FROM {CUPTI}GRAPH_TRACE LIMIT 1"  # noqa: S608 - our own name
    if f"{CUPTI}GRAPH_TRACE" in tables and base.execute(whole_graphs).fetchone():
        raise ValueError(f"{path} has CUDA graphs as a whole: capture with {CAPTURE}")
    if f"{CUPTI}KERNEL" not in tables:
        raise ValueError(f"{path} has no kernels: capture with {CAPTURE}")
    strings = [*base.execute("SELECT id, value FROM StringIds")]
    names = {row["id"]: row["value"] for row in strings}
    if len(names) < len(strings):
        raise TypeError("StringIds must have each id once")
    cards = base.execute("SELECT * FROM TARGET_INFO_GPU") if "TARGET_INFO_GPU" in tables else ()
    gpus = {row.get("id"): (row.get("name"), row.get("smCount")) for row in cards}
    events = (
        _event(row, category, names)
        for table, category in TABLES.items()
        if table in tables
        for row in base.execute(f"SELECT * FROM {table}")  # noqa: S608 - our own name
        # A mark of a moment, and a range that never ended, have no end.
        if category != "user_annotation" or row["end"] is not None
    )
    return _kept(path, "Nsight Systems", gpus, events)


def _event(row: Mapping[str, Any], category: str, names: Mapping[Any, str]) -> dict[str, Any]:
    """A row of an export as torch.profiler would write it; Nsight Systems counts nanoseconds."""
    known = (row.get(key) for key in ("demangledName", "nameId", "textId"))
    number = next((n for n in known if n is not None), None)
    if number is not None and number not in names:
        raise TypeError(f"StringIds must have id {number!r}, the name of a {category}")
    name = row.get("text") or names.get(number, "")
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
    process = (row.get("globalPid") or row.get("globalTid") or 0) >> 24
    us = {"ts": start / 1e3, "dur": (_number(row, "end") - start) / 1e3}
    named = {"gpu_memcpy": COPIES.get(row.get("copyKind", 0), "Memcpy"), "gpu_memset": "Memset"}
    whole = {"ph": "X", "cat": category, "name": named.get(category, name), "args": args}
    return {**whole, "pid": f"[{process}]", **us}


def _kept(path: Path, source: str, gpus: Gpus, events: Iterable[Mapping[str, Any]]) -> Trace:
    """What is looked at, of the GPU that ran most; ValueError if none ran anything."""
    work: dict[tuple[str, Any], list[Span]] = defaultdict(list)
    # By process: correlation ids are its own.
    waits: dict[str, list[Span]] = defaultdict(list)
    marks: dict[str, list[Span]] = defaultdict(list)
    launched: dict[str, dict[int, float]] = defaultdict(dict)
    graphs: dict[str, set[int]] = defaultdict(set)
    begin = None
    for event in events:
        if event.get("ph") != "X":
            continue
        category = event.get("cat")
        name = event.get("name")
        args = event.get("args") or {}
        if not isinstance(name, str) or not isinstance(args, dict):
            raise TypeError(
                f"an event must have a name and args, got {name!r:.60} and {args!r:.60}"
            )
        begin = _number(event, "ts") if begin is None else begin
        if category not in (*GPU_WORK, *LAUNCHES, "user_annotation"):
            continue
        start = round(_number(event, "ts") - begin, 3)
        length = _number(event, "dur")
        _require_counts(name, args)
        launch = args.get("correlation")
        pid = event.get("pid")
        # Where a file has several, which ran or launched it (SGLang's `[TP0] 7`).
        process = pid.partition("]")[0] if isinstance(pid, str) and pid.startswith("[") else ""
        if category in GPU_WORK:
            device = args.get("device", event.get("pid"))
            work[process, device].append(work_span(event, start))
        elif category in LAUNCHES and "Synchronize" in name:
            waits[process].append(Span("wait", name, start, length, length))
        elif category in LAUNCHES and launch is not None:
            launched[process][launch] = start
            graphs[process] |= {launch} if "GraphLaunch" in name else set()
        elif category == "user_annotation" and name.startswith(MARKS):
            marks[process].append(Span("mark", name, start, length, length))
    if not any(span.kind == "kernel" for spans in work.values() for span in spans):
        raise ValueError(
            f"{path} has no kernel of a GPU: profile with ProfilerActivity.CUDA, or nsys with "
            "--trace cuda, on the process that holds the GPU"
        )
    process, device = max(work, key=lambda place: len(work[place]))
    # Older profilers tell a graph's kernels by their launch alone.
    replays = graphs[process]
    ran = [
        span if span.in_graph or span.launch not in replays else replace(span, in_graph=True)
        for span in work[process, device]
    ]
    for spans in (ran, waits[process], marks[process]):
        spans.sort(key=lambda span: span.start_us)
    gpu, sms = gpus.get(device, (None, None))
    if not isinstance(gpu or "", str) or type(sms or 0) is not int or (sms or 0) < 0:
        raise TypeError(f"a GPU must have a name and a count of SMs, got {gpu!r} and {sms!r}")
    facts = (path.name, source, gpu or "", sms or 0, len(work))
    return Trace(*facts, ran, waits[process], marks[process], launched[process])


def _number(owner: Mapping[str, Any], name: str) -> float:
    """A time of an event or row; TypeError unless it is a number from 0 to 2**53."""
    value: Any = owner.get(name)
    if type(value) not in (int, float) or not 0 <= value < MOST:
        raise TypeError(f"{name} of an event must be a number from 0 to 2**53, got {value!r:.60}")
    return value


def _require_counts(name: str, args: Mapping[str, Any]) -> None:
    """TypeError unless ids, bytes and sizes are whole numbers, where they are given."""
    sizes = [*(args.get("grid") or ()), *(args.get("block") or ())]
    counts = [*map(args.get, COUNTS), *sizes]
    if not {*map(type, counts)} <= {int, type(None)} or min(filter(None, sizes), default=0) < 0:
        words = f"{', '.join(COUNTS)}, grid and block of {name!r:.60} must be whole, sizes >= 0"
        raise TypeError(f"{words}, got {counts!r:.60}")
