"""A guard for FlashMLA's `FlashMLASchedMeta`, which remembers a schedule and not what it is for.

FlashMLA fills the object at its first call and reuses it at every other, silently also where shapes
or lengths are others (its sparse path compares some shapes). `GuardedSchedMeta` refuses.

    meta = GuardedSchedMeta()                       # or meta.renew(), once per step
    out, lse = meta.attend(q, k_cache, block_table, cache_seqlens, head_dim_v, indices=indices)

Lengths are not read, which would synchronise: they must be the same tensor, not written since
(PyTorch counts writes). Writes that PyTorch does not see go undetected: a kernel of one's own, a
replayed graph, a tensor made in inference mode.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from . import library
from .flash_attn3 import writes

OPTIONS = ("causal", "is_fp8_kvcache", "enable_batch_invariant", "use_legacy", "kv_format")


@dataclass
class GuardedSchedMeta:
    """FlashMLA's schedule with the facts and the lengths of its first call."""

    made_for: dict[str, Any] | None = None
    _meta: Any = field(default=None, repr=False)
    _lengths: dict[str, tuple[torch.Tensor, int | None]] = field(default_factory=dict, repr=False)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor | None,
        cache_seqlens: torch.Tensor | None,
        head_dim_v: int,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`flash_mla_with_kvcache` under the guard: (out, lse); arguments and shapes are its own.

        Raises ValueError, with nothing launched, where the schedule was made for another call.
        """
        flash_mla = library.load(library.FLASHMLA)
        self.require_fits(facts_of(q, k_cache, head_dim_v, options), cache_seqlens, options)
        if self._meta is None:
            self._meta = flash_mla.get_mla_metadata()[0]
        return flash_mla.flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, head_dim_v, self._meta, **options
        )

    def renew(self) -> None:
        """Forget the schedule; the next call makes a new one, for whatever it is."""
        self.made_for, self._meta = None, None
        self._lengths.clear()

    def refill(self, cache_seqlens: torch.Tensor) -> None:
        """Write dense attention's schedule for `cache_seqlens` [bs] int32 into the same memory,
        where a graph captured over `attend` reads it at its next replay, as `renew` would not
        reach it. Before the first call there is nothing to write. Launches, so not in a capture.
        """
        call = self.made_for
        if call is None or self._meta is None:
            return self.renew()
        heads, kv_heads = call["num_qo_heads"], call["num_kv_heads"]
        rows, legacy = call["q_len"] * heads // kv_heads, bool(call["use_legacy"])
        made = library.load(library.FLASHMLA).get_mla_decoding_metadata(
            cache_seqlens, rows, kv_heads, heads, use_legacy=legacy
        )
        self._meta.tile_scheduler_metadata.copy_(made[0])
        self._meta.num_splits.copy_(made[1])
        self._lengths = {"cache_seqlens": (cache_seqlens, writes(cache_seqlens))}

    def require_fits(
        self, call: dict[str, Any], cache_seqlens: torch.Tensor | None, options: dict[str, Any]
    ) -> None:
        """Raise ValueError unless `call` is the first one, or like it, with untouched lengths.

        Those are topk_length and extra_topk_length, of dense attention cache_seqlens.
        """
        given = {name: options.get(name) for name in ("topk_length", "extra_topk_length")}
        given["cache_seqlens"] = cache_seqlens if options.get("indices") is None else None
        if self.made_for is None:
            self.made_for = call
            self._lengths = {name: (t, writes(t)) for name, t in given.items() if t is not None}
            return
        told = [
            f"{name} must be {mine!r}, got {call[name]!r}"
            for name, mine in self.made_for.items()
            if mine != call[name]
        ]
        if told:
            raise ValueError(
                f"FlashMLA's schedule does not fit the call: {'; '.join(told)}; renew() it"
            )
        for name, tensor in given.items():
            _require_untouched(name, tensor, self._lengths.get(name))


def facts_of(
    q: torch.Tensor, k_cache: torch.Tensor, head_dim_v: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Shapes, dtypes and options that the schedule, or the kernel behind it, depends on.

    Of a call with `q` [bs, q_len, num_qo_heads, head_dim] over `k_cache` [num_pages, page_size,
    num_kv_heads, token_width] (elements, or bytes of a quantised token) and its keyword options.
    What is not given is None.
    """
    if q.ndim != 4 or k_cache.ndim != 4:
        raise ValueError(
            "q must be [bs, q_len, num_qo_heads, head_dim] and k_cache [num_pages, page_size, "
            f"num_kv_heads, token_width], got {list(q.shape)} and {list(k_cache.shape)}"
        )
    indices, extra = options.get("indices"), options.get("extra_indices_in_kvcache")
    extra_cache = options.get("extra_k_cache")
    return {
        "batch_size": q.shape[0],
        "q_len": q.shape[1],
        "num_qo_heads": q.shape[2],
        "num_kv_heads": k_cache.shape[2],
        "head_dim": q.shape[3],
        "head_dim_v": head_dim_v,
        "page_size": k_cache.shape[1],
        "token_width": k_cache.shape[3],
        "dtype": q.dtype,
        "kv_dtype": k_cache.dtype,
        "device": q.device,
        "topk": None if indices is None else indices.shape[-1],
        "extra_page_size": None if extra_cache is None else extra_cache.shape[1],
        "extra_topk": None if extra is None else extra.shape[-1],
        **{name: options.get(name) for name in OPTIONS},
    }


def _require_untouched(
    name: str, tensor: torch.Tensor | None, held: tuple[torch.Tensor, int | None] | None
) -> None:
    if tensor is None and held is None:
        return
    if tensor is None or held is None:
        was, now = ("none" if t is None else "a tensor" for t in (held, tensor))
        raise ValueError(f"{name} must be given as when the schedule was made: {was}, got {now}")
    first, written = held
    if (tensor.data_ptr(), tensor.shape) != (first.data_ptr(), first.shape):
        was, now = (f"{t.data_ptr():#x} {list(t.shape)}" for t in (first, tensor))
        raise ValueError(
            f"{name} must be the tensor that FlashMLA's schedule was made from, {was}, got {now}; "
            "renew() it"
        )
    if writes(tensor) != written:
        raise ValueError(
            f"{name} must not change under FlashMLA's schedule: written {written} times when it "
            f"was made, got {writes(tensor)}; renew() it"
        )
