"""Stand-ins on the CPU for FlashInfer's MLA wrapper and FlashMLA: their arguments, plain softmax.

They read what the libraries read: FlashInfer ragged pages, FlashMLA slots or a page table. Each
checks what its kernel demands.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from attnlib.kinds.mla.format import dequantize


def softmax_over(q: torch.Tensor, tokens: torch.Tensor, scale: float) -> torch.Tensor:
    """[heads, 576] over tokens [n, 576]: [heads, 512] bfloat16."""
    scores = scale * q.double() @ tokens.double().T
    return (torch.softmax(scores, -1) @ tokens[:, :512].double()).bfloat16()


class FakeWrapper:
    """BatchMLAPagedAttentionWrapper of FlashInfer 0.6.4: signature and buffers."""

    made: list[FakeWrapper]

    def __init__(
        self, workspace: torch.Tensor, use_cuda_graph: bool = False, **options: Any
    ) -> None:
        self._backend = options.pop("backend")
        self.buffers = options if use_cuda_graph else {}
        self.made.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        given = locals()
        assert (head_dim_ckv, head_dim_kpe, causal, use_profiler) == (512, 64, False, False)
        assert qo_indptr.tolist() == list(range(len(kv_len_arr) + 1))
        self.tensors = {}
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"):
            assert given[name].dtype == torch.int32
            held = self.buffers.get(name, torch.empty_like(given[name]))
            held[: len(given[name])].copy_(given[name])
            self.tensors[name] = held
        self.heads, self.page_size, self.scale = num_heads, page_size, sm_scale

    def run(self, *parts: torch.Tensor) -> torch.Tensor:
        q_nope, q_pe, ckv, kpe = parts
        assert ckv.shape[1] == kpe.shape[1] == self.page_size and q_nope.shape[1] == self.heads
        q, cache = torch.cat([q_nope, q_pe], -1), torch.cat([ckv, kpe], -1)
        starts = self.tensors["kv_indptr"].tolist()
        rows = []
        for i, length in enumerate(self.tensors["kv_len_arr"].tolist()):
            pages = self.tensors["kv_indices"][starts[i] : starts[i + 1]].long()
            rows.append(softmax_over(q[i], cache[pages].flatten(0, 1)[:length], self.scale))
        return torch.stack(rows)


class FakeFlashMla:
    """`flash_mla` on Hopper; dense schedules carry their lengths and are believed, not checked."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.heads: list[int] = []

    def get_mla_metadata(self) -> tuple[Any, None]:
        return SimpleNamespace(tile_scheduler_metadata=None, num_splits=None), None

    def get_mla_decoding_metadata(
        self, seqlens_k: torch.Tensor, rows: int, h_k: int, h_q: int, *, use_legacy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert use_legacy and h_k == 1 and rows == h_q
        return seqlens_k.clone(), seqlens_k.clone()

    def flash_mla_with_kvcache(
        self, q: torch.Tensor, k_cache: torch.Tensor, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table, lens, head_dim_v, meta = arguments
        assert options.pop("use_legacy") and head_dim_v == 512 and q.shape[1] == 1
        assert k_cache.shape[2] == 1
        self.calls.append(options)
        self.heads.append(q.shape[2])
        attend = self._dense if "indices" not in options else self._sparse
        tokens = attend(k_cache[:, :, 0], table, lens, meta, options.get("indices"))
        rows = [
            softmax_over(x[0], t, options["softmax_scale"]) for x, t in zip(q, tokens, strict=True)
        ]
        return torch.stack(rows)[:, None], q

    def _dense(
        self, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, meta: Any, _: None
    ) -> list[torch.Tensor]:
        assert cache.shape[1] == 64 and cache.dtype == torch.bfloat16
        if meta.num_splits is None:
            meta.tile_scheduler_metadata, meta.num_splits = lens.clone(), lens.clone()
        assert meta.num_splits.tolist() == lens.tolist(), "a stale schedule"
        pages = zip(table.long(), lens.tolist(), strict=True)
        return [cache[row[: -(-n // 64)]].flatten(0, 1)[:n] for row, n in pages]

    def _sparse(
        self, cache: torch.Tensor, table: None, lens: None, meta: Any, indices: torch.Tensor
    ) -> list[torch.Tensor]:
        assert (table, lens) == (None, None) and cache.dtype == torch.float8_e4m3fn
        assert indices.shape[1:] == (1, -(-indices.shape[2] // 64) * 64)
        assert self.heads[-1] in (64, 128) and indices.dtype == torch.int32
        slots = cache.view(torch.uint8).flatten(0, 1)
        return [dequantize(slots[row[row != -1].long()]) for row in indices[:, 0]]
