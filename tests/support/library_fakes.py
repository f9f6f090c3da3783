"""Stand-ins on the CPU for FlashInfer's wrappers, FlashAttention-3's calls and FlashMLA.

They read what the libraries read (prefix sums, pages, packed mask bits, slots), never a batch of
ours, and attend request by request. Each checks what its library demands.
"""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch

from attnlib.core.fa2.coverage import tokens_read
from attnlib.core.schedule import splits
from attnlib.core.schedule.words import words_of
from attnlib.measure.calls.decode.measure import attend_rows
from attnlib.measure.calls.mla.format import dequantize

SMS = 132


def attend(q, q_lens, tokens, sees, scale):
    """Like `q`, of which each request has `q_lens` rows, over its K and V in `tokens`; zeros where
    there are none."""
    assert len(q) == sum(q_lens), "q must have the planned rows"
    each = zip(q.split(q_lens), tokens, sees, strict=True)
    rows = ((x, k.double(), v.double(), seen) for x, (k, v), seen in each)
    out = []
    for x, k, v, seen in rows:
        if len(k):
            out.append(attend_rows(x, k, v, scale, sees=seen, probs_dtype=None))
        else:
            out.append(v.new_zeros(*x.shape[:-1], v.shape[-1]))
    return torch.cat(out).to(q.dtype)


def attend_latent(q, tokens, scale, q_len=1):
    """[rows, heads, 512] of `q_len` queries per request over its tokens [n, 576], causal."""
    keys = [each[:, None] for each in tokens]
    kv = [(key, key[..., :512]) for key in keys]
    q_lens = [q_len] * len(kv)
    return attend(
        q,
        q_lens,
        kv,
        masks_of(q_lens, [len(k) for k, _ in kv], True),
        scale,
    )


def masks_of(q_lens, kv_lens, causal, left=-1):
    """Of each request [rows, tokens] bool; causal, the last row sees the last token, and `left`
    before it."""
    shapes = zip(q_lens, kv_lens, strict=True)
    full = (torch.ones(shape, dtype=torch.bool) for shape in shapes)
    found = []
    for sees in full:
        before = sees.shape[1] - len(sees)
        if causal:
            sees = sees.tril(before)
        if left >= 0:
            sees = sees.triu(before - left)
        found.append(sees)
    return found


