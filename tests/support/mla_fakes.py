"""Stand-ins on the CPU for FlashInfer's MLA wrapper and FlashMLA: their arguments, plain softmax.

They read what the libraries read: FlashInfer ragged pages, FlashMLA slots or a page table. Each
checks what its kernel demands.
"""

from types import SimpleNamespace
from typing import Any

import torch

from attnlib.kinds.mla.format import dequantize


def softmax_over(q, tokens, scale):
    """[heads, 576] over tokens [n, 576]: [heads, 512] bfloat16."""
    scores = scale * q.double() @ tokens.double().T
    return (torch.softmax(scores, -1) @ tokens[:, :512].double()).bfloat16()


class FakeWrapper:
    """BatchMLAPagedAttentionWrapper of FlashInfer 0.6.4: signature and buffers."""

    def __init__(self, workspace, use_cuda_graph=False, **options):
        self._backend = options.pop("backend")
        self.buffers = options if use_cuda_graph else {}
        self.made.append(self)

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        use_profiler=False,
    ):
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

    def run(self, *parts):
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

    def __init__(self):
        self.calls: list[dict[str, Any]] = []
        self.heads: list[int] = []

    def get_mla_metadata(self):
        return SimpleNamespace(tile_scheduler_metadata=None, num_splits=None), None

    def get_mla_decoding_metadata(self, seqlens_k, rows, h_k, h_q, *, use_legacy):
        assert use_legacy and h_k == 1 and rows == h_q
        return seqlens_k.clone(), seqlens_k.clone()

    def flash_mla_with_kvcache(self, q, k_cache, *arguments, **options):
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

    def _dense(self, cache, table, lens, meta, _):
        assert cache.shape[1] == 64 and cache.dtype == torch.bfloat16
        if meta.num_splits is None:
            meta.tile_scheduler_metadata, meta.num_splits = lens.clone(), lens.clone()
        assert meta.num_splits.tolist() == lens.tolist(), "a stale schedule"
        pages = zip(table.long(), lens.tolist(), strict=True)
        return [cache[row[: -(-n // 64)]].flatten(0, 1)[:n] for row, n in pages]

    def _sparse(self, cache, table, lens, meta, indices):
        assert (table, lens) == (None, None) and cache.dtype == torch.float8_e4m3fn
        assert indices.shape[1:] == (1, -(-indices.shape[2] // 64) * 64)
        assert self.heads[-1] in (64, 128) and indices.dtype == torch.int32
        slots = cache.view(torch.uint8).flatten(0, 1)
        return [dequantize(slots[row[row != -1].long()]) for row in indices[:, 0]]
