"""Decode metadata op by op, a launch per op, as SGLang did it up to 0.5.9: the baseline.

It never waits for the GPU, so it can be captured in a graph, after a call outside of one.
"""

from functools import cache

import torch

from ...core.metadata import decode
from ...core.metadata.eager import write_decode_metadata
from ...core.metadata.require import DecodeTensors


def build_decode_metadata(
    *,
    page_size: int,
    max_pages: int,
    seq_len_delta: int = 0,
    **tensors: torch.Tensor | None,
) -> None:
    """As `core.metadata.decode.build_decode_metadata`, and fills all `max_pages` columns, as
    `core.metadata.eager` says."""
    given = DecodeTensors(**tensors)
    decode.LAUNCHER.check(
        (*given, None),
        (page_size,),
        (seq_len_delta, max_pages),
    )
    given.cu_seqlens_k[:1].zero_()
    first_tokens = _first_tokens(given.seq_lens.device, max_pages, page_size)
    write_decode_metadata(given, first_tokens, page_size, seq_len_delta)


@cache
def _first_tokens(
    device: torch.device,
    max_pages: int,
    page_size: int,
) -> torch.Tensor:
    """Token offsets of the pages, made once and kept, as engines do when they start."""
    return torch.arange(0, max_pages * page_size, page_size, device=device)
