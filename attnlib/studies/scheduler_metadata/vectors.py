"""Test vectors: random calls, the words that FlashAttention-3 wrote for them, and the comparison.

A vector file is gzipped JSON lines. The first line says what wrote it (`gpu`, `num_sms`, versions);
each other line is a call and its `words`, or the library's `refused`. Lengths are not stored: a
`LengthSpec` regenerates them (NumPy's PCG64), so a file of thousands of calls stays small.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ...core.schedule.splits import (
    BATCHES_PER_CTA,
    TIE,
    WHY,
    SchedulerFacts,
    SplitPlan,
    plan_splits,
)

HEADS = (
    *((32, 8), (32, 32), (8, 1), (16, 2), (64, 8), (28, 4), (40, 8), (5, 1), (6, 6), (128, 1)),
    *((16, 16), (12, 4), (96, 8), (1, 1), (24, 3), (16, 1), (2, 2), (14, 2), (64, 64)),
)
HEAD_DIMS = (64, 64, 128, 128, 128, 128, 256, 192, 96, 80, 112, 32, 160)
VALUE_DIMS = {192: (128,), 64: (256, 512)}
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 80, 96, 112, 160, 176, 192, 224, 512)
QUERY_LENGTHS = (2, 3, 4, 5, 8, 16, 64, 129, 512, 1000, 4096)
KINDS = ("fixed", "uniform", "skewed", "zeros", "edges", "few")
LONGEST = 2**20


COMMITTED = (
    Path(__file__).resolve().parents[3] / "data" / "vectors" / "fa3_scheduler_metadata.jsonl.gz"
)
"""The real library's schedules: part of the project, wherever its records may be."""


@dataclass(frozen=True)
class LengthSpec:
    """Lengths in 0..`high`, not all zero: `kind` is one of `KINDS`, `seed` feeds PCG64."""

    kind: str
    high: int
    seed: int

    def sample(self, batch_size: int) -> np.ndarray:
        """The lengths, [batch_size] int32."""
        rng = np.random.default_rng(self.seed)
        lens = _DRAW[self.kind](rng, self.high, batch_size)
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
        q_lens = None if self.q_lens is None else self.q_lens.sample(batch_size)
        return self.seq_lens.sample(batch_size), q_lens

    def to_dict(self) -> dict[str, Any]:
        """JSON form; what is usual goes unsaid."""
        told = {f.name: getattr(self.facts, f.name) for f in fields(self.facts)}
        usual = {f.name: f.default for f in fields(self.facts) if f.default is not MISSING}
        return {
            "facts": {k: v for k, v in told.items() if k not in usual or v != usual[k]},
            "seq_lens": asdict(self.seq_lens),
            "q_lens": asdict(self.q_lens) if self.q_lens else None,
        }

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Call:
        """Inverse of `to_dict`."""
        q_lens = LengthSpec(**form["q_lens"]) if form["q_lens"] else None
        return cls(SchedulerFacts(**form["facts"]), LengthSpec(**form["seq_lens"]), q_lens)


@dataclass(frozen=True)
class Comparison:
    """The library's words against the model's, for one call.

    `wrong` counts specified words that differ, a part, and under `ties` positions that no order
    of equal keys explains, at the rounding that fits best. `counts` are words a reason;
    `open_alike` are the open ones among them that came out as the model's default choice: equal
    keys in the order of requests.
    """

    wrong: dict[str, int]
    counts: dict[str, int]
    open_alike: dict[str, int]


def compare(call: Call, words: np.ndarray) -> Comparison:
    """Judge the library's `words` [n] int32; a tensor of another size is `wrong["size"]`.

    Where rounding leaves a choice, the whole tensor must follow from one of the candidates.
    """
    plan = plan_splits(call.facts, *call.lengths())
    model = plan.words()
    if words.shape != model.values.shape:
        return Comparison({"size": 1}, model.counts(), {})
    wrong = min((_wrong_words(candidate, words) for candidate in plan.candidates), key=_total)
    alike = {
        name: int(((model.why == code) & (words == model.values)).sum())
        for code, name in enumerate(WHY)
        if code >= TIE
    }
    return Comparison(wrong, model.counts(), alike)


def draw_calls(seed: int, *, num_sms: int, hdim96: bool) -> Iterator[Call]:
    """Random calls without end, the same for the same arguments; all that the model accepts."""
    rng = np.random.default_rng(seed)
    while True:
        try:
            call = _draw_call(rng, num_sms, hdim96)
            plan_splits(call.facts, *call.lengths())
        except ValueError:
            continue
        yield call


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines gzipped; the same lines give the same bytes."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> tuple[dict[str, Any], list[tuple[Call, np.ndarray | None]]]:
    """The file's header, and each call with its words (None where the library refused)."""
    header, *lines = (json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines())
    found = []
    for line in lines:
        words = line.get("words")
        array = None if words is None else np.array(words, np.int32)
        found.append((Call.from_dict(line), array))
    return header, found


