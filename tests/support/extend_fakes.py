"""Stand-ins on the CPU for FlashInfer's prefill wrappers and FlashAttention-3's calls.

They read what the libraries read (prefix sums, pages, packed mask bits), never an `ExtendBatch`,
and compute plain softmax. Each checks what its library demands.
"""

import numpy as np
import torch


def softmax_rows(q, k, v, sees, scale):
    """[rows, heads, dim] over [tokens, kv_heads, dim] where `sees` [rows, tokens]: like `q`."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("rhd,nhd->hrn", q.double() * scale, k)
    probs = torch.softmax(scores.masked_fill(~sees, float("-inf")), -1)
    return torch.einsum("hrn,nhd->rhd", probs, v).to(q.dtype)


def causal(rows, tokens):
    """[rows, tokens] bool, the last row sees the last token."""
    return torch.ones(rows, tokens, dtype=torch.bool).tril(tokens - rows)


class FakePrefill:
    """What both wrappers of FlashInfer 0.6.4 have: buffers, packed masks, run over requests."""

    positional: tuple[str, ...]

    def __init__(self, workspace, kv_layout="NHD", use_cuda_graph=False, **given):
        assert kv_layout == "NHD"
        self._backend = given.pop("backend")
        self.buffers = given if use_cuda_graph else {}
        self.max_rows = 0
        self.made.append(self)

    def plan(self, *arguments, causal=False, custom_mask=None, sm_scale, q_data_type, kv_data_type):
        told = dict(zip(self.positional, arguments, strict=True))
        self.sizes = {name: told.pop(name) for name in list(told) if name.startswith(("num", "p"))}
        assert all(tensor.dtype == torch.int32 for tensor in told.values())
        self.rows = int(told["qo_indptr"][-1])
        self.max_rows = self.max_rows or self.rows
        assert not self.buffers or self.rows <= self.max_rows, "more rows than the first plan"
        self.tensors = {name: self._hold(name, value) for name, value in told.items()}
        masked = custom_mask is not None
        assert not self.buffers or masked == ("custom_mask_buf" in self.buffers)
        if self._backend == "auto":
            self._backend = "fa2" if masked else "fa3"
        assert not (masked and self._backend == "fa3"), "fa3 takes no custom mask"
        self.causal, self.scale, self.packed = causal, sm_scale, None
        if masked:
            self._pack(custom_mask)

    def _hold(self, name, value):
        paged = "" if name == "qo_indptr" or not hasattr(self, "paged") else "paged_"
        held = self.buffers.get(f"{paged}{name}_buf", torch.empty_like(value))
        held[: len(value)].copy_(value)
        return held

    def _pack(self, mask):
        assert mask.dtype == torch.bool and mask.ndim == 1
        sizes = self.q_lens() * self.kv_lens()
        assert int(sizes.sum()) == len(mask)
        parts = [
            np.packbits(part.numpy(), bitorder="little") for part in mask.split(sizes.tolist())
        ]
        packed = torch.from_numpy(np.concatenate(parts))
        self.packed = self.buffers.get("custom_mask_buf", torch.empty_like(packed))
        self.packed[: len(packed)].copy_(packed)

    def q_lens(self):
        return self.tensors["qo_indptr"].diff()

    def sees(self):
        """Mask [rows, tokens] of each request, custom bits before the causal flag."""
        shapes = list(zip(self.q_lens().tolist(), self.kv_lens().tolist(), strict=True))
        if self.packed is None:
            return [causal(*s) if self.causal else torch.ones(s, dtype=torch.bool) for s in shapes]
        sizes = [-(-rows * tokens // 8) for rows, tokens in shapes]
        parts = self.packed[: sum(sizes)].split(sizes)
        bits = [np.unpackbits(part.numpy(), bitorder="little") for part in parts]
        pairs = zip(bits, shapes, strict=True)
        return [torch.from_numpy(b[: r * n].astype(bool)).view(r, n) for b, (r, n) in pairs]

    def attend(self, q, tokens):
        assert len(q) == self.rows, "q must have the planned rows"
        queries = q.split(self.q_lens().tolist())
        each = zip(queries, tokens, self.sees(), strict=True)
        return torch.cat([softmax_rows(x, *kv, sees, self.scale) for x, kv, sees in each])


class FakePaged(FakePrefill):
    """BatchPrefillWithPagedKVCacheWrapper."""

    paged = True
    positional = (
        *("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"),
        *("num_qo_heads", "num_kv_heads", "num_dim", "page_size"),
    )

    def kv_lens(self):
        pages = self.tensors["kv_indptr"].diff()
        return (pages - 1) * self.sizes["page_size"] + self.tensors["kv_last_page_len"]

    def run(self, q, cache):
        starts, lens = self.tensors["kv_indptr"].tolist(), self.kv_lens().tolist()
        tokens = []
        for i, n in enumerate(lens):
            pages = self.tensors["kv_indices"][starts[i] : starts[i + 1]].long()
            tokens.append(tuple(c[pages].flatten(0, 1)[:n] for c in cache))
        return self.attend(q, tokens)


class FakeRagged(FakePrefill):
    """BatchPrefillWithRaggedKVCacheWrapper."""

    positional = ("qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "num_dim")

    def kv_lens(self):
        return self.tensors["kv_indptr"].diff()

    def run(self, q, k, v):
        assert k.ndim == v.ndim == 3
        lens = self.kv_lens().tolist()
        total = sum(lens)
        return self.attend(q, list(zip(k[:total].split(lens), v[:total].split(lens), strict=True)))


class FakeFlashAttention:
    """FlashAttention-3's two calls, as `attnlib.core.backends.fa3.Fa3Extend` makes them."""

    def flash_attn_with_kvcache(self, q, k_cache, v_cache, **given):
        page_size, lens = k_cache.shape[1], given["cache_seqlens"].tolist()
        tokens = []
        for row, n in zip(given["page_table"].long(), lens, strict=True):
            pages = row[: -(-n // page_size)]
            tokens.append([c[pages].flatten(0, 1)[:n] for c in (k_cache, v_cache)])
        return self._attend(q, tokens, given["cu_seqlens_q"], given["max_seqlen_q"], given)

    def flash_attn_varlen_func(self, *arguments, **given):
        q, k, v, q_sums, k_sums, longest_q, longest_k = arguments
        lens = k_sums.diff().tolist()
        assert max(lens) <= longest_k
        parts = (x[: sum(lens)].split(lens) for x in (k, v))
        return self._attend(q, list(zip(*parts, strict=True)), q_sums, longest_q, given)

    def _attend(self, q, tokens, q_sums, longest, given):
        lens = q_sums.diff().tolist()
        assert max(lens) <= longest
        out = []
        for x, (k, v) in zip(q[: sum(lens)].split(lens), tokens, strict=True):
            sees = torch.ones(len(x), len(k), dtype=torch.bool)
            sees = causal(*sees.shape) if given["causal"] else sees
            out.append(softmax_rows(x, k, v, sees, given["softmax_scale"]))
        return torch.cat(out)
