"""FlashInfer's decode and prefill wrappers, in every mode that an engine can ask for.

fa2, fa3 and cuDNN are asked for by `backend`, cuda-cores by `use_tensor_cores=False`, which ignores
it; the CUDA-graph class (graph-auto) takes no backend. Rules of the releases read in their
decode.py, 0.5.3 to 0.7.2.post1; prefill's arguments are those that 0.6.3 to 0.7.2.post1 share.

`plan` copies prefix sums to the host, and packs a custom mask into bits, so it synchronises and
cannot be captured; `run` can. A paged prefill's `run` zeroes its output first, as the library does
for engines. Under CUDA graphs a prefill's first plan sets how many query rows there may be; fa2
cuts its tiles for the case that one request has them all.
"""

import importlib
from dataclasses import replace
from typing import Any

import torch

from ..batch import DecodeBatch, PagedKV
from ..extend import ExtendBatch
from ..spec import CUSTOM_MASKS, AttnSpec
from .base import Backend, Plan, installed_version, require_same_table
from .limits import why_not
from .table import Entry

WORKSPACE_BYTES = 2**30
"""FlashInfer recommends 128 MiB; in a graph those do not hold fa2's partial outputs of 148 requests
and 64 heads, nor 512 those of 256 requests and 128 heads. Must be zero at first use."""
CUDNN = "nvidia-cudnn-frontend"
MASK_BITS = 8
FIXED_SPLIT = 2048
"""Tokens: SGLang's default of SGLANG_FLASHINFER_DECODE_SPLIT_TILE_SIZE, in pages of one token."""


class Decode(Backend[DecodeBatch, PagedKV]):
    """BatchDecodeWithPagedKVCacheWrapper."""

    def plan(self, batch: DecodeBatch, out: Plan[DecodeBatch] | None = None) -> Plan[DecodeBatch]:
        """FlashInfer's own plan; with `out`, its wrapper replans in its fixed buffers."""
        return self._plan(batch, out)

    def _plan(
        self, batch: DecodeBatch, out: Plan[DecodeBatch] | None, **told: Any
    ) -> Plan[DecodeBatch]:
        """`plan`, where the library's is `told` more."""
        spec = batch.spec
        made = (self._wrapper(batch), self._scales(spec)) if out is None else out.state
        wrapper, scales, *_ = made
        dtypes = {
            "q_data_type": getattr(torch, spec.dtype),
            "kv_data_type": getattr(torch, spec.kv_dtype),
        }
        # Releases before 0.6 have no o_data_type; it is only needed where it differs from q's.
        if spec.out_dtype != spec.dtype:
            dtypes["o_data_type"] = getattr(torch, spec.out_dtype)
        options = {"sm_scale": spec.softmax_scale, "window_left": spec.window - 1}
        wrapper.plan(*_paged_lengths(batch), **options, **dtypes, **told)
        reported = reported_backend(wrapper) if self._tensor_cores else self.entry.asks
        return Plan(batch, reported, made)

    def run(self, q: torch.Tensor, cache: PagedKV, plan: Plan[DecodeBatch]) -> torch.Tensor:
        """FlashInfer's own run."""
        cache.require_pages_of(plan.batch.spec)
        wrapper, scales, *_ = plan.state
        return wrapper.run(q, (cache.k_cache, cache.v_cache), *scales)

    @property
    def _tensor_cores(self) -> bool:
        return self.entry.asks != "cuda-cores"

    def _scales(self, spec: AttnSpec) -> tuple[torch.Tensor, ...]:
        """Those of an FP8 query, K and V, one per head; made here, not in every run."""
        fp8 = spec.dtype.startswith("float8")
        heads = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads) if fp8 else ()
        return tuple(torch.ones(n, device=self.device) for n in heads)

    def _wrapper(self, batch: DecodeBatch) -> Any:
        arguments: dict[str, Any] = {"use_tensor_cores": self._tensor_cores}
        if self.entry.asks in ("fa2", "fa3", "cudnn"):
            arguments["backend"] = self.entry.asks
        if self.cuda_graph:
            arguments["use_cuda_graph"] = True
            arguments |= {f"paged_{name}_buffer": b for name, b in _page_buffers(batch).items()}
        return _make("BatchDecodeWithPagedKVCacheWrapper", self.device, **arguments)

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """What the table of limits says of the kernels that the mode asks for."""
        release = installed_version(entry.distribution)
        return why_not(entry.asks, spec, mode="decode", release=release)