def _total(counts: dict[str, int]) -> int:
    return sum(counts.values())


def _wrong_words(plan: SplitPlan, words: np.ndarray) -> dict[str, int]:
    """Specified words that differ, a part, and the positions that no tie explains."""
    model = plan.words()
    differs = (words != model.values) & model.specified
    bounds = [*plan.layout.parts.items(), ("end", plan.layout.size)]
    spans = zip(bounds, bounds[1:], strict=False)
    wrong = {name: int(differs[at:end].sum()) for (name, at), (_, end) in spans}
    wrong["ties"] = _unexplained_positions(plan, words)
    return {name: n for name, n in wrong.items() if n}


def _unexplained_positions(plan: SplitPlan, words: np.ndarray) -> int:
    """Positions whose request does not belong there, or whose other words are not its own."""
    layout, batch_size = plan.layout, plan.facts.batch_size
    if layout.batch_order is None:
        return 0
    splits, m_blocks, order = (
        words[at : at + batch_size]
        for at in (layout.num_splits, layout.num_m_blocks, layout.batch_order)
    )
    requests = np.arange(batch_size)
    if not np.array_equal(np.sort(order), requests):
        return batch_size
    right = plan.sort_keys[order] == plan.sort_keys[plan.batch_order]
    right &= order // BATCHES_PER_CTA == requests // BATCHES_PER_CTA
    right &= (splits == plan.num_splits[order]) & (m_blocks == plan.num_m_blocks[order])
    return int((~right).sum())


def _draw_call(rng: np.random.Generator, num_sms: int, hdim96: bool) -> Call:
    def pick(options: tuple[Any, ...]) -> Any:
        return options[rng.integers(len(options))]

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    heads, head_dim = pick(HEADS), pick(HEAD_DIMS)
    dtype = pick(("bfloat16", "bfloat16", "bfloat16", "float16", "float8_e4m3fn"))
    head_dim_v = pick(VALUE_DIMS[head_dim]) if head_dim in VALUE_DIMS and chance(0.1) else head_dim
    page_size = pick(PAGE_SIZES) if chance(0.75) else None
    most = 1 + _log_uniform(rng, LONGEST if chance(0.1) else 2**17)
    if page_size and chance(0.8):
        most = -(-most // page_size) * page_size
    max_q = 1 if chance(0.6) else pick(QUERY_LENGTHS)
    window = (-1, -1)
    if chance(0.25):
        window = (_log_uniform(rng, most) if chance(0.9) else -1, pick((0, 0, -1, 3, 100)))
    facts = SchedulerFacts(
        batch_size=_draw_batch_size(rng),
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        max_seqlen_q=max_q,
        max_seqlen_k=most,
        num_sms=num_sms,
        page_size=page_size,
        dtype=dtype,
        head_dim_v=head_dim_v,
        causal=chance(0.6),
        window=window,
        has_softcap=chance(0.1),
        varlen_q=chance(0.25),
        pack_gqa=None if chance(0.88) else chance(0.5),
        num_splits=0 if chance(0.7) else int(rng.integers(1, 256)) if chance(0.8) else 1,
        sm_margin=0 if chance(0.85) else int(rng.integers(1, num_sms)),
        hdim96=hdim96,
    )
    q_lens = LengthSpec(pick(KINDS), max_q, int(rng.integers(2**31))) if facts.varlen_q else None
    return Call(facts, LengthSpec(pick(KINDS), most, int(rng.integers(2**31))), q_lens)


def _draw_batch_size(rng: np.random.Generator) -> int:
    share = rng.random()
    bounds = ((0.6, 1, 17), (0.85, 17, 129), (0.94, 129, 601), (1.0, 601, 2001))
    low, high = next((low, high) for upto, low, high in bounds if share < upto)
    return int(rng.integers(low, high))


def _log_uniform(rng: np.random.Generator, high: int) -> int:
    """An integer in 0..high - 1, every order of magnitude as likely."""
    return int(np.exp(rng.uniform(0, np.log(high)))) - 1 if high > 1 else 0


def _zeros(rng: np.random.Generator, high: int, n: int) -> np.ndarray:
    return rng.integers(1, high + 1, n) * (rng.random(n) < 0.7)


def _edges(rng: np.random.Generator, high: int, n: int) -> np.ndarray:
    near = rng.integers(0, high // 64 + 1, n) * 64 + rng.integers(-1, 2, n)
    return np.clip(near, 1, high)


def _skewed(rng: np.random.Generator, high: int, n: int) -> np.ndarray:
    lens = np.full(n, max(1, high // 32))
    lens[rng.integers(n)] = high
    return lens


_DRAW = {
    "fixed": lambda rng, high, n: np.full(n, high),
    "uniform": lambda rng, high, n: rng.integers(1, high + 1, n),
    "skewed": _skewed,
    "zeros": _zeros,
    "edges": _edges,
    "few": lambda rng, high, n: rng.choice(rng.integers(1, high + 1, 3), n),
}
