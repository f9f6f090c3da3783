"""What a backend is expected to take for a decode call that is not on record, by all batches.

The logarithm of a backend's time over another's is a smooth function of a call's shape, known at
each recorded batch that has both. It is estimated by Gaussian process regression (kriging): the
covariance of two batches is exp(-d), d the sum over `shape_of` of what differs, and `NOISE` is that
of a measurement. A mean over the nearest batches is worse: one of few blocks often stands nearest
to one of many, and FlashInfer's plan has steps that no size alone shows.

The weights of `shape_of`, `NOISE` and `MOST` were chosen on 2026-11-28 for what is lost on recorded
layers left out and on 24 batches that had been judged (`data/captures/unseen_batches.jsonl`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..core.fa2.choice import (
    BLOCK_TOKENS,
    PlanShape,
    candidates,
    counted,
    library_chunk,
    predicted_time,
)
from ..core.gpu import FA2_CTAS, HOPPER_SMS
from ..core.spec import AttnSpec
from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.lengths import sample_seq_lens
from ..run.look_up import kernel_of
from ..studies import random_batches
from .recorded import recorded_batches

Array = NDArray[np.floating[Any]]
NOISE = 0.03
"""The variance of a measured logarithm beside that of the shape, which is 1."""
MOST = math.log(6)
"""A ratio of times above six counts as six: how much a bad choice loses says little elsewhere."""
OTHER_CARD = 0.3
"""How unlike the batches of another GPU are."""
FEWEST = 20
"""Batches with both backends from which a ratio is estimated."""
SLOTS = FA2_CTAS * HOPPER_SMS


class Expected(NamedTuple):
    """A backend's expected time over that of the engine's choice, by how many batches, and the
    call's GPU, or another where no batch is of it."""

    ratio: float
    batches: int
    gpu: str


def expected_ratios(
    call: DecodeCase,
    own: str,
    rivals: Sequence[str],
    draws: Sequence[str],
) -> dict[str, Expected]:
    """Backend -> what is expected of it against `own`, for each of `rivals` that is on record with
    it in `FEWEST` batches or more, of the call's head_dim and dtypes.

    The call's GPU is that of the first of `draws`; batches of another count less (`OTHER_CARD`).
    """
    kernel = str(kernel_of(call.spec))
    found: dict[str, Expected] = {}
    for rival in rivals:
        kriged = _kriged(own, rival, tuple(draws), kernel)
        if kriged is not None:
            ratio = math.exp(kriged.at(shape_of(call)))
            found[rival] = Expected(ratio, len(kriged.weights), kriged.gpu)
    return found


class Kriged(NamedTuple):
    """An estimate: the shapes of batches [n, sizes + 1], the last 0 on the call's GPU, the weight
    of each [n], and the call's GPU, or that of the first where none is of it."""

    shapes: Array
    weights: Array
    gpu: str

    def at(self, shape: Array) -> float:
        """The expected logarithm at a shape [sizes]."""
        here = np.append(shape, 0.0)
        alike = covariance(here[None], self.shapes)
        return float((alike @ self.weights)[0])


@cache
def _kriged(
    own: str,
    rival: str,
    draws: tuple[str, ...],
    kernel: str,
) -> Kriged | None:
    """The estimate of rival / own over the batches of a kernel; None where too few have both."""
    tables = []
    for draw in draws:
        batches = recorded_batches(draw)
        if {own, rival} <= {*batches}:
            is_like = [str(kernel_of(case.spec)) == kernel for case in batches.case]
            both = batches[is_like].dropna(subset=[own, rival])
            tables += [both] if len(both) else []
    if not tables:
        return None
    rows = pd.concat(tables, ignore_index=True)
    if len(rows) < FEWEST:
        return None
    here = recorded_batches(draws[0]).gpu.iloc[0]
    is_other = rows.gpu != here
    gpu = here
    if is_other.all():
        gpu = rows.gpu.iloc[0]
        is_other = rows.gpu != gpu
    shapes = np.array([shape_of(case) for case in rows.case])
    shapes = np.column_stack([shapes, OTHER_CARD * is_other])
    ratios = _clipped(rows[rival] / rows[own])
    weights = np.linalg.solve(measured_covariance(shapes), ratios)
    return Kriged(shapes, weights, gpu)


def _clipped(ratios: pd.Series) -> Array:
    """The logarithms of ratios of times, at most `MOST` from 0."""
    return np.log(ratios.to_numpy(dtype=float)).clip(-MOST, MOST)


