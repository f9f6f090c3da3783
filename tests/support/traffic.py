"""The maker of data/traffic: decode batches, simulated over published request traces.

    PYTHONPATH=. python tests/support/traffic.py azure-code AzureLLMInferenceTrace_code.csv

keeps a downloaded trace, and draws the batches again once all are there.

The model is closed continuous batching. A fixed number of requests decodes at once. Each step adds
one token to each of them. When a request has all its tokens, the next request of the trace takes
its slot in the next step. Prefill is instantaneous and arrival times are not used, so this does not
model queues, a batch that shrinks when traffic is low, steps that mix prefill and decode,
preemption, or prefixes that requests share.

The traces do not travel with the project: `data/traffic/README.md` says where they are published,
and `import_trace` reads a downloaded file. The batches that studies measure do: `batches`.
"""

import csv
import heapq
import itertools
import json
import lzma
import random
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

from attnlib.core.spec import require_int, require_word
from attnlib.studies.splits.traffic import BATCHES, IN_FLIGHT, STEPS, TRACES, Traffic, batches

FOLDER = BATCHES.parent
KIMI_FIELDS = ("timestamp", "input_length", "output_length")
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
HEADER = "arrival_ms,input_tokens,output_tokens"
MOST_IN_FLIGHT = 1024
SHARED = 4
"""Two steps in a row share one in `SHARED` of their requests, on average over a long run."""


def draw_batches() -> list[Traffic]:
    """`batches`, drawn again from the traces; FileNotFoundError for one that was not imported."""
    drawn = []
    for trace, in_flight in itertools.product(TRACES, IN_FLIGHT):
        for step, lens in enumerate(decode_steps(trace, in_flight, STEPS)):
            lengths = "+".join(str(length) for length in lens.tolist())
            drawn.append(Traffic(trace, in_flight, step, lengths))
    return drawn


@cache
def requests(trace: str) -> np.ndarray:
    """All requests of a trace, in its order: int64 [n, 3], read-only.

    Columns are arrival_ms (milliseconds after the first request), input_tokens (the prompt) and
    output_tokens. `trace` is one of `TRACES`. Raises ValueError listing them for another name or
    if the file has other columns, FileNotFoundError if the trace was not imported.

    Examples
    --------
    >>> arrival_ms, prompts, outputs = requests("azure-code").T
    """
    path = _path(trace)
    if not path.exists():
        raise FileNotFoundError(
            f"trace must have been imported to {path.name} in data/traffic, got {trace!r}, which "
            "was not: data/traffic/README.md says where to download it"
        )
    text = lzma.decompress(path.read_bytes()).decode()
    header, *lines = text.splitlines()
    if header != HEADER:
        raise ValueError(f"columns of {path.name} must be {HEADER}, got {header}")
    rows = np.loadtxt(
        lines,
        dtype=np.int64,
        delimiter=",",
        ndmin=2,
    )
    rows.setflags(write=False)  # callers share the one that is cached
    return rows


def decode_steps(
    trace: str,
    in_flight: int,
    count: int,
    *,
    seed: int = 0,
    longest: int = 131_072,
) -> list[np.ndarray]:
    """Lengths of the requests in `count` decode steps of a server: a list of int32 [in_flight].

    A length is in tokens: the prompt and all tokens generated so far, this step's included. A
    request of `output_tokens` is so in flight for as many steps. Its place in the array, the slot,
    stays the same; slots that are free in the same step are filled in their order.

    Requests are taken in the order of the trace from one that `seed` draws, and from the first
    again after the last. Those without output, or with prompt and output above `longest` tokens
    together, are skipped. The first step taken is the first in which every slot has been refilled.
    The next follow `spacing` steps apart. The same arguments give the same lengths everywhere.

    Parameters
    ----------
    trace
        One of `TRACES`.
    in_flight
        Requests that decode at once, 1 to 1,024.
    count
        Number of steps, at least 1.
    seed
        At least 0.
    longest
        Most tokens of a request, prompt and output, at least those of the shortest request.

    Raises
    ------
    ValueError
        Names the argument, what it must be and what it was.
    FileNotFoundError
        The trace was not imported.

    Examples
    --------
    >>> batches = decode_steps("azure-code", in_flight=32, count=100)
    >>> len(batches), batches[0].shape
    (100, (32,))
    """
    require_int("in_flight", in_flight, most=MOST_IN_FLIGHT)
    require_int("count", count)
    require_int("seed", seed, least=0)
    require_int("longest", longest)
    pool = _pool(trace, longest)
    # Of all draws, Python promises only those of random() to be the same in every release.
    first = int(random.Random(seed).random() * len(pool))
    pool = np.roll(pool, -first, axis=0)
    outputs = pool[:, 1]
    refilled = int(outputs[:in_flight].max())  # the pool wraps only if all of it was taken
    apart = spacing(outputs)
    steps = range(refilled, refilled + count * apart, apart)
    return list(_lengths(pool, in_flight, steps))


