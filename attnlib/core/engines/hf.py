"""transformers' continuous batching: lengths and FlashAttention-3's schedule once a step.

    with attnlib.core.engines.hf.decode("once"):
        model.generate_batch(...)

Its decode path derives the lengths in every layer and passes no schedule, so that FlashAttention-3
prepares one in every layer too. `once` makes both in the first layer; the others of the step, also
in a CUDA graph, are given them.
"""

from collections import Counter, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from ..spec import require_word
from .arms import require_tried

TRIED = ("5.17.0",)
"""Releases of transformers whose decode path was read."""
ARMS = ("own", "once")
PATH = "transformers.integrations.flash_paged"
Step = tuple[torch.Tensor, torch.Tensor]
Call = namedtuple(
    "Call",
    "module q k v cache cu_seq_lens_k sliding_window flash_attn_with_kvcache block_table",
)
"""Of `_paged_decode_forward`, less what it hands on."""


def require_release() -> None:
    """RuntimeError unless the transformers that is installed was tried."""
    require_tried("transformers", TRIED, f"pip install transformers=={TRIED[-1]}")


@contextmanager
def decode(arm: str) -> Iterator[Counter[str]]:
    """Decode steps in the block run `arm`; counts its layers' calls, those of a graph at capture.

    Raises RuntimeError for another release, ValueError for an unknown arm.
    """
    require_word("arm", arm, ARMS)
    require_release()
    path: Any = import_module(PATH)
    calls, own = Counter[str](), path._paged_decode_forward
    forward = own if arm == "own" else _Once()

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[f"metadata={arm}"] += 1
        return forward(*args, **kwargs)

    path._paged_decode_forward = torch.compiler.disable(counted)
    try:
        yield calls
    finally:
        path._paged_decode_forward = own


class _Once:
    """In the place of `_paged_decode_forward`: what the layers of one step share is made once.

    q, k, v [1, heads, batch, head_dim] -> [batch, heads, head_dim]; k and v are cached.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Step] = {}

    def __call__(self, *args: Any, **flash_kwargs: Any) -> torch.Tensor:
        call = Call(*args)
        cache, window, attend = call.cache, call.sliding_window, call.flash_attn_with_kvcache
        group, layer = cache.layer_index_to_group_indices[call.module.layer_idx]
        pages = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        q, k, v = (each.permute(2, 0, 1, 3).contiguous() for each in (call.q, call.k, call.v))
        if call.module.layer_idx == 0:
            self._made.clear()
        if window not in self._made:  # of this step
            self._made[window] = _prepare(call, q, k)
        lens, words = self._made[window]
        flash_kwargs[cache.get_block_table_key(attend)] = call.block_table[group]
        out = attend(
            q=q,
            k_cache=cache.key_cache[layer].view(pages),
            v_cache=cache.value_cache[layer].view(pages),
            k=k,
            v=v,
            cache_seqlens=lens,
            softmax_scale=call.module.scaling,
            causal=True,
            window_size=window,
            scheduler_metadata=words,
            **flash_kwargs,
        )
        return (out[0] if isinstance(out, tuple) else out).squeeze(1)


def _prepare(call: Call, q: torch.Tensor, k: torch.Tensor) -> Step:
    """Lengths before the step's tokens, and the schedule for them, as the attention call asks."""
    from flash_attn_interface import get_scheduler_metadata

    sums = call.cu_seq_lens_k[: len(q) + 1]
    lens = (sums[1:] - sums[:-1] - 1).to(torch.int32)
    words = get_scheduler_metadata(
        batch_size=len(q),
        max_seqlen_q=1,
        max_seqlen_k=call.block_table.shape[-1] * call.cache.block_size,
        num_heads=q.shape[2],
        num_heads_k=k.shape[2],
        headdim=call.cache.head_dim,
        cache_seqlens=lens,
        qkv_dtype=call.q.dtype,
        page_size=call.cache.block_size,
        max_seqlen_k_new=1,
        causal=True,
        window_size=call.sliding_window,
    )
    return lens, words
