"""All metadata of a decode step in one launch: lengths, page table and FA3's schedule.

    scheduler = reserve(facts, device)               # room for the schedule's words, once
    build_step_metadata(..., scheduler=scheduler)    # one kernel per step
    for layer in layers:
        attend(..., metadata=scheduler)              # no prepare kernel, guarded as ever

The schedule is what `splits.plan_splits` says, word for word; words that the library never writes
are 0. FA3's attention, given metadata, does not overlap the kernel before it: it starts afterwards.
"""

import torch
import triton
import triton.language as tl

from ..batch import require_tensor
from ..schedule.facts import SchedulerFacts
from ..schedule.flash_attn3 import SchedulerMetadata
from ..schedule.splits import BATCHES_PER_CTA, blocks_in_l2, num_words, scheduled_heads
from . import decode
from .device import ROWS, copy_row, wait_for_predecessor, write_lengths, write_schedule
from .launch import Derived, Launcher
from .require import EveryCall, StepTensors, require_decode, require_one_device


@triton.jit(
    do_not_specialize=[
        *("batch", "delta", "max_pages", "lead", "pool_rows", "num_slots"),
        *("split_cap", "m_blocks", "block_n", "heads", "sms", "l2_blocks", "unpacked"),
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
    # sizes
    batch,
    delta,
    max_pages,
    lead,
    pool_rows,
    num_slots,
    token_stride,
    table_stride,
    # what FA3's host decides
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
    """See `build_step_metadata`; `lead` programs of dimension 0 come before the rows'."""
    wait_for_predecessor(OVERLAP)
    part = tl.program_id(0)
    if part >= lead:
        inputs = (seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr)
        tables = (page_table_ptr, swa_slot_map_ptr, swa_page_table_ptr)
        sizes = (delta, max_pages, pool_rows, num_slots, token_stride, table_stride)
        copy_row(part - lead, *inputs, *tables, *sizes, SHIFT, HAS_SWA, VECTOR, COLS)
    elif tl.program_id(1) == 0:
        if part == 0:
            write_lengths(seq_lens_ptr, cache_seqlens_ptr, cu_seqlens_k_ptr, batch, delta, SCAN)
        else:
            step = (seq_lens_ptr, words_ptr, batch, delta)
            facts = (split_cap, m_blocks, block_n, heads, sms, l2_blocks, unpacked)
            write_schedule(part - 1, *step, *facts, SORTS, SWIZZLES, SPAN)


def require_step(
    t: StepTensors, page_size: int, facts: SchedulerFacts, seq_len_delta: int, max_pages: int
) -> EveryCall:
    """Raise unless these are arguments of `build_step_metadata`, and `facts` of the same step."""
    every_call = require_decode(t._replace(words=None), page_size, seq_len_delta, max_pages)
    batch, columns = t.page_table.shape
    wanted = {
        "batch_size": batch,
        "page_size": page_size,
        "max_seqlen_k": columns * page_size,
        "max_seqlen_q": 1,
    }
    for name, value in wanted.items():
        if (given := getattr(facts, name)) != value:
            raise ValueError(
                f"scheduler must be for a decode step of {name} {value}, as page_table "
                f"[{batch}, {columns}] and page_size {page_size} make it, got {name} {given}"
            )
    require_tensor("scheduler.words", t.words, (num_words(facts),), "int32", contiguous=True)
    require_one_device({"seq_lens": t.seq_lens, "scheduler.words": t.words})
    return every_call


def derive(t: StepTensors, page_size: int, facts: SchedulerFacts) -> Derived:
    """The launch of the kernel: that of the rows, after programs for lengths and schedule."""
    batch = len(t.seq_lens)
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
    span = max(32, triton.next_power_of_2(min(batch, BATCHES_PER_CTA)))
    flags = (not facts.is_local, facts.is_causal or facts.is_local, span)
    lead = 1 + -(-batch // ROWS.value)
    rows = decode.derive(t, page_size, lead, flags)
    return rows._replace(scalars=(lead, *rows.scalars, *schedule))


LAUNCHER = Launcher(step_metadata_kernel, StepTensors, require_step, derive)


def build_step_metadata(
    *,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_pages: int,
    scheduler: SchedulerMetadata,
    seq_len_delta: int = 0,
    swa_slot_map: torch.Tensor | None = None,
    swa_page_table: torch.Tensor | None = None,
) -> None:
    """`build_decode_metadata`, and the schedule of `cache_seqlens`, in place, in one launch.

    `scheduler` comes from `reserve` (or `precompute`) for the facts of the step's attention calls:
    one query token a request, `batch_size` requests, pages of `page_size`, and a `max_seqlen_k` of
    the page table's whole width; causal or not, with a window or not; with `cu_seqlens_q` or not,
    which then counts one token a request. Its words become those that the library would write for
    these lengths, padding zero. All other arguments as there.

    Lengths beyond `max_seqlen_k` are not looked at. If all lengths are 0 every request gets one
    split, where the library divides by zero. Else as all of `core.metadata`.
    """
    if not isinstance(scheduler, SchedulerMetadata):
        raise TypeError(f"scheduler must be SchedulerMetadata, got {type(scheduler).__name__}")
    inputs = (seq_lens, req_pool_indices, req_to_token)
    outputs = (cache_seqlens, cu_seqlens_k, page_table)
    tensors = (*inputs, *outputs, swa_slot_map, swa_page_table, scheduler.words)
    LAUNCHER.launch(tensors, (page_size, scheduler.facts), (seq_len_delta, max_pages))
    scheduler.mark_written()
