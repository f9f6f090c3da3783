"""The roofline: what kernels reach, under the ceilings measured on the same GPU.

A case's intensity is its useful FLOPs over the bytes that it must move (`DecodeCase.cost`), the
same for every kernel: one that multiplies padding or reads twice lies low, not sideways.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..core.backends.table import FAMILIES
from ..draw import charts, style
from ..kinds.cost import Ceilings
from ..run.frame import CASE, cases_of, decode_rows
from ..run.store import require_comparable

NUDGE = 1.06
"""Factor between the families' places on the intensity axis: a case has one intensity for all."""


def roofline_table(frame: pd.DataFrame, release: str) -> pd.DataFrame:
    """A row per case and kernel family: FLOP/byte, TFLOP/s, GB/s, and whether its bytes fit the L2.

    Rates are useful work over the median time of the rounds, graph timer.
    """
    rows = decode_rows(frame, release=release)
    require_comparable(rows)
    times = rows.groupby(["case", "kernel_family"], sort=False)
    times = times.agg({"run_us": "median", "l2_mib": "max"}).reset_index()
    times = times.merge(cases_of(rows)[["case", *CASE]], on="case", how="left")
    costs = times.case.map(lambda case: case.cost)
    flops, io_bytes = costs.map(lambda cost: cost.flops), costs.map(lambda cost: cost.io_bytes)
    return times[CASE].assign(
        family=times.kernel_family,
        intensity=flops / io_bytes,
        tflops=flops / times.run_us / 1e6,
        gbps=io_bytes / times.run_us / 1e3,
        in_l2=io_bytes <= times.l2_mib * 2**20,
    )


def roofline(frame: pd.DataFrame, limit: Ceilings, release: str) -> charts.Figure:
    """Intensity against TFLOP/s, a dot per case and kernel family, hollow where the L2 holds it.

    A ceiling that the study did not measure is not drawn. ValueError if there is no decode record
    of `release`.
    """
    table = roofline_table(frame, release)
    if table.empty:
        raise ValueError(f"frame must hold decode records of release {release!r}, it has none")
    title = f"Decode under the measured roofs, FlashInfer {release}"
    flops = "useful FLOP per byte that must be moved (kernels of a case side by side)"
    words, drawn = (flops, "useful TFLOP/s"), decode_rows(frame, release=release)
    figure, (axis,) = charts.panels([title], (7.5, 4.6), drawn, words)
    table["place"] = table.intensity * NUDGE ** charts.spread(table.family, 2)
    looks = style.family_looks(FAMILIES)
    charts.dots(axis, table, "place", "tflops", by="family", looks=looks, hollow="in_l2")
    _draw_roofs(axis, limit, low=table.intensity.min() / 1.6)
    style.log_axes(axis, "x", "y")
    axis.set_ylim(table.tflops.min() / 2, limit.matmul_tflops * 2.5)
    axis.legend(title="kernel; hollow: fits the L2", loc="lower right")
    return figure


def _draw_roofs(axis: charts.Axes, limit: Ceilings, *, low: float) -> None:
    """The slopes of memory bandwidth up to the flat roof of matrix products, labelled on them."""
    flat = limit.matmul_tflops
    ridge = flat * 1e3 / limit.copy_gbps
    axis.set_xlim(low, 6 * ridge)
    roofs = (("copy", limit.copy_gbps, "-"), ("read", limit.read_gbps, "--"))
    for name, gbps, line in roofs:
        if np.isfinite(gbps):
            ends = np.array([low, flat * 1e3 / gbps])
            label = f"{name}, {gbps:,.0f} GB/s"
            axis.plot(ends, ends * gbps / 1e3, line, **style.RULE, label=label)
    label = f"bf16 matmul, {flat:,.0f} TFLOP/s"
    axis.plot([ridge, 6 * ridge], [flat, flat], color=style.LINE, linewidth=2, label=label)
