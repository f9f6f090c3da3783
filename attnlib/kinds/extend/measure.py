"""Calls with several queries per request: tensors, oracle, measurement.

`plan_us` holds the packing of a custom mask into bits. The oracle is masked softmax in float64: for
request i with K and V of its n tokens, query row r of its q rows, and the tokens S(r) it sees,

    out[r, h] = softmax(softmax_scale * q[r, h] K[S(r)]^T) V[S(r)]

S(r) is every token up to n - q + r under the causal mask, all n under the full one, and where the
row of `custom_mask` says so under a custom one. Rows are taken a block at a time, so that the
scores fit into memory; nothing is split along the tokens.
"""

import torch

from ...core.batch import DecodeBatch, PagedKV
from ...core.extend import ExtendBatch
from ...core.spec import CUSTOM_MASKS
from ..call import CallSubject, Workload
from ..check import require_inputs
from ..decode.measure import attend_rows, draw_inputs, gather_tokens
from ..lengths import shuffled_pages
from .case import ExtendCase, sample_drafts, sample_extend_lens


def build_extend_batch(case: ExtendCase, *, device: str) -> ExtendBatch:
    """Lengths, page table and mask of `case` on `device`; pages of a ragged call are in order."""
    q_lens, kv_lens = sample_extend_lens(case)
    seed = None if case.ragged else case.cached.seed + 1
    table = torch.from_numpy(shuffled_pages(kv_lens, case.spec.page_size, seed)).to(device)
    paged = DecodeBatch.build(case.spec, torch.from_numpy(kv_lens), table)
    drafts = torch.from_numpy(sample_drafts(case)) if case.mask in CUSTOM_MASKS else None
    return ExtendBatch.build(
        paged, torch.from_numpy(q_lens), mask=case.mask, drafts=drafts, ragged=case.ragged
    )


def build_extend_workload(case: ExtendCase, *, device: str) -> Workload[ExtendCase]:
    """Batch, query and cache on `device`; values are standard normal, as in `build_workload`."""
    batch = build_extend_batch(case, device=device)
    q, kv = draw_inputs(batch.paged, rows=batch.rows, seed=case.cached.seed)
    return Workload(case, batch, q, kv)


BLOCK_SCORES = 2**28
"""Scores of a block of rows, all heads: 2 GiB in float64."""


def attend_extend(
    q: torch.Tensor, kv: PagedKV, batch: ExtendBatch, *, probs_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Output [rows, num_qo_heads, head_dim] float64 of `q` over `kv`, both as in `extend`.

    With `probs_dtype` the unnormalised probabilities are rounded to it, as for decode.
    """
    require_inputs(q, kv, batch.paged, rows=batch.rows)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    starts = batch.qo_indptr.tolist()
    for i, n in enumerate(batch.paged.seq_lens_cpu.tolist()):
        k, v = gather_tokens(kv, batch.paged, i)
        block = max(1, BLOCK_SCORES // (q.shape[1] * n))
        for first in range(starts[i], starts[i + 1], block):
            rows, scale = slice(first, min(first + block, starts[i + 1])), batch.spec.softmax_scale
            sees = _visible(batch, i, range(rows.start - starts[i], rows.stop - starts[i]))
            out[rows] = attend_rows(q[rows], k, v, scale, probs_dtype=probs_dtype, sees=sees)
    return out


def _visible(batch: ExtendBatch, index: int, rows: range) -> torch.Tensor:
    """Which tokens the rows of one request see, [rows, tokens] bool."""
    n, q_len = int(batch.paged.seq_lens_cpu[index]), int(batch.q_lens_cpu[index])
    device = batch.paged.page_table.device
    if batch.custom_mask is not None:
        sizes = batch.q_lens_cpu.long() * batch.paged.seq_lens_cpu
        end = int(sizes[: index + 1].sum())
        return batch.custom_mask[end - q_len * n : end].view(q_len, n)[rows.start : rows.stop]
    if batch.mask == "full":
        return torch.ones((len(rows), n), dtype=torch.bool, device=device)
    last = torch.arange(rows.start, rows.stop, device=device) + n - q_len
    return torch.arange(n, device=device) <= last[:, None]


class ExtendSubject(CallSubject[ExtendCase]):
    """Measures a call with several queries per request."""

    memory_share = 0.6
    plans = "extend"
    build = staticmethod(build_extend_workload)
    attend = staticmethod(attend_extend)
