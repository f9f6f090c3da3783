"""What people paste in place of a trace: sums of kernels, without steps. Needs no torch.

| text | made by |
|---|---|
| a table between lines of dashes | `key_averages().table()` of torch.profiler |
| CSV | `nsys stats --report cuda_gpu_kern_sum --format csv` of Nsight Systems |
| a table over a line of dashes | the same without `--format` |

Of torch.profiler's rows those of the GPU are taken: operators count the same time again.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .marks import BEGINS
from .spans import short_name

MOST_BYTES = 1 << 24
"""Of a file of sums."""
MOST_NAME = 4096
"""Characters of a name that are read."""
HEAD_LINES = 400
"""Lines in which the head of a table is looked for."""
RULE = re.compile(r"-{3,}(?: +-{3,})+")
APART = re.compile(" {2,}")
TIME = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|ms|s)")
UNITS_US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
NSYS_TIME, NSYS_COUNT = "Total Time (ns)", "Instances"
CUTS = ("...", "\N{HORIZONTAL ELLIPSIS}")
"""How a name ends that a table cut short."""
RANGES = (*BEGINS, "ProfilerStep")
"""How the names of rows begin that are ranges: the time of kernels again."""
TORCH, NSYS = "torch.profiler's key_averages()", "nsys stats"


@dataclass(frozen=True)
class KernelSum:
    """All launches of one kernel: their microseconds together, and their count."""

    name: str
    us: float
    launches: int
    is_cut: bool = False
    """Whether the table cut its name short."""


@dataclass(frozen=True)
class KernelSums:
    """The kernels of one file, most time first, and who made it."""

    path: str
    source: str
    kernels: tuple[KernelSum, ...]


def read_sums(path: Path) -> KernelSums | None:
    """The sums of a file; None for any other file, such as a trace.

    ValueError, in one line, for a table without kernels of a GPU, or with a wrong field.
    """
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if b"\0" in data[:4096] or b"traceEvents" in data[:4096]:
        return None
    text = data[:MOST_BYTES].decode(errors="replace")
    lines = text.splitlines()
    head = lines[:HEAD_LINES]
    rules = []
    columns = []
    for at, line in enumerate(head):
        if RULE.match(line.strip()):
            rules.append(at)
        if NSYS_TIME in line and NSYS_COUNT in line:
            columns.append(at)
    if columns:
        source = NSYS
        found = _of_nsys(path, _nsys_rows(lines[columns[0] :]))
    elif len(rules) > 1 and "Name" in head[rules[0] + 1]:
        source = TORCH
        found = _of_torch(path, lines[rules[0] :])
    else:
        return None
    if len(data) > MOST_BYTES:
        most_mib = MOST_BYTES >> 20
        raise ValueError(f"{path} must have at most {most_mib} MiB, it has more")
    kernels = sorted(found, key=lambda kernel: -kernel.us)
    if not kernels:
        raise ValueError(f"{path} has no kernel of a GPU: profile with ProfilerActivity.CUDA")
    return KernelSums(
        path=path.name,
        source=source,
        kernels=tuple(kernels),
    )


def _nsys_rows(lines: list[str]) -> Iterable[dict[str, str]]:
    """The rows of CSV, or of the table that nsys prints, whose last column may have blanks."""
    if "," in lines[0]:
        return csv.DictReader(lines)
    names = APART.split(lines[0].strip())
    rows = []
    for line in lines[2:]:
        words = line.split(maxsplit=len(names) - 1)
        if len(words) < len(names):  # what follows the table
            break
        rows.append(dict(zip(names, words, strict=True)))
    return rows


def _of_nsys(path: Path, rows: Iterable[dict[str, str]]) -> Iterator[KernelSum]:
    for row in rows:
        name = row.get("Name") or row.get("Operation")
        if not name:  # what follows the table
            break
        ns = _number(path, NSYS_TIME, row[NSYS_TIME])
        launches = _number(path, NSYS_COUNT, row[NSYS_COUNT])
        yield _sum_of(name, ns / 1e3, int(launches))


def _of_torch(path: Path, lines: list[str]) -> Iterator[KernelSum]:
    """The rows of GPU work: they take no time of the CPU."""
    names = APART.split(lines[1].strip())
    spent = "Self CUDA" if "Self CUDA" in names else "Self GPU"
    needed = {"Name", "Self CPU", "# of Calls", spent}
    if not needed.issubset(names):
        raise ValueError(f"{path} must have columns Name, Self CPU, Self CUDA and # of Calls")
    for line in lines[3:]:
        if RULE.match(line.strip()):
            break
        row = _row(path, names, line)
        name = row["Name"]
        us = _time_us(path, spent, row[spent])
        is_of_gpu = us and not _time_us(path, "Self CPU", row["Self CPU"])
        if is_of_gpu and not name.startswith(RANGES):
            launches = _number(path, "# of Calls", row["# of Calls"])
            yield _sum_of(name, us, int(launches))


def _row(path: Path, names: list[str], line: str) -> dict[str, str]:
    """The fields of a line by column. They stand two blanks apart, as the first one's words may."""
    words = APART.split(line.strip())
    more = len(words) - len(names)
    if more < 0:
        raise ValueError(f"{path} must have {len(names)} columns in each row, got {line!r:.60}")
    of_name = more + 1
    name = "  ".join(words[:of_name])
    fields = [name, *words[of_name:]]
    return dict(zip(names, fields, strict=True))


def _sum_of(name: str, us: float, launches: int) -> KernelSum:
    cut = name[:MOST_NAME]
    is_cut = cut.endswith(CUTS) or len(name) > MOST_NAME
    whole = cut
    for end in CUTS:
        whole = whole.removesuffix(end)
    if is_cut:  # within its template arguments, which tell nothing then
        whole = whole.partition("<")[0]
    return KernelSum(
        name=short_name(whole),
        us=us,
        launches=launches,
        is_cut=is_cut,
    )


def _time_us(path: Path, column: str, text: str) -> float:
    found = TIME.fullmatch(text[:30])
    if not found:
        raise ValueError(f"{path} must have times in {column}, such as 1.5us, it has {text!r:.60}")
    number, unit = found.groups()
    return float(number) * UNITS_US[unit]


def _number(path: Path, column: str, text: str | None) -> float:
    words = (text or "")[:30].replace(",", "")
    if not re.fullmatch(r"\d{1,15}(?:\.\d{1,9})?", words):
        raise ValueError(f"{path} must have numbers in {column}, it has {text!r:.60}")
    return float(words)
