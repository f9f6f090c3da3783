"""What an engine's steps look like, one JSON object per line: sizes and lengths, no tokens.

`studies.captured` turns them into cases.
"""

import fcntl
import io
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..core.spec import AttnSpec, require_types

MOST_BYTES = 1 << 26
"""Most bytes of a file of captured steps that are read."""
EVERY = 10
"""One of this many steps of each mode is captured, beginning with the first."""


@dataclass(frozen=True)
class Step:
    """One step of a model, as its attention layers see it.

    `mode` is the engine's word. `lengths` are the tokens of each request as cases write them
    (`33+1+60`), with those of this step but without drafts to verify; empty where the host does not
    know them. `q_lengths` are the query tokens, empty also where each request has one.
    `batch_size` is without a graph's padding. Heads are those of a layer on this GPU; dtypes are
    torch's names. `kind` is `mha` (grouped-query too) or `mla`, `backend` the engine's name of its
    attention backend, `release` the engine's; `draft` marks a draft model's step.
    """

    mode: str
    batch_size: int
    lengths: str
    q_lengths: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    kv_dtype: str
    kind: str
    backend: str
    release: str
    draft: bool

    @property
    def spec(self) -> AttnSpec:
        """The layer; ValueError if no backend here can have it (MLA, other dtypes)."""
        if self.kind != "mha":
            raise ValueError(f"kind must be mha, got {self.kind!r}")
        return AttnSpec(
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
        )


class Capture:
    """Appends steps to `path`; OSError at once if it cannot be appended to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seen: Counter[str] = Counter()
        open(path, "ab").close()

    def due(self, mode: str) -> bool:
        """Count a step; True if it is one to write."""
        self.seen[mode] += 1
        return (self.seen[mode] - 1) % EVERY == 0

    def write(self, step: Step) -> None:
        """Append one whole line, or none and OSError; other processes may write the same file."""
        line = (json.dumps(asdict(step)) + "\n").encode()
        with open(self.path, "ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = os.fstat(file.fileno()).st_size
            written = file.write(line)
            if written != len(line):
                file.truncate(before)
                raise OSError(f"{written} of {len(line)} bytes had room in {self.path}")


def joined(lengths: Any) -> str:
    """Lengths on the host (a tensor, an array, a list) as `Step.lengths`; empty for None."""
    if lengths is None:
        return ""
    return "+".join(map(str, np.asarray(lengths).tolist()))


def read(path: str | Path) -> list[Step]:
    """The steps of a file; blank lines are skipped.

    ValueError names the first invalid line, or a file of more than `MOST_BYTES`.
    """
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path} must have at most {MOST_BYTES >> 20} MiB, it has more")
    steps = []
    for number, line in enumerate(io.BytesIO(data), 1):
        if not line.strip():
            continue
        try:
            form = json.loads(line)
            steps.append(Step(**form))
            require_types(fields(Step), form)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}:{number} must be a captured step, got {error!r}") from None
    return steps
