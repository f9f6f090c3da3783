"""All metadata of a step in one launch, with the schedule of each kind of its layers.

    schedules = StepSchedules.reserve({"full": ..., "window": ...}, device)   # once
    build_step_schedules(..., schedules=schedules)    # one kernel per step
    for layer in layers:
        attend(..., metadata=schedules[layer.kind])    # no prepare kernel; still guarded

A step is decode, or verification of drafts: `cu_seqlens_q` then may say how many query tokens a
request has. The kinds share lengths and requests. What differs between them is data, a row of
`schedules.table`: one kernel serves any number of kinds, and none is compiled for new ones.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..batch import require_tensor
from ..schedule.facts import SchedulerFacts
from ..schedule.kinds import COLUMNS, StepSchedules, layout
from ..spec import ceil_div, require_between
from . import decode
from .device import (
    ROWS,
    span_width,
    wait_for_predecessor,
    write_lengths,
    write_pages,
    write_schedule,
)
from .launch import Launch, Launcher
from .require import DecodeTensors, require_decode, require_one_device, values_of
from .step import require_step

WIDTH = tl.constexpr(COLUMNS)
QUERIES = "cu_seqlens_q"
TABLE = "schedules.table"
WORDS = "schedules.words"


@triton.jit(
    do_not_specialize=[
        "delta",
        "max_pages",
        "first_row",
        "batch",
        "pool_rows",
        "num_slots",
        "kind_programs",
    ]
)
def step_schedules_kernel(
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
    # inputs: query tokens or none, and what the host decides of each kind of layer
    cu_seqlens_q_ptr,  # [batch + 1] int32
    table_ptr,  # [kinds, WIDTH] int32: `kinds.KernelFacts`, SORTS, SWIZZLES and the first word
    # output: the schedules, each laid out as `schedule.splits` says
    words_ptr,  # int32
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
    kind_programs,
    # structure
    SHIFT: tl.constexpr,
    HAS_SWA: tl.constexpr,
    VECTOR: tl.constexpr,
    SCAN: tl.constexpr,
    SPAN: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `build_step_schedules`; SHIFT = log2(page_size), blocks of COLS columns.

    Programs of dimension 0: the lengths, `kind_programs` for each kind of layer, and from
    `first_row` on a request each.
    """
    wait_for_predecessor(OVERLAP)
    part = tl.program_id(0)
    if part >= first_row:
        write_pages(
            part - first_row,
            seq_lens_ptr,
            req_pool_indices_ptr,
            req_to_token_ptr,
            page_table_ptr,
            swa_slot_map_ptr,
            swa_page_table_ptr,
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
            write_lengths(seq_lens_ptr, cache_seqlens_ptr, cu_seqlens_k_ptr, batch, delta, SCAN)
        else:
            kind = table_ptr + (part - 1) // kind_programs * WIDTH
            write_schedule(
                (part - 1) % kind_programs,
                seq_lens_ptr,
                cu_seqlens_q_ptr,
                words_ptr + tl.load(kind + 11),
                batch,
                delta,
                tl.load(kind),
                tl.load(kind + 1),
                tl.load(kind + 2),
                tl.load(kind + 3),
                tl.load(kind + 4),
                tl.load(kind + 5),
                tl.load(kind + 6),
                tl.load(kind + 7),
                tl.load(kind + 8),
                tl.load(kind + 9) != 0,
                tl.load(kind + 10) != 0,
                SPAN,
            )


def prepare(
    tensors: tuple[Any, ...],
    page_size: int,
    facts: tuple[SchedulerFacts, ...],
) -> Launch:
    """The launch of `build_step_schedules`, or the error for wrong tensors or facts."""
    *decode_tensors, queries, table, words = tensors
    t = DecodeTensors(*decode_tensors)
    require_decode(t, page_size)
    for each in facts:
        require_step("schedules", each, t, page_size, max_seqlen_q=facts[0].max_seqlen_q)
    batch = len(t.seq_lens)
    if queries is not None:
        require_tensor(QUERIES, queries, (batch + 1,), "int32", contiguous=True)
        for each in facts:
            each.require_q(QUERIES, queries)
    require_tensor(TABLE, table, (len(facts), COLUMNS), "int32", contiguous=True)
    require_tensor(WORDS, words, (layout(facts)[-1],), "int32", contiguous=True)
    others = {QUERIES: queries, TABLE: table, WORDS: words}
    require_one_device({"seq_lens": t.seq_lens, **others})
    programs = ceil_div(batch, ROWS.value)
    schedule = decode.Schedule(
        tensors=others,
        programs=len(facts) * programs,
        facts=(programs,),
        flags=(span_width(batch),),
    )
    return decode.launch_of(t, page_size, schedule)


LAUNCHER = Launcher(step_schedules_kernel, prepare)


def build_step_schedules(
    *,
    page_size: int,
    max_pages: int,
    schedules: StepSchedules,
    cu_seqlens_q: Tensor | None = None,
    seq_len_delta: int = 0,
    check: bool = False,
    **tensors: Tensor | None,
) -> None:
    """`build_decode_metadata`, and the schedule of each kind of layer, in place, in one launch.

    The words of a kind become those that the library would write for `cache_seqlens`, padding zero:
    `schedule_words`. Lengths beyond `max_seqlen_k` are not detected, and neither are sums of tiles
    beyond int32. Where no request has both query tokens and KV, the library divides by zero; a
    request without KV has one split then.

    Parameters
    ----------
    page_size, max_pages, seq_len_delta, check : int, bool
        As for `build_decode_metadata`. In verification the delta is the number of query tokens.
        With `check`, `cu_seqlens_q` is looked at too.
    schedules : StepSchedules
        For this step: as many requests, pages of `page_size`, and a `max_seqlen_k` of the page
        table's whole width.
    cu_seqlens_q : Tensor, optional
        [bs + 1] int32, first query token of each request, and their sum; every kind has `varlen_q`
        then. Without it a request has `max_seqlen_q` tokens.
    **tensors : Tensor
        Those of `build_decode_metadata`.

    Raises
    ------
    ValueError, TypeError
        Before the launch, naming the argument.

    Examples
    --------
    Under TRITON_INTERPRET=1, without a GPU. One request of 5 tokens, in a layer with full attention
    and in one with a window of two tokens; each needs one split:

    >>> from dataclasses import replace
    >>> import torch
    >>> from attnlib.core import SchedulerFacts, StepSchedules
    >>> full = SchedulerFacts(1, 32, 8, 128, 1, max_seqlen_k=8, num_sms=132, page_size=4)
    >>> facts = {"full": full, "window": replace(full, window=(1, 0))}
    >>> schedules = StepSchedules.reserve(facts, torch.device("cpu"))
    >>> build_step_schedules(
    ...     page_size=4,
    ...     max_pages=2,
    ...     schedules=schedules,
    ...     seq_lens=torch.tensor([5]),
    ...     req_pool_indices=torch.tensor([0]),
    ...     req_to_token=torch.arange(8, dtype=torch.int32)[None],
    ...     cache_seqlens=torch.zeros(1, dtype=torch.int32),
    ...     cu_seqlens_k=torch.zeros(2, dtype=torch.int32),
    ...     page_table=torch.zeros((1, 2), dtype=torch.int32),
    ... )
    >>> [int(kind.words[0]) for kind in schedules.kinds.values()]
    [1, 1]
    """
    if not isinstance(schedules, StepSchedules):
        raise TypeError(f"schedules must be StepSchedules, got {type(schedules).__name__}")
    t = DecodeTensors(**tensors)
    facts = schedules.facts
    values = None
    if check:
        pages = values_of(t, page_size, max_pages, seq_len_delta)

        def values() -> None:
            pages()
            require_queries(cu_seqlens_q, facts[0].max_seqlen_q)

    LAUNCHER.launch(
        (*t, cu_seqlens_q, schedules.table, schedules.words),
        (page_size, facts),
        (seq_len_delta, max_pages),
        values,
    )
    for kind in schedules.kinds.values():
        kind.mark_written()


def require_queries(cu_seqlens_q: Tensor | None, most: int) -> None:
    """ValueError for a request with fewer than 0 or more than `most` query tokens."""
    if cu_seqlens_q is not None:
        why = " query tokens of a request, which max_seqlen_q bounds"
        require_between(QUERIES, cu_seqlens_q.diff(), 0, most, why)
