"""All metadata of a decode step in one launch: lengths, page table, FlashAttention-3's schedule.

    scheduler = reserve(facts, device)               # memory for the schedule, once
    build_step_metadata(..., scheduler=scheduler)    # one kernel per step
    for layer in layers:
        attend(..., metadata=scheduler)              # no prepare kernel; still guarded

The schedule is that of `splits.plan_splits`, word for word; words that the library never writes are
0. FlashAttention-3 with metadata starts after the previous kernel has ended.
"""

from typing import Any

import triton
from torch import Tensor

from ..batch import require_tensor
from ..schedule.facts import SchedulerFacts
from ..schedule.flash_attn3 import SchedulerMetadata
from ..schedule.splits import BATCHES_PER_CTA, blocks_in_l2, num_words, scheduled_heads
from ..spec import ceil_div
from . import decode
from .device import ROWS
from .launch import Launch, Launcher
from .require import DecodeTensors, require_decode, require_one_device, values_of


def prepare(tensors: tuple[Any, ...], page_size: int, facts: SchedulerFacts) -> Launch:
    """The launch of `build_step_metadata`, or the error for wrong tensors or facts."""
    *decode_tensors, words = tensors
    t = DecodeTensors(*decode_tensors)
    require_decode(t, page_size)
    batch, columns = t.page_table.shape
    expected = {
        "batch_size": batch,
        "page_size": page_size,
        "max_seqlen_k": columns * page_size,
        "max_seqlen_q": 1,
    }
    for name, value in expected.items():
        if getattr(facts, name) != value:
            raise ValueError(
                f"scheduler must be for a decode step of {name} {value}, as page_table "
                f"[{batch}, {columns}] and page_size {page_size} make it, got {name} "
                f"{getattr(facts, name)}"
            )
    require_tensor("scheduler.words", words, (num_words(facts),), "int32", contiguous=True)
    require_one_device({"seq_lens": t.seq_lens, "scheduler.words": words})
    query_rows = facts.group_size if facts.packs else 1
    schedule = decode.Schedule(
        programs=ceil_div(batch, ROWS.value),
        facts=(
            facts.split_cap if batch <= BATCHES_PER_CTA else 1,
            ceil_div(query_rows, facts.tile[0]),
            facts.tile[1],
            scheduled_heads(facts),
            facts.usable_sms,
            blocks_in_l2(facts),
            1 if facts.packs else facts.group_size,
        ),
        flags=(
            not facts.is_local,
            facts.is_causal or facts.is_local,
            max(32, triton.next_power_of_2(min(batch, BATCHES_PER_CTA))),
        ),
    )
    return decode.launch_of(t, page_size, schedule, words)


LAUNCHER = Launcher(decode.decode_metadata_kernel, prepare)


def build_step_metadata(
    *,
    page_size: int,
    max_pages: int,
    scheduler: SchedulerMetadata,
    seq_len_delta: int = 0,
    check: bool = False,
    **tensors: Tensor | None,
) -> None:
    """`build_decode_metadata`, and the schedule of `cache_seqlens`, in place, in one launch.

    The words of the scheduler become those that the library would write for these lengths, padding
    zero. Lengths beyond `max_seqlen_k` are not detected. If all lengths are 0 every request gets
    one split, where the library divides by zero.

    Parameters
    ----------
    page_size, max_pages, seq_len_delta, check : int, bool
        As for `build_decode_metadata`.
    scheduler : SchedulerMetadata
        From `reserve` (or `precompute`) for the facts of the step's attention calls: one query
        token a request, `batch_size` requests, pages of `page_size`, and a `max_seqlen_k` of the
        page table's whole width; causal or not, with a window or not; with `cu_seqlens_q` or not,
        which then counts one token a request.
    **tensors : Tensor
        Those of `build_decode_metadata`.

    Raises
    ------
    ValueError, TypeError
        Before the launch, naming the argument.

    Examples
    --------
    Under TRITON_INTERPRET=1, without a GPU. One request of 5 tokens, which needs one split:

    >>> import torch
    >>> from attnlib.core import SchedulerFacts, reserve
    >>> facts = SchedulerFacts(1, 32, 8, 128, 1, max_seqlen_k=8, num_sms=132, page_size=4)
    >>> scheduler = reserve(facts, torch.device("cpu"))
    >>> build_step_metadata(
    ...     page_size=4,
    ...     max_pages=2,
    ...     scheduler=scheduler,
    ...     seq_lens=torch.tensor([5]),
    ...     req_pool_indices=torch.tensor([0]),
    ...     req_to_token=torch.arange(8, dtype=torch.int32)[None],
    ...     cache_seqlens=torch.zeros(1, dtype=torch.int32),
    ...     cu_seqlens_k=torch.zeros(2, dtype=torch.int32),
    ...     page_table=torch.zeros((1, 2), dtype=torch.int32),
    ... )
    >>> int(scheduler.words[0])
    1
    """
    if not isinstance(scheduler, SchedulerMetadata):
        raise TypeError(f"scheduler must be SchedulerMetadata, got {type(scheduler).__name__}")
    t = DecodeTensors(**tensors)
    values = None
    if check:
        values = values_of(t, page_size, max_pages, seq_len_delta)
    LAUNCHER.launch(
        (*t, scheduler.words),
        (page_size, scheduler.facts),
        (seq_len_delta, max_pages),
        values,
    )
    scheduler.mark_written()
