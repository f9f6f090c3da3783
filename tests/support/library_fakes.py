"""Stand-ins on the CPU for FlashInfer's wrappers, FlashAttention-3's calls and FlashMLA.

They read what the libraries read (prefix sums, pages, packed mask bits, slots), never a batch of
ours, and compute plain softmax. Each checks what its library demands.
"""

from types import SimpleNamespace

import numpy as np
import torch

from attnlib.kinds.mla.format import dequantize


def softmax_rows(q, k, v, sees, scale):
    """[rows, heads, dim] over [tokens, kv_heads, dim] where `sees` [rows, tokens]: like `q`."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("rhd,nhd->hrn", q.double() * scale, k)
    probs = torch.softmax(scores.masked_fill(~sees, float("-inf")), -1)
    return torch.einsum("hrn,nhd->rhd", probs, v).to(q.dtype)


def softmax_latent(q, tokens, scale):
    """[heads, 576] over tokens [n, 576]: [heads, 512]."""
    sees = torch.ones(1, len(tokens), dtype=torch.bool)
    return softmax_rows(q[None], tokens[:, None], tokens[:, None, :512], sees, scale)[0]


def mask_of(rows, tokens, causal):
    """[rows, tokens] bool; causal, the last row sees the last token."""
    sees = torch.ones(rows, tokens, dtype=torch.bool)
    return sees.tril(tokens - rows) if causal else sees


class FakeWrapper:
    """What the wrappers of FlashInfer 0.6.4 share: a CUDA graph's buffers, and a plan's tensors."""

    made: list
    positional: tuple

    def __init__(self, workspace, kv_layout="NHD", use_cuda_graph=False, **given):
        assert kv_layout == "NHD"
        self._backend = given.pop("backend")
        self.buffers = given if use_cuda_graph else {}
        self.max_rows = 0
        self.made.append(self)

    def hold(self, arguments):
        """Take a plan's positional arguments: tensors into the buffers, sizes as they are."""
        told = dict(zip(self.positional, arguments, strict=True))
        self.tensors, self.sizes = {}, {}
        for name, value in told.items():
            if not torch.is_tensor(value):
                self.sizes[name] = value
                continue
            assert value.dtype == torch.int32
            buffers = (self.buffers.get(n) for n in (name, f"{name}_buf", f"paged_{name}_buf"))
            held = next((b for b in buffers if b is not None), torch.empty_like(value))
            held[: len(value)].copy_(value)
            self.tensors[name] = held

    def tokens_of(self, lens, *caches):
        """Of each request, its tokens in each cache."""
        starts = self.tensors["kv_indptr"].tolist()
        for i, n in enumerate(lens.tolist()):
            pages = self.tensors["kv_indices"][starts[i] : starts[i + 1]].long()
            yield [cache[pages].flatten(0, 1)[:n] for cache in caches]


