"""Test vectors: calls, and the words that FlashAttention-3 wrote for them.

A vector file is JSON lines, xz. The first line says what wrote it (`gpu`, `num_sms`, versions);
each other line is a call and its `words`, or the library's `refused`. Lengths are not stored: a
`LengthSpec` draws them anew (NumPy's PCG64).
"""

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlib.core import SchedulerFacts

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "data" / "vectors" / "fa3_scheduler_metadata.jsonl.xz"
"""The real library's schedules: part of the project, wherever its records may be. `left_out` of its
first line says which of the calls drawn are not in it any more."""
SGLANG = COMMITTED.with_name("sglang_fa3_schedules.jsonl.xz")
"""The same of sglang-kernel 0.4.4 and 0.4.5, up to 100 requests."""
STEPS = COMMITTED.with_name("step_schedules.jsonl.xz")
"""Full, window and MLA layers in decode and verification, of three builds (`make_vectors --steps`).
sglang-kernel 0.4.5 and 0.4.10 wrote the same words, which stand once."""
VLLM = COMMITTED.with_name("vllm_fa3_schedules.jsonl.xz")
"""The same of vLLM 0.33.0's build, whose words are others (`core.schedule.splits`)."""


def _edges(rng: np.random.Generator, high: int, n: int) -> np.ndarray:
    near = rng.integers(0, high // 64 + 1, n) * 64
    near += rng.integers(-1, 2, n)
    return np.clip(near, 1, high)


def _skewed(rng: np.random.Generator, high: int, n: int) -> np.ndarray:
    lens = np.full(n, max(1, high // 32))
    lens[rng.integers(n)] = high
    return lens


def _padded(rng: np.random.Generator, high: int, n: int) -> np.ndarray:
    lens = np.ones(n, np.int64)
    real = rng.integers(1, n + 1)
    lens[:real] = rng.integers(1, high + 1, real)
    return lens


def _zeros(rng: np.random.Generator, high: int, n: int) -> np.ndarray:
    lens = rng.integers(1, high + 1, n)
    return lens * (rng.random(n) < 0.7)


KINDS = {
    "fixed": lambda rng, high, n: np.full(n, high),
    "uniform": lambda rng, high, n: rng.integers(1, high + 1, n),
    "skewed": _skewed,
    "zeros": _zeros,
    "edges": _edges,
    "few": lambda rng, high, n: rng.choice(rng.integers(1, high + 1, 3), n),
    "padded": _padded,
}
"""The last one: requests of one token, as an engine pads the batch of a graph or of a rank."""


@dataclass(frozen=True)
class LengthSpec:
    """Lengths in 0..`high`, not all zero: `kind` is one of `KINDS`, `seed` feeds PCG64."""

    kind: str
    high: int
    seed: int

    def sample(self, batch_size: int) -> np.ndarray:
        """The lengths, [batch_size] int32."""
        rng = np.random.default_rng(self.seed)
        lens = KINDS[self.kind](rng, self.high, batch_size)
        if not lens.any():
            lens[0] = self.high
        return lens.astype(np.int32)


@dataclass(frozen=True)
class Call:
    """One drawn call: its facts and its lengths; `q_lens` where `facts.varlen_q`."""

    facts: SchedulerFacts
    seq_lens: LengthSpec
    q_lens: LengthSpec | None

    def lengths(self) -> tuple[np.ndarray, np.ndarray | None]:
        """KV lengths and query lengths, each [batch_size] int32."""
        batch_size = self.facts.batch_size
        q_lens = self.q_lens.sample(batch_size) if self.q_lens else None
        return self.seq_lens.sample(batch_size), q_lens

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> "Call":
        """The call of a line of a vector file, where what is usual goes unsaid."""
        q_lens = LengthSpec(**form["q_lens"]) if form["q_lens"] else None
        return cls(SchedulerFacts(**form["facts"]), LengthSpec(**form["seq_lens"]), q_lens)


def read(path: Path) -> tuple[dict[str, Any], list[tuple[Call, np.ndarray | None]]]:
    """The file's header, and each call with its words (None where the library refused)."""
    header, *lines = (json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines())
    words = [np.array(line["words"], np.int32) if "words" in line else None for line in lines]
    return header, list(zip(map(Call.from_dict, lines), words, strict=True))
