"""The rows of a diagnosis: kernels of steps, what is around them, their lengths, and the host.

Times are microseconds.
"""

from collections import Counter, defaultdict
from typing import Any

from ..core.backends.table import FAMILIES, family_of, role_of
from ..measure.spans import busy_us
from ..measure.steps import UNKNOWN, Step, idle_under
from ..measure.trace_file import CALL_US, Trace

Row = dict[str, Any]
ATTENTION = "attention"
IN_NO_CALL = f"none of {CALL_US:g} us or more: other code of the host"
NAN = float("nan")


def kernel_rows(kind: str, steps: list[Step]) -> list[Row]:
    """A row per kernel of steps of a kind, most time first."""
    busy_us = sum(step.busy_us for step in steps) or 1.0
    calls = sum(calls_in(step) for step in steps)
    lengths_us: defaultdict[str, list[float]] = defaultdict(list)
    for step in steps:
        for span in step.work:
            lengths_us[span.name].append(span.length_us)
    attention = {span.name for step in steps for span in step.attention}
    rows = []
    for name, lengths in lengths_us.items():
        family = family_of(name)
        is_attention = family or name in attention
        rows.append(
            {
                "step": kind,
                "kernel": name,
                "is": f"{ATTENTION} ({family or UNKNOWN})" if is_attention else role_of(name),
                "of": FAMILIES[family].library if family else "",
                "a step": len(lengths) / len(steps),
                "per attention call": len(lengths) / calls,
                "us a step": sum(lengths) / len(steps),
                "share": sum(lengths) / busy_us,
            }
        )
    return sorted(rows, key=lambda row: -row["us a step"])


def around(step: Step) -> Row:
    """What a step has, and what is before its first layer."""
    idle_later = step.length_us - step.busy_us - step.idle_ahead_us
    return {
        "step": step.kind,
        "attention calls": calls_in(step),
        "launches": len(step.work),
        "us": step.length_us,
        "us busy": step.busy_us,
        "us idle before": step.idle_ahead_us,
        "us idle later": max(0.0, idle_later),
        "in a graph": step.in_graph,
        "launches before": len(step.ahead),
        "us the host waits": busy_us(step.waits),
        "copies to the host": sum(span.name == "Memcpy DtoH" for span in step.ahead),
    }


def lengths_of(step: Step) -> Row:
    """What the mark of a step says of its requests; NaN where it does not."""
    mark = step.mark
    requests = max(1, mark.requests)
    kv_tokens = mark.kv_tokens or NAN
    return {
        "step": step.kind,
        "requests": mark.requests,
        "query tokens": mark.query_tokens,
        "queries per request": mark.query_tokens / requests,
        "KV tokens": kv_tokens,
        "KV tokens a request": kv_tokens / requests,
        "longest": kv_tokens if mark.requests == 1 else NAN,
        "us": step.length_us,
    }


def host_rows(trace: Trace, kind: str, steps: list[Step]) -> list[Row]:
    """A row per call of the host, most idle time first, and one for the idle time in no call."""
    if not trace.calls:
        return []
    under_us: defaultdict[str, float] = defaultdict(float)
    for step in steps:
        in_calls = idle_under(trace, step)
        for name, us in in_calls.items():
            under_us[name] += us
        idle_us = sum(gap.length_us for gap in step.gaps)
        under_us[IN_NO_CALL] += max(0.0, idle_us - sum(in_calls.values()))
    rows = []
    for name, us in sorted(under_us.items(), key=lambda item: -item[1]):
        row = {
            "step": kind,
            "call": name,
            "us the GPU idles, a step": us / len(steps),
        }
        rows.append(row)
    return rows


def calls_in(step: Step) -> int:
    """Attention calls of a step: launches of its most frequent attention kernel; 1 without any."""
    counts = Counter(span.name for span in step.attention)
    return max(counts.values(), default=1)