class FakePrefill(FakeWrapper):
    """What both prefill wrappers have: packed masks, run over requests."""

    def plan(self, *arguments, causal=False, custom_mask=None, sm_scale, q_data_type, kv_data_type):
        self.hold(arguments)
        self.rows = int(self.tensors["qo_indptr"][-1])
        self.max_rows = self.max_rows or self.rows
        assert not self.buffers or self.rows <= self.max_rows, "more rows than the first plan"
        masked = custom_mask is not None
        assert not self.buffers or masked == ("custom_mask_buf" in self.buffers)
        if self._backend == "auto":
            self._backend = "fa2" if masked else "fa3"
        assert not (masked and self._backend == "fa3"), "fa3 takes no custom mask"
        self.causal, self.scale, self.packed = causal, sm_scale, None
        if masked:
            self._pack(custom_mask)

    def _pack(self, mask):
        assert mask.dtype == torch.bool and mask.ndim == 1
        sizes = self.q_lens() * self.kv_lens()
        assert int(sizes.sum()) == len(mask)
        parts = mask.split(sizes.tolist())
        bits = np.concatenate([np.packbits(part.numpy(), bitorder="little") for part in parts])
        self.packed = self.buffers.get("custom_mask_buf", torch.empty(len(bits), dtype=torch.uint8))
        self.packed[: len(bits)].copy_(torch.from_numpy(bits))

    def q_lens(self):
        return self.tensors["qo_indptr"].diff()

    def sees(self):
        """Mask [rows, tokens] of each request, custom bits before the causal flag."""
        shapes = list(zip(self.q_lens().tolist(), self.kv_lens().tolist(), strict=True))
        if self.packed is None:
            return [mask_of(*shape, self.causal) for shape in shapes]
        sizes = [-(-rows * tokens // 8) for rows, tokens in shapes]
        parts = self.packed[: sum(sizes)].split(sizes)
        bits = [np.unpackbits(part.numpy(), bitorder="little").astype(bool) for part in parts]
        pairs = zip(bits, shapes, strict=True)
        return [torch.from_numpy(b[: r * n]).view(r, n) for b, (r, n) in pairs]

    def attend(self, q, tokens):
        assert len(q) == self.rows, "q must have the planned rows"
        each = zip(q.split(self.q_lens().tolist()), tokens, self.sees(), strict=True)
        return torch.cat([softmax_rows(x, *kv, sees, self.scale) for x, kv, sees in each])


class FakePaged(FakePrefill):
    """BatchPrefillWithPagedKVCacheWrapper."""

    positional = (
        *("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"),
        *("num_qo_heads", "num_kv_heads", "head_dim", "page_size"),
    )

    def kv_lens(self):
        pages = self.tensors["kv_indptr"].diff()
        return (pages - 1) * self.sizes["page_size"] + self.tensors["kv_last_page_len"]

    def run(self, q, cache):
        return self.attend(q, self.tokens_of(self.kv_lens(), *cache))


class FakeRagged(FakePrefill):
    """BatchPrefillWithRaggedKVCacheWrapper."""

    positional = ("qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim")

    def kv_lens(self):
        return self.tensors["kv_indptr"].diff()

    def run(self, q, k, v):
        assert k.ndim == v.ndim == 3
        lens = self.kv_lens().tolist()
        return self.attend(q, zip(*(x[: sum(lens)].split(lens) for x in (k, v)), strict=True))


class FakeMla(FakeWrapper):
    """BatchMLAPagedAttentionWrapper."""

    positional = (
        *("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"),
        *("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size"),
        *("causal", "sm_scale", "q_data_type", "kv_data_type"),
    )

    def plan(self, *arguments):
        self.hold(arguments)
        dims = [self.sizes[name] for name in ("head_dim_ckv", "head_dim_kpe", "causal")]
        assert dims == [512, 64, False]
        assert arguments[0].tolist() == list(range(len(arguments[3]) + 1))

    def run(self, q_nope, q_pe, ckv, kpe):
        assert ckv.shape[1] == kpe.shape[1] == self.sizes["page_size"]
        assert q_nope.shape[1] == self.sizes["num_heads"]
        q, cache = torch.cat([q_nope, q_pe], -1), torch.cat([ckv, kpe], -1)
        each = zip(q, self.tokens_of(self.tensors["kv_len_arr"], cache), strict=True)
        scale = self.sizes["sm_scale"]
        return torch.stack([softmax_latent(x, *tokens, scale) for x, tokens in each])


class FakeFlashAttention:
    """FlashAttention-3's two calls, as `attnlib.core.backends.fa3.Fa3Extend` makes them."""

    def flash_attn_with_kvcache(self, q, k_cache, v_cache, **given):
        page_size, lens = k_cache.shape[1], given["cache_seqlens"].tolist()
        tokens = []
        for row, n in zip(given["page_table"].long(), lens, strict=True):
            pages = row[: -(-n // page_size)]
            tokens.append([c[pages].flatten(0, 1)[:n] for c in (k_cache, v_cache)])
        return self._attend(q, tokens, given["cu_seqlens_q"], given["max_seqlen_q"], given)

    def flash_attn_varlen_func(self, q, k, v, q_sums, k_sums, longest_q, longest_k, **given):
        lens = k_sums.diff().tolist()
        assert max(lens) <= longest_k
        tokens = zip(*(x[: sum(lens)].split(lens) for x in (k, v)), strict=True)
        return self._attend(q, tokens, q_sums, longest_q, given)

    def _attend(self, q, tokens, q_sums, longest, given):
        lens = q_sums.diff().tolist()
        assert max(lens) <= longest
        out = []
        for x, (k, v) in zip(q[: sum(lens)].split(lens), tokens, strict=True):
            sees = mask_of(len(x), len(k), given["causal"])
            out.append(softmax_rows(x, k, v, sees, given["softmax_scale"]))
        return torch.cat(out)


class FakeFlashMla:
    """`flash_mla` on Hopper; dense schedules carry their lengths and are believed, not checked."""

    def __init__(self):
        self.calls, self.heads = [], []

    def get_mla_metadata(self):
        return SimpleNamespace(tile_scheduler_metadata=None, num_splits=None), None

    def get_mla_decoding_metadata(self, seqlens_k, rows, h_k, h_q, *, use_legacy):
        assert use_legacy and h_k == 1 and rows == h_q
        return seqlens_k.clone(), seqlens_k.clone()

    def flash_mla_with_kvcache(self, q, k_cache, table, lens, head_dim_v, meta, **options):
        assert options.pop("use_legacy") and head_dim_v == 512 and q.shape[1] == 1
        assert k_cache.shape[2] == 1
        self.calls.append(options)
        self.heads.append(q.shape[2])
        attend = self._dense if "indices" not in options else self._sparse
        tokens = attend(k_cache[:, :, 0], table, lens, meta, options.get("indices"))
        scale = options["softmax_scale"]
        rows = [softmax_latent(x[0], t, scale) for x, t in zip(q, tokens, strict=True)]
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
