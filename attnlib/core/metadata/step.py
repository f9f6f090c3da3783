"""All metadata of a decode step in one launch: lengths, page table, FlashAttention-3's schedule.

    scheduler = reserve(facts, device)               # memory for the schedule, once
    build_step_metadata(..., scheduler=scheduler)    # one kernel per step
    for layer in layers:
        attend(..., metadata=scheduler)              # no prepare kernel; still guarded

The schedule is that of `splits.plan_splits`, word for word; words that the library never writes are
0. FlashAttention-3 with metadata starts after the previous kernel has ended.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from ..batch import require_tensor
from ..schedule.facts import SchedulerFacts
from ..schedule.flash_attn3 import SchedulerMetadata
from ..schedule.splits import BATCHES_PER_CTA, blocks_in_l2, num_words, scheduled_heads
from . import decode
from .device import ROWS, copy_row, wait_for_predecessor, write_lengths, write_schedule
from .launch import Launch, Launcher
from .require import DecodeTensors, require_decode, require_one_device


@triton.jit(
    do_not_specialize=[
        "delta",
        "max_pages",
        "first_row",
        "batch",
        "pool_rows",
        "num_slots",
        "split_cap",
        "m_blocks",
        "block_n",
        "heads",
        "sms",
        "l2_blocks",
        "unpacked",
    ]
)
def step_metadata_kernel(
    # inputs
    seq_lens_ptr,  # [batch] int32 or int64
    req_pool_indices_ptr,  # [batch] int32 or int64
    req_to_token_ptr,  # [pool_rows, token_stride] int32
    # outputs
    cache_seqlens_ptr,  # [batch] int32
    cu_seqlens_k_ptr,  # [batch + 1] int32
    page_table_ptr,  # [batch, table_stride] int32
    # of a sliding window, both or neither: an input and an output
    swa_slot_map_ptr,  # [num_slots] int32 or int64
    swa_page_table_ptr,  # as page_table
    # output: the schedule, laid out as `splits` says
    words_ptr,  # [2 to 4 times batch rounded up to 4, and 1] int32
    # numbers
    delta,
    max_pages,
    # sizes
    first_row,
    batch,
    pool_rows,
    num_slots,
    token_stride,
    table_stride,
    # what FlashAttention-3's host decides
    split_cap,
    m_blocks,
    block_n,
    heads,
    sms,
    l2_blocks,
    unpacked,
    # structure
    SHIFT: tl.constexpr,
    HAS_SWA: tl.constexpr,
    VECTOR: tl.constexpr,
    SCAN: tl.constexpr,
    SORTS: tl.constexpr,
    SWIZZLES: tl.constexpr,
    SPAN: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `build_step_metadata`; rows start at program `first_row` of dimension 0."""
    wait_for_predecessor(OVERLAP)
    part = tl.program_id(0)
    if part >= first_row:
        inputs = (seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr)
        tables = (page_table_ptr, swa_slot_map_ptr, swa_page_table_ptr)
        sizes = (delta, max_pages, pool_rows, num_slots, token_stride, table_stride)
        copy_row(part - first_row, *inputs, *tables, *sizes, SHIFT, HAS_SWA, VECTOR, COLS)
    elif tl.program_id(1) == 0:
        if part == 0:
            write_lengths(seq_lens_ptr, cache_seqlens_ptr, cu_seqlens_k_ptr, batch, delta, SCAN)
        else:
            step = (seq_lens_ptr, words_ptr, batch, delta)
            facts = (split_cap, m_blocks, block_n, heads, sms, l2_blocks, unpacked)
            write_schedule(part - 1, *step, *facts, SORTS, SWIZZLES, SPAN)


def require_facts(t: DecodeTensors, page_size: int, facts: SchedulerFacts) -> None:
    """Raise unless `facts` are those of attention over the page table of `t`."""
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


def prepare(tensors: tuple[Any, ...], page_size: int, facts: SchedulerFacts) -> Launch:
    """The launch of `build_step_metadata`, or the error for wrong tensors or facts."""
    *decode_tensors, words = tensors
    t = DecodeTensors(*decode_tensors)
    require_decode(t, page_size)
    require_facts(t, page_size, facts)
    require_tensor("scheduler.words", words, (num_words(facts),), "int32", contiguous=True)
    require_one_device({"seq_lens": t.seq_lens, "scheduler.words": words})
    batch = len(t.seq_lens)
    span = max(32, triton.next_power_of_2(min(batch, BATCHES_PER_CTA)))
    flags = (not facts.is_local, facts.is_causal or facts.is_local, span)
    first_row = 1 + -(-batch // ROWS.value)
    rows = decode.launch_of(t, page_size, first_row, flags)
    query_rows = facts.group_size if facts.packs else 1
    schedule = (
        facts.split_cap if batch <= BATCHES_PER_CTA else 1,
        -(-query_rows // facts.tile[0]),
        facts.tile[1],
        scheduled_heads(facts),
        facts.usable_sms,
        blocks_in_l2(facts),
        1 if facts.packs else facts.group_size,
    )
    return replace(rows, sizes=(first_row, *rows.sizes, *schedule))


LAUNCHER = Launcher(step_metadata_kernel, prepare)


def build_step_metadata(
    *,
    page_size: int,
    max_pages: int,
    scheduler: SchedulerMetadata,
    seq_len_delta: int = 0,
    **tensors: torch.Tensor | None,
) -> None:
    """`build_decode_metadata`, and the schedule of `cache_seqlens`, in place, in one launch.

    `scheduler` comes from `reserve` (or `precompute`) for the facts of the step's attention calls:
    one query token a request, `batch_size` requests, pages of `page_size`, and a `max_seqlen_k` of
    the page table's whole width; causal or not, with a window or not; with `cu_seqlens_q` or not,
    which then counts one token a request. Its words become those that the library would write for
    these lengths, padding zero. All other arguments as there.

    Lengths beyond `max_seqlen_k` are not detected. If all lengths are 0 every request gets one
    split, where the library divides by zero.
    """
    if not isinstance(scheduler, SchedulerMetadata):
        raise TypeError(f"scheduler must be SchedulerMetadata, got {type(scheduler).__name__}")
    all_tensors = (*DecodeTensors(**tensors), scheduler.words)
    LAUNCHER.launch(all_tensors, (page_size, scheduler.facts), (seq_len_delta, max_pages))
    scheduler.mark_written()
