"""FlashAttention-3's scheduler metadata that does not fit its attention call, case by case.

    python tests/support/mismatch.py NAME        on a GPU: the outcome with the guard, then without

| outcome | meaning |
|---|---|
| refused | by the guard, before the launch |
| refused by the library | by its own check of the tensor's length |
| output right, wrong | within the budget of the float64 oracle, or not; not finite is wrong |

Without the guard a case may read and write out of bounds, and its process may die.
data/captures/metadata_mismatch.json has what came of each case on an H200, with the words in which
the guard refused it then.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from attnlib.core import AttnSpec, DecodeBatch, ExtendBatch, PagedKV, SchedulerFacts
from attnlib.core.backends.flash_attn3 import attend, facts_of, launch
from attnlib.core.schedule.flash_attn3 import ask_library, precompute
from attnlib.core.schedule.splits import max_words, num_words, plan_splits
from attnlib.measure.calls.check import Judge
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.extend.measure import attend_extend
from attnlib.measure.calls.inputs import draw_inputs, paged_batch
from attnlib.measure.calls.lengths import sample_seq_lens


@dataclass(frozen=True)
class Mismatch:
    """What differs between a metadata call and its attention call.

    `metadata` replaces facts of the metadata call; `call` has options of the attention call.
    `metadata_tokens` and `call_tokens` set the length of every request of either call. With
    `in_buffer` the words lie at the head of a zeroed buffer of the call's size, as in CUDA graphs.
    """

    name: str
    case: DecodeCase
    metadata: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    metadata_tokens: int = 0
    call_tokens: int = 0
    in_buffer: bool = False


def case_of(heads: tuple[int, int], batch_size: int, kv_len: int, **spec: Any) -> DecodeCase:
    """A case of head_dim 128 and pages of 64."""
    return DecodeCase(AttnSpec(*heads, 128, 64, **spec), batch_size, kv_len)


LONG = case_of((16, 4), 1, 32768)
GROWN = case_of((16, 2), 1, 8000)
SHORT_MQA = case_of((8, 1), 1, 1024)
WIDE_MQA = case_of((8, 1), 1, 32768)
FP8_MQA = case_of((8, 1), 1, 1024, dtype="float8_e4m3fn")
EIGHT = replace(case_of((8, 2), 8, 4096), lengths="ragged")
FIVE = replace(EIGHT, batch_size=5)
ROWS = case_of((32, 1), 2, 4096)
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
REFUSED = "refused"
BY_NAME = {mismatch.name: mismatch for mismatch in MISMATCHES}


@dataclass(frozen=True)
class Call:
    """An attention call, and the facts and lengths of the metadata call that goes before it."""

    batch: DecodeBatch
    q: torch.Tensor
    kv: PagedKV
    facts: SchedulerFacts
    made_for: SchedulerFacts
    metadata_lens: torch.Tensor


def build(mismatch: Mismatch, device: str) -> Call:
    """The tensors of a mismatch: the attention call's pages are as wide as the case's lengths."""
    case = mismatch.case
    lens = sample_seq_lens(case)
    batch = paged_batch(case.spec, lens, case.seed + 1, device=device)
    rows = case.batch_size * mismatch.call.get("q_len", 1)
    q, kv = draw_inputs(batch, rows=rows, seed=case.seed)
    if mismatch.call_tokens:
        shorter = torch.full_like(batch.seq_lens_cpu, mismatch.call_tokens)
        batch = DecodeBatch.build(batch.spec, shorter, batch.page_table)
    facts = facts_of(batch, **mismatch.call)
    # A cap of the attention call is not passed to the metadata call.
    told = replace(facts, num_splits=0) if "num_splits" in mismatch.call else facts
    made_for = replace(told, **mismatch.metadata)
    if mismatch.metadata_tokens:
        lens = np.full_like(lens, mismatch.metadata_tokens)
    # A metadata call of more requests sees the first ones again.
    metadata_lens = torch.from_numpy(np.resize(lens, made_for.batch_size)).to(device)
    return Call(batch, q, kv, facts, made_for, metadata_lens)


def predict(call: Call) -> tuple[int, bool]:
    """By the model: the most splits of any request in the metadata, and whether the kernels write
    past buffers that the call sized by its cap.

    With a cap of one there are no such buffers, and the metadata's splits are not read.
    """
    plan = plan_splits(call.made_for, call.metadata_lens.cpu().numpy())
    splits = int(plan.num_splits.max())
    return splits, 1 < call.facts.split_cap < splits


def run_guarded(mismatch: Mismatch, call: Call) -> torch.Tensor:
    """The attention call; ValueError, before a launch, unless the metadata fits it."""
    buffer = None
    if mismatch.in_buffer:
        buffer = call.metadata_lens.new_zeros(max_words(call.facts.batch_size))
    metadata = precompute(call.made_for, call.metadata_lens, out=buffer)
    return attend(call.q, call.kv, call.batch, metadata=metadata, **mismatch.call)


def run_unguarded(mismatch: Mismatch, call: Call) -> torch.Tensor:
    """The same past the guard: the kernel takes whatever the words say."""
    words = ask_library(call.made_for, call.metadata_lens)
    if mismatch.in_buffer:
        buffer = words.new_zeros(num_words(call.facts))
        buffer[: len(words)] = words
        words = buffer
    return launch(call.q, call.kv, call.batch, call.facts, words=words)


def outcome(
    run: Callable[[Mismatch, Call], torch.Tensor], mismatch: Mismatch, device: str = "cuda"
) -> str:
    """What comes of `run`; RuntimeError if the process is lost."""
    call = build(mismatch, device)
    try:
        out = run(mismatch, call)
    except ValueError:
        return REFUSED
    except RuntimeError as error:
        if "CUDA error" in str(error):
            raise
        return "refused by the library"
    q_lens = torch.full_like(call.batch.seq_lens_cpu, call.facts.max_seqlen_q)
    queries = ExtendBatch.build(call.batch, q_lens)
    judge = Judge(attend_extend, call.q, call.kv, queries)
    return "output right" if judge.check(out).passed else "wrong"


if __name__ == "__main__":
    for run in (run_guarded, run_unguarded):
        print(outcome(run, BY_NAME[sys.argv[1]]), flush=True)
