"""The policy of a layer as a table of buckets, for an engine to look up in a microsecond.

A bucket is a batch size that engines capture, half an octave of mean length and half of longest
over mean. It holds what the policy chooses in its middle, for one long request among equal ones;
the last buckets are open. A batch takes the next size up, as it does to be replayed.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..spec import AttnSpec
from .policy import Policy

BATCHES = (1, 2, 4, 8, *range(16, 257, 8))
LENGTHS, SKEWS = 24, 10
"""Half octaves: mean tokens from `SHORTEST`, longest over mean from 1."""
SHORTEST = 32


def table_of(policy: Policy, spec: AttnSpec, backends: Sequence[str] = ()) -> dict[str, Any]:
    """JSON: `chosen` [batch][mean][skew] as places in `backends`, and how `sure` each choice is."""
    shape = (len(BATCHES), LENGTHS, SKEWS)
    picks = [policy.choose(spec, _middle(*at), backends=backends) for at in np.ndindex(shape)]
    names = sorted({pick.backend for pick in picks})
    chosen = np.reshape([names.index(pick.backend) for pick in picks], shape).tolist()
    sure = np.reshape([round(pick.confidence, 3) for pick in picks], shape).tolist()
    return {"backends": names, "chosen": chosen, "sure": sure}


def look_up(table: dict[str, Any], batch_size: int, tokens: int, longest: int) -> str:
    """The backend for so many requests of `tokens` in all, the longest of `longest`; 0 is 1."""
    mean = max(tokens, 1) / max(batch_size, 1)
    batch = min(bisect_left(BATCHES, batch_size), len(BATCHES) - 1)
    length = min(int(2 * math.log2(max(mean / SHORTEST, 1))), LENGTHS - 1)
    skew = min(int(2 * math.log2(max(longest / mean, 1))), SKEWS - 1)
    return table["backends"][table["chosen"][batch][length][skew]]


def _middle(batch: int, length: int, skew: int) -> list[int]:
    """Lengths in the middle of a bucket."""
    count, mean = BATCHES[batch], round(SHORTEST * 2 ** (length / 2 + 0.25))
    if count == 1 or skew == 0:
        return [mean] * count
    longest = min(round(mean * 2 ** (skew / 2 + 0.25)), count * mean - count + 1)
    rest = (count * mean - longest) // (count - 1)
    return [longest, *[max(1, rest)] * (count - 1)]
