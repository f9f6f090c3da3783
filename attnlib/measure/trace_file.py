"""Traces of servers: what torch.profiler or Nsight Systems wrote, read as a stream. Needs no torch.

| file | is | of it are kept |
|---|---|---|
| `.json`, `.json.gz` | a Chrome trace of torch.profiler | GPU work, host's waits, marks |
| `.sqlite` | `nsys export --type sqlite` of Nsight Systems | the same |

Marks are annotations that SGLang (`step[DECODE bs=4]`) and vLLM (`execute_context_0(0)_...`) put
around a forward pass. Times are microseconds from the first that was kept.
"""

import gzip
import json
import math
import os
import re
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from .spans import GPU_WORK, LAUNCHES, Span, short_name

CHUNK, MOST_CHARACTERS = 1 << 20, 1 << 24
"""Characters read at a time; and most that a single event, or what precedes them all, may take."""
MARKS = ("step[", "execute_")
EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
BETWEEN = re.compile(r"[\s,]*")
GZIP, SQLITE = b"\x1f\x8b", b"SQLite format 3\0"
COPIES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD"}
"""CUPTI's kinds of copies."""
KERNELS, GRAPHS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
EXPECTED = (
    "a Chrome trace of torch.profiler (.json, .json.gz) or an Nsight Systems export (.sqlite)"
)


@dataclass(frozen=True)
class Trace:
    """What one GPU of a trace ran, by start, and what the host waited for meanwhile.

    `work` are kernels, copies and fills; `waits` are calls that block the host; `marks` are of the
    host, or of the GPU where the host's are missing (`kind` is `gpu mark`). `launched_us` maps a
    launch to the moment it was made, by the host. `num_sms` is 0 and `gpu` empty if not told.
    """

    path: str
    source: str
    gpu: str
    num_sms: int
    gpus: int
    work: tuple[Span, ...]
    waits: tuple[Span, ...]
    marks: tuple[Span, ...]
    launched_us: Mapping[int, float]


