"""Look up a call in the records: the exact one comes first, else the nearest.

How far two calls are apart is a sum over their `features`, and `OTHER_KERNEL` for each thing that
has kernels of its own and differs. A factor of two in the tokens of each request, or in requests,
is 3.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..core.call_text import Lens
from ..core.gpu import HOPPER_SMS
from ..core.spec import ELEMENT_BYTES, LENGTHS, AttnSpec, MlaSpec
from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.extend.case import ExtendCase
from ..measure.calls.lengths import explicit_lengths, sample_seq_lens
from ..measure.calls.mla.case import MlaCase
from . import store

AttentionCase = DecodeCase | MlaCase | ExtendCase
Recorded = Mapping[Any, list[Any]]
OTHER_KERNEL = 6.0
"""The distance of another head_dim, element size or mode."""
GROUP_WEIGHT = 3.0
"""The weight of a factor of two in query heads per KV head."""
UNITS_WEIGHT = 2.0
"""The weight of a factor of two in requests x KV heads, which is what fills the GPU."""
SLOTS_WEIGHT = 4.0
"""The distance of calls that fit the GPU's slots of two blocks per SM from those that do not: past
them some kernels split no request."""
LONGEST_WEIGHT = 2.0
"""The weight of a factor of two in the longest request. All weights were chosen among 108 settings
by how well the nearest batches of other layers choose."""
LOGARITHM = "log_"
"""How the names of sizes begin that are logarithms; others are alike or not."""


def look_up(rows: pd.DataFrame, *apart: Sequence[float]) -> pd.DataFrame:
    """The rows, nearest first: by the first of `apart`, a distance per row, ties by the next."""
    keys = [np.asarray(far) for far in apart]
    order = np.lexsort(keys[::-1])  # its last key is the first to sort by
    return rows.iloc[order]


def nearest_calls(call: AttentionCase, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, each a `case` with columns of `sizes_of`, nearest to `call` first.

    `distance` is how far a case is from the call. Of those at one distance the call itself comes
    first, then those of its layer.
    """
    wanted = plain(call)
    distance = distances(call, rows).round(3)
    is_other = []
    of_other_layer = []
    for case in rows.case:
        recorded = plain(case)
        is_other.append(recorded != wanted)
        of_other_layer.append(recorded.spec != wanted.spec)
    rows = rows.assign(distance=distance)
    return look_up(rows, rows.distance, is_other, of_other_layer)


def distances(call: AttentionCase, rows: pd.DataFrame) -> NDArray[np.float64]:
    """How far each row, of columns of `sizes_of`, is from a call."""
    apart = np.zeros(len(rows))
    for name, value in sizes_of(call).items():
        recorded = rows[name].to_numpy()
        if name.startswith(LOGARITHM):
            apart += np.abs(recorded - value)
        else:
            apart += OTHER_KERNEL * (recorded != value)
    return apart


def sizes_of(call: AttentionCase) -> dict[str, Any]:
    """What tells how near a call is: its `features`, and what has kernels of its own."""
    if isinstance(call, ExtendCase):
        return sizes_of(call.cached) | {"mode": call.mode}
    lengths = sample_seq_lens(call)
    return features(call.spec, lengths) | kernel_of(call.spec)


def features(layer: AttnSpec | MlaSpec, lengths: NDArray[Any]) -> dict[str, float]:
    """The weighted logarithms of a call's sizes, and whether it fits the slots of a Hopper GPU."""
    kv_heads = 1
    group = layer.num_qo_heads
    if isinstance(layer, AttnSpec):
        kv_heads = layer.num_kv_heads
        group = layer.group_size
    requests = len(lengths)
    tokens = int(lengths.sum())
    longest = int(lengths.max())
    units = requests * kv_heads
    return {
        "log_tokens": math.log2(tokens * kv_heads),
        "log_units": UNITS_WEIGHT * math.log2(units),
        "log_slots": SLOTS_WEIGHT * (units > 2 * HOPPER_SMS),
        "log_longest": LONGEST_WEIGHT * math.log2(longest),
        "log_skew": math.log2(longest * requests / tokens),
        "log_group": GROUP_WEIGHT * math.log2(group),
    }


def kernel_of(layer: AttnSpec | MlaSpec) -> dict[str, Any]:
    """What of a layer has kernels of its own."""
    if isinstance(layer, MlaSpec):
        return {"kv_format": layer.kv_format, "dense": not layer.top_k}
    return {
        "head_dim": layer.head_dim,
        "kv_bytes": ELEMENT_BYTES[layer.kv_dtype],
        "query_bytes": ELEMENT_BYTES[layer.dtype],
    }


def plain(call: AttentionCase) -> AttentionCase:
    """A call without what does not change it: explicit lengths that are all alike are fixed ones,
    and a page table (`context`) may be wider than the longest request."""
    if isinstance(call, ExtendCase):
        return call
    if call.lengths in LENGTHS:
        return replace(call, context=0)
    tokens = explicit_lengths(call.lengths).tolist()
    lens = Lens.of(tokens)
    return replace(call, context=0, **lens.fields)


def recorded_as(call: AttentionCase, study: str, machine: str) -> list[Any]:
    """The cases on record of a study on a machine that are this call (`plain`)."""
    recorded = calls_on_record(study, machine)
    return recorded.get(plain(call), [])


def calls_on_record(study: str, machine: str) -> Recorded:
    """The calls of decode and MLA (`plain`) on record -> the cases that they were measured as."""
    stamp = store.stamp(study, machine)
    return _calls_on_record(study, machine, stamp)


@lru_cache(maxsize=64)
def _calls_on_record(study: str, machine: str, stamp: object) -> Recorded:
    # Records that changed have another stamp.
    frame = store.load(study, machine)
    recorded: Iterable[Any] = frame.case.unique()
    calls: defaultdict[Any, list[Any]] = defaultdict(list)
    for case in recorded:
        if isinstance(case, DecodeCase | MlaCase):
            calls[plain(case)].append(case)
    return dict(calls)
