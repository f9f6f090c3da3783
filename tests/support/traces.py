"""Traces of servers, written by hand in the words of torch.profiler and of Nsight Systems."""

import gzip
import json
import sqlite3

TRAITS = "flashinfer::KernelTraits<(flashinfer::MaskMode)1, {}u, 1u, 4u, 8u, 8u, 1u, 4u>"
FA2 = "void flashinfer::BatchPrefillWithPagedKVCacheKernel<{}, PagedParams>(PagedParams)"
FA2_16, FA2_128 = (FA2.format(TRAITS.format(rows)) for rows in (16, 128))
MERGE = "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u>(float*, int)"
FA3 = "void flashinfer::PrefillWithKVCacheKernel<flashinfer::SparseCollectiveMainloop<P> >(P)"
CUDA_CORES = "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0>(P)"
FLASH_ATTN_3 = "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<M> > >(P)"
PREPARE = "void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int)"
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
XQA = "kernel_mha"
INDEX = "void at::native::index_elementwise_kernel<128, 4, T>(int, T)"
ADD = "void at::native::vectorized_elementwise_kernel<4, T>(int, T)"
SCAN = "void at_cuda_detail::cub::DeviceScanKernel<P, T>(T)"
HEAD = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "numSms": 132}],
}


class Writer:
    """Events of a trace: the GPU runs one thing after the other, `gap` after it was launched."""

    def __init__(self):
        self.events, self.clock, self.correlation = [], 1000.0, 0

    def _add(self, category, name, start, length, **args):
        event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7}
        self.events.append({**event, "ts": start, "dur": length, "args": args})

    def kernel(self, name, us=10.0, *, grid=(132, 1, 1), block=(128, 1, 1), launch=0):
        """A kernel: launched alone, or by the graph launch `launch`."""
        if not launch:
            launch = self.launch()
            where = {"graph id": 0, "graph node id": 0}
        else:
            where = {"graph id": 3, "graph node id": 17}
        where |= {"device": 0, "stream": 7, "correlation": launch}
        self._add("kernel", name, self.clock, us, grid=list(grid), block=list(block), **where)
        self.clock += us + 1.0

    def copy(self, how, size=8):
        """A copy, `DtoH` or another."""
        where = {"device": 0, "stream": 7, "correlation": self.launch("cudaMemcpyAsync")}
        long = f"Memcpy {how} (Device -> Pinned)"
        self._add("gpu_memcpy", long, self.clock, 2.0, bytes=size, **where)
        self.clock += 3.0

    def launch(self, name="cudaLaunchKernel"):
        """A launch by the host; returns its correlation id."""
        self.correlation += 1
        self._add("cuda_runtime", name, self.clock - 0.5, 0.4, correlation=self.correlation)
        return self.correlation

    def wait(self, us=50.0):
        """The host waits, and the GPU runs nothing."""
        self._add("cuda_runtime", "cudaStreamSynchronize", self.clock, us, correlation=0)
        self.clock += us

    def mark(self, name, begin):
        """An annotation of the host from `begin` until now."""
        self._add("user_annotation", name, begin, self.clock - begin)

    def save(self, path):
        """Write it as torch.profiler does, compressed if the name says so."""
        text = json.dumps({**HEAD, "traceEvents": self.events, "traceName": "made by hand"})
        data = text.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def graph_step(writer, attention, *, layers=4, ahead=(), prepare=False, mark=""):
    """A decode step: kernels `ahead` one by one, then layers in a CUDA graph, then sampling."""
    begin = writer.clock - 0.6
    for each in ahead:
        each(writer)
    graph = writer.launch("cudaGraphLaunch")
    for _ in range(layers):
        writer.kernel(GEMM, launch=graph)
        if prepare:
            writer.kernel(PREPARE, 2.0, grid=(1, 1, 1), launch=graph)
        attention(writer, graph)
    if mark:
        writer.mark(mark, begin)
    writer.kernel("_sample_kernel")
    writer.copy("DtoH", 4)


def runs(name, us=10.0, **how):
    """What launches this kernel, in a graph if one is given."""
    return lambda writer, graph=0: writer.kernel(name, us, launch=graph, **how)


def to_sqlite(writer, path):
    """The same trace as `nsys export --type sqlite` writes it."""
    names = {name: number for number, name in enumerate({e["name"] for e in writer.events})}
    kernels, copies, calls, marks = [], [], [], []
    for event in writer.events:
        args, name = event["args"], names[event["name"]]
        times = (int(event["ts"] * 1000), int((event["ts"] + event["dur"]) * 1000))
        if event["cat"] == "kernel":
            node = args["graph node id"] or None
            place = (0, 7, args["correlation"], node, name)
            kernels.append((*times, *place, *args["grid"], *args["block"]))
        elif event["cat"] == "gpu_memcpy":
            kind = {"HtoD": 1, "DtoH": 2, "DtoD": 8}[event["name"].split()[1]]
            copies.append((*times, 0, 7, args["correlation"], args["bytes"], kind))
        elif event["cat"] == "cuda_runtime":
            calls.append((*times, args["correlation"], name))
        else:
            marks.append((*times, event["name"], None))
    place = "start, end, deviceId, streamId, correlationId"
    sizes = "gridX, gridY, gridZ, blockX, blockY, blockZ"
    database = sqlite3.connect(path)
    for table, columns, rows in (
        ("StringIds", "id, value", [(number, name) for name, number in names.items()]),
        ("TARGET_INFO_GPU", "id, name, smCount", [(0, "NVIDIA H200", 132)]),
        (
            "CUPTI_ACTIVITY_KIND_KERNEL",
            f"{place}, graphNodeId, demangledName, {sizes}",
            kernels,
        ),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", f"{place}, bytes, copyKind", copies),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "start, end, correlationId, nameId", calls),
        ("NVTX_EVENTS", "start, end, text, textId", marks),
    ):
        database.execute(f"CREATE TABLE {table} ({columns})")
        holders = ", ".join("?" * len(columns.split(",")))
        database.executemany(f"INSERT INTO {table} VALUES ({holders})", rows)
    database.commit()
    database.close()
    return path