def gather(pages, lens, caches):
    """Of each request, its tokens in each cache; pages beyond its length are not read."""
    size = caches[0].shape[1]
    found = []
    for row, length in zip(pages, lens, strict=True):
        read = row[: -(-length // size)].long()
        found.append([cache[read].flatten(0, 1)[:length] for cache in caches])
    return found


def slices(values, starts):
    """The values from each start to the next."""
    return [values[begin:end] for begin, end in pairwise(starts)]


def split_both(k, v, lens):
    """Of each request its K and V, which lie one behind the other."""
    count = sum(lens)
    return zip(k[:count].split(lens), v[:count].split(lens), strict=True)


class FakeWrapper:
    """What the wrappers of FlashInfer 0.6.4 share: a CUDA graph's buffers, and a plan's tensors."""

    made: list
    positional: tuple
    library_names: dict = {}
    """Of `positional`, where the library has another name."""

    def __init__(self, workspace, kv_layout="NHD", use_cuda_graph=False, **given):
        assert kv_layout == "NHD"
        self._backend = given.pop("backend", "auto")
        self._use_cuda_graph = use_cuda_graph
        self._window_left = -1
        self._plan_info = None
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = torch.zeros(2**21, dtype=torch.uint8)
        self.buffers = given if use_cuda_graph else {}
        self.max_rows = 0
        self.made.append(self)

    def hold(self, arguments):
        """Take a plan's positional arguments: tensors into the buffers, sizes as they are."""
        self.told = dict(zip(self.positional, arguments, strict=True))
        for name, value in self.told.items():
            if torch.is_tensor(value):
                assert value.dtype == torch.int32
                buffers = (self.buffers.get(n) for n in (name, f"{name}_buf", f"paged_{name}_buf"))
                held = next((b for b in buffers if b is not None), torch.empty_like(value))
                held[: len(value)].copy_(value)
                self.told[name] = held
                setattr(self, f"_{name}_buf" if name == "qo_indptr" else f"_paged_{name}_buf", held)

    def tokens_of(self, lens, *caches):
        starts = self.told["kv_indptr"].tolist()
        pages = slices(self.told["kv_indices"], starts)
        return gather(pages, lens, caches)


class FakePrefill(FakeWrapper):
    """What both prefill wrappers have: packed masks, run over requests."""

    def plan(
        self,
        *,
        causal=False,
        custom_mask=None,
        sm_scale,
        window_left=-1,
        **dtypes,
    ):
        names = [self.library_names.get(name, name) for name in self.positional]
        self.hold([dtypes.pop(name) for name in names])
        self._window_left = window_left
        self.q_lens = self.told["qo_indptr"].diff().tolist()
        self.promised = dtypes.pop("uniform_q_len", None)
        assert self.promised is None or {*self.q_lens} == {self.promised}
        self.max_rows = self.max_rows or sum(self.q_lens)
        assert not self.buffers or sum(self.q_lens) <= self.max_rows, "more rows than the first"
        masked = custom_mask is not None
        assert not self.buffers or masked == ("custom_mask_buf" in self.buffers)
        if self._backend == "auto":
            self._backend = "fa2" if masked else "fa3"
        assert not (masked and self._backend == "fa3"), "fa3 takes no custom mask"
        self.causal = causal
        self.scale = sm_scale
        self.packed = None
        self._fixed_batch_size = len(self.q_lens)
        self._plan_info = list(range(15))
        self._num_qo_heads, self._num_kv_heads = (
            self.told[f"num_{which}_heads"] for which in ("qo", "kv")
        )
        assert set(dtypes) == {"q_data_type", "kv_data_type"}
        self._cached_q_data_type, self._cached_kv_data_type = dtypes.values()
        if masked:
            self._pack(custom_mask)

    def _pack(self, mask):
        assert mask.dtype == torch.bool and mask.ndim == 1
        sizes = [q * n for q, n in zip(self.q_lens, self.kv_lens(), strict=True)]
        parts = [np.packbits(part.numpy(), bitorder="little") for part in mask.split(sizes)]
        bits = torch.from_numpy(np.concatenate(parts))
        self.packed = self.buffers.get("custom_mask_buf", torch.empty_like(bits))
        self.packed[: len(bits)].copy_(bits)

    def attend(self, q, tokens):
        """Custom bits stand before the causal flag."""
        sees = masks_of(self.q_lens, self.kv_lens(), self.causal, self._window_left)
        if self.packed is not None:
            parts = self.packed.numpy()
            for i, mask in enumerate(sees):
                bits = np.unpackbits(parts, count=mask.numel(), bitorder="little")
                sees[i] = torch.from_numpy(bits.astype(bool)).view(mask.shape)
                parts = parts[-(-mask.numel() // 8) :]
        return attend(q, self.q_lens, tokens, sees, self.scale)


class FakeBatchAttention:
    """BatchAttention: lengths are copied by `plan`, the pages are read where they lie."""

    def __init__(self, kv_layout, device):
        assert kv_layout == "NHD"
        torch.empty(0, device=device)

    def plan(self, *, qo_indptr, kv_indptr, kv_indices, kv_len_arr, **given):
        for tensor in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert tensor.dtype == torch.int32
        assert given["head_dim_qk"] == given["head_dim_vo"] <= 256
        self.kv_indices = kv_indices
        self.q_lens = qo_indptr.diff().tolist()
        self.kv_lens = kv_len_arr.tolist()
        self.starts = kv_indptr.tolist()
        self.causal = given["causal"]
        self.scale = given["sm_scale"]
        self.dtypes = (given["q_data_type"], given["kv_data_type"])

    def run(self, q, kv_cache):
        assert self.dtypes == (q.dtype, kv_cache[0].dtype)
        pages = slices(self.kv_indices, self.starts)
        sees = masks_of(self.q_lens, self.kv_lens, self.causal)
        out = attend(
            q,
            self.q_lens,
            gather(pages, self.kv_lens, kv_cache),
            sees,
            self.scale,
        )
        return out, torch.empty(out.shape[:2])


class FakePaged(FakePrefill):
    """BatchPrefillWithPagedKVCacheWrapper."""

    positional = (
        *("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"),
        *("num_qo_heads", "num_kv_heads", "head_dim", "page_size"),
    )
    library_names = {
        "kv_indptr": "paged_kv_indptr",
        "kv_indices": "paged_kv_indices",
        "kv_last_page_len": "paged_kv_last_page_len",
        "head_dim": "head_dim_qk",
    }

    def kv_lens(self):
        full = (self.told["kv_indptr"].diff() - 1) * self.told["page_size"]
        return (full + self.told["kv_last_page_len"]).tolist()

    def run(self, q, paged_kv_cache):
        if self._plan_info != list(range(15)):
            self.follow_plan()
        return self.attend(q, self.tokens_of(self.kv_lens(), *paged_kv_cache))

    def follow_plan(self):
        """A plan of ours must be for these rows, and read all that they see."""
        (
            (
                _,
                rows,
                _,
                tile,
            ),
            lens,
        ) = self._plan_info[:4], np.array(self.kv_lens())
        assert rows == sum(self.q_lens)
        words = self._int_workspace_buffer.view(torch.int32).numpy()
        seen = lens if self._window_left < 0 else np.minimum(lens, self._window_left + tile)
        assert (tokens_read(words, tuple(self._plan_info), lens) >= seen).all()


class FakeDecode(FakePaged):
    """BatchDecodeWithPagedKVCacheWrapper on tensor cores: one query of each request."""

    def __init__(self, workspace, use_tensor_cores, **given):
        assert use_tensor_cores
        short = {name.replace("_buffer", "_buf"): value for name, value in given.items()}
        super().__init__(workspace, **short)

    def plan(self, *, indptr, indices, last_page_len, head_dim, **options):
        super().plan(
            qo_indptr=torch.arange(len(indptr), dtype=torch.int32),
            paged_kv_indptr=indptr,
            paged_kv_indices=indices,
            paged_kv_last_page_len=last_page_len,
            head_dim_qk=head_dim,
            **options,
        )


class PlannedWrapper(SimpleNamespace):
    """What FlashInfer's decode wrapper holds: planned once, the private names of a planner."""

    def __init__(self, workspace, kv_layout, backend, use_tensor_cores, **graph):
        self._backend = backend
        self.plans = 0
        self._plan_info = None
        self.is_cuda_graph_enabled = self._use_cuda_graph = graph.pop("use_cuda_graph", False)
        for name, buffer in graph.items():
            setattr(self, f"_{name.removesuffix('fer')}", buffer)
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = torch.zeros(2**20, dtype=torch.uint8)
        self._num_qo_heads = 32
        self._num_kv_heads = 8
        self._window_left = -1
        self._cached_q_data_type = self._cached_kv_data_type = torch.bfloat16
        if graph:
            self._fixed_batch_size = len(self._paged_kv_last_page_len_buf)
            self._qo_indptr_buf = torch.zeros(self._fixed_batch_size + 1, dtype=torch.int32)

    def begin_forward(self, *args, **kwargs):
        self.plans += 1
        self._plan_info = list(range(15))

    @classmethod
    def of_graph(cls, rows, pages):
        """One of fa2 with a graph of so many requests and pages."""
        sizes = {"indptr": rows + 1, "indices": pages, "last_page_len": rows}
        arrays = {name: torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()}
        buffers = {f"paged_kv_{name}_buffer": array for name, array in arrays.items()}
        floats = torch.zeros(2**24, dtype=torch.uint8)
        return cls(floats, "HND", "fa2", True, use_cuda_graph=True, **buffers)


class FakeRagged(FakePrefill):
    """BatchPrefillWithRaggedKVCacheWrapper."""

    positional = ("qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim")
    library_names = {"head_dim": "head_dim_qk"}

    def kv_lens(self):
        return self.told["kv_indptr"].diff().tolist()

    def run(self, q, k, v):
        assert k.ndim == v.ndim == 3
        lens = self.kv_lens()
        return self.attend(q, split_both(k, v, lens))


def fake_xqa(*, query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, **given):
    """`flashinfer.decode.trtllm_batch_decode_with_kv_cache` with backend "xqa"."""
    assert (given.pop("backend"), given.pop("kv_layout")) == ("xqa", "NHD")
    # Read as bare pointers, in rows of the table's width.
    for read, dtype in (
        (query, query.dtype),
        (block_tables, torch.int32),
        (seq_lens, torch.int32),
    ):
        assert read.is_contiguous() and read.dtype == dtype
    size = kv_cache[0].shape[1]
    lens = seq_lens.tolist()
    assert size in (16, 32, 64, 128)
    assert max_seq_len == block_tables.shape[1] * size
    assert query.dtype == kv_cache[0].dtype
    assert workspace_buffer.count_nonzero() == 0
    sees = masks_of([1] * len(lens), lens, True, given.pop("window_left"))
    scale = given.pop("bmm1_scale")
    tokens = gather(block_tables, lens, kv_cache)
    assert not given
    return attend(query, [1] * len(lens), tokens, sees, scale)


class FakeMla(FakeWrapper):
    """BatchMLAPagedAttentionWrapper."""

    positional = (
        *("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"),
        *("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size"),
        *("causal", "sm_scale", "q_data_type", "kv_data_type"),
    )

    def plan(self, **given):
        self.hold([given.pop(name) for name in self.positional])
        dims = [self.told[name] for name in ("head_dim_ckv", "head_dim_kpe")]
        assert dims == [512, 64] and not given
        (self.q_len,) = {*self.told["qo_indptr"].diff().tolist()}
        assert self.told["causal"] or self.q_len == 1

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, **scales):
        ckv = ckv_cache
        kpe = kpe_cache
        fp8 = self.told["kv_data_type"] == torch.float8_e4m3fn
        assert ckv.dtype == kpe.dtype == self.told["kv_data_type"]
        assert set(scales) == ({"ckv_scale", "kpe_scale"} if fp8 else set())
        if fp8:
            ckv = ckv.float() * scales["ckv_scale"]
            kpe = kpe.float() * scales["kpe_scale"]
        assert ckv.shape[1] == kpe.shape[1] == self.told["page_size"]
        assert q_nope.shape[1] == self.told["num_heads"]
        q = torch.cat([q_nope, q_pe], -1)
        cache = torch.cat([ckv, kpe], -1)
        tokens = self.tokens_of(self.told["kv_len_arr"].tolist(), cache)
        return attend_latent(
            q,
            (x for (x,) in tokens),
            self.told["sm_scale"],
            self.q_len,
        )


class FakeNewMla(FakeMla):
    """The same from FlashInfer 0.7.1 on."""

    def plan(self, *, metadata, query_layout, kv_cache_layout, **given):
        assert query_layout == kv_cache_layout == "split"
        super().plan(**metadata, **given)

    def run(self, *, query, kv_cache, **scales):
        return super().run(*query, *kv_cache, **scales)


class FakeFlashAttention:
    """FlashAttention-3 of the model and the oracle; `scheduled` and `launched` are the arguments of
    its calls."""

    def __init__(self):
        self.scheduled = []
        self.launched = []

    def get_scheduler_metadata(self, *sizes, cache_seqlens, **options):
        names = ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_qo_heads", "num_kv_heads")
        seq_lens = cache_seqlens
        given = dict(zip((*names, "head_dim"), sizes, strict=True))
        self.scheduled.append({**given, **options, "seq_lens": seq_lens})
        if options["headdim_v"] == 512:
            return seq_lens.clone()
        cu_seqlens_q = options.pop("cu_seqlens_q")
        given |= {"num_sms": SMS, "dtype": str(options.pop("qkv_dtype")).removeprefix("torch.")}
        given |= {"head_dim_v": options.pop("headdim_v"), "window": options.pop("window_size")}
        facts = splits.SchedulerFacts(**given, varlen_q=cu_seqlens_q is not None, **options)
        q_lens = None if cu_seqlens_q is None else cu_seqlens_q.diff().numpy()
        plan = splits.plan_splits(facts, seq_lens.numpy(), q_lens)
        return torch.from_numpy(words_of(plan))

    def flash_attn_with_kvcache(self, q, k_cache, v_cache, **given):
        self.launched.append(given)
        if "qv" in given:
            return self._attend_latent(q, k_cache, v_cache, **given)
        lens = given["cache_seqlens"].tolist()
        tokens = gather(given["page_table"], lens, (k_cache, v_cache))
        if "cu_seqlens_q" in given:
            q_sums = given["cu_seqlens_q"]
            longest = given["max_seqlen_q"]
            return self._attend(q, lens, tokens, q_sums, longest, given)
        q_sums = torch.arange(len(q) + 1) * q.shape[1]
        out = self._attend(
            q.flatten(0, 1),
            lens,
            tokens,
            q_sums,
            q.shape[1],
            given,
        )
        return out.view(q.shape)

    def _attend_latent(self, q, rope, latent, *, qv, causal, scheduler_metadata, **given):
        assert q.shape[1:] == (*qv.shape[1:3], 64)
        assert qv.shape[3] == 512
        assert causal
        lens = given["cache_seqlens"]
        assert lens.dtype == given["page_table"].dtype == torch.int32
        assert torch.equal(scheduler_metadata, lens), "a stale schedule"
        found = gather(
            given["page_table"],
            lens.tolist(),
            (latent[:, :, 0], rope[:, :, 0]),
        )
        tokens = (torch.cat(each, -1) for each in found)
        rows = torch.cat([qv, q], -1).flatten(0, 1)
        out = attend_latent(rows, tokens, given["softmax_scale"], q.shape[1])
        return out.unflatten(0, q.shape[:2])

    def flash_attn_varlen_func(self, *, q, k, v, cu_seqlens_q, cu_seqlens_k, **given):
        lens = cu_seqlens_k.diff().tolist()
        assert max(lens) <= given["max_seqlen_k"]
        tokens = split_both(k, v, lens)
        return self._attend(q, lens, tokens, cu_seqlens_q, given["max_seqlen_q"], given)

    def _attend(self, q, kv_lens, tokens, q_sums, longest, given):
        lens = q_sums.diff().tolist()
        assert max(lens) <= longest
        left, right = given.get("window_size", (-1, -1))
        assert right == (0 if left >= 0 else -1)
        sees = masks_of(lens, kv_lens, given["causal"], left)
        return attend(q[: sum(lens)], lens, tokens, sees, given["softmax_scale"])


class FakeSglangFlashAttention:
    """SGLang's build: query rows by prefix sums, no default for what SGLang passes.

    `scheduled` and `launched` are the arguments of its calls; a schedule is its lengths.
    """

    def __init__(self):
        self.scheduled = []
        self.launched = []

    def get_scheduler_metadata(self, *, cache_seqlens, **given):
        assert given["causal"] and given["cu_seqlens_q"].dtype == torch.int32
        assert given["max_seqlen_k"] >= int(cache_seqlens.max())
        assert "window_size" not in given, "SGLang schedules layers without a window alone"
        self.scheduled.append(given)
        return cache_seqlens.clone()

    def flash_attn_with_kvcache(
        self,
        *,
        q,
        k_cache,
        v_cache,
        qv=None,
        ver,
        causal,
        **given,
    ):
        assert ver == 3
        self.launched.append(given)
        words = given.get("scheduler_metadata")
        lens = given["cache_seqlens"]
        table = given["page_table"]
        assert lens.dtype == table.dtype == torch.int32
        assert words is None or torch.equal(words, lens), "a stale schedule"
        has_window = given["window_size"] != (-1, -1)
        assert words is None or not has_window, "a window layer prepares its own schedule"
        q_lens = given["cu_seqlens_q"].diff().tolist()
        assert max(q_lens) <= given["max_seqlen_q"]
        if qv is not None:
            latent = gather(
                table,
                lens.tolist(),
                (v_cache[:, :, 0], k_cache[:, :, 0]),
            )
            tokens = (torch.cat(each, -1) for each in latent)
            (q_len,) = {*q_lens}
            assert causal
            return attend_latent(
                torch.cat([qv, q], -1),
                tokens,
                given["softmax_scale"],
                q_len,
            )
        left, _ = given["window_size"]
        sees = masks_of(q_lens, lens.tolist(), causal, left)
        tokens = gather(table, lens.tolist(), (k_cache, v_cache))
        return attend(q, q_lens, tokens, sees, given["softmax_scale"])


class FakeVllm:
    """vLLM's two kernels; a schedule is its lengths."""

    def get_scheduler_metadata(*, cache_seqlens, **sizes):
        assert sizes["num_splits"] == 32
        return cache_seqlens.clone()

    def flash_attn_varlen_func(*, scheduler_metadata, seqused_k, fa_version, **given):
        assert torch.equal(scheduler_metadata, seqused_k) and fa_version == 3, "a stale schedule"
        FakeVllm._attend(seqused_k=seqused_k, **given)

    def unified_attention(*, seq_threshold_3D, softmax_segm_max, **given):
        assert softmax_segm_max.shape == (seq_threshold_3D, given["q"].shape[1], 16)
        FakeVllm._attend(**given)

    def _attend(
        *,
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        seqused_k,
        block_table,
        window_size,
        **given,
    ):
        lens = seqused_k.tolist()
        assert cu_seqlens_q.tolist() == [*range(len(q) + 1)]
        assert max(lens) <= given["max_seqlen_k"]
        sees = masks_of(
            [1] * len(lens),
            lens,
            given["causal"],
            window_size[0],
        )
        tokens = gather(block_table, lens, (k, v))
        out.copy_(
            attend(
                q,
                [1] * len(lens),
                tokens,
                sees,
                given["softmax_scale"],
            )
        )


class FakeFlashMla:
    """`flash_mla` on Hopper; dense schedules carry their lengths and are believed, not checked."""

    def __init__(self):
        self.calls = []
        self.heads = []

    def get_mla_metadata(self):
        return SimpleNamespace(tile_scheduler_metadata=None, num_splits=None), None

    def get_mla_decoding_metadata(
        self, *, seqlens_k, num_q_tokens_per_head_k, h_k, h_q, use_legacy
    ):
        assert use_legacy and h_k == 1 and num_q_tokens_per_head_k % h_q == 0
        return seqlens_k.clone(), seqlens_k.clone()

    def flash_mla_with_kvcache(self, *, q, k_cache, head_dim_v, **options):
        assert options.pop("use_legacy") and head_dim_v == 512
        table = options["block_table"]
        lens = options["cache_seqlens"]
        meta = options["tile_scheduler_metadata"]
        assert options.get("causal", False) == (q.shape[1] > 1)
        assert k_cache.shape[2] == 1
        self.calls.append(meta)
        self.heads.append(q.shape[2])
        attend = self._dense if "indices" not in options else self._sparse
        tokens = attend(
            k_cache[:, :, 0],
            table,
            lens,
            meta,
            options.get("indices"),
        )
        out = attend_latent(
            q.flatten(0, 1),
            tokens,
            options["softmax_scale"],
            q.shape[1],
        )
        return out.unflatten(0, q.shape[:2]), q

    def flash_mla_sparse_fwd(self, q, kv, indices, sm_scale, *, use_legacy):
        assert use_legacy
        assert q.shape[1] in (64, 128)
        assert kv.shape[1:] == (1, 576)
        assert indices.shape[1:] == (1, -(-indices.shape[2] // 128) * 128)
        tokens = [kv[row[row != -1].long(), 0] for row in indices[:, 0]]
        return attend_latent(q, tokens, sm_scale), None, None

    def _dense(self, cache, table, lens, meta, _):
        assert cache.shape[1] == 64 and cache.dtype == torch.bfloat16
        if meta.num_splits is None:
            meta.tile_scheduler_metadata, meta.num_splits = lens.clone(), lens.clone()
        assert meta.num_splits.tolist() == lens.tolist(), "a stale schedule"
        return [tokens for (tokens,) in gather(table, lens.tolist(), [cache])]

    def _sparse(self, cache, table, lens, meta, indices):
        assert table is None
        assert lens is None
        assert cache.dtype == torch.float8_e4m3fn
        assert indices.shape[1:] == (1, -(-indices.shape[2] // 64) * 64)
        assert self.heads[-1] in (64, 128)
        assert indices.dtype == torch.int32
        slots = cache.view(torch.uint8).flatten(0, 1)
        return [dequantize(slots[row[row != -1].long()]) for row in indices[:, 0]]
