"""FlashInfer's decode and prefill wrappers, in every mode that an engine can ask for.

`backend` selects fa2 or fa3; `use_tensor_cores=False` selects the CUDA cores and ignores it; the
CUDA-graph class (graph-auto) takes no backend. Sources: decode.py of 0.5.3 to 0.7.2.post1; the
prefill arguments are those that 0.6.3 to 0.7.2.post1 share.

`plan` copies prefix sums to the host and packs a custom mask into bits, so it synchronises and
cannot be captured; `run` can. The `run` of a paged prefill zeroes its output first, as the library
does for engines. Under CUDA graphs the first plan of a prefill sets the number of query rows; fa2
sizes its tiles for one request that has them all.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from ..batch import DecodeBatch, PagedKV
from ..extend import ExtendBatch
from ..spec import CUSTOM_MASKS, AttnSpec, ceil_div
from .base import Backend, Plan, installed_version
from .limits import why_not
from .table import Entry

WORKSPACE_BYTES = 2**30
"""FlashInfer recommends 128 MiB. In a graph that is too small for fa2's partial outputs of 148
requests and 64 heads, and 512 MiB for 256 requests and 128 heads. Must be zero at first use."""
MASK_BITS = 8


class Decode(Backend[DecodeBatch, PagedKV]):
    """BatchDecodeWithPagedKVCacheWrapper. A plan's state is the wrapper and the scales of FP8."""

    def prepare(self, batch: DecodeBatch, held: Any) -> tuple[Any, ...]:
        """FlashInfer's own plan; a wrapper that is held replans in its fixed buffers."""
        if held is None:
            held = (self._wrapper(batch), self._scales(batch.spec))
        spec = batch.spec
        options = plan_options(spec)
        # Releases before 0.6 have no o_data_type; it is only needed where it differs from q's.
        if spec.out_dtype != spec.dtype:
            options["o_data_type"] = getattr(torch, spec.out_dtype)
        held[0].plan(
            indptr=batch.kv_indptr,
            indices=batch.kv_indices,
            last_page_len=batch.kv_last_page_len,
            num_qo_heads=spec.num_qo_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=spec.page_size,
            window_left=spec.window - 1,  # -1: all tokens
            **options,
        )
        return held

    def reported(self, state: Any) -> str:
        """The wrapper's own report, which it has for tensor cores alone."""
        if self._tensor_cores:
            return reported_backend(state[0])
        return self.entry.asks

    def attend(self, q: Tensor, cache: PagedKV, plan: Plan[DecodeBatch]) -> Tensor:
        """FlashInfer's own run."""
        cache.require_pages_of(plan.batch.spec)
        wrapper, scales, *_ = plan.state
        # Scales of FP8 are arguments of the JIT module, which have no names.
        return wrapper.run(q, (cache.k_cache, cache.v_cache), *scales)

    @property
    def _tensor_cores(self) -> bool:
        return self.entry.asks != "cuda-cores"

    def _scales(self, spec: AttnSpec) -> tuple[Tensor, ...]:
        """Scales of an FP8 query, K and V, one per head; made once, not in every run."""
        if not spec.dtype.startswith("float8"):
            return ()
        query = torch.ones(spec.num_qo_heads, device=self.device)
        kv = torch.ones(spec.num_kv_heads, device=self.device)
        return (query, kv, kv.clone())

    def _wrapper(self, batch: DecodeBatch) -> Any:
        arguments: dict[str, Any] = {"use_tensor_cores": self._tensor_cores}
        if self.entry.asks in ("fa2", "fa3"):
            arguments["backend"] = self.entry.asks
        if self.cuda_graph:
            arguments["use_cuda_graph"] = True
            for name, buffer in _page_buffers(batch).items():
                arguments[f"paged_{name}_buffer"] = buffer
        return _make("BatchDecodeWithPagedKVCacheWrapper", self.device, **arguments)

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """The limits of the kernels that the mode asks for."""
        release = installed_version(entry.distribution)
        return why_not(
            kernel=entry.asks,
            spec=spec,
            mode="decode",
            release=release,
        )


class GraphDecode(Decode):
    """CUDAGraphBatchDecodeWithPagedKVCacheWrapper; engines could not pin its backend."""

    def _wrapper(self, batch: DecodeBatch) -> Any:
        buffers = _page_buffers(batch)
        return _make(
            "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
            self.device,
            use_tensor_cores=True,
            indptr_buffer=buffers["kv_indptr"],
            indices_buffer=buffers["kv_indices"],
            last_page_len_buffer=buffers["kv_last_page_len"],
        )


