"""What metadata must be, row by row in NumPy: slow, obvious, and independent of the builders."""

import numpy as np

Rows = list[np.ndarray]


def decode_metadata(
    seq_lens: np.ndarray,
    req_pool_indices: np.ndarray,
    req_to_token: np.ndarray,
    *,
    page_size: int,
    max_pages: int,
    seq_len_delta: int = 0,
    swa_slot_map: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, Rows, Rows]:
    """`cache_seqlens` [bs], `cu_seqlens_k` [bs + 1], and each row's live pages, full and SWA.

    A live page is the first slot of the page, divided by the page size and rounded down; slot -1
    gives page -1. The window's slot is translated before the division.
    """
    cache_seqlens = seq_lens.astype(np.int64) + seq_len_delta
    cu_seqlens_k = np.concatenate([[0], np.cumsum(cache_seqlens)])
    full = []
    swa = []
    for length, pool_row in zip(cache_seqlens, req_pool_indices, strict=True):
        pages = -(-int(length) // page_size)
        pages = min(pages, max_pages)
        row = req_to_token[pool_row].astype(np.int64)
        slots = row[: pages * page_size : page_size]
        full.append(slots // page_size)
        if swa_slot_map is not None:
            of_window = np.where(slots < 0, -1, swa_slot_map[slots])
            swa.append(of_window // page_size)
    return cache_seqlens, cu_seqlens_k, full, swa


def kv_indices(
    seq_lens: np.ndarray,
    req_pool_indices: np.ndarray,
    req_to_token: np.ndarray,
    *,
    page_size: int,
    max_pages: int,
    seq_len_delta: int = 0,
    kv_start: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`kv_indptr` [bs + 1], `kv_indices` [pages] and `kv_last_page_len` [bs], 0 without a page.

    A request's tokens count from `kv_start` [bs]; those past the end of its row have page -1.
    """
    pages: list[int] = []
    kv_indptr = [0]
    last_page_len = []
    starts = np.zeros_like(seq_lens) if kv_start is None else kv_start
    for length, pool_row, start in zip(seq_lens, req_pool_indices, starts, strict=True):
        tokens = max(0, int(length) + seq_len_delta)
        tokens = min(tokens, max_pages * page_size)
        row = req_to_token[pool_row].tolist()
        first = int(start)
        for token in range(first, first + tokens, page_size):
            is_in_row = 0 <= token < len(row)
            pages.append(row[token] // page_size if is_in_row else -1)
        count = len(pages) - kv_indptr[-1]
        kv_indptr.append(len(pages))
        before_last = max(0, count - 1)
        last_page_len.append(tokens - before_last * page_size)
    return (
        np.array(kv_indptr),
        np.array(pages, dtype=np.int64),
        np.array(last_page_len),
    )
