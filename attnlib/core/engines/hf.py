"""transformers' continuous batching: lengths and FlashAttention-3's schedule once a step.

    with attnlib.core.engines.hf.decode("once"):
        model.generate_batch(...)

Its decode path derives the lengths in every layer and passes no schedule, so that FlashAttention-3
prepares one in every layer too. `once` makes both in the first layer; the others of the step, also
in a CUDA graph, are given them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from ..backends.base import installed_version
from ..spec import require_word

TRIED = ("5.17.0",)
"""Releases of transformers whose decode path was read."""
ARMS = ("own", "once")
PATH = "transformers.integrations.flash_paged"
Step = tuple[torch.Tensor, torch.Tensor]


def require_release() -> None:
    """RuntimeError unless the transformers that is installed was tried."""
    if (found := installed_version("transformers")) not in TRIED:
        raise RuntimeError(
            f"transformers must be a release that was tried ({', '.join(TRIED)}), got "
            f"{found or 'none'}: pip install transformers=={TRIED[-1]}"
        )


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
    """In the place of `_paged_decode_forward`: what the layers of one step share is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Step] = {}

    def __call__(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: Any,
        cu_seq_lens_k: torch.Tensor,
        sliding_window: tuple[int, int],
        flash_attn_with_kvcache: Callable[..., Any],
        block_table: torch.Tensor,
        **flash_kwargs: Any,
    ) -> torch.Tensor:
        """q, k, v [1, heads, batch, head_dim] -> [batch, heads, head_dim]; k and v are cached."""
        group, layer = cache.layer_index_to_group_indices[module.layer_idx]
        pages = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        q, k, v = (each.permute(2, 0, 1, 3).contiguous() for each in (q, k, v))
        if module.layer_idx == 0:
            self._made.clear()
        if sliding_window not in self._made:  # of this step
            width = block_table.shape[-1] * cache.block_size
            self._made[sliding_window] = _prepare(q, k, cu_seq_lens_k, cache, width, sliding_window)
        lens, words = self._made[sliding_window]
        flash_kwargs[cache.get_block_table_key(flash_attn_with_kvcache)] = block_table[group]
        out = flash_attn_with_kvcache(
            q=q,
            k_cache=cache.key_cache[layer].view(pages),
            v_cache=cache.value_cache[layer].view(pages),
            k=k,
            v=v,
            cache_seqlens=lens,
            softmax_scale=module.scaling,
            causal=True,
            window_size=sliding_window,
            scheduler_metadata=words,
            **flash_kwargs,
        )
        return (out[0] if isinstance(out, tuple) else out).squeeze(1)


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    cache: Any,
    width: int,
    window: tuple[int, int],
) -> Step:
    """Lengths before the step's tokens, and the schedule for them, as the attention call asks."""
    from flash_attn_interface import get_scheduler_metadata

    lens = (cu_seq_lens_k[1 : len(q) + 1] - cu_seq_lens_k[: len(q)] - 1).to(torch.int32)
    words = get_scheduler_metadata(
        batch_size=len(q),
        max_seqlen_q=1,
        max_seqlen_k=width,
        num_heads=q.shape[2],
        num_heads_k=k.shape[2],
        headdim=q.shape[3],
        cache_seqlens=lens,
        qkv_dtype=q.dtype,
        page_size=cache.block_size,
        max_seqlen_k_new=1,
        causal=True,
        window_size=window,
    )
    return lens, words