class Prefill(Backend[ExtendBatch, PagedKV]):
    """BatchPrefillWithPagedKVCacheWrapper, or the ragged one for a ragged batch.

    fa2 takes any mask, packs query heads by group and splits KV; fa3 does none of these. A plan's
    state is the wrapper.
    """

    def prepare(self, batch: ExtendBatch, held: Any) -> tuple[Any, ...]:
        """FlashInfer's own plan; a wrapper that is held replans in its fixed buffers."""
        if held is None:
            held = (self._wrapper(batch),)
        spec = batch.spec
        paged = batch.paged
        if batch.ragged:
            lengths = {"kv_indptr": paged.kv_indptr}
        else:
            lengths = {
                "paged_kv_indptr": paged.kv_indptr,
                "paged_kv_indices": paged.kv_indices,
                "paged_kv_last_page_len": paged.kv_last_page_len,
                "page_size": spec.page_size,
            }
        held[0].plan(
            qo_indptr=batch.qo_indptr,
            **lengths,
            num_qo_heads=spec.num_qo_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim_qk=spec.head_dim,
            causal=batch.mask == "causal",
            custom_mask=batch.custom_mask,  # replaces `causal` where it is given
            **self._options(batch),
        )
        return held

    def reported(self, state: Any) -> str:
        """The wrapper's own report."""
        return reported_backend(state[0])

    def attend(self, q: Tensor, cache: PagedKV, plan: Plan[ExtendBatch]) -> Tensor:
        """FlashInfer's own run: [rows, num_qo_heads, head_dim]."""
        cache.require_pages_of(plan.batch.spec)
        wrapper = plan.state[0]
        if plan.batch.ragged:
            return wrapper.run(
                q=q,
                k=cache.k_cache[:, 0],
                v=cache.v_cache[:, 0],
            )
        return wrapper.run(q=q, paged_kv_cache=(cache.k_cache, cache.v_cache))

    def _options(self, batch: ExtendBatch) -> dict[str, Any]:
        """Arguments of the library's plan by name, beside the mask."""
        return plan_options(batch.spec)

    def _wrapper(self, batch: ExtendBatch) -> Any:
        form = "Ragged" if batch.ragged else "Paged"
        name = f"BatchPrefillWith{form}KVCacheWrapper"
        graph = _prefill_buffers(batch) if self.cuda_graph else {}
        return _make(
            name,
            self.device,
            backend=self.entry.asks,
            use_cuda_graph=self.cuda_graph,
            **graph,
        )

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """FP8 queries, whose scales are not passed, and the limits of the kernels."""
        if "float8" in spec.dtype:
            return f"dtype must be bfloat16 or float16, got {spec.dtype}"
        return why_not(
            entry.asks,
            spec,
            mode="prefill_paged",
            release=installed_version(entry.distribution),
            custom_mask=mask if mask in CUSTOM_MASKS else "",
        )


class UniformPrefill(Prefill):
    """`uniform_q_len` of FlashInfer 0.7.2.post1: in a graph fa2's tile then fits the queries.

    The library drops a wrong `uniform_q_len` with a warning; here it is a ValueError.
    """

    def _options(self, batch: ExtendBatch) -> dict[str, Any]:
        least = int(batch.q_lens_cpu.min())
        most = batch.max_q_len
        if least != most:
            raise ValueError(f"q_lens must be equal for {self.entry.name}, got {least} to {most}")
        return super()._options(batch) | {"uniform_q_len": most}


def plan_options(spec: AttnSpec) -> dict[str, Any]:
    """Scale and dtypes, by the names that every plan of the library takes."""
    return {
        "sm_scale": spec.softmax_scale,
        "q_data_type": getattr(torch, spec.dtype),
        "kv_data_type": getattr(torch, spec.kv_dtype),
    }


def reported_backend(wrapper: Any) -> str:
    """The backend that the library chose in `plan`, by its own report."""
    # `resolved_backend` is public from 0.7.2. Before, plan() overwrites a private attribute (0.5.3
    # leaves "auto" there).
    return getattr(wrapper, "resolved_backend", None) or wrapper._backend


def _make(name: str, device: torch.device, **arguments: Any) -> Any:
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    cls = getattr(importlib.import_module("flashinfer"), name)
    return cls(workspace, kv_layout="NHD", **arguments)


def _page_buffers(batch: DecodeBatch) -> dict[str, Tensor]:
    return {
        "kv_indptr": torch.zeros_like(batch.kv_indptr),
        # Room for every page-table column, so that a replan with longer requests still fits.
        "kv_indices": torch.zeros_like(batch.page_table).flatten(),
        "kv_last_page_len": torch.ones_like(batch.kv_last_page_len),
    }


def _prefill_buffers(batch: ExtendBatch) -> dict[str, Tensor]:
    pages = _page_buffers(batch.paged)
    buffers = {"qo_indptr_buf": torch.zeros_like(batch.qo_indptr)}
    if batch.ragged:
        buffers["kv_indptr_buf"] = pages["kv_indptr"]
    else:
        for name, buffer in pages.items():
            buffers[f"paged_{name}_buf"] = buffer
    # The library takes a buffer for a mask to mean that there is one.
    if batch.custom_mask is not None:
        tokens = batch.paged.page_table.shape[1] * batch.spec.page_size
        packed = ceil_div(batch.max_q_len * tokens, MASK_BITS)  # bytes of a request
        size = batch.paged.batch_size * packed
        device = batch.qo_indptr.device
        buffers["custom_mask_buf"] = torch.zeros(size, dtype=torch.uint8, device=device)
        buffers["mask_indptr_buf"] = torch.zeros_like(batch.qo_indptr)
    return buffers
