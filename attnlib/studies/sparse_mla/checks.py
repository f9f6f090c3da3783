"""Checks of claims about sparse MLA: vLLM's default for FP8 caches on Blackwell.

No Blackwell GPU is on record, so none is decided; each says what was compared in its place.
"""

from collections.abc import Sequence

import pandas as pd

from ...run.frame import good_rows
from ..evidence import NOT_HERE, Finding, Judged, judge_rows, needed
from .study import BFLOAT16, HEADS
from .tables import FA3, FLASHMLA, NEW, mla_records

TP_HEADS = {1: 128, 2: 64, 4: 32, 8: 16}
"""Tensor parallelism -> query heads per GPU, of DeepSeek's 128."""
MANY = 64
"""Requests from which the source's "higher concurrency" is read; it gives no number."""
WHY = "It is about Blackwell's kernels, and no Blackwell GPU is on record."
INSTEAD = (
    f"Compared instead, call by call on a Hopper GPU: FlashInfer {NEW}'s fa3 over a bfloat16 cache "
    f"with FlashMLA over an FP8 one;"
)


def sparse_default_faster(frame: pd.DataFrame) -> Finding:
    """FlashInfer's sparse MLA over an FP8 cache is faster than FlashMLA's."""
    return _not_here(f"FlashInfer is {_judge(frame, HEADS).counts}.")


def sparse_faster_at_tp_1_4_8(frame: pd.DataFrame) -> Finding:
    """So is the served model, at three degrees of tensor parallelism."""
    heads = [TP_HEADS[degree] for degree in (1, 4, 8)]
    said = f"with {', '.join(map(str, heads))} heads FlashInfer is {_judge(frame, heads).counts}."
    return _not_here(f"{said} No model was served.")


def sparse_slower_at_tp_2(frame: pd.DataFrame) -> Finding:
    """At the fourth degree it is slightly slower with many requests."""
    judged = _judge(frame, (TP_HEADS[2],), least_batch=MANY)
    said = f"with {TP_HEADS[2]} heads and {MANY} requests or more FlashInfer is {judged.counts}."
    return _not_here(f"{said} No model was served.")


def sparse_bad_at_tp_2(frame: pd.DataFrame) -> Finding:
    """FlashInfer's kernel does worse with 64 heads than with more or fewer."""
    medians = {heads: _judge(frame, (heads,)).ratios.median() for heads in HEADS}
    said = ", ".join(f"{ratio:.2f} with {heads}" for heads, ratio in medians.items())
    return _not_here(f"its time over FlashMLA's, in the median of shapes, is {said} heads.")


def _not_here(said: str) -> Finding:
    return Finding(NOT_HERE, f"{WHY} {INSTEAD} {said}")


def _judge(frame: pd.DataFrame, heads: Sequence[int], *, least_batch: int = 1) -> Judged:
    """fa3 against FlashMLA, shape by shape; MissingRecordsError where one lacks a round."""
    shapes = [case for case in BFLOAT16 if case.spec.num_qo_heads in heads]
    shapes = [case for case in shapes if case.batch_size >= least_batch]
    rows = needed(mla_records(frame), shapes, (FA3, FLASHMLA))
    return judge_rows(good_rows(rows), (FA3, FLASHMLA))