class FixedDecode(Decode):
    """Splits that do not depend on the batch, so that neither does a request's output: parts of
    `FIXED_SPLIT` tokens, and in CUDA graphs one, since others need not fit the grid.

    As SGLang 0.5.11 plans with --enable-deterministic-inference (flashinfer_backend.py, lines 189,
    445 and 597). The arguments are there since FlashInfer 0.4.0.
    """

    def plan(self, batch: DecodeBatch, out: Plan[DecodeBatch] | None = None) -> Plan[DecodeBatch]:
        """As `Decode.plan`."""
        pages = max(FIXED_SPLIT // batch.spec.page_size, 1)
        splits = {"disable_split_kv": True} if self.cuda_graph else {"fixed_split_size": pages}
        return self._plan(batch, out, **splits)


class CudnnDecode(Decode):
    """cuDNN's decode, which walks a page table and needs no plan but lengths.

    Read in FlashInfer 0.7.1 to 0.7.2.post1 (decode.py, cudnn/decode.py). The table is ours and
    fixed, since the library's own cannot grow in a CUDA graph. Without cuDNN's frontend the library
    runs kernels that it downloads: refused.
    """

    def plan(self, batch: DecodeBatch, out: Plan[DecodeBatch] | None = None) -> Plan[DecodeBatch]:
        """As `Decode.plan`; `out` must have the same page-table shape."""
        if out is None:
            table = batch.page_table.clone(memory_format=torch.contiguous_format)
        else:
            table = out.state[-1]
            require_same_table((out.batch.spec, table), (batch.spec, batch.page_table))
            table.copy_(batch.page_table)
        plan = self._plan(batch, out, block_tables=table)
        return replace(plan, state=(*plan.state[:2], table))

    @classmethod
    def unavailable(cls, entry: Entry) -> str:
        """As any backend, and without cuDNN's frontend."""
        if (reason := super().unavailable(entry)) or installed_version(CUDNN):
            return reason
        return f"{CUDNN} is not installed: pip install {CUDNN}"


class GraphDecode(Decode):
    """CUDAGraphBatchDecodeWithPagedKVCacheWrapper; engines could not pin its backend."""

    def _wrapper(self, batch: DecodeBatch) -> Any:
        buffers = {f"{n.removeprefix('kv_')}_buffer": b for n, b in _page_buffers(batch).items()}
        name = "CUDAGraphBatchDecodeWithPagedKVCacheWrapper"
        return _make(name, self.device, use_tensor_cores=True, **buffers)


class Prefill(Backend[ExtendBatch, PagedKV]):
    """BatchPrefillWithPagedKVCacheWrapper, or the ragged one of a ragged batch.

    fa2 takes any mask, packs query heads by group and splits KV; fa3 does neither.
    """

    def plan(self, batch: ExtendBatch, out: Plan[ExtendBatch] | None = None) -> Plan[ExtendBatch]:
        """FlashInfer's own plan; with `out`, its wrapper replans in its fixed buffers.

        `out` must have as many requests, page-table columns and the same mask. Synchronises.
        """
        if out is not None:
            out.batch.require_alike(batch)
        (wrapper,) = (self._wrapper(batch),) if out is None else out.state
        spec, paged = batch.spec, batch.paged
        sizes = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim)
        lengths = (paged.kv_indptr, *sizes) if batch.ragged else _paged_lengths(paged)
        wrapper.plan(
            *(batch.qo_indptr, *lengths),
            causal=batch.mask == "causal",
            custom_mask=batch.custom_mask,
            sm_scale=spec.softmax_scale,
            q_data_type=getattr(torch, spec.dtype),
            kv_data_type=getattr(torch, spec.kv_dtype),
            **self._promise(batch),
        )
        return Plan(batch, reported_backend(wrapper), (wrapper,))

    def run(self, q: torch.Tensor, cache: PagedKV, plan: Plan[ExtendBatch]) -> torch.Tensor:
        """FlashInfer's own run: [rows, num_qo_heads, head_dim]."""
        cache.require_pages_of(plan.batch.spec)
        k, v = cache.k_cache, cache.v_cache
        return plan.state[0].run(q, *((k[:, 0], v[:, 0]) if plan.batch.ragged else ((k, v),)))

    def _promise(self, batch: ExtendBatch) -> dict[str, Any]:
        """What the plan is told of queries beside their prefix sums; nothing."""
        return {}

    def _wrapper(self, batch: ExtendBatch) -> Any:
        form = "Ragged" if batch.ragged else "Paged"
        graph = {"use_cuda_graph": True, **_prefill_buffers(batch)} if self.cuda_graph else {}
        name = f"BatchPrefillWith{form}KVCacheWrapper"
        return _make(name, self.device, backend=self.entry.asks, **graph)

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """FP8 queries, whose scales are not passed, and what the table of limits says."""
        if "float8" in spec.dtype:
            return f"dtype must be bfloat16 or float16, got {spec.dtype}"
        release, custom = installed_version(entry.distribution), mask in CUSTOM_MASKS and mask
        return why_not(entry.asks, spec, mode="prefill_paged", release=release, custom_mask=custom)


