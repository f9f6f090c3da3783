"""Scheduler metadata that does not fit its attention call: which cases there are, by their facts.

The facts of both calls follow from a case alone, so `plan_splits` says without a GPU what the
metadata holds and should hold, and what the call allocates for.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from ...core.schedule.facts import SchedulerFacts
from ...core.schedule.splits import plan_splits
from ...core.spec import AttnSpec
from ..decode.case import DecodeCase
from ..form import NamedCase
from ..lengths import sample_seq_lens


@dataclass(frozen=True)
class Mismatch:
    """`told` replaces facts in the metadata call; `call` holds `attend`'s own options.

    `told_tokens` and `call_tokens` set every request's length at either call. With `in_buffer` the
    words lie at the head of a zeroed buffer of the call's size, as engines keep one for graphs.
    """

    name: str
    case: DecodeCase
    told: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    told_tokens: int = 0
    call_tokens: int = 0
    in_buffer: bool = False

    @property
    def what(self) -> str:
        """What does not fit, in words."""
        return WHAT[self.name]


@dataclass(frozen=True)
class MismatchCase(NamedCase):
    """An entry of `MISMATCHES` by name, with the guard or past it."""

    kind: ClassVar = "mismatch"
    name: str
    guard: bool

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        return f"{self.name} {'guarded' if self.guard else 'unguarded'}"


@dataclass(frozen=True)
class Splits:
    """The most splits of any request: in the metadata, by rights, and the cap of the call."""

    in_metadata: int
    right: int
    cap: int

    @property
    def overrun(self) -> bool:
        """Whether the kernels write past buffers that the call sized by its cap.

        With a cap of one there are no such buffers, and the metadata's splits are not read.
        """
        return 1 < self.cap < self.in_metadata


def _case(heads: tuple[int, int], batch_size: int, kv_len: int, **spec: Any) -> DecodeCase:
    return DecodeCase(AttnSpec(*heads, 128, 64, **spec), batch_size, kv_len)


LONG = _case((16, 4), 1, 32768)
GROWN = _case((16, 2), 1, 8000)
SHORT_MQA = _case((8, 1), 1, 1024)
WIDE_MQA = replace(SHORT_MQA, kv_len=32768)
FP8_MQA = _case((8, 1), 1, 1024, dtype="float8_e4m3fn")
EIGHT = replace(_case((8, 2), 8, 4096), lengths="ragged")
FIVE = replace(EIGHT, batch_size=5)
ROWS = _case((32, 1), 2, 4096)
WHAT = {
    "none": "nothing differs",
    "lengths-grown": "64 tokens told, 8000 attended",
    "lengths-shrunk": "8000 tokens told, 64 attended",
    "head-counts": "head counts divided by the tensor-parallel size, 4, instead of 1",
    "cap-in-call-only": "num_splits=2 given to attention only",
    "cap-in-metadata-only": "num_splits=64 given to the metadata",
    "narrower-table": "metadata for a table of 32768 tokens, attention over one of 1024",
    "wider-table": "metadata for a table of 1024 tokens, attention over one of 32768",
    "batch-grown": "metadata of 5 requests, attention of 8",
    "batch-shrunk": "metadata of 8 requests, attention of 5",
    "batch-resized": "metadata of 3 requests, attention of 8",
    "graph-padding": "metadata of 3 requests in the buffer of a graph of 8",
    "dtype-fp8-told": "metadata for FP8, a bf16 cache",
    "dtype-bf16-told": "metadata for bf16, an FP8 cache",
    "head-dim": "metadata for head_dim 256, attention with 128",
    "window": "metadata for a sliding window, attention without",
    "causal": "metadata without a causal mask, attention with",
    "query-length": "metadata for 1 query token, attention with 8",
    "packing": "metadata with pack_gqa=False, where the kernel packs regardless",
    "sm-margin": "metadata for half the SMs",
}
"""What does not fit, by the name of a mismatch."""

MISMATCHES = (
    Mismatch("none", LONG),
    Mismatch("lengths-grown", GROWN, told_tokens=64),
    Mismatch("lengths-shrunk", GROWN, call_tokens=64),
    Mismatch("head-counts", LONG, {"num_qo_heads": 4, "num_kv_heads": 1}),
    Mismatch("cap-in-call-only", LONG, call={"num_splits": 2}),
    Mismatch("cap-in-metadata-only", LONG, {"num_splits": 64}),
    Mismatch("narrower-table", SHORT_MQA, {"max_seqlen_k": 32768}),
    Mismatch("wider-table", WIDE_MQA, {"max_seqlen_k": 1024}, told_tokens=1024, call_tokens=1024),
    Mismatch("batch-grown", EIGHT, {"batch_size": 5}),
    Mismatch("batch-shrunk", FIVE, {"batch_size": 8}),
    Mismatch("batch-resized", EIGHT, {"batch_size": 3}),
    Mismatch("graph-padding", EIGHT, {"batch_size": 3}, in_buffer=True),
    Mismatch("dtype-fp8-told", SHORT_MQA, {"dtype": "float8_e4m3fn"}),
    Mismatch("dtype-bf16-told", FP8_MQA, {"dtype": "bfloat16"}),
    Mismatch("head-dim", SHORT_MQA, {"head_dim": 256, "head_dim_v": 256}, {"causal": False}),
    Mismatch("window", EIGHT, {"window": (1023, 0)}, {"causal": False}),
    Mismatch("causal", LONG, {"causal": False}),
    Mismatch("query-length", ROWS, {"max_seqlen_q": 1}, {"q_len": 8}),
    Mismatch("packing", ROWS, {"pack_gqa": False}, {"q_len": 8}),
    Mismatch("sm-margin", LONG, {"sm_margin": 66}),
)


def call_facts(mismatch: Mismatch, *, num_sms: int) -> SchedulerFacts:
    """The facts of the attention call, as the backend derives them from its tensors."""
    case, spec = mismatch.case, mismatch.case.spec
    options = {"causal": True, **mismatch.call}
    pages = -(-int(sample_seq_lens(case).max()) // spec.page_size)
    return SchedulerFacts(
        batch_size=case.batch_size,
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_seqlen_q=options.pop("q_len", 1),
        max_seqlen_k=pages * spec.page_size,
        num_sms=num_sms,
        page_size=spec.page_size,
        dtype=spec.dtype,
        **options,
    )


def told_facts(mismatch: Mismatch, facts: SchedulerFacts) -> SchedulerFacts:
    """The facts that the metadata call is told; a cap goes to one call only, unless told here."""
    own = {"num_splits": 0} if "num_splits" in mismatch.call else {}
    return replace(facts, **{**own, **mismatch.told})


def predict_splits(mismatch: Mismatch, *, num_sms: int) -> Splits:
    """What the model says of a case on a GPU of `num_sms` multiprocessors."""
    lens = sample_seq_lens(mismatch.case)
    called = np.full_like(lens, mismatch.call_tokens) if mismatch.call_tokens else lens
    prepared = np.full_like(called, mismatch.told_tokens) if mismatch.told_tokens else lens
    facts = call_facts(mismatch, num_sms=num_sms)
    told = told_facts(mismatch, facts)
    return Splits(
        int(plan_splits(told, np.resize(prepared, told.batch_size)).num_splits.max()),
        int(plan_splits(facts, called).num_splits.max()),
        facts.split_cap,
    )
