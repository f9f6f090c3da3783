"""Cases of scheduler metadata that does not fit its attention call.

The facts of both calls follow from the case alone, so `plan_splits` predicts without a GPU how many
splits the metadata has, how many are right, and for how many the call has buffers.
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
    """What differs between a metadata call and its attention call.

    `metadata` replaces facts in the metadata call; `call` holds `attend`'s own options.
    `metadata_tokens` and `call_tokens` set the length of every request in either call. With
    `in_buffer` the words lie at the head of a zeroed buffer of the call's size, as in CUDA graphs.
    """

    name: str
    case: DecodeCase
    metadata: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    metadata_tokens: int = 0
    call_tokens: int = 0
    in_buffer: bool = False


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
MISMATCHES = (
    Mismatch("none", LONG),
    Mismatch("lengths-grown", GROWN, metadata_tokens=64),
    Mismatch("lengths-shrunk", GROWN, call_tokens=64),
    Mismatch("head-counts", LONG, {"num_qo_heads": 4, "num_kv_heads": 1}),
    Mismatch("cap-in-call-only", LONG, call={"num_splits": 2}),
    Mismatch("cap-in-metadata-only", LONG, {"num_splits": 64}),
    Mismatch("narrower-table", SHORT_MQA, {"max_seqlen_k": 32768}),
    Mismatch(
        "wider-table", WIDE_MQA, {"max_seqlen_k": 1024}, metadata_tokens=1024, call_tokens=1024
    ),
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


def metadata_facts(mismatch: Mismatch, call: SchedulerFacts) -> SchedulerFacts:
    """The facts of the metadata call. A cap of the attention call is not passed to it."""
    if "num_splits" in mismatch.call:
        call = replace(call, num_splits=0)
    return replace(call, **mismatch.metadata)


def metadata_lengths(mismatch: Mismatch, batch_size: int) -> np.ndarray:
    """Tokens of each request in the metadata call [batch_size] int32, repeated where it has more
    requests than the attention call."""
    lens = sample_seq_lens(mismatch.case)
    if mismatch.metadata_tokens:
        lens = np.full_like(lens, mismatch.metadata_tokens)
    return np.resize(lens, batch_size)


def predict_splits(mismatch: Mismatch, *, num_sms: int) -> Splits:
    """What the model predicts for a case on a GPU of `num_sms` multiprocessors."""
    lens = sample_seq_lens(mismatch.case)
    call_lens = np.full_like(lens, mismatch.call_tokens) if mismatch.call_tokens else lens
    call = call_facts(mismatch, num_sms=num_sms)
    made_for = metadata_facts(mismatch, call)
    metadata_lens = metadata_lengths(mismatch, made_for.batch_size)
    return Splits(
        in_metadata=int(plan_splits(made_for, metadata_lens).num_splits.max()),
        right=int(plan_splits(call, call_lens).num_splits.max()),
        cap=call.split_cap,
    )