def covariance(shapes: Array, others: Array) -> Array:
    """Of shapes [m, sizes] with others [n, sizes]: [m, n]; the mean has a variance of 1 too."""
    apart = np.abs(shapes[:, None] - others[None]).sum(axis=2)
    return np.exp(-apart) + 1


def measured_covariance(shapes: Array) -> Array:
    """Of measured batches among one another [n, n]."""
    return covariance(shapes, shapes) + NOISE * np.eye(len(shapes))


@cache
def shape_of(call: DecodeCase) -> Array:
    """The weighted sizes of a call: a difference of 1 makes two calls unlike."""
    layer = call.spec
    lengths = sample_seq_lens(call)
    tokens = int(lengths.sum())
    longest = int(lengths.max())
    units = len(lengths) * layer.num_kv_heads
    share = tokens * layer.num_kv_heads / SLOTS
    waves = units / HOPPER_SMS
    last_wave = math.ceil(waves) / waves if 2 * units > HOPPER_SMS else 1.0
    return np.array(
        [
            0.05 * math.log2(tokens * layer.num_kv_heads),
            0.1 * math.log2(units),
            0.5 * (units > SLOTS),  # past them fa2 splits no request
            0.1 * math.log2(longest),
            0.05 * math.log2(max(1.0, longest / share)),  # the longest, in shares of a slot
            0.1 * math.log2(last_wave),
            0.05 * math.log2(layer.num_kv_heads),
            0.075 * math.log2(layer.group_size),
            0.2 * math.log2(_idle(layer, lengths)),
        ]
    )


def _idle(layer: AttnSpec, lengths: NDArray[np.int64]) -> float:
    """The predicted time of FlashInfer's plan of fa2 over that of an even one, as of 16 bits and
    head_dim 128, which has all kinds of tiles."""
    layer = replace(layer, head_dim=128, window=0, dtype="bfloat16", kv_dtype="bfloat16")
    shape = PlanShape.of(layer, lengths, HOPPER_SMS)
    lens = counted(shape, lengths)
    chunk = library_chunk(shape, lens, candidates(lens, shape.page_size))
    (time,) = predicted_time(shape, lens, np.array([chunk]))
    even = lens.sum() * shape.copies / shape.slots + BLOCK_TOKENS
    return float(time / even)


def neighbour_loss(backends: Sequence[str] = random_batches.BACKENDS) -> pd.Series:
    """How much slower the backend is that `advise` expects to be fastest by *other layers* alone.

    Parameters
    ----------
    backends : sequence of str
        Names of backends; batches that lack one of them are left out.

    Returns
    -------
    pandas.Series
        Time of the choice over that of the best backend, less 1: a value per recorded batch.

    Raises
    ------
    KeyError
        For a backend that no batch was measured with.

    Examples
    --------
    >>> import attnlib
    >>> bool(attnlib.neighbour_loss().mean() < 0.02)
    True
    """
    return loss_on_layers_left_out("all layers", backends)


def loss_on_layers_left_out(draw: str, backends: Sequence[str]) -> pd.Series:
    """The same for a draw; the first of `backends` is what the others are compared with."""
    own, *rivals = backends
    batches = recorded_batches(draw).dropna(subset=[*backends]).reset_index(drop=True)
    expected = pd.DataFrame(0.0, index=batches.index, columns=[*backends])
    kernels = [str(kernel_of(case.spec)) for case in batches.case]
    for _, rows in batches.groupby(kernels, sort=False):
        shapes = np.array([shape_of(case) for case in rows.case])
        layers, _ = pd.factorize(np.array([case.spec for case in rows.case], dtype=object))
        inverse = np.linalg.inv(measured_covariance(shapes))
        for rival in rivals:
            ratios = _clipped(rows[rival] / rows[own])
            expected.loc[rows.index, rival] = _left_out(inverse, ratios, layers)
    chosen = expected.to_numpy().argmin(axis=1)
    times = batches[[*backends]].to_numpy()
    loss = times[batches.index, chosen] / times.min(axis=1) - 1
    return pd.Series(loss, name="loss")


def _left_out(inverse: Array, ratios: Array, layers: NDArray[np.int64]) -> Array:
    """What the other layers' batches let expect of each batch [n]."""
    expected = np.empty(len(ratios))
    weights = inverse @ ratios
    for layer in np.unique(layers):
        here = np.flatnonzero(layers == layer)
        block = inverse[np.ix_(here, here)]
        expected[here] = ratios[here] - np.linalg.solve(block, weights[here])
    return expected
