"""Advice for one decode call: the rule that holds for it, and the nearest recorded batches.

Nothing is predicted: `advise` shows times that were measured, how far those batches are from the
call, and on which GPU and release. The backend with the least mean time over the 16 nearest batches
chooses well, not perfectly: `neighbour_loss` computes what it loses on layers left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..core.spec import ELEMENT_BYTES, AttnSpec, require_int
from ..draw.cards import Card, Shown
from ..kinds.decode.case import DecodeCase
from ..kinds.lengths import sample_seq_lens
from ..select import Call, Choice, explain
from ..studies import random_batches

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEAREST = 16
GROUP_WEIGHT, OTHER_KERNEL = 3.0, 6.0
"""Weight of a factor of two in query heads per KV head, and the distance added for another head_dim
or another element size of the cache. Chosen among 24 settings by `neighbour_loss`."""
FEATURES = "tokens x KV heads, requests, longest / mean length, query heads per KV head"


@dataclass(frozen=True, eq=False, repr=False)
class Advice(Shown):
    """The rule's `choice` for a call, and `nearest`, a row per recorded batch, nearest first.

    Columns of `nearest`: case, distance, a column of median us per backend, rounds, spread (largest
    relative difference between rounds of one backend), gpu, machine, release.
    """

    layer: AttnSpec
    lengths: tuple[int, ...]
    choice: Choice
    nearest: pd.DataFrame

    def table(self) -> pd.DataFrame:
        """A row per backend, best first: its time / the best of each batch (geometric mean)."""
        times = self.nearest[[name for name in random_batches.BACKENDS if name in self.nearest]]
        over_best = times.div(times.min(axis=1), axis=0)
        table = pd.DataFrame(
            {
                "fastest in": times.idxmin(axis=1).value_counts(),
                "mean of time / best": np.exp(np.log(over_best).mean()).round(3),
                "worst": over_best.max().round(3),
            }
        )
        table = table.reindex(times.columns).fillna({"fastest in": 0}).astype({"fastest in": int})
        return table.sort_values("mean of time / best").rename_axis("backend").reset_index()

    def card(self) -> Card:
        """The rule, the nearest batches, and how far they are."""
        decided = self.choice.decided_by
        ran = f", which runs {self.choice.kernel}" if self.choice.inner else ""
        near, far = self.nearest.distance.iloc[0], self.nearest.distance.iloc[-1]
        first = self.nearest.iloc[0]
        heads = f"{self.layer.heads} heads, head_dim {self.layer.head_dim}"
        return Card(
            title=f"decode, {heads}, {len(self.lengths)} requests, {sum(self.lengths):,} tokens",
            notes=["Times of recorded batches; nothing is predicted for this call."],
            facts=[
                (f"rule of {self.choice.library}", f"{self.choice.backend}{ran}"),
                ("decided by", f"{decided.why} ({decided.source})"),
                ("nearest batches", f"{len(self.nearest)}, distance {near:.2f} to {far:.2f}"),
                ("measured on", f"{first.gpu}, FlashInfer {first.release}, L2 cold"),
                ("spread of rounds", f"{self.nearest.spread.median():.1%} (median)"),
            ],
            table=self.table().astype(str),
            caption="backends among the nearest recorded batches",
            footer=f"distance: sum of differences of log2({FEATURES})",
        )


def advise(
    call: DecodeCase | AttnSpec,
    lengths: Sequence[int] = (),
    *,
    library: str = "flashinfer==0.7.2",
    gpu: str = "sm90",
    count: int = NEAREST,
) -> Advice:
    """The rule of `library` for a decode call, and the `count` nearest recorded batches.

    `call` is a case, or a layer with the `lengths` (tokens) of its requests. Raises ValueError for
    missing lengths or lengths below 1, and what `explain` raises.
    """
    if isinstance(call, DecodeCase):
        layer, tokens = call.spec, sample_seq_lens(call)
    else:
        layer, tokens = call, np.asarray(lengths, np.int64)
    if not len(tokens) or tokens.min() < 1:
        raise ValueError(f"lengths must be one or more tokens per request, got {list(lengths)}")
    require_int("count", count)
    kv_lens = tuple(int(n) for n in tokens)
    choice = explain(
        layer, mode="decode", gpu=gpu, library=library, call=Call(kv_lens=kv_lens, graph=True)
    )
    batches = recorded_batches()
    distance = distances(layer, tokens, batches)
    nearest = batches.assign(distance=distance.round(3)).nsmallest(count, "distance")
    return Advice(layer, kv_lens, choice, nearest.reset_index(drop=True))


def distances(layer: AttnSpec, lengths: NDArray[np.int64], batches: pd.DataFrame) -> pd.Series:
    """How far the recorded batches are from a call: 1 is a factor of two in one feature."""
    point = _features(layer, lengths)
    apart = sum((batches[name] - value).abs() for name, value in point.items())
    other_dim = batches.head_dim != layer.head_dim
    other_bytes = batches.kv_bytes != ELEMENT_BYTES[layer.kv_dtype]
    return apart + OTHER_KERNEL * (other_dim.astype(float) + other_bytes.astype(float))


def _features(layer: AttnSpec, lengths: NDArray[np.int64]) -> dict[str, float]:
    tokens = int(lengths.sum())
    return {
        "log_tokens": math.log2(tokens * layer.num_kv_heads),
        "log_batch": math.log2(len(lengths)),
        "log_skew": math.log2(int(lengths.max()) * len(lengths) / tokens),
        "log_group": GROUP_WEIGHT * math.log2(layer.group_size),
    }


@cache
def recorded_batches() -> pd.DataFrame:
    """A row per recorded random batch: case, features, median us per backend, where measured."""
    rows = random_batches.load_all()
    keys = ["machine", "case"]
    wide = rows.pivot_table("run_us", keys, "backend", "median", sort=False)
    ends = rows.groupby([*keys, "backend"], sort=False).run_us.agg(["min", "max", "size"])
    rounds = ends["size"].groupby(keys, sort=False).min()
    spread = (ends["max"] / ends["min"] - 1).groupby(keys, sort=False).max()
    table = wide.assign(rounds=rounds, spread=spread).reset_index()
    cases = table.case
    features = pd.DataFrame([_features(case.spec, sample_seq_lens(case)) for case in cases])
    gpu = rows.drop_duplicates("machine").set_index("machine").gpu
    return pd.concat([table, features], axis=1).assign(
        heads=[case.spec.heads for case in cases],
        head_dim=[case.spec.head_dim for case in cases],
        kv_bytes=[ELEMENT_BYTES[case.spec.kv_dtype] for case in cases],
        gpu=table.machine.map(gpu),
        release="0.7.2",
    )


def neighbour_loss(
    backends: Sequence[str] = random_batches.BACKENDS, count: int = NEAREST
) -> pd.Series:
    """Time of the backend that the nearest batches of *other layers* choose / the best, - 1.

    The choice is the backend with the least mean of log(time / best). A value per recorded batch
    that has all `backends`; batches of the same layer are left out.
    """
    batches = recorded_batches().dropna(subset=list(backends)).reset_index(drop=True)
    times = batches[list(backends)].to_numpy()
    over_best = times / times.min(axis=1, keepdims=True)
    losses = []
    for place, case in enumerate(batches.case):
        far = distances(case.spec, sample_seq_lens(case), batches).to_numpy(copy=True)
        far[[other.spec == case.spec for other in batches.case]] = np.inf
        nearest = np.argsort(far)[:count]
        chosen = np.log(over_best[nearest]).mean(axis=0).argmin()
        losses.append(over_best[place, chosen] - 1)
    return pd.Series(losses, name="loss")
