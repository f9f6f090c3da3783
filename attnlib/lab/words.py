"""A view in words: who answers, what to mind, and its tables rounded for reading."""

from __future__ import annotations

import math

import pandas as pd

from ..studies.fa3_decode_regression.tables import intervals
from .choices import LIVE, Choices
from .sources import Source
from .tables import NOTHING, Found

FOOTER = "us is microseconds; share is the time at the ceiling over the time taken."


def served(source: Source, found: Found) -> str:
    """Who answers, in a sentence."""
    days = sorted({record.started_at[:10] for record in found.mine})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "not yet"
    gpu = f"{found.machine.get('gpu') or 'CPU'} {found.machine.get('gpu_id', '')}".strip()
    if source.name == LIVE:
        return f"Measured here, on {gpu}, {when}." if days else "Measures here; not on record yet."
    return f"Served from records: study {source.name}, {gpu}, measured {when}. No GPU is used."


def facts(found: Found) -> tuple[tuple[str, str], ...]:
    """What the case must cost, and at which ceilings."""
    said = [("must move", f"{found.cost.io_bytes / 1e6:,.4g} MB")]
    said += [("useful work", f"{found.cost.flops / 1e9:,.4g} GFLOP")]
    if found.limit is None:
        return tuple(said)
    rates = [f"copy {found.limit.copy_gbps:,.0f} GB/s"]
    if "FLOPs" in found.bounds_us:
        rates.append(f"bf16 matmul {found.limit.matmul_tflops:,.0f} TFLOP/s")
    longest = max(found.bounds_us, key=found.bounds_us.__getitem__)
    said += [("ceilings, measured", ", ".join(rates))]
    said += [("time at the ceiling", f"{found.floor_us:,.1f} us, by {longest}")]
    return tuple(said)


def notes(found: Found, choices: Choices) -> list[str]:
    """What to mind: failures with their reasons, what was left out, what is missing."""
    failed = {(r.item.backend, r.status, r.reason) for r in found.mine if r.status != "ok"}
    said = [f"{backend}: {status}: {reason}" for backend, status, reason in sorted(failed)]
    seen = {record.item.backend for record in found.mine}
    absent = [name for name in choices.backends if name not in seen]
    said += [f"Not on record for these choices: {', '.join(absent)}."] if seen and absent else []
    throttled = sum(record.throttled for record in found.mine)
    if throttled:
        said.append(f"{throttled} records were taken while the GPU was throttled: left out.")
    if found.limit is None and len(found.good):
        said.append(f"No share of a ceiling: {found.why_no_limit}.")
    if found.limit and "FLOPs" not in found.bounds_us:
        said.append("No matmul ceiling on record: the ceiling is that of the bytes.")
    if found.limit and found.cost.io_bytes <= found.machine.get("l2_mib", 0) * 2**20:
        said.append("The bytes fit the L2 cache, which is faster than the copy ceiling.")
    return said


def shares(table: pd.DataFrame) -> list[float]:
    """The bars of the table of times; none without ceilings."""
    return table.share.fillna(0).tolist() if table.share.notna().any() else []


def times_in_words(table: pd.DataFrame) -> pd.DataFrame:
    """The table of times, rounded for reading."""
    shown = {
        "backend": table.backend,
        "us": [_words(x, ",.1f") for x in table.us],
        "ran": table.ran,
        "kernels a call": [_words(x, "g") for x in table.launches],
        "plan, us": [_words(x, ",.0f") for x in table.plan_us],
        "rounds": table.rounds,
        "share": [_words(x, ".0%") for x in table.share],
    }
    return pd.DataFrame(shown)


def comparison_in_words(table: pd.DataFrame) -> pd.DataFrame:
    """The comparison, rounded for reading."""
    shown = {
        "time over time": table.backend + " / " + table.against,
        "ratio": [f"{ratio:.2f}" for ratio in table.ratio],
        "95 %": intervals(table),
        "rounds": table.pairs,
        "verdict": table.verdict,
        "margin": [f"{margin:.1%}" for margin in table.margin],
    }
    return pd.DataFrame(shown)


def kernels_in_words(table: pd.DataFrame) -> pd.DataFrame:
    """The kernels, rounded for reading."""
    shown = {
        "backend": table.backend,
        "kernel": table.kernel,
        "launches a call": [_words(x, "g") for x in table.launches],
        "us": [_words(x, ",.1f") for x in table.us],
    }
    return pd.DataFrame(shown)


def rules_in_words(table: pd.DataFrame) -> pd.DataFrame:
    """The rules, with times rounded for reading."""
    return table.assign(us=[_words(x, ",.1f") for x in table.us])


def _words(value: float, style: str) -> str:
    return NOTHING if math.isnan(value) else format(value, style)
