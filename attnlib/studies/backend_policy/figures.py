"""Figures of the study `backend_policy`: what the policy chooses where, and what rules lose.

The map's ground is the policy's choice, its dots are measured cases with the backend that was the
fastest there; where a dot differs from its ground, measurement and interpolation disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...core.policy.policy import Policy
from ...core.spec import AttnSpec
from ...draw import charts, style
from ...run.frame import decode_rows
from .learn import policy_of
from .tables import LABELS, MEASURED, POOLS, regrets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = style.looks(LABELS[name] for name in POOLS["with FA3"])
CELLS = 30
"""Choices along each side of a map."""
EVEN = 2.2
"""Longest over mean up to which a case is drawn: fixed and ragged lengths, not skewed ones."""
LOST = 0.001
"""Regret below which a case is drawn as none, so that a log axis can show it."""
SHARES = {LOST: "up to 0.1 %", 0.01: "1 %", 0.1: "10 %", 1: "100 %", 10: "1000 %"}


def policy_map(frame: pd.DataFrame, specs: Sequence[AttnSpec], *, pool: str) -> Figure:
    """Which backend of `pool` is chosen for requests of equal length, and measured cases.

    A panel per spec: batch size across, tokens of each request up. Dots are cases of fixed and of
    ragged lengths, at their mean. Raises ValueError if `specs` is empty or holds one that the frame
    lacks.
    """
    if not specs:
        raise ValueError("specs must hold at least one, it holds none")
    policy = policy_of(frame)
    figure, axes = charts.panels(
        [f"{spec.heads} heads, page {spec.page_size}" for spec in specs],
        (1 + 2.6 * len(specs), 3.6),
        source=decode_rows(frame),
        title="Decode: fastest backend, measured (dots) and chosen (ground)",
        x="batch, requests",
        y="mean length, tokens",
    )
    for axis, spec in zip(axes, specs, strict=True):
        _draw_map(axis, policy, spec, POOLS[pool])
    handles = style.handles({LABELS[name]: LOOKS[LABELS[name]] for name in POOLS[pool]})
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    return figure


def regret_chart(frame: pd.DataFrame, *, pool: str) -> Figure:
    """A row per rule: every held-out case's regret as a dot, the geometric mean as a line."""
    lost = regrets(frame, (pool,))
    mean = np.expm1(np.log1p(lost.regret).groupby(lost.rule).mean()).sort_values()
    figure, (axis,) = charts.panels(
        [""],
        (7, 0.9 + 0.38 * len(mean)),
        source=decode_rows(frame),
        title=f"Regret in {lost.case.nunique()} held-out decode cases, backends {pool}",
        x="time of the choice over the fastest, less 1 (log)",
    )
    for place, (rule, value) in enumerate(mean.items()):
        shown = lost[lost.rule == rule].regret.clip(lower=LOST)
        color = style.BLUE if rule == MEASURED else style.OTHER
        axis.scatter(shown, np.full(len(shown), place), s=12, color=color, alpha=0.6, linewidth=0)
        axis.plot([max(value, LOST)] * 2, [place - 0.35, place + 0.35], color="0.1", linewidth=2)
    charts.categories(axis, "y", mean.index)
    axis.set_xscale("log")
    axis.set_xticks(list(SHARES), list(SHARES.values()))
    axis.minorticks_off()
    return figure


def _draw_map(axis: Axes, policy: Policy, spec: AttnSpec, backends: Sequence[str]) -> None:
    from matplotlib.colors import ListedColormap

    points = [point for point in policy.points[spec] if point.longest <= EVEN * point.mean_len]
    sizes = pd.DataFrame(
        {"batch": [p.batch_size for p in points], "mean": [p.mean_len for p in points]}
    )
    batches, lengths = ((sizes[name].min() / 1.2, sizes[name].max() * 1.2) for name in sizes)
    x, y = (np.geomspace(*ends, CELLS) for ends in (batches, lengths))
    chosen = [[backends.index(_choice(policy, spec, b, n, backends)) for b in x] for n in y]
    ground = ListedColormap([LOOKS[LABELS[name]].color for name in backends])
    look = {"cmap": ground, "vmin": -0.5, "vmax": len(backends) - 0.5, "alpha": style.PALE}
    axis.pcolormesh(x, y, chosen, rasterized=True, **look)
    fastest = [min((p.run_us[n], n) for n in p.run_us if n in backends)[1] for p in points]
    rows = sizes.assign(fastest=[LABELS[name] for name in fastest])
    edge = {"edgecolor": "white", "linewidth": 0.4}
    charts.dots(axis, rows, x="batch", y="mean", by="fastest", looks=LOOKS, **edge)
    style.log_axes(axis, "x", "y")
    axis.set(xlim=batches, ylim=lengths)
    axis.grid(visible=False)


def _choice(
    policy: Policy, spec: AttnSpec, batch: float, length: float, backends: Sequence[str]
) -> str:
    lens = [max(1, round(length))] * max(1, round(batch))
    return policy.choose(spec, lens, backends=backends).backend
