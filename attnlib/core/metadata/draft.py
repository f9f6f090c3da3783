"""Metadata of speculative decoding, a launch each: draft steps by top-k, and their verification.

While a draft decodes, each of a request's `topk` branches attends to its own new tokens as if it
were a sequence: the last, partly filled page of the request's cache, copied for the branch, and the
tokens after it. Verification then runs all drafted tokens of a request as one query.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .draft_arguments import require_draft, require_verify
from .launch import DirectLaunches, Known, remember, require_launchable
from .lengths import scan_width, write_lengths
from .require import signature

TILE = 512
"""Slots that a program looks at in one turn: short rows share it."""
MIN_COLS, MAX_COLS = 4, TILE
WARPS = 4


@triton.jit
def load_pages(slots, wanted, SHIFT: tl.constexpr):
    """Pages of the slots at these addresses, int32; 0 where not wanted."""
    return (tl.load(slots, mask=wanted, other=0) >> SHIFT).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "decode_length", "topk", "slot_stride", "table_stride"])
def draft_metadata_kernel(
    cache_loc,
    last_page_lens,
    cache_seqlens,
    page_table,
    num_rows,
    decode_length,
    topk,
    slot_stride,
    table_stride,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `build_draft_metadata`; SHIFT = log2(page_size), ROWS x COLS slots a turn."""
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    last = tl.load(last_page_lens + rows // topk, mask=inside, other=0).to(tl.int32)
    tl.store(cache_seqlens + rows, last + decode_length, mask=inside)
    slots = (cache_loc + rows.to(tl.int64) * slot_stride)[:, None]
    table = (page_table + rows.to(tl.int64) * table_stride)[:, None]
    written = tl.zeros([ROWS], tl.int32)
    for start in range(0, decode_length, COLS):
        cols = (start + tl.arange(0, COLS))[None, :]
        live = inside[:, None] & (cols < decode_length)
        pages = load_pages(slots + cols, live, SHIFT)
        before = load_pages(slots + cols - 1, live & (cols > 0), SHIFT)
        is_new = live & ((cols == 0) | (pages != before))
        place = written[:, None] + tl.cumsum(is_new.to(tl.int32), 1) - 1
        tl.store(table + place, pages, mask=is_new)
        written += tl.sum(is_new.to(tl.int32), 1)


@triton.jit(do_not_specialize=["batch", "num_draft_tokens"])
def verify_metadata_kernel(
    seq_lens,
    cache_seqlens,
    cu_seqlens_q,
    cu_seqlens_k,
    batch,
    num_draft_tokens,
    SCAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `build_verify_metadata`; program 0 scans the lengths, the others count queries."""
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if tl.program_id(0) == 0:
        write_lengths(seq_lens, cache_seqlens, cu_seqlens_k, batch, num_draft_tokens, SCAN)
    else:
        ends = (tl.program_id(0) - 1) * SCAN + tl.arange(0, SCAN)
        tl.store(cu_seqlens_q + ends, ends * num_draft_tokens, mask=ends <= batch)


_KNOWN_DRAFTS: dict[tuple[Any, ...], Known] = {}
_KNOWN_VERIFIES: dict[tuple[Any, ...], Known] = {}


def build_draft_metadata(
    *,
    cache_loc: torch.Tensor,
    last_page_lens: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    decode_length: int,
    topk: int,
    page_size: int,
) -> None:
    """Lengths and page tables of the branches of a draft, in place, in one launch.

    | argument | shape, dtype | |
    |---|---|---|
    | `cache_loc` | [bs * topk, >= decode_length] int32 or int64 | KV slot of each drafted token |
    | `last_page_lens` | [bs] int32 or int64 | tokens copied from the request's last page |
    | `cache_seqlens` | [bs * topk] int32, out | `decode_length` + the request's last page |
    | `page_table` | [bs * topk, >= decode_length] int32, out | pages of the branch, each once |
    | `decode_length` | int >= 0 | drafted tokens that count; a runtime value |
    | `topk` | int >= 1 | branches of a request, one row after another |
    | `page_size` | power of two | tokens of a KV page |

    A row's pages are slot // page_size of its first `decode_length` slots, without the repetition
    of neighbours: a page that comes again after another one is written again. Slot -1 gives
    page -1. Columns after a row's last page are left untouched. Each token may start a page, so a
    `decode_length` beyond the table's width (where SGLang before 0.5.14 wrote into the next row) or
    beyond that of `cache_loc` is refused.

    All tensors contiguous, on one device. Raises ValueError or TypeError naming the argument before
    anything is launched. Capturable: a replay reads slots and lengths as they are then. Semantics:
    SGLang's `draft_decode_set_expand_metadata`, for the slots that its callers pass since 0.5.14.
    """
    tensors = (cache_loc, last_page_lens, cache_seqlens, page_table)
    known = _KNOWN_DRAFTS.get(signature(tensors, page_size))
    # What a signature does not hold is looked at in every call.
    if (
        known is None
        or type(decode_length) is not int
        or not 0 <= decode_length <= known.reachable
        or type(topk) is not int
        or topk < 1
        or len(last_page_lens) * topk != known.batch
        or cache_loc.data_ptr() == page_table.data_ptr()
        or last_page_lens.data_ptr() == cache_seqlens.data_ptr()
    ):
        known = _check_draft(tensors, decode_length, topk, page_size)
    programs = -(-known.batch // known.constants[1])
    numbers = (known.batch, decode_length, topk, *known.scalars)
    known.launches((max(1, programs), 1), tensors, numbers, known.constants, known.warps)


def _check_draft(tensors: tuple[Any, ...], decode_length: int, topk: int, page_size: int) -> Known:
    names = draft_metadata_kernel.arg_names[: len(tensors)]
    reachable = require_draft(
        **dict(zip(names, tensors, strict=True)),
        decode_length=decode_length,
        topk=topk,
        page_size=page_size,
    )
    device, ((rows, slots), columns) = tensors[0].device, (tensors[0].shape, tensors[3].shape[1])
    require_launchable(device)
    cols = min(MAX_COLS, max(MIN_COLS, triton.next_power_of_2(slots)))
    known = Known(
        batch=rows,
        reachable=reachable,
        scalars=(slots, columns),
        constants=(page_size.bit_length() - 1, TILE // cols, cols),
        launches=DirectLaunches(draft_metadata_kernel, device),
        warps=WARPS,
    )
    return remember(_KNOWN_DRAFTS, signature(tensors, page_size), known)


def build_verify_metadata(
    *,
    seq_lens: torch.Tensor,
    num_draft_tokens: int,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
) -> None:
    """Lengths of the step that verifies drafted tokens, and their prefix sums, in one launch.

    | argument | shape, dtype | |
    |---|---|---|
    | `seq_lens` | [bs] int32 or int64 | tokens in the cache before the drafted ones |
    | `num_draft_tokens` | int >= 1 | drafted tokens of each request; a runtime value |
    | `cache_seqlens` | [bs] int32, out | `seq_lens + num_draft_tokens` |
    | `cu_seqlens_q` | [bs + 1] int32, out | 0, num_draft_tokens, 2 * num_draft_tokens, ... |
    | `cu_seqlens_k` | [bs + 1] int32, out | 0 and the running sums of `cache_seqlens` |

    All tensors contiguous, on one device. Raises ValueError or TypeError naming the argument before
    anything is launched. Capturable: a replay reads the lengths as they are then. Semantics: the
    target-verify branch of SGLang's FlashAttention backend, with topk 1.
    """
    tensors = (seq_lens, cache_seqlens, cu_seqlens_q, cu_seqlens_k)
    known = _KNOWN_VERIFIES.get(signature(tensors, None))
    if (
        known is None
        or type(num_draft_tokens) is not int
        or not 1 <= num_draft_tokens <= known.reachable
        or seq_lens.data_ptr() == cache_seqlens.data_ptr()
    ):
        known = _check_verify(tensors, num_draft_tokens)
    grid = (1 + -(-(known.batch + 1) // known.constants[0]), 1)
    known.launches(grid, tensors, (known.batch, num_draft_tokens), known.constants, known.warps)


def _check_verify(tensors: tuple[Any, ...], num_draft_tokens: int) -> Known:
    names = verify_metadata_kernel.arg_names[: len(tensors)]
    named = dict(zip(names, tensors, strict=True))
    reachable = require_verify(**named, num_draft_tokens=num_draft_tokens)
    batch, device = len(tensors[0]), tensors[0].device
    require_launchable(device)
    known = Known(
        batch=batch,
        reachable=reachable,
        scalars=(),
        constants=(scan_width(batch),),
        launches=DirectLaunches(verify_metadata_kernel, device),
        warps=WARPS,
    )
    return remember(_KNOWN_VERIFIES, signature(tensors, None), known)
