"""What an engine's steps are like, a JSON object a line: sizes and lengths, no contents, no tokens.

`kinds.captured` makes cases of it.
"""

import fcntl
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from ..spec import AttnSpec


@dataclass(frozen=True)
class Step:
    """One step of a model, as its attention layers see it.

    `mode` is the engine's word, `number` counts the steps of one in a process. `lengths` are the
    tokens of each request, those of this step included (but drafts to verify), None where the host
    does not know them; `q_lengths` the query tokens, None also where each has one. `batch_size` is
    without a graph's padding. Heads are those of a layer on this GPU, pages the engine's, dtypes
    torch names. `kind` is `mha` (grouped-query too) or `mla`, `backend` the engine's name of its
    attention, `release` its own; `draft` marks a draft model's step.
    """

    mode: str
    number: int
    batch_size: int
    lengths: tuple[int, ...] | None
    q_lengths: tuple[int, ...] | None
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    kv_dtype: str
    kind: str
    backend: str
    release: str
    rank: int
    draft: bool

    @property
    def spec(self) -> AttnSpec:
        """The layer; ValueError if it is none of ours (MLA, dtypes)."""
        if self.kind != "mha":
            raise ValueError(f"kind must be mha, got {self.kind!r}")
        heads = (self.num_qo_heads, self.num_kv_heads, self.head_dim)
        return AttnSpec(*heads, self.page_size, self.dtype, self.kv_dtype)


class Capture:
    """Appends every `every`-th step of each mode to `path`, the first one included.

    OSError at once if it cannot be appended to.
    """

    def __init__(self, path: str, every: int) -> None:
        self.path, self.every = path, every
        self.seen: Counter[str] = Counter()
        open(path, "ab").close()

    def due(self, mode: str) -> int | None:
        """Count a step; its number if it is one to write."""
        number = self.seen[mode]
        self.seen[mode] += 1
        return None if number % self.every else number

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
    """The steps of a file; ValueError naming the first line that is none."""
    steps = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            values = json.loads(line)
            for name in ("lengths", "q_lengths"):
                values[name] = None if values[name] is None else tuple(values[name])
            steps.append(Step(**values))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} must be a captured step, got {error!r}") from None
    return steps
