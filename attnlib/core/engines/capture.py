"""What an engine's steps are like, a JSON object a line: sizes and lengths, no contents, no tokens.

steps = read("steps.jsonl")         # of one engine's traffic, for a study or a policy
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from ..spec import AttnSpec


@dataclass(frozen=True)
class Step:
    """One step of a model, as its attention layers see it.

    | field | meaning |
    |---|---|
    | `mode` | the engine's word: `decode`, `extend`, `mixed`, `target_verify`, ... |
    | `number` | of the steps of this mode in this process, from 0 |
    | `lengths` | tokens of each request, those of this step included; None: not on the host |
    | `q_lengths` | query tokens of each request; None: one each, or not on the host |
    | `batch_size` | requests, without a graph's padding |
    | `num_qo_heads`, `num_kv_heads`, `head_dim` | of a layer, on this GPU |
    | `page_size` | the engine's, tokens; FlashInfer's wrappers may be given slots |
    | `dtype`, `kv_dtype` | torch dtype names |
    | `kind` | of attention, `mha` (grouped-query too) or `mla` |
    | `backend`, `release` | of attention, as the engine names it, and the engine's own |
    | `rank`, `draft` | of the process among those that share the model; a draft model's step |
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
    rank: int = 0
    draft: bool = False

    @property
    def spec(self) -> AttnSpec:
        """The layer; ValueError if it is none of ours (MLA, dtypes)."""
        if self.kind != "mha":
            raise ValueError(f"kind must be mha for an AttnSpec, got {self.kind!r}")
        heads = (self.num_qo_heads, self.num_kv_heads, self.head_dim)
        return AttnSpec(*heads, self.page_size, self.dtype, self.kv_dtype)

    @property
    def line(self) -> str:
        """Of a file of steps."""
        return json.dumps(asdict(self)) + "\n"


class Capture:
    """Appends every `every`-th step of each mode to `path`, the first one included."""

    def __init__(self, path: str, every: int) -> None:
        self.path, self.every = path, every
        self.seen: Counter[str] = Counter()

    def due(self, mode: str) -> int | None:
        """Count a step; its number if it is one to write."""
        number = self.seen[mode]
        self.seen[mode] += 1
        return None if number % self.every else number

    def write(self, step: Step) -> None:
        """One line, at once, so that processes may share a file."""
        with open(self.path, "a") as file:
            file.write(step.line)


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