@dataclass
class _Found:
    """What was read so far; its clock begins at the first that was."""

    gpus: dict[Any, dict[str, Any]] = field(default_factory=dict)
    work: dict[Any, list[Span]] = field(default_factory=dict)
    waits: list[Span] = field(default_factory=list)
    marks: list[Span] = field(default_factory=list)
    launched: dict[int, float] = field(default_factory=dict)
    graphs: set[int] = field(default_factory=set)
    same: dict[Any, Any] = field(default_factory=dict)
    begin: float = float("nan")

    def gpu(
        self, device: Any, kind: str, name: str, times: tuple[float, float], **known: Any
    ) -> None:
        """Keep what a GPU ran; `name` as the file spells it. Equal words are kept once."""
        if (names := self.same.get(name)) is None:
            names = self.same[name] = (short_name(name), name)
        short, symbol = names
        for size in ("grid", "block", "lane"):
            given = known.get(size) or ()
            given = given if isinstance(given, str) else tuple(given)
            known[size] = self.same.setdefault((size, given), given)
        span = self._span(kind, short, times, symbol=symbol, **known)
        self.work.setdefault(device, []).append(span)

    def host(self, name: str, launch: int, times: tuple[float, float]) -> None:
        """Keep a call of the CUDA API: when it launched, and whether it waited."""
        if "Synchronize" in name:
            self.waits.append(self._span("wait", name, times))
        elif launch >= 0:
            self.launched[launch] = self._from_begin(times[0])
            if "GraphLaunch" in name:
                self.graphs.add(launch)

    def mark(self, kind: str, name: str, times: tuple[float, float]) -> None:
        """Keep an annotation, if it is of a step."""
        if name.startswith(MARKS):
            self.marks.append(self._span(kind, name, times))

    def _from_begin(self, moment: float) -> float:
        self.begin = moment if math.isnan(self.begin) else self.begin
        return round(moment - self.begin, 3)

    def _span(self, kind: str, name: str, times: tuple[float, float], **known: Any) -> Span:
        start, length = self._from_begin(times[0]), times[1]
        return Span(kind, name, known.pop("lane", "host"), start, length, length, **known)

    def trace(self, path: Path, source: str) -> Trace:
        """All of it, of the GPU that ran most; ValueError if none ran anything."""
        if not self.work:
            raise ValueError(
                f"{path} has no kernel of a GPU: profile with ProfilerActivity.CUDA, or nsys with "
                "--trace cuda, on the process that holds the GPU"
            )
        device, work = max(self.work.items(), key=lambda each: len(each[1]))
        # Older profilers tell a graph's kernels by their launch alone.
        late = (
            n for n, span in enumerate(work) if span.launch in self.graphs and not span.in_graph
        )
        for place in late:
            work[place] = replace(work[place], in_graph=True)
        marks = [mark for mark in self.marks if mark.kind == "mark"] or self.marks
        for spans in (work, self.waits, marks):
            spans.sort(key=lambda span: span.start_us)
        known = self.gpus.get(device, {})
        told = (path.name, source, known.get("name") or "", known.get("sms") or 0, len(self.work))
        return Trace(*told, tuple(work), tuple(self.waits), tuple(marks), self.launched)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace; ValueError in one line for a file that is none, is cut short or has no kernels.

    OSError where it cannot be read. Memory grows with the kernels that it holds, not with its size.
    """
    path = Path(path)
    with path.open("rb") as file:
        begins = file.read(16)
    if begins == SQLITE:
        return _read_sqlite(path)
    if path.suffix == ".nsys-rep":
        raise ValueError(f"{path} must be exported first: nsys export --type sqlite {path.name}")
    packed = begins.startswith(GZIP)
    opened = gzip.open if packed else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace") as text:
            return _read_chrome(path, text)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} must be a whole gzip file: {error}") from error


def _read_chrome(path: Path, text: TextIO) -> Trace:
    found = _Found()
    for event in _events(path, text, found.gpus):
        if event.get("ph") != "X" or "dur" not in event:
            continue
        category, args = event.get("cat"), event.get("args") or {}
        times = (float(event["ts"]), float(event["dur"]))
        if category in GPU_WORK:
            found.gpu(
                args.get("device", event.get("pid")),
                GPU_WORK[category],
                event["name"],
                times,
                lane=str(args.get("stream", event.get("tid"))),
                launch=args.get("correlation", -1),
                in_graph=bool(args.get("graph id")),
                grid=args.get("grid"),
                block=args.get("block"),
                copied_bytes=int(args.get("bytes", 0)) if category == "gpu_memcpy" else 0,
            )
        elif category in LAUNCHES:
            found.host(event["name"], args.get("correlation", -1), times)
        elif category in ("user_annotation", "gpu_user_annotation"):
            kind = "mark" if category == "user_annotation" else "gpu mark"
            found.mark(kind, event["name"], times)
    return found.trace(path, "torch.profiler")


def _gpus(head: str) -> dict[Any, dict[str, Any]]:
    """Name and SMs of each GPU that the head of a Chrome trace tells, if it tells any."""
    try:
        told = json.loads(head.strip().rstrip(",") + "}").get("deviceProperties", ())
    except (ValueError, AttributeError):
        return {}
    return {e.get("id"): {"name": e.get("name"), "sms": e.get("numSms")} for e in told}


def _events(path: Path, text: TextIO, gpus: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The events of a Chrome trace, one after the other; ValueError as `read_trace` says."""
    buffer = text.read(CHUNK)
    listed = buffer.lstrip().startswith("[")
    start = re.search(r"\[", buffer) if listed else EVENTS.search(buffer)
    while not start and buffer.lstrip().startswith("{") and len(buffer) < MOST_CHARACTERS:
        more = text.read(CHUNK)
        buffer += more
        start = EVENTS.search(buffer)
        if not more:
            break
    if not start:
        raise ValueError(f"{path} must be {EXPECTED}; it begins with {buffer[:24]!r}")
    gpus.update({} if listed else _gpus(buffer[: start.start()]))
    decode, place, count = json.JSONDecoder(strict=False).raw_decode, start.end(), 0
    while True:
        between = BETWEEN.match(buffer, place)
        place = between.end() if between else place
        if buffer.startswith("]", place):
            return
        try:
            event, place = decode(buffer, place)
        except ValueError as error:
            more = text.read(CHUNK)
            if not more:
                raise ValueError(
                    f"{path} ends within its events, after {count:,}: is it whole?"
                ) from error
            buffer, place = buffer[place:] + more, 0
            if len(buffer) > MOST_CHARACTERS:
                raise ValueError(
                    f"{path} must be JSON, event {count:,} is none: {error}"
                ) from error
            continue
        count += 1
        if isinstance(event, dict):
            yield event


