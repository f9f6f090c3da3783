"""Figures of the measured policy: what it chooses where, and what rules lose."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from ...core.policy.policy import Policy
from ...core.spec import AttnSpec
from ...draw import charts, style
from ...run.frame import LABELS
from .learn import advising
from .tables import MEASURED, POOLS, pool_of

LOOKS = style.looks(LABELS[name] for name in POOLS["with FlashAttention-3"])
CELLS = 20
"""Choices along each side of a map."""
EVEN = 2.2
"""Longest over mean up to which a case is drawn: fixed and ragged lengths, few skewed ones."""
LOST = 0.001
"""Regret below which a case is drawn as none, so that a log axis can show it."""
SHARES = {LOST: "up to 0.1 %", 0.01: "1 %", 0.1: "10 %", 1: "100 %", 10: "1000 %"}


def policy_map(
    frame: pd.DataFrame, policy: Policy, specs: Sequence[AttnSpec], *, pool: str
) -> charts.Figure:
    """Which backend of `pool` the policy chooses for requests of equal length, a panel per spec.

    Dots are measured cases of about equal lengths (`EVEN`), at their mean, with the backend that
    was the fastest there. `frame` taught the policy. Raises ValueError if `specs` is empty.
    """
    from matplotlib.lines import Line2D

    if not specs:
        raise ValueError("specs must hold at least one, it holds none")
    rows, backends = advising(frame), pool_of(policy, pool)
    looks = {LABELS[name]: LOOKS[LABELS[name]] for name in backends}
    figure, axes = charts.panels(
        [f"{spec.heads} heads, page {spec.page_size}" for spec in specs],
        (1 + 2.6 * len(specs), 3.6),
        rows[[case.spec in specs for case in rows.case]],
        ("batch, requests", "mean length, tokens"),
        title="Fastest: measured (dots), chosen (ground)",
    )
    for axis, spec in zip(axes, specs, strict=True):
        _draw_map(axis, policy, spec, backends)
    dots = [
        Line2D([], [], marker=look.marker, color=look.color, linestyle="", label=name)
        for name, look in looks.items()
    ]
    figure.legend(handles=dots, loc="outside upper right", ncols=len(dots), frameon=False)
    return figure


def regret_chart(frame: pd.DataFrame, lost: pd.DataFrame, *, pool: str) -> charts.Figure:
    """A row per rule: every batch's regret as a dot, the geometric mean as a line.

    `lost` is what `left_out` makes of `frame`.
    """
    lost, drawn = lost[lost.pool == pool], advising(frame)
    mean = np.expm1(np.log1p(lost.regret).groupby(lost.rule).mean()).sort_values()
    title, counts = f"Regret, each layer left out: {pool}", lost.groupby("rule").regret.count()
    xlabel = "time of the choice over the fastest, less 1 (log)"
    size = (7, 0.9 + 0.38 * len(mean))
    figure, (axis,) = charts.panels([""], size, drawn, (xlabel, ""), title=title)
    places = {rule: place for place, rule in enumerate(mean.index)}
    shown = lost.assign(place=lost.rule.map(places), shown=lost.regret.clip(lower=LOST))
    looks = {name: style.Look(style.OTHER, "o") for name in places}
    looks[MEASURED] = style.Look(style.BLUE, "o")
    charts.dots(axis, shown, "shown", "place", by="rule", looks=looks, alpha=0.6, linewidth=0)
    charts.categories(axis, "y", [f"{rule}  ({counts[rule]} batches)" for rule in places])
    place = np.array(list(places.values()))
    axis.vlines(mean.clip(lower=LOST), place - 0.35, place + 0.35, color=style.INK, linewidth=2)
    axis.set_xscale("log")
    axis.set_xticks(list(SHARES), list(SHARES.values()))
    axis.minorticks_off()
    return figure


def _draw_map(axis: charts.Axes, policy: Policy, spec: AttnSpec, backends: Sequence[str]) -> None:
    from matplotlib.colors import ListedColormap

    @cache
    def choice(batch: int, length: int) -> int:
        return backends.index(policy.choose(spec, [length] * batch, backends=backends).backend)

    found = pd.DataFrame(
        {
            "batch": point.batch_size,
            "length": point.mean_len,
            "fastest": LABELS[min((point.run_us[n], n) for n in point.run_us if n in backends)[1]],
        }
        for point in policy.points[spec]
        if point.longest <= EVEN * point.mean_len
    )
    xlim, ylim = (
        (column.min() / 1.2, column.max() * 1.2) for column in (found.batch, found.length)
    )
    x, y = np.geomspace(*xlim, CELLS), np.geomspace(*ylim, CELLS)
    sizes, lens = ([max(1, round(size)) for size in each] for each in (x, y))
    chosen = [[choice(size, length) for size in sizes] for length in lens]
    ground = ListedColormap([LOOKS[LABELS[name]].color for name in backends])
    mesh = axis.pcolormesh(x, y, chosen, cmap=ground, alpha=style.PALE, rasterized=True)
    mesh.set_clim(-0.5, len(backends) - 0.5)
    edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4}
    charts.dots(axis, found, "batch", "length", by="fastest", looks=LOOKS, **edge)
    style.log_axes(axis, "x", "y")
    axis.set(xlim=xlim, ylim=ylim)
    axis.grid(visible=False)
