"""Two figures of the decode policy: what it chooses where, and what rules lose that do not measure.

The map's background is the policy's choice, its dots are measured cases with the backend that was
the fastest there; where a dot differs from its ground, measurement and interpolation disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...core.policy.policy import Point, Policy
from ...core.spec import AttnSpec
from ...draw import style
from ...run.frame import decode_rows
from .learn import policy_of
from .tables import MEASURED, NAMES, POOLS, regrets

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORDER = tuple(NAMES[name] for name in POOLS["with FA3"])
COLORS = dict(zip(ORDER, style.PALETTE, strict=False))
MARKERS = dict(zip(ORDER, style.SHAPES, strict=False))
CELLS = 30
"""Choices along each side of a map."""
PALE = 0.35
EVEN = 2.2
"""Longest over mean up to which a case is drawn: fixed and ragged lengths, not skewed ones."""
LOST = 0.001
"""Regret below which a case is drawn as none, so that a log axis can show it."""


def policy_map(frame: pd.DataFrame, specs: Sequence[AttnSpec], *, pool: str) -> Figure:
    """Which backend of `pool` is chosen for requests of equal length, and measured cases.

    A panel a spec: batch size across, tokens of each request up. Dots are cases of fixed and of
    ragged lengths, at their mean. Raises ValueError if `specs` is empty or holds one that the frame
    lacks.
    """
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    if not specs:
        raise ValueError("specs must hold at least one, it holds none")
    style.apply()
    policy = policy_of(frame)
    figure, axes = plt.subplots(
        1, len(specs), figsize=(1 + 2.6 * len(specs), 3.6), layout="constrained", squeeze=False
    )
    for axis, spec in zip(axes[0], specs, strict=True):
        _draw_map(axis, policy, spec, POOLS[pool])
        axis.set(title=f"{spec.heads} heads, page {spec.page_size}", xlabel="batch, requests")
    axes[0][0].set_ylabel("mean length, tokens")
    shown = [NAMES[name] for name in POOLS[pool]]
    dots = [
        Line2D([], [], marker=MARKERS[n], color=COLORS[n], linestyle="", label=n) for n in shown
    ]
    figure.legend(handles=dots, loc="outside upper right", ncols=len(dots), frameon=False)
    style.add_title(figure, "Decode: fastest backend, measured (dots) and chosen (ground)")
    style.add_footer(figure, decode_rows(frame))
    return figure


def regret_chart(frame: pd.DataFrame, *, pool: str) -> Figure:
    """A row a rule: every held-out case's regret as a dot, the geometric mean as a line."""
    import matplotlib.pyplot as plt

    style.apply()
    lost = regrets(frame, (pool,))
    mean = np.expm1(np.log1p(lost.regret).groupby(lost.rule).mean()).sort_values()
    figure, axis = plt.subplots(figsize=(7, 0.9 + 0.38 * len(mean)), layout="constrained")
    for place, (rule, value) in enumerate(mean.items()):
        shown = lost[lost.rule == rule].regret.clip(lower=LOST)
        color = style.PALETTE[0] if rule == MEASURED else style.OTHER
        axis.scatter(shown, np.full(len(shown), place), s=12, color=color, alpha=0.6, linewidth=0)
        axis.plot([max(value, LOST)] * 2, [place - 0.35, place + 0.35], color="0.1", linewidth=2)
    axis.set_yticks(range(len(mean)), mean.index)
    axis.set(xscale="log", xlabel="time of the choice over the fastest, less 1 (log)")
    ticks = [LOST, 0.01, 0.1, 1, 10]
    axis.set_xticks(ticks, ["up to 0.1 %", "1 %", "10 %", "100 %", "1000 %"])
    axis.minorticks_off()
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    cases = lost.case.nunique()
    style.add_title(figure, f"Regret in {cases} held-out decode cases, backends {pool}")
    style.add_footer(figure, decode_rows(frame))
    return figure


def _draw_map(axis: Axes, policy: Policy, spec: AttnSpec, backends: Sequence[str]) -> None:
    from matplotlib.colors import ListedColormap

    points = policy.points[spec]
    even = [point for point in points if point.longest <= EVEN * point.mean_len]
    batches = _ends([point.batch_size for point in even])
    lengths = _ends([point.mean_len for point in even])
    x, y = (np.geomspace(*ends, CELLS) for ends in (batches, lengths))
    chosen = np.array([[_chosen(policy, spec, b, n, backends) for b in x] for n in y])
    ground = ListedColormap([COLORS[NAMES[name]] for name in backends])
    limits = {"vmin": -0.5, "vmax": len(backends) - 0.5}
    axis.pcolormesh(x, y, chosen, cmap=ground, alpha=PALE, rasterized=True, **limits)
    for name in backends:
        won = [point for point in even if _fastest(point, backends) == name]
        axis.scatter(
            [p.batch_size for p in won],
            [p.mean_len for p in won],
            s=16,
            color=COLORS[NAMES[name]],
            marker=MARKERS[NAMES[name]],
            edgecolor="white",
            linewidth=0.4,
        )
    axis.set(xscale="log", yscale="log", xlim=batches, ylim=lengths)
    style.plain_ticks(axis, "x", "y")
    axis.grid(visible=False)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values) / 1.2, max(values) * 1.2


def _chosen(
    policy: Policy, spec: AttnSpec, batch: float, length: float, backends: Sequence[str]
) -> int:
    lens = [max(1, round(length))] * max(1, round(batch))
    return list(backends).index(policy.choose(spec, lens, backends=backends).backend)


def _fastest(point: Point, backends: Sequence[str]) -> str:
    return min((us, name) for name, us in point.run_us.items() if name in backends)[1]
