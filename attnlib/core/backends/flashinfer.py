"""FlashInfer's paged decode wrappers, one class per mode that an engine can ask for.

| backend | wrapper | asked for | runs, bf16 on Hopper |
|---|---|---|---|
| flashinfer-fa2 | BatchDecodeWithPagedKVCacheWrapper | backend="fa2", tensor cores | fa2 |
| flashinfer-fa3 | the same | backend="fa3", tensor cores | fa3, from 0.6.0 |
| flashinfer-auto | the same | backend="auto", tensor cores | fa3 in 0.6.0..0.6.3, else fa2 |
| flashinfer-cuda-cores | the same | use_tensor_cores=False (ignores `backend`) | cuda-cores |
| flashinfer-graph-auto | CUDAGraphBatchDecodeWithPagedKVCacheWrapper | takes no backend | as auto |

Rules of the releases read in their decode.py, 0.5.3 to 0.7.2.post1. `plan` copies kv_indptr to the
host, so it synchronises and cannot be captured; `run` can.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch
from packaging.version import Version

from ..batch import DecodeBatch, PagedKV
from ..spec import AttnSpec
from .base import Backend, Plan, installed_version, not_hopper

DISTRIBUTION = "flashinfer-python"
WORKSPACE_BYTES = 512 * 2**20
"""FlashInfer recommends 128 MiB; in a graph those do not hold fa2's partial outputs of 148 requests
and 64 heads. Must be zero at first use."""
FP8_QUERY_RELEASE = "0.6.0"
HEAD_DIMS = (64, 128, 256)
CUDA_CORE_GROUP_SIZES = (1, 2, 3, 4, 8)
"""DISPATCH_GQA_GROUP_SIZE of include/flashinfer/utils.cuh."""


class _FlashInferDecode(Backend):
    """What the modes share: buffers, `plan`, `run`. Each mode says how its wrapper is made."""

    distribution = DISTRIBUTION
    requested: ClassVar[str] = "auto"
    use_tensor_cores: ClassVar[bool] = True
    wrapper_class: ClassVar[str] = "BatchDecodeWithPagedKVCacheWrapper"
    first_release: ClassVar[str] = "0.5.0"

    def plan(self, batch: DecodeBatch, out: Plan | None = None) -> Plan:
        """FlashInfer's own plan; with `out`, its wrapper replans in its fixed buffers."""
        spec = batch.spec
        wrapper, scales = out.state if out is not None else self._build_state(batch)
        wrapper.plan(
            batch.kv_indptr,
            batch.kv_indices,
            batch.kv_last_page_len,
            spec.num_qo_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.page_size,
            sm_scale=spec.softmax_scale,
            **_dtypes(spec),
        )
        return Plan(batch, self._reported(wrapper), (wrapper, scales))

    def run(self, q: torch.Tensor, kv: PagedKV, plan: Plan) -> torch.Tensor:
        """FlashInfer's own run."""
        wrapper, scales = plan.state
        return wrapper.run(q, (kv.k_cache, kv.v_cache), *scales)

    def _build_state(self, batch: DecodeBatch) -> tuple[Any, tuple[torch.Tensor, ...]]:
        cls = getattr(_import_flashinfer(), self.wrapper_class)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        wrapper = cls(workspace, **self._wrapper_arguments(batch))
        return wrapper, self._unit_scales(batch.spec)

    def _wrapper_arguments(self, batch: DecodeBatch) -> dict[str, Any]:
        arguments: dict[str, Any] = {"kv_layout": "NHD", "use_tensor_cores": self.use_tensor_cores}
        if self.requested != "auto":
            arguments["backend"] = self.requested
        if self.cuda_graph:
            arguments["use_cuda_graph"] = True
            arguments.update(
                {f"paged_{name}_buffer": buffer for name, buffer in _graph_buffers(batch).items()}
            )
        return arguments

    def _unit_scales(self, spec: AttnSpec) -> tuple[torch.Tensor, ...]:
        # An FP8 query needs its scale, K's and V's, one a head; made here, not in every run.
        if not spec.dtype.startswith("float8"):
            return ()
        heads = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
        return tuple(torch.ones(n, device=self.device) for n in heads)

    def _reported(self, wrapper: Any) -> str:
        if not self.use_tensor_cores:
            return "cuda-cores"
        # `resolved_backend` is public from 0.7.2; before, the attribute that plan() overwrites
        # is the only word the library gives (and 0.5.3 leaves "auto" there).
        return getattr(wrapper, "resolved_backend", None) or wrapper._backend

    @classmethod
    def unavailable(cls) -> str:
        """FlashInfer missing or too old for this mode, or no CUDA GPU."""
        version = installed_version(DISTRIBUTION)
        if not version:
            return f"{DISTRIBUTION} is not installed: pip install {DISTRIBUTION}"
        if Version(version) < Version(cls.first_release):
            return (
                f"{DISTRIBUTION} {version} has no such decode mode: "
                f'pip install "{DISTRIBUTION}>={cls.first_release}"'
            )
        if not torch.cuda.is_available():
            return "needs a CUDA GPU (torch.cuda.is_available() is False)"
        return ""

    @classmethod
    def unsupported(cls, spec: AttnSpec) -> str:
        """Other head_dims than FlashInfer compiles; FP8 queries before 0.6.0."""
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim must be one of {HEAD_DIMS}, got {spec.head_dim}"
        old = Version(installed_version(DISTRIBUTION) or "0") < Version(FP8_QUERY_RELEASE)
        if old and spec.dtype.startswith("float8"):
            return f"an FP8 query needs {DISTRIBUTION}>={FP8_QUERY_RELEASE} (o_data_type in plan)"
        return ""


