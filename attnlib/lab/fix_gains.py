"""What the fixes of known patterns save, by the records.

`lab.gains` writes them to data/gains.json. A gain is the ratio of a time without the fix to
that with it, and the shape of the layer.
"""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from ..core.call_text import OTHER_NAMES

GAINS = Path(__file__).resolve().parents[1] / "data" / "gains.json"
SIZES = ("head_dim", "page_size", "batch_size", "kv_len")
STATED = ("heads", *SIZES, "dtype", "kv_dtype")
"""The facts of a layer that a caller can state, and that records have."""
LONGEST = "longest"
"""Tokens of the longest request; `kv_len` is their mean."""
LENS = "lens"
"""A caller's tokens of each request, as the text of a call: three facts in one."""
WORD_OF_FACT = {**OTHER_NAMES, LONGEST: LENS}
"""Fact -> the word of a call's text that says it, where that is another one."""
Row = dict[str, Any]


@cache
def gains() -> Row:
    """data/gains.json: key -> study, gpu, rows (shape and ratio); empty if it is missing."""
    if GAINS.exists():
        return json.loads(GAINS.read_text())
    return {}


def gained(key: str, shape: Row, us: float, gpu: str = "") -> str:
    """What the records of shapes like `shape` say that the fix saves of `us` per step.

    `gpu` is that of the trace; records of another one are said to be so.
    """
    entry = gains().get(key)
    if entry is None:
        return "no records of the fix"
    card = entry["gpu"]
    if gpu and gpu != card:
        card += f", not of this trace's {gpu}"
    rows: list[Row] = entry["rows"]
    varying = [name for name in (*STATED, LONGEST) if _varies(name, rows)]
    known = [name for name in varying if name in shape]
    unknown = [name for name in varying if name not in shape]
    alike: list[str] = []
    for name in known:
        rows = [row for row in rows if _is_alike(row[name], shape[name])]
        alike.append(f"{name} {shape[name]}")
        if not rows:
            return f"no records like {', '.join(alike)}; {card}"
    if "kv_len" in shape:  # where the lengths are open, so is the gain
        rows = _nearest(rows, shape)
    count = f"{len(rows)} recorded shape"
    if len(rows) > 1:
        count = f"median of {count}s"
    if alike:
        count += f" like {', '.join(alike)}"
    saved = _saved(
        us=us,
        ratios=[row["ratio"] for row in rows],
        count=count,
        card=card,
    )
    return f"{saved} {_asked(unknown)}".rstrip()


def _asked(unknown: list[str]) -> str:
    """What to state for a narrower gain, under the names that the text of a call has."""
    words = {WORD_OF_FACT.get(name, name): None for name in unknown}
    if not words:
        return ""
    *most, last = words
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"Pass {listed} to narrow it."


def _varies(name: str, rows: list[Row]) -> bool:
    """Whether recorded shapes have a fact, and not all the same one."""
    return name in rows[0] and len({row[name] for row in rows}) > 1


def _is_alike(recorded: Any, given: Any) -> bool:
    """Whether a fact is the same word, or a number within a factor of two."""
    if isinstance(given, str):
        return recorded == given
    return abs(math.log2(recorded / given)) <= 1


def _nearest(rows: list[Row], shape: Row) -> list[Row]:
    """The recorded shapes whose sizes are nearest to those of `shape`, by factors of two."""
    sizes = []
    for name in (*SIZES, LONGEST):
        if name in rows[0] and name in shape:
            sizes.append(name)
    apart = []
    for row in rows:
        factors = [row[name] / shape[name] for name in sizes]
        apart.append(sum(abs(math.log2(factor)) for factor in factors))
    least = min(apart)
    return [row for row, far in zip(rows, apart, strict=True) if far == least]


def _saved(us: float, ratios: Sequence[float], count: str, card: str) -> str:
    """What is saved of `us` by fixes of these ratios of times, without / with the fix."""
    middle = median(ratios)
    if middle <= 1:
        return f"No saving: {middle:.2f} times the time with the fix ({count}; {card})."
    ends = (min(ratios), max(ratios), middle)
    least, most, usual = (f"{max(0.0, us * (1 - 1 / ratio)):,.1f}" for ratio in ends)
    spread = f", {least} to {most}" if len(ratios) > 1 else ""
    return f"Possible saving per step: {usual} us ({count}{spread}; {card})."
