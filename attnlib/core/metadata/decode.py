"""Decode metadata in one launch: lengths, their prefix sum, and every request's page table.

- `cache_seqlens[i] = seq_lens[i] + delta`
- `cu_seqlens_k[i + 1] = sum(seq_lens[: i + 1] + delta)`
- `page_table[i, p] = req_to_token[req_pool_indices[i], p * page_size] // page_size`
- `swa_page_table[i, p] = swa_slot_map[that slot] // page_size`

for `p < min(max_pages, ceil(cache_seqlens[i] / page_size))`. Semantics: SGLang's
`normal_decode_set_metadata`, with its live-page bound of 0.5.18 and later.

Columns past a row's live pages, and from `max_pages` on, stay as they are. Slots are translated,
then divided; slot -1 stays -1. Out of range: a pool row outside `req_to_token` gives pages of -1,
and so does a slot outside the map; neither is read. A length beyond int32 counts as the longest or
the shortest that int32 has. The sum of the lengths must be below 2^31, which is not checked.
`cache_seqlens` may be `seq_lens` itself where those are int32 and the delta is 0, as in SGLang
under CUDA graphs.

Program 0 writes the lengths and scans them, block by block; no program waits for it. The others
copy pages: a row's programs take its blocks of columns in turn and stop at the last live page, so
work follows the lengths and not the table's width. Rows are copied four words at a time: the load
is bounded by the row's end rounded up to four, which stays inside `req_to_token`; the store is
exact.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..schedule.kinds import COLUMNS
from ..spec import ceil_div
from .device import (
    PER_WARP,
    part_width,
    scan_width,
    wait_for_predecessor,
    write_lengths,
    write_pages,
    write_schedule,
)
from .launch import Cut, Launch, Launcher
from .require import (
    DecodeTensors,
    kept_apart,
    page_bounds,
    require_decode,
    row_stride,
    tensors_named,
    values_of,
)

MANY_ROWS = 1024
WIDTH = tl.constexpr(COLUMNS)
QUERIES = "cu_seqlens_q"
TABLE = "schedules.table"
WORDS = "schedules.words"
OUTPUTS = ("cache_seqlens", "cu_seqlens_k", "page_table", "swa_page_table")


class Tiling(NamedTuple):
    """Columns of a block, warps of a program, and blocks that a program takes in turn."""

    cols: int
    warps: int
    turns: int


SHORT_ROWS = Tiling(128, 1, 4)
COPY_SMALL = Tiling(1024, 4, 1)
COPY_LARGE = Tiling(2048, 4, 2)
GATHER_SMALL = Tiling(128, 4, 1)
GATHER_LARGE = Tiling(256, 8, 4)
GATHER_HUGE = Tiling(512, 8, 4)


def tiling_of(batch: int, max_pages: int, page_size: int) -> Tiling:
    """How rows are cut into programs.

    Chosen by hand on an H200 over 29 sizes; study `decode_metadata` shows a wrong choice as a size
    at which a rival is faster. Many short rows are bound by the rate at which programs start, a
    small table by latency (a thread per word), a large one by traffic (fewer, longer programs).
    """
    if batch >= MANY_ROWS and max_pages <= (512 if page_size == 1 else 1024):
        return SHORT_ROWS
    words = batch * max_pages
    if page_size == 1:
        return COPY_SMALL if words <= 2**20 else COPY_LARGE
    if words <= 2**17:
        return GATHER_SMALL
    return GATHER_LARGE if words <= 2**22 else GATHER_HUGE


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
def decode_metadata_kernel(
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
    # FlashAttention-3's schedules or none. Inputs: query tokens, if they are told by request, and
    # what the host decides of each kind of layer
    cu_seqlens_q_ptr,  # [batch + 1] int32
    table_ptr,  # [kinds, WIDTH] int32: `kinds.KernelFacts`, SORTS, SWIZZLES and the first word
    # output: each schedule is laid out as `schedule.splits` says
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
    PART: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `build_decode_metadata`; SHIFT = log2(page_size), blocks of COLS columns.

    Programs of dimension 0: the lengths, `kind_programs` for each kind of layer with a schedule,
    and from `first_row` on a request each.
    """
    program = tl.program_id(0)
    if program >= first_row:
        wait_for_predecessor(OVERLAP)
        write_pages(
            program - first_row,
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
        if program == 0:
            wait_for_predecessor(OVERLAP)
            write_lengths(seq_lens_ptr, cache_seqlens_ptr, cu_seqlens_k_ptr, batch, delta, SCAN)
        elif words_ptr is not None:
            write_schedule(
                (program - 1) % kind_programs,
                table_ptr + (program - 1) // kind_programs * WIDTH,
                seq_lens_ptr,
                cu_seqlens_q_ptr,
                words_ptr,
                batch,
                delta,
                SPAN,
                PART,
                OVERLAP,
            )


class Schedules(NamedTuple):
    """FlashAttention-3's schedules in a launch.

    The kernel's tensors for them by their names, the last of which is written; kinds of layers;
    programs of a kind; and SPAN, which holds all requests that one is ordered among.
    """

    tensors: Mapping[str, Tensor | None]
    kinds: int
    programs: int
    span: int


NO_SCHEDULES = Schedules(
    tensors={QUERIES: None, TABLE: None, WORDS: None},
    kinds=0,
    programs=0,
    span=32,
)


def launch_of(
    t: DecodeTensors,
    page_size: int,
    schedules: Schedules,
) -> Launch:
    """The launch for checked tensors, with schedules or without."""
    batch, columns = t.page_table.shape
    pool_rows, max_ctx = t.req_to_token.shape
    strides = (row_stride(t.req_to_token), row_stride(t.page_table))
    num_slots = 0 if t.swa_slot_map is None else len(t.swa_slot_map)
    vector = 1 if any(words % 4 for words in (max_ctx, *strides)) else 4
    shift = page_size.bit_length() - 1
    first_row = 1 + schedules.kinds * schedules.programs
    constants = (
        shift,
        t.swa_slot_map is not None,
        vector,
        scan_width(batch),
        schedules.span,
        part_width(schedules.span),
    )

    def cut(seq_len_delta: int, max_pages: int) -> Cut:
        cols, warps, turns = tiling_of(batch, max_pages, page_size)
        programs = ceil_div(max_pages, cols * turns) or 1
        warps = max(warps, schedules.span // PER_WARP)
        return (first_row + batch, programs), (*constants, cols), warps

    # Without a delta int32 lengths are rewritten with the same values, whoever reads them.
    is_int32 = t.seq_lens.dtype == torch.int32
    apart = kept_apart(
        {**t._asdict(), **schedules.tensors},
        (*OUTPUTS, WORDS),
        same_if_zero=("seq_lens", "cache_seqlens") if is_int32 else None,
    )
    return Launch(
        bounds=page_bounds(t, page_size, columns, f"page_table has {columns} columns"),
        apart=apart,
        sizes=(first_row, batch, pool_rows, num_slots, *strides, schedules.programs),
        cut=cut,
    )


def prepare(tensors: tuple[Any, ...], page_size: int) -> Launch:
    """The launch of `build_decode_metadata`, or the error for wrong tensors."""
    t = DecodeTensors(*tensors[: len(DecodeTensors._fields)])
    require_decode(t, page_size)
    return launch_of(t, page_size, NO_SCHEDULES)


LAUNCHER = Launcher(decode_metadata_kernel, prepare)


def build_decode_metadata(
    *,
    page_size: int,
    max_pages: int,
    seq_len_delta: int = 0,
    check: bool = False,
    **tensors: Tensor | None,
) -> None:
    """Lengths, their prefix sum and page tables of a decode step, in place, in one launch.

    Values that are out of range: see the module. What holds for all builders: `core.metadata`.

    It reads slots, as SGLang has them. A block table, as vLLM has it, is FlashAttention-3's page
    table as it is, and lengths in int32 are `cache_seqlens`: such an engine needs no launch of
    these. For its schedules: `precompute`, or `build_step_schedules`.

    Parameters
    ----------
    page_size, max_pages : int
        A power of two; columns of the page tables that may be written.
    seq_len_delta : int
        At least 0; added to every length.
    check : bool
        Whether values are looked at too: a request that has no room, or is not in the pool, raises
        ValueError. It waits for the GPU, and no graph can capture it.
    seq_lens : Tensor
        [bs] int32 or int64, tokens in the cache before `seq_len_delta`.
    req_pool_indices : Tensor
        [bs] int32 or int64, each request's row of `req_to_token`.
    req_to_token : Tensor
        [pool, max_ctx] int32, KV slot of each token; -1: none.
    cache_seqlens : Tensor
        [bs] int32, out: `seq_lens + seq_len_delta`.
    cu_seqlens_k : Tensor
        [bs + 1] int32, out: 0 and the running sums of `cache_seqlens`.
    page_table : Tensor
        [bs, >= max_pages] int32, out: first slot of each page // page_size.
    swa_slot_map : Tensor, optional
        [slots] int32 or int64, slot of the full pool -> slot of the window's pool.
    swa_page_table : Tensor, optional
        As `page_table`, out, of the translated slots; with the map, or neither.

    Raises
    ------
    ValueError, TypeError
        Before the launch, naming the argument.

    Examples
    --------
    Under TRITON_INTERPRET=1, without a GPU. The one request has 5 tokens, in slots 8 to 12:

    >>> import torch
    >>> page_table = torch.zeros((1, 2), dtype=torch.int32)
    >>> build_decode_metadata(
    ...     page_size=4,
    ...     max_pages=2,
    ...     seq_lens=torch.tensor([5]),
    ...     req_pool_indices=torch.tensor([0]),
    ...     req_to_token=torch.arange(8, 16, dtype=torch.int32)[None],
    ...     cache_seqlens=torch.zeros(1, dtype=torch.int32),
    ...     cu_seqlens_k=torch.zeros(2, dtype=torch.int32),
    ...     page_table=page_table,
    ... )
    >>> page_table.tolist()
    [[2, 3]]
    """
    t: DecodeTensors = tensors_named(DecodeTensors, tensors)
    values = None
    if check:
        values = values_of(t, page_size, max_pages, seq_len_delta)
    LAUNCHER.launch(
        (*t, *NO_SCHEDULES.tensors.values()),
        (page_size,),
        (seq_len_delta, max_pages),
        values,
    )