class FlashInferAuto(_FlashInferDecode):
    """What an engine gets that lets the library choose."""

    name = "flashinfer-auto"


class FlashInferFa2(_FlashInferDecode):
    """Pinned to fa2: tensor cores, query heads packed by group, split-KV."""

    name = "flashinfer-fa2"
    requested = "fa2"
    pinned_family = "fa2"

    @classmethod
    def unsupported(cls, spec: AttnSpec) -> str:
        """fa2 has no FP8 query."""
        fp8 = f"fa2 takes no FP8 query, got {spec.dtype}" if "float8" in spec.dtype else ""
        return fp8 or super().unsupported(spec)


class FlashInferFa3(_FlashInferDecode):
    """Pinned to fa3, FlashInfer's Hopper prefill kernel; decode accepts it from 0.6.0."""

    name = "flashinfer-fa3"
    requested = "fa3"
    pinned_family = "fa3"
    first_release = "0.6.0"

    @classmethod
    def unavailable(cls) -> str:
        """As the others, and compute capability 9.x exactly (wgmma)."""
        return super().unavailable() or not_hopper()


class FlashInferCudaCores(_FlashInferDecode):
    """The CUDA-core decode kernel, for small group sizes; `backend` does not matter to it."""

    name = "flashinfer-cuda-cores"
    use_tensor_cores = False
    pinned_family = "cuda-cores"

    @classmethod
    def unsupported(cls, spec: AttnSpec) -> str:
        """Only the group sizes that the kernel is compiled for, and no FP8 query."""
        if spec.group_size not in CUDA_CORE_GROUP_SIZES:
            return f"group size must be one of {CUDA_CORE_GROUP_SIZES}, got {spec.group_size}"
        if "float8" in spec.dtype:
            return f"the CUDA-core kernel takes no FP8 query, got {spec.dtype}"
        return super().unsupported(spec)


class FlashInferGraphAuto(_FlashInferDecode):
    """The CUDA-graph wrapper class; it takes no `backend`, so engines could not pin it."""

    name = "flashinfer-graph-auto"
    wrapper_class = "CUDAGraphBatchDecodeWithPagedKVCacheWrapper"

    def _wrapper_arguments(self, batch: DecodeBatch) -> dict[str, Any]:
        buffers = {
            f"{name.removeprefix('kv_')}_buffer": buffer
            for name, buffer in _graph_buffers(batch).items()
        }
        return {"kv_layout": "NHD", "use_tensor_cores": True, **buffers}


def _import_flashinfer() -> Any:
    return importlib.import_module("flashinfer")


def _graph_buffers(batch: DecodeBatch) -> dict[str, torch.Tensor]:
    # Room for every page-table column, so that a replan with longer requests still fits.
    indices = torch.zeros_like(batch.page_table).flatten()
    return {
        "kv_indptr": torch.zeros_like(batch.kv_indptr),
        "kv_indices": indices,
        "kv_last_page_len": torch.ones_like(batch.kv_last_page_len),
    }


def _dtypes(spec: AttnSpec) -> dict[str, torch.dtype]:
    dtypes = {
        "q_data_type": getattr(torch, spec.dtype),
        "kv_data_type": getattr(torch, spec.kv_dtype),
    }
    # Releases before 0.6 have no o_data_type; it is only needed where it differs from q's.
    if spec.out_dtype != spec.dtype:
        dtypes["o_data_type"] = getattr(torch, spec.out_dtype)
    return dtypes
