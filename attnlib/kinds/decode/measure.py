"""Decode attention, one query per request over a paged cache: tensors, oracle, measurement.

The oracle takes one request at a time, in float64. For request i, K and V are the tokens of its
gathered pages, the last `window` of them if the layer has one, of KV head h // group_size for query
head h:

    out[i, h] = softmax(softmax_scale * q[i, h] K^T) V

With sinks the softmax has one more logit, sinks[h], without a value.

No batching, no splitting, no online softmax: it shares nothing with the kernels it checks.
"""

from collections.abc import Callable
from functools import partial

import torch

from ...core.backends import create
from ...core.backends.table import entry_of
from ...core.batch import DecodeBatch, PagedKV
from ..call import CallSubject, Workload
from ..check import Judge, require_inputs
from ..lengths import normal_values, sample_seq_lens, shuffled_pages
from .case import DecodeCase


def build_batch(case: DecodeCase, *, device: str) -> DecodeBatch:
    """Lengths and a page table [bs, max_pages] whose live pages are distinct and shuffled.

    Sinks are about as large as the largest scores.
    """
    lens = sample_seq_lens(case)
    table = torch.from_numpy(shuffled_pages(lens, case.spec.page_size, case.seed + 1)).to(device)
    sinks = None
    if case.spec.sinks:
        drawn = torch.randn(
            case.spec.num_qo_heads, generator=torch.Generator().manual_seed(case.seed)
        )
        sinks = (2 + drawn).bfloat16().to(device)
    return DecodeBatch.build(case.spec, torch.from_numpy(lens), table, sinks)


def build_workload(case: DecodeCase, *, device: str) -> Workload[DecodeCase]:
    """Batch, query and cache on `device`, of standard normal values, so softmax has real spread."""
    batch = build_batch(case, device=device)
    q, kv = draw_inputs(batch, rows=case.batch_size, seed=case.seed)
    return Workload(case, batch, q, kv)


def draw_inputs(batch: DecodeBatch, *, rows: int, seed: int) -> tuple[torch.Tensor, PagedKV]:
    """A query of `rows` rows, and a cache that the batch's pages fill, where its page table is."""
    spec = batch.spec
    generator = torch.Generator(device=batch.page_table.device).manual_seed(seed)
    q = normal_values((rows, spec.num_qo_heads, spec.head_dim), spec.dtype, generator)
    shape = (batch.kv_indices.shape[0], spec.page_size, spec.num_kv_heads, spec.head_dim)
    kv = PagedKV(*(normal_values(shape, spec.kv_dtype, generator) for _ in range(2)))
    require_inputs(q, kv, batch, rows=rows)
    return q, kv


def attend(
    q: torch.Tensor, kv: PagedKV, batch: DecodeBatch, *, probs_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Attention output [bs, num_qo_heads, head_dim] float64 of `q` over `batch`'s pages.

    With `probs_dtype` the unnormalised probabilities are rounded to it, as kernels do before
    their second matrix product; the result then shows what that rounding alone costs.
    """
    require_inputs(q, kv, batch)
    scale, window = batch.spec.softmax_scale, batch.spec.window
    out = []
    for i in range(batch.batch_size):
        k, v = (tokens[-window:] for tokens in gather_tokens(kv, batch, i))  # -0: all
        options = {"probs_dtype": probs_dtype, "sinks": batch.sinks}
        out.append(attend_rows(q[i : i + 1], k, v, scale, **options))
    return torch.cat(out)


def gather_tokens(kv: PagedKV, batch: DecodeBatch, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [seq_len, num_kv_heads, head_dim] float64 of one request, in token order."""
    length = int(batch.seq_lens_cpu[index])
    pages = batch.page_table[index, : -(-length // batch.spec.page_size)].long()
    k, v = (cache[pages].flatten(0, 1)[:length].double() for cache in (kv.k_cache, kv.v_cache))
    return k, v


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    *,
    probs_dtype: torch.dtype | None,
    sees: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output [rows, heads, dim of v] float64 of rows of queries over K and V of one request.

    `sees` [rows, tokens] bool says which tokens a row attends to, all of them if it is None.
    `sinks` [heads] are logits without a value.
    """
    grouped = q.double().view(len(q), k.shape[1], -1, q.shape[-1])
    scores = torch.einsum("rhgd,nhd->hgrn", grouped, k).mul_(softmax_scale)
    if sees is not None:
        scores.masked_fill_(~sees, float("-inf"))
    top, rest = scores.amax(-1, keepdim=True), 0.0
    if sinks is not None:
        logits = sinks.double().view(*scores.shape[:2], 1, 1)
        top = torch.maximum(top, logits)
        rest = (logits - top).exp()
    probs = scores.sub_(top).exp_()
    weights = probs if probs_dtype is None else round_probs(probs, probs_dtype)
    out = torch.einsum("hgrn,nhd->hgrd", weights, v) / (probs.sum(-1, keepdim=True) + rest)
    return out.permute(2, 0, 1, 3).reshape(*q.shape[:2], -1)


def round_probs(probs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unnormalised probabilities (0..1) rounded to `dtype`, as float64."""
    # FP8 kernels scale probabilities to the format's range first, or most would underflow.
    scale = torch.finfo(dtype).max if dtype.itemsize == 1 else 1.0
    return (probs * scale).to(dtype).double() / scale


Oracle = partial(Judge, attend)
"""The judge of a decode call, of query, cache and batch."""


class DecodeCall:
    """One decode call of a backend at a case: `call()` runs attention and returns its output.

    Inputs (seeded, as in the studies) and the plan are made by the first call, so a call can be
    named where its backend cannot run. `cuda_graph` plans as for a capture. The first call raises
    RuntimeError if the backend cannot run here.
    """

    def __init__(
        self, backend: str, case: DecodeCase, *, device: str = "cuda", cuda_graph: bool = False
    ) -> None:
        entry_of(backend, "decode")
        self.backend, self.case = backend, case
        self.device, self.cuda_graph = device, cuda_graph
        self._run: Callable[[], torch.Tensor] | None = None

    @property
    def __name__(self) -> str:
        """The backend and the case, as a profile's title."""
        return f"{self.backend}, {self.case.label}"

    def __call__(self) -> torch.Tensor:
        """Run one call; the output is [batch, query heads, head_dim]."""
        if self._run is None:
            work = build_workload(self.case, device=self.device)
            backend = create(
                self.backend, self.case.spec, device=self.device, cuda_graph=self.cuda_graph
            )
            self._run = partial(backend.run, work.q, work.kv, backend.plan(work.batch))
        return self._run()


class DecodeSubject(CallSubject[DecodeCase]):
    """Measures one attention call of a backend."""

    plans = "decode"
    build = staticmethod(build_workload)
    attend = staticmethod(attend)


decode_call = DecodeCall
"""`attnlib.decode_call(backend, case)`."""