class UniformPrefill(Prefill):
    """The plan is promised as many queries of each request: in a graph fa2's tile then fits them.

    `uniform_q_len` of FlashInfer 0.7.2.post1, which drops a promise that does not hold, with a
    warning; here it is a ValueError.
    """

    def _promise(self, batch: ExtendBatch) -> dict[str, Any]:
        least, most = int(batch.q_lens_cpu.min()), batch.max_q_len
        if least != most:
            raise ValueError(f"q_lens must be equal for {self.entry.name}, got {least} to {most}")
        return {"uniform_q_len": most}


def reported_backend(wrapper: Any) -> str:
    """The library's own word for what it chose, after `plan`."""
    # `resolved_backend` is public from 0.7.2; before, the attribute that plan() overwrites is the
    # only word the library gives (and 0.5.3 leaves "auto" there).
    return getattr(wrapper, "resolved_backend", None) or wrapper._backend


def _make(name: str, device: torch.device, **arguments: Any) -> Any:
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    cls = getattr(importlib.import_module("flashinfer"), name)
    return cls(workspace, kv_layout="NHD", **arguments)


def _paged_lengths(batch: DecodeBatch) -> tuple[Any, ...]:
    spec = batch.spec
    lengths = (batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
    return (*lengths, spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.page_size)


def _page_buffers(batch: DecodeBatch) -> dict[str, torch.Tensor]:
    return {
        "kv_indptr": torch.zeros_like(batch.kv_indptr),
        # Room for every page-table column, so that a replan with longer requests still fits.
        "kv_indices": torch.zeros_like(batch.page_table).flatten(),
        "kv_last_page_len": torch.ones_like(batch.kv_last_page_len),
    }


def _prefill_buffers(batch: ExtendBatch) -> dict[str, torch.Tensor]:
    pages, form = _page_buffers(batch.paged), "" if batch.ragged else "paged_"
    kept = ("kv_indptr",) if batch.ragged else tuple(pages)
    buffers = {f"{form}{name}_buf": pages[name] for name in kept}
    buffers["qo_indptr_buf"] = torch.zeros_like(batch.qo_indptr)
    # The library takes a buffer for a mask to mean that there is one.
    if batch.custom_mask is not None:
        tokens = batch.paged.page_table.shape[1] * batch.spec.page_size
        packed = batch.paged.batch_size * -(-batch.max_q_len * tokens // MASK_BITS)
        bits = torch.zeros(packed, dtype=torch.uint8, device=batch.qo_indptr.device)
        buffers |= {"custom_mask_buf": bits, "mask_indptr_buf": torch.zeros_like(batch.qo_indptr)}
    return buffers
