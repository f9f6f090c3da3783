"""What an engine's steps are like, a JSON object a line: sizes and lengths, no contents, no tokens.

`studies.captured` makes cases of it.
"""

import fcntl
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from ..spec import AttnSpec

EVERY = 10
"""One step in so many of each mode is captured, the first one included."""


@dataclass(frozen=True)
class Step:
    """One step of a model, as its attention layers see it.

    `mode` is the engine's word. `lengths` are the tokens of each request as cases say them,
    `33+1+60`, those of this step included (but drafts to verify), empty where the host does not
    know them; `q_lengths` the query tokens, empty also where each request has one. `batch_size` is
    without a graph's padding. Heads are those of a layer on this GPU, pages the engine's, dtypes
    torch names. `kind` is `mha` (grouped-query too) or `mla`, `backend` the engine's name of its
    attention, `release` its own; `draft` marks a draft model's step. `told` is what FA3's schedule
    is told of heads, `8/4`, empty where the backend keeps no such numbers.
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
    told: str = ""

    @property
    def spec(self) -> AttnSpec:
        """The layer; ValueError if it is none of ours (MLA, dtypes)."""
        if self.kind != "mha":
            raise ValueError(f"kind must be mha, got {self.kind!r}")
        heads = (self.num_qo_heads, self.num_kv_heads, self.head_dim)
        return AttnSpec(*heads, self.page_size, self.dtype, self.kv_dtype)


class Capture:
    """Appends steps to `path`; OSError at once if it cannot be appended to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seen: Counter[str] = Counter()
        open(path, "ab").close()

    def due(self, mode: str) -> bool:
        """Count a step, and say whether it is one to write."""
        self.seen[mode] += 1
        return not (self.seen[mode] - 1) % EVERY

    def write(self, step: Step) -> None:
        """One line, whole or not at all, whoever else writes; OSError if not at all."""
        line = (json.dumps(asdict(step)) + "\n").encode()
        with open(self.path, "ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = os.fstat(file.fileno()).st_size
            if (wrote := file.write(line)) != len(line):
                file.truncate(before)
                raise OSError(f"{wrote} of {len(line)} bytes had room in {self.path}")


def read(path: str | Path) -> list[Step]:
    """The steps of a file, a line each or blank; ValueError naming the first that is none."""
    steps = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            steps += [Step(**json.loads(line))] if line.strip() else []
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number} must be a captured step, got {error!r}") from None
    return steps
