"""All metadata of a decode step in one launch: lengths, page table and FA3's schedule.

    scheduler = reserve(facts, device)               # room for the schedule's words, once
    build_step_metadata(..., scheduler=scheduler)    # one kernel a step
    for layer in layers:
        attend(..., metadata=scheduler)              # no prepare kernel, guarded as ever

The schedule is what `splits.plan_splits` says, word for word; words that the library never writes
are 0. It is made by programs of its own, beside those that copy rows.

The kernel that follows may start before this one has ended, if it was launched for that and waits
(programmatic dependent launch). FA3's attention, given metadata, is not: it starts afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from ..schedule.fa3 import SchedulerFacts, SchedulerMetadata, reserve
from ..schedule.splits import BATCHES_PER_CTA, blocks_in_l2, layout_of, scheduled_heads
from .decode import checked, tiling_of
from .launch import DirectLaunches, Known
from .lengths import write_lengths
from .require import MAX_INT32, require_one_device, require_tensor, signature
from .rows import copy_row
from .splits_triton import ROWS, write_schedule

__all__ = ["SchedulerFacts", "SchedulerMetadata", "build_step_metadata", "reserve"]


@triton.jit(
    do_not_specialize=[
        *("batch", "delta", "max_pages", "lead", "pool_rows", "num_slots"),
        *("split_cap", "m_blocks", "block_n", "heads", "sms", "l2_blocks", "unpacked"),
    ]
)
def step_metadata_kernel(
    seq_lens,
    req_pool_indices,
    req_to_token,
    cache_seqlens,
    cu_seqlens_k,
    page_table,
    swa_slot_map,
    swa_page_table,
    words,
    batch,
    delta,
    max_pages,
    lead,
    pool_rows,
    num_slots,
    token_stride,
    table_stride,
    split_cap,
    m_blocks,
    block_n,
    heads,
    sms,
    l2_blocks,
    unpacked,
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
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    part = tl.program_id(0)
    if part >= lead:
        copy_row(
            part - lead,
            seq_lens,
            req_pool_indices,
            req_to_token,
            page_table,
            swa_slot_map,
            swa_page_table,
            delta,
            max_pages,
            pool_rows,
            num_slots,
            token_stride,
            table_stride,
            SHIFT,
            HAS_SWA,
            VECTOR,
            COLS,
        )
    elif tl.program_id(1) == 0:
        if part == 0:
            write_lengths(seq_lens, cache_seqlens, cu_seqlens_k, batch, delta, SCAN)
        else:
            facts = (split_cap, m_blocks, block_n, heads, sms, l2_blocks, unpacked)
            write_schedule(part - 1, seq_lens, words, batch, delta, *facts, SORTS, SWIZZLES, SPAN)


@dataclass(frozen=True)
class _Step:
    """A known signature, and how many programs come before those of the rows."""

    known: Known
    lead: int


_KNOWN: dict[tuple[Any, ...], _Step] = {}


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
    the page table's whole width; causal or not, with a window or not. Its words become those that
    the library would write for these lengths, padding zero. All other arguments as there.

    Raises ValueError or TypeError naming the argument before anything is launched. Capturable: a
    replay schedules the lengths as they are then. Lengths beyond `max_seqlen_k` are not looked at.
    If all lengths are 0 every request gets one split, where the library divides by zero.
    """
    tensors = (
        seq_lens,
        req_pool_indices,
        req_to_token,
        cache_seqlens,
        cu_seqlens_k,
        page_table,
        swa_slot_map,
        swa_page_table,
    )
    if not isinstance(scheduler, SchedulerMetadata):
        raise TypeError(f"scheduler must be SchedulerMetadata, got {type(scheduler).__name__}")
    words = scheduler.words
    step = _KNOWN.get((signature((*tensors, words), page_size), scheduler.facts))
    # What a signature does not hold is looked at in every call.
    if (
        step is None
        or type(max_pages) is not int
        or not 0 <= max_pages <= step.known.reachable
        or type(seq_len_delta) is not int
        or not 0 <= seq_len_delta <= MAX_INT32
        or seq_lens.data_ptr() == cache_seqlens.data_ptr()
    ):
        step = _check(tensors, page_size, max_pages, seq_len_delta, scheduler)
    known = step.known
    tiling = tiling_of(known.batch, max_pages, page_size)
    programs = -(-max_pages // (tiling.cols * tiling.turns)) or 1
    grid = (step.lead + known.batch, programs)
    numbers = (known.batch, seq_len_delta, max_pages, step.lead, *known.scalars)
    constants = (*known.constants, tiling.cols)
    known.launches(grid, (*tensors, words), numbers, constants, tiling.warps)
    scheduler.mark_written()


def _check(
    tensors: tuple[Any, ...],
    page_size: int,
    max_pages: int,
    seq_len_delta: int,
    scheduler: SchedulerMetadata,
) -> _Step:
    known = checked(tensors, page_size, max_pages, seq_len_delta)
    facts, words = scheduler.facts, scheduler.words
    _require_step(facts, known.batch, page_size, tensors[5].shape[1])
    require_tensor("scheduler.words", words, (layout_of(facts).size,), (torch.int32,))
    require_one_device({"seq_lens": tensors[0], "scheduler.words": words})
    step = _derive(known, facts, tensors[0].device)
    form = signature((*tensors, words), page_size)
    return step if form is None else _KNOWN.setdefault((form, facts), step)


def _require_step(facts: SchedulerFacts, batch: int, page_size: int, columns: int) -> None:
    """Raise unless these are facts of the step that the other arguments describe."""
    wanted = {
        "batch_size": batch,
        "page_size": page_size,
        "max_seqlen_k": columns * page_size,
        "max_seqlen_q": 1,
        "varlen_q": False,
    }
    for name, value in wanted.items():
        if (given := getattr(facts, name)) != value:
            raise ValueError(
                f"scheduler must be for a decode step of {name} {value}, as page_table "
                f"[{batch}, {columns}] and page_size {page_size} make it, got {name} {given}"
            )


def _derive(known: Known, facts: SchedulerFacts, device: torch.device) -> _Step:
    rows = facts.group_size if facts.packs else 1
    one_cta = known.batch <= BATCHES_PER_CTA
    schedule = (
        facts.split_cap if one_cta else 1,
        -(-rows // facts.tile[0]),
        facts.tile[1],
        scheduled_heads(facts),
        facts.usable_sms,
        blocks_in_l2(facts),
        1 if facts.packs else facts.group_size,
    )
    span = max(32, triton.next_power_of_2(min(known.batch, BATCHES_PER_CTA)))
    flags = (not facts.is_local, facts.is_causal or facts.is_local)
    changed = replace(
        known,
        launches=DirectLaunches(step_metadata_kernel, device),
        scalars=(*known.scalars, *schedule),
        constants=(*known.constants, *flags, span),
    )
    return _Step(changed, 1 + -(-known.batch // ROWS.value))
