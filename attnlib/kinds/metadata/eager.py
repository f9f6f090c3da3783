"""Metadata op by op, as engines had it before they fused it: the baselines, one launch per op.

None waits for the GPU, so all can be captured. The first is SGLang's `normal_decode_set_metadata`
up to 0.5.9.
"""

import torch

from ...core.metadata import decode, kv_indices
from ...core.metadata.eager import write_decode_metadata
from ...core.metadata.require import DecodeTensors, PageArrays


def build_decode_metadata(
    *, page_size: int, max_pages: int, seq_len_delta: int = 0, **tensors: torch.Tensor | None
) -> None:
    """As `core.metadata.decode.build_decode_metadata`, and fills all `max_pages` columns, as
    `core.metadata.eager` says."""
    t = DecodeTensors(**tensors)
    decode.LAUNCHER.check((*t, None), (page_size,), (seq_len_delta, max_pages))
    t.cu_seqlens_k[:1].zero_()
    first_tokens = _first_tokens(t.seq_lens.device, max_pages, page_size)
    write_decode_metadata(t, first_tokens, page_size, seq_len_delta)


_FIRST_TOKENS: dict[tuple[torch.device, int, int], torch.Tensor] = {}


def _first_tokens(device: torch.device, max_pages: int, page_size: int) -> torch.Tensor:
    """Token offsets of the pages, made once and kept, as engines do when they start."""
    key = (device, max_pages, page_size)
    if key not in _FIRST_TOKENS:
        offsets = torch.arange(0, max_pages * page_size, page_size, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # It would be the graph's memory, and empty until the graph is replayed.
            return offsets
        _FIRST_TOKENS[key] = offsets
    return _FIRST_TOKENS[key]


def build_kv_indices(
    *, page_size: int, max_pages: int, seq_len_delta: int = 0, **tensors: torch.Tensor | None
) -> None:
    """As `core.metadata.kv_indices.build_kv_indices`, word for word.

    Masking a page table (vLLM's builders before `_copy_page_indices_kernel`) is shorter, and makes
    the host wait for the result's size. This looks up each word's request in `kv_indptr` instead,
    for the first bs * max_pages words. A pool row out of range is an error of the indexing, a token
    past its row's end is the row's last one.
    """
    t = PageArrays(**tensors)
    kv_indices.LAUNCHER.check(t, (page_size,), (seq_len_delta, max_pages))
    lens = (t.seq_lens + seq_len_delta).clamp_(0, max_pages * page_size)
    counts = (lens + page_size - 1) // page_size
    if t.kv_last_page_len is not None:
        t.kv_last_page_len.copy_(lens - (counts - 1).clamp_(min=0) * page_size)
    t.kv_indptr[:1].zero_()
    torch.cumsum(counts, dim=0, dtype=torch.int32, out=t.kv_indptr[1:])
    reach = min(len(t.seq_lens) * max_pages, len(t.kv_indices))
    if reach == 0:
        return
    words = torch.arange(reach, device=t.seq_lens.device, dtype=torch.int32)
    rows = torch.searchsorted(t.kv_indptr[1:-1], words, right=True)
    tokens = (words - t.kv_indptr[rows]).clamp_(max=max_pages - 1) * page_size
    if t.kv_start is not None:
        tokens = (tokens + t.kv_start[rows]).clamp_(max=t.req_to_token.shape[1] - 1)
    pages = t.req_to_token[t.req_pool_indices[rows], tokens] // page_size
    kept = t.kv_indices[:reach]
    kept.copy_(torch.where(words < t.kv_indptr[-1], pages, kept))
