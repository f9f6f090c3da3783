"""Traces of servers, made by hand in the words of torch.profiler and of Nsight Systems."""

import gzip
import json
import sqlite3
from contextlib import closing

import pandas as pd

from attnlib.measure.trace_file import COPIES, TABLES

TRAITS = "flashinfer::KernelTraits<(flashinfer::MaskMode)1, {}u, 1u, 4u, 8u, 8u, 1u, 4u>"
FA2 = "void flashinfer::BatchPrefillWithPagedKVCacheKernel<{}, PagedParams>(PagedParams)"
FA2_16, FA2_128 = (FA2.format(TRAITS.format(rows)) for rows in (16, 128))
MERGE = "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u>(float*, int)"
FA3 = "void flashinfer::PrefillWithKVCacheKernel<flashinfer::SparseCollectiveMainloop<P> >(P)"
CUDA_CORES = "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0>(P)"
FLASH_ATTN_3 = "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<M> > >(P)"
PREPARE = "void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int)"
COMBINE = "void cutlass::device_kernel<flash::FlashAttnFwdCombine<C> >(P)"
METADATA = "_fused_metadata_kernel_ps1_no_swa"
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
TRITON_2D = "kernel_unified_attention_2d"
TRITON_EXTEND = "_fwd_kernel"
VLLM_FA4 = "kernel_cutlass_kernel_vllmvllm_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_0"
SGLANG_FA4 = "kernel_cutlass_kernel_sglangkernelsopsattentionflash_attncuteflash_fwd_sm90_0"
TRTLLM_103 = "fmhaSm103aKernel_QkvBfloat16OBfloat16H128PagedKvDenseP16"
INDEX = "void at::native::index_elementwise_kernel<128, 4, T>(int, T)"
ADD = "void at::native::vectorized_elementwise_kernel<4, T>(int, T)"
SCAN = "void at_cuda_detail::cub::DeviceScanKernel<P, T>(T)"
SIZES = {"grid", "block"}
AXES = list(enumerate("XYZ"))
TABLE_OF = {category: table for table, category in TABLES.items()}
HEAD = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "numSms": 132}],
}


class Writer:
    """Events of a trace: the GPU runs one thing after the other, a microsecond after the last."""

    def __init__(self):
        self.events = []
        self.clock = 1000.0
        self.correlation = 0

    def _add(self, category, name, start, length, **args):
        event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7}
        self.events.append({**event, "ts": start, "dur": length, "args": args})

    def kernel(
        self,
        name,
        us=10.0,
        *,
        grid=(132, 1, 1),
        block=(128, 1, 1),
        graph=0,
    ):
        """A kernel: launched alone, or by the graph launch `graph`."""
        where = {
            "device": 0,
            "correlation": graph or self.launch(),
            "graph id": 3 * bool(graph),
        }
        self._add(
            "kernel",
            name,
            self.clock,
            us,
            grid=grid,
            block=block,
            **where,
        )
        self.clock += us + 1.0

    def copy(self, how, size=8):
        """A copy, `DtoH` or another."""
        where = {"device": 0, "correlation": self.launch("cudaMemcpyAsync"), "bytes": size}
        self._add("gpu_memcpy", f"Memcpy {how} (Device -> Pinned)", self.clock, 2.0, **where)
        self.clock += 3.0

    def launch(self, name="cudaLaunchKernel"):
        """A launch by the host; returns its correlation id."""
        self.correlation += 1
        self._add("cuda_runtime", name, self.clock - 0.5, 0.4, correlation=self.correlation)
        return self.correlation

    def idle(self, us):
        """Nothing runs."""
        self.clock += us

    def wait(self, us=50.0):
        """The host waits, and the GPU runs nothing."""
        self._add("cuda_runtime", "cudaStreamSynchronize", self.clock, us, correlation=0)
        self.clock += us

    def step(self, attention, *, layers=4, ahead=(), mark=""):
        """A decode step: kernels `ahead` one by one, then layers in a CUDA graph, then sampling."""
        begin = self.clock - 0.6
        for each in ahead:
            each(self)
        graph = self.launch("cudaGraphLaunch")
        for _ in range(layers):
            self.kernel(GEMM, graph=graph)
            for each in attention:
                each(self, graph)
        if mark:
            self._add("user_annotation", mark, begin, self.clock - begin)
        self.kernel("_sample_kernel")
        self.copy("DtoH", 4)

    def save(self, path):
        """Write it as torch.profiler does, compressed if the name says so."""
        data = json.dumps({**HEAD, "traceEvents": self.events}).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        return path

    def export(self, path):
        """Write it as `nsys export --type sqlite` does."""
        names = sorted({event["name"] for event in self.events})
        rows = {"StringIds": [{"id": number, "value": name} for number, name in enumerate(names)]}
        rows["TARGET_INFO_GPU"] = [{"id": 0, "name": "NVIDIA H200", "smCount": 132}]
        for event in self.events:
            args = event["args"]
            start = int(event["ts"] * 1000)
            category = event["cat"]
            row = {
                "start": start,
                "end": start + int(event["dur"] * 1000),
                "deviceId": 0,
            }
            row |= {"correlationId": args.get("correlation"), "graphNodeId": args.get("graph id")}
            row |= {
                f"{s}{axis}": args[s][i] for s in sorted(SIZES & args.keys()) for i, axis in AXES
            }
            if category == "gpu_memcpy":
                copied = f"Memcpy {event['name'].split()[1]}"
                kind = next(number for number, name in COPIES.items() if name == copied)
                row |= {"bytes": args["bytes"], "copyKind": kind}
            named = {"kernel": "demangledName", "cuda_runtime": "nameId"}.get(category, "textId")
            rows.setdefault(TABLE_OF[category], []).append(
                row | {named: names.index(event["name"])}
            )
        with closing(sqlite3.connect(path)) as base:
            for table, lines in rows.items():
                pd.DataFrame(lines).to_sql(table, base, index=False)
        return path


def runs(name, us=10.0, **how):
    """What launches this kernel, in a graph if one is given."""
    return lambda writer, graph=0: writer.kernel(name, us, graph=graph, **how)
