"""Metadata of speculative decoding, one launch each: draft steps by top-k, and verification.

Of a draft, with row `r = i * topk + branch` of request `i` and `pages = cache_loc // page_size`:

- `cache_seqlens[r] = decode_length + last_page_lens[i]`
- `page_table[r] = [page for page, _ in itertools.groupby(pages[r, :decode_length])]`

Of the verification:

- `cache_seqlens[i] = seq_lens[i] + num_draft_tokens`
- `cu_seqlens_q[i] = i * num_draft_tokens`
- `cu_seqlens_k[i + 1] = sum(cache_seqlens[: i + 1])`

While a draft decodes, each of a request's `topk` branches attends to its own new tokens as if it
were a sequence: a copy of the last, partly filled page of the request's cache, and what follows.
"""

import torch
import triton
import triton.language as tl

from .device import scan_width, wait_for_predecessor, write_lengths
from .launch import Derived, Launcher
from .require import DraftTensors, VerifyTensors, require_draft, require_verify, row_stride

TILE = 512
"""Slots that a program looks at in one turn: short rows share it."""
MIN_COLS, MAX_COLS = 4, TILE
WARPS = 4


@triton.jit
def load_pages(slots, wanted, SHIFT: tl.constexpr):
    """Pages of the slots at these addresses, int32; 0 where not wanted."""
    return (tl.load(slots, mask=wanted, other=0) >> SHIFT).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        *("num_rows", "decode_length", "topk", "slot_rows", "slot_stride", "table_stride")
    ]
)
def draft_metadata_kernel(
    # inputs
    cache_loc_ptr,  # [slot_rows, slot_stride] int32 or int64
    last_page_lens_ptr,  # [num_rows / topk] int32 or int64
    # outputs
    cache_seqlens_ptr,  # [num_rows] int32
    page_table_ptr,  # [num_rows, table_stride] int32
    # sizes
    num_rows,
    decode_length,
    topk,
    slot_rows,
    slot_stride,
    table_stride,
    # structure
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `build_draft_metadata`; SHIFT = log2(page_size), ROWS x COLS slots a turn."""
    wait_for_predecessor(OVERLAP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    last = tl.load(last_page_lens_ptr + rows // topk, mask=inside, other=0).to(tl.int32)
    tl.store(cache_seqlens_ptr + rows, last + decode_length, mask=inside)
    slots = (cache_loc_ptr + rows.to(tl.int64) * slot_stride)[:, None]
    table = (page_table_ptr + rows.to(tl.int64) * table_stride)[:, None]
    drafted = (rows < slot_rows)[:, None]
    written = tl.zeros([ROWS], tl.int32)
    for start in range(0, decode_length, COLS):
        cols = (start + tl.arange(0, COLS))[None, :]
        live = drafted & (cols < decode_length)
        pages = load_pages(slots + cols, live, SHIFT)
        before = load_pages(slots + cols - 1, live & (cols > 0), SHIFT)
        is_new = live & ((cols == 0) | (pages != before))
        place = written[:, None] + tl.cumsum(is_new.to(tl.int32), 1) - 1
        tl.store(table + place, pages, mask=is_new)
        written += tl.sum(is_new.to(tl.int32), 1)


@triton.jit(do_not_specialize=["batch", "num_draft_tokens"])
def verify_metadata_kernel(
    # input
    seq_lens_ptr,  # [batch] int32 or int64
    # outputs
    cache_seqlens_ptr,  # [batch] int32
    cu_seqlens_q_ptr,  # [batch + 1] int32
    cu_seqlens_k_ptr,  # [batch + 1] int32
    # sizes
    batch,
    num_draft_tokens,
    # structure
    SCAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `build_verify_metadata`; program 0 scans the lengths, the others count queries."""
    wait_for_predecessor(OVERLAP)
    if tl.program_id(0) == 0:
        write_lengths(
            seq_lens_ptr, cache_seqlens_ptr, cu_seqlens_k_ptr, batch, num_draft_tokens, SCAN
        )
    else:
        ends = (tl.program_id(0) - 1) * SCAN + tl.arange(0, SCAN)
        tl.store(cu_seqlens_q_ptr + ends, ends * num_draft_tokens, mask=ends <= batch)


def derive_draft(t: DraftTensors, page_size: int) -> Derived:
    """The launch of the draft's kernel, the same for any numbers."""
    rows, (drafted, slots) = len(t.page_table), t.cache_loc.shape
    cols = min(MAX_COLS, max(MIN_COLS, triton.next_power_of_2(slots)))
    rows_per_program = TILE // cols
    grid = (max(1, -(-rows // rows_per_program)), 1)
    cut = (grid, (page_size.bit_length() - 1, rows_per_program, cols), WARPS)
    strides = row_stride(t.cache_loc), row_stride(t.page_table)
    return Derived(rows, (drafted, *strides), lambda decode_length, topk: cut)


def derive_verify(t: VerifyTensors) -> Derived:
    """The launch of the verification's kernel, the same for any `num_draft_tokens`."""
    batch = len(t.seq_lens)
    scan = scan_width(batch)
    cut = ((1 + -(-(batch + 1) // scan), 1), (scan,), WARPS)
    return Derived(batch, (), lambda num_draft_tokens: cut)


DRAFTS = Launcher(draft_metadata_kernel, DraftTensors, require_draft, derive_draft)
VERIFIES = Launcher(verify_metadata_kernel, VerifyTensors, require_verify, derive_verify)


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
    | `cache_loc` | [<= bs * topk, >= decode_length] int32 or int64 | slot of each drafted token |
    | `last_page_lens` | [bs] int32 or int64 | tokens copied from the request's last page |
    | `cache_seqlens` | [bs * topk] int32, out | `decode_length` + the request's last page |
    | `page_table` | [bs * topk, >= decode_length] int32, out | pages of the branch, each once |
    | `decode_length` | int >= 0 | drafted tokens that count |
    | `topk` | int >= 1 | branches of a request, one row after another |
    | `page_size` | power of two | tokens of a KV page |

    A row's pages are slot // page_size of its first `decode_length` slots, without the repetition
    of neighbours: a page that comes again after another one is written again. Slot -1 gives
    page -1. Columns after a row's last page are left untouched. Each token may start a page, so a
    `decode_length` beyond the table's width (where SGLang before 0.5.14 wrote into the next row) or
    beyond that of `cache_loc` is refused.

    Rows that `cache_loc` lacks, of a batch that is padded while its slots are not, get lengths and
    no page.

    Else as all of `core.metadata`. Semantics: SGLang's `draft_decode_set_expand_metadata`, for the
    slots that its callers pass since 0.5.14.
    """
    tensors = (cache_loc, last_page_lens, cache_seqlens, page_table)
    DRAFTS.launch(tensors, (page_size,), (decode_length, topk))


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
    | `num_draft_tokens` | int >= 1 | drafted tokens of each request |
    | `cache_seqlens` | [bs] int32, out | `seq_lens + num_draft_tokens` |
    | `cu_seqlens_q` | [bs + 1] int32, out | 0, num_draft_tokens, 2 * num_draft_tokens, ... |
    | `cu_seqlens_k` | [bs + 1] int32, out | 0 and the running sums of `cache_seqlens` |

    As all of `core.metadata`. Semantics: the target-verify branch of SGLang's FlashAttention
    backend, with topk 1.
    """
    tensors = (seq_lens, cache_seqlens, cu_seqlens_q, cu_seqlens_k)
    VERIFIES.launch(tensors, (), (num_draft_tokens,))