def spacing(outputs: np.ndarray) -> int:
    """Steps between two that share a quarter of their requests, or less, on average.

    `outputs` [n] are the output tokens of the requests, all at least 1. Over a long run a step
    meets a request of `o` tokens in proportion to `o`, and `g` steps later meets it again in
    proportion to `max(o - g, 0)`. The smallest `g` is taken for which the sum of the latter is at
    most a quarter of the sum of the former.

    Examples
    --------
    >>> spacing(np.array([8, 8]))
    6
    """
    gap = 1
    while SHARED * _met_again(outputs, gap) > outputs.sum():
        gap += 1
    return gap


def _met_again(outputs: np.ndarray, gap: int) -> int:
    """The steps in which a request is met that is met again `gap` steps later, of all requests."""
    left = np.maximum(outputs - gap, 0)
    return int(left.sum())


def import_trace(trace: str, source: str | Path) -> np.ndarray:
    """Keep arrival and lengths of a published trace in `data/traffic`; returns `requests(trace)`.

    `source` is the file as published: JSON lines of Mooncake for the traces of kimi, a CSV file of
    Azure for those of azure. Every request is kept, in order. Raises ValueError listing `TRACES`
    for another name, KeyError naming a field that the file lacks.

    Examples
    --------
    >>> import_trace("azure-code", "AzureLLMInferenceTrace_code.csv")  # doctest: +SKIP
    """
    path = _path(trace)
    with open(source, encoding="utf-8-sig", newline="") as lines:
        rows = _kimi_rows(lines) if trace.startswith("kimi") else _azure_rows(lines)
    lines_kept = [HEADER]
    for row in rows:
        lines_kept.append(",".join(str(field) for field in row))
    text = "".join(f"{line}\n" for line in lines_kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode(), preset=9))
    requests.cache_clear()
    return requests(trace)


def _path(trace: str) -> Path:
    require_word("trace", trace, TRACES)
    return FOLDER / f"{trace}.csv.xz"


def _pool(trace: str, longest: int) -> np.ndarray:
    """Prompt and output tokens [n, 2] of the requests that have output and fit in `longest`."""
    pairs = requests(trace)[:, 1:]
    pairs = pairs[pairs[:, 1] > 0]
    totals = pairs.sum(axis=1)
    if longest < totals.min():
        least = f"{totals.min()} tokens, the shortest request of {trace}"
        raise ValueError(f"longest must be at least {least}, got {longest}")
    return pairs[totals <= longest]


def _lengths(
    pool: np.ndarray,
    in_flight: int,
    steps: Iterable[int],
) -> Iterator[np.ndarray]:
    """Lengths int32 [in_flight] in each of `steps`, which rise.

    Only the steps in which a request ends are simulated: between them a length grows by one a step.
    """
    queue = itertools.cycle(pool.tolist())
    free = [(0, slot) for slot in range(in_flight)]  # a heap of (first free step, slot)
    before = np.zeros(in_flight, dtype=np.int64)  # a slot's length less the number of the step
    for step in steps:
        while free[0][0] <= step:
            start, slot = free[0]
            prompt, output = next(queue)
            before[slot] = prompt + 1 - start
            heapq.heapreplace(free, (start + output, slot))
        yield (before + step).astype(np.int32)


def _kimi_rows(lines: Iterable[str]) -> list[tuple[int, ...]]:
    rows = []
    for line in lines:
        request = json.loads(line)
        rows.append(tuple(int(request[field]) for field in KIMI_FIELDS))
    return rows


def _azure_rows(lines: Iterable[str]) -> list[tuple[int, ...]]:
    """As Mooncake counts time: whole milliseconds after the first request, rounded down."""
    columns: list[list[str]] = [[], [], []]
    for request in csv.DictReader(lines):
        for column, field in zip(columns, AZURE_FIELDS, strict=True):
            column.append(request[field])
    arrived, prompts, outputs = columns
    times = np.array(arrived, dtype="datetime64[ns]")
    arrivals = (times - times[0]) // np.timedelta64(1, "ms")
    rows: list[tuple[int, ...]] = []
    for at, prompt, output in zip(arrivals, prompts, outputs, strict=True):
        rows.append((int(at), int(prompt), int(output)))
    return rows


if __name__ == "__main__":
    print(f"{len(import_trace(*sys.argv[1:]))} requests")
    if all(_path(each).exists() for each in TRACES):
        print("as in batches.csv" if tuple(draw_batches()) == batches() else "other batches")