def _read_sqlite(path: Path) -> Trace:
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return _read_tables(path, database)
    except (sqlite3.Error, KeyError) as error:
        raise ValueError(f"{path} must be a whole export of Nsight Systems: {error}") from error


def _read_tables(path: Path, database: sqlite3.Connection) -> Trace:
    found = _Found()
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    if KERNELS not in tables and GRAPHS in tables:
        raise ValueError(
            f"{path} has CUDA graphs as wholes, no kernels: capture with --cuda-graph-trace=node"
        )
    if KERNELS not in tables:
        raise ValueError(f"{path} has no table {KERNELS}: capture with --trace cuda")
    names = dict(database.execute("SELECT id, value FROM StringIds"))
    for row in _rows(database, KERNELS):
        found.gpu(
            row["deviceId"],
            "kernel",
            names.get(row.get("demangledName", row.get("shortName")), ""),
            _us(row),
            **_place(row),
            grid=[row[f"grid{axis}"] for axis in "XYZ"],
            block=[row[f"block{axis}"] for axis in "XYZ"],
        )
    for kind, table in (("memcpy", "MEMCPY"), ("memset", "MEMSET")):
        for row in _rows(database, f"CUPTI_ACTIVITY_KIND_{table}"):
            name = "Memset" if kind == "memset" else COPIES.get(row["copyKind"], "Memcpy")
            size = {"copied_bytes": row["bytes"]} if kind == "memcpy" else {}
            found.gpu(row["deviceId"], kind, name, _us(row), **_place(row), **size)
    for row in _rows(database, "CUPTI_ACTIVITY_KIND_RUNTIME"):
        launch = row["correlationId"]
        found.host(names.get(row["nameId"], ""), -1 if launch is None else launch, _us(row))
    for row in _rows(database, "NVTX_EVENTS"):
        if row["end"] is not None:
            found.mark("mark", row["text"] or names.get(row.get("textId"), ""), _us(row))
    found.gpus = {
        row.get("id"): {"name": row.get("name"), "sms": row.get("smCount")}
        for row in _rows(database, "TARGET_INFO_GPU")
    }
    return found.trace(path, "Nsight Systems")


def _rows(database: sqlite3.Connection, table: str) -> Iterator[dict[str, Any]]:
    """The rows of a table, one after the other; none where it is missing."""
    known = "SELECT 1 FROM sqlite_master WHERE name = ?"
    if database.execute(known, (table,)).fetchone():
        cursor = database.execute(f"SELECT * FROM {table}")  # noqa: S608 - our own name
        columns = [column[0] for column in cursor.description]
        yield from (dict(zip(columns, row, strict=True)) for row in cursor)


def _us(row: Mapping[str, Any]) -> tuple[float, float]:
    """Start and length of a row, microseconds; Nsight Systems counts nanoseconds."""
    return row["start"] / 1e3, (row["end"] - row["start"]) / 1e3


def _place(row: Mapping[str, Any]) -> dict[str, Any]:
    """Stream, launch and graph of a row."""
    launch = row.get("correlationId")
    return {
        "lane": str(row.get("streamId", "")),
        "launch": -1 if launch is None else launch,
        "in_graph": bool(row.get("graphNodeId")),
    }
