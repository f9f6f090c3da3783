"""Do page tables and page arrays ask for what the pool has, and for no more?

An id outside the pool reads, or writes, memory of something else, and a table that is narrower than
its longest request reads what lies behind it: often without a crash. These checks copy to the host,
so they synchronise.
"""

import torch
from torch import Tensor

from ..spec import ceil_div


def require_table(
    table: Tensor,
    seq_lens: Tensor,
    *,
    page_size: int,
    num_pages: int,
    window: int = 0,
    name: str = "page_table",
) -> None:
    """RuntimeError unless a page table holds pages of the pool for every token of a call.

    Parameters
    ----------
    table : Tensor
        [>= bs, columns] integers, the pages of request i in row i; what lies behind them is not
        looked at.
    seq_lens : Tensor
        [bs] integers, tokens of each request, 0 of one that pads a graph.
    page_size : int
        Tokens of a page.
    num_pages : int
        Pages of the pool.
    window : int
        Tokens that a query sees, 0: all. Pages before them are not looked at.
    name : str
        What the error calls the table.

    Examples
    --------
    >>> import torch
    >>> table = torch.tensor([[3, 1], [8, 0]])
    >>> require_table(table, torch.tensor([20, 9]), page_size=16, num_pages=9)
    >>> require_table(table, torch.tensor([20, 9]), page_size=16, num_pages=8)
    Traceback (most recent call last):
        ...
    RuntimeError: page_table must have pages in 0..7 for request 1 of 9 tokens, got 8 in column 0
    """
    lens = seq_lens.long()
    if not len(lens):
        return
    columns = table.shape[1]
    longest, request = (int(part) for part in lens.max(0))
    if longest > columns * page_size:
        raise RuntimeError(
            f"{name} must be as wide as its lengths, request {request} of {longest} tokens, got "
            f"{columns} columns of {page_size} tokens"
        )
    used = ceil_div(longest, page_size)
    rows = table[: len(lens), :used]
    column = torch.arange(used, device=table.device) * page_size
    live = column < lens[:, None]
    if window:
        live &= column + page_size > lens[:, None] - window
    wrong = live & ((rows < 0) | (rows >= num_pages))
    if bool(wrong.any()):
        request, place = wrong.nonzero()[0].tolist()
        raise RuntimeError(
            f"{name} must have pages in 0..{num_pages - 1} for request {request} of "
            f"{int(lens[request])} tokens, got {int(rows[request, place])} in column {place}"
        )


def require_arrays(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    seq_lens: Tensor,
    *,
    page_size: int,
    num_pages: int,
) -> None:
    """The same of FlashInfer's page arrays, as `build_kv_indices` writes them.

    Parameters
    ----------
    kv_indptr, kv_indices, kv_last_page_len : Tensor
        [>= bs + 1], [capacity], [>= bs] integers.
    seq_lens : Tensor
        [bs] integers, tokens of each request.
    page_size, num_pages : int
        Tokens of a page, and pages of the pool.

    Examples
    --------
    >>> import torch
    >>> sums, pages, last = torch.tensor([0, 2]), torch.tensor([5, 4]), torch.tensor([3])
    >>> require_arrays(sums, pages, last, torch.tensor([19]), page_size=16, num_pages=8)
    >>> require_arrays(sums, pages, last, torch.tensor([40]), page_size=16, num_pages=8)
    Traceback (most recent call last):
        ...
    RuntimeError: the page arrays must have 40 tokens of request 0, got 19 in 2 pages
    """
    lens = seq_lens.cpu().long()
    sums = kv_indptr[: len(lens) + 1].cpu().long()
    last = kv_last_page_len[: len(lens)].cpu().long()
    pages = sums.diff()
    tokens = (pages - 1) * page_size + last
    tokens[pages == 0] = 0
    unlike = (tokens != lens).nonzero().flatten()
    if len(unlike):
        request = int(unlike[0])
        raise RuntimeError(
            f"the page arrays must have {int(lens[request])} tokens of request {request}, got "
            f"{int(tokens[request])} in {int(pages[request])} pages"
        )
    if int(sums[-1]) > len(kv_indices):
        raise RuntimeError(
            f"kv_indices must have room for {int(sums[-1])} pages, got {len(kv_indices)}"
        )
    ids = kv_indices[: int(sums[-1])]
    wrong = (ids < 0) | (ids >= num_pages)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        request = int(torch.searchsorted(sums, place, right=True)) - 1
        raise RuntimeError(
            f"kv_indices must have pages in 0..{num_pages - 1} for request {request} of "
            f"{int(lens[request])} tokens, got {int(ids[place])} as its page "
            f"{place - int(sums[request])}"
        )
