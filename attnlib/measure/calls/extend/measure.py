"""Calls with several queries per request: tensors, oracle, measurement.

`plan_us` holds the packing of a custom mask into bits. The oracle is masked softmax in float64: for
request i with K and V of its n tokens, query row r of its q rows, and the tokens S(r) it sees,

    out[r, h] = softmax(softmax_scale * q[r, h] K[S(r)]^T) V[S(r)]

S(r) is every token up to n - q + r under the causal mask, all n under the full one, and where the
row of `custom_mask` says so under a custom one. Rows are taken a block at a time, so that the
scores fit into memory; nothing is split along the tokens.
"""

import torch

from ....core.batch import PagedKV
from ....core.extend import ExtendBatch
from ....core.spec import CUSTOM_MASKS
from ..call import CallSubject
from ..check import attend_rows
from ..decode.measure import gather_tokens
from ..inputs import Workload, draw_inputs, paged_batch
from .case import ExtendCase, sample_drafts, sample_extend_lens

BLOCK_SCORES = 2**28
"""Scores of a block of rows, all heads: 2 GiB in float64."""


def build_extend_workload(case: ExtendCase, *, device: str) -> Workload:
    """Batch, query and cache on `device`; pages of a ragged call are in order."""
    q_lens, kv_lens = sample_extend_lens(case)
    if case.ragged:
        seed = None
    else:
        seed = case.cached.seed + 1
    paged = paged_batch(
        case.spec,
        kv_lens,
        seed,
        device=device,
        context=case.cached.context,
    )
    drafts = None
    if case.mask in CUSTOM_MASKS:
        drafts = torch.from_numpy(sample_drafts(case))
    batch = ExtendBatch.build(
        paged,
        torch.from_numpy(q_lens),
        mask=case.mask,
        drafts=drafts,
        ragged=case.ragged,
    )
    q, kv = draw_inputs(
        paged,
        rows=batch.rows,
        seed=case.cached.seed,
    )
    return Workload(case, batch, q, kv)


def attend_extend(
    q: torch.Tensor,
    kv: PagedKV,
    batch: ExtendBatch,
    *,
    probs_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Output [rows, num_qo_heads, head_dim] float64 of `q` over `kv`, both as in `extend`.

    With `probs_dtype` the unnormalised probabilities are rounded to it, as for decode.
    """
    out = []
    for i, rows in enumerate(q.split(batch.q_lens_cpu.tolist())):
        k, v = gather_tokens(kv, batch.paged, i)
        row_scores = q.shape[1] * len(k)
        size = max(1, BLOCK_SCORES // row_scores)
        seen = _visible(batch, i).split(size)
        for block, sees in zip(rows.split(size), seen, strict=True):
            of_block = attend_rows(
                block,
                k,
                v,
                batch.spec.softmax_scale,
                probs_dtype=probs_dtype,
                sees=sees,
            )
            out.append(of_block)
    return torch.cat(out)


def _visible(batch: ExtendBatch, index: int) -> torch.Tensor:
    """Which tokens the queries of one request see, [queries, tokens] bool."""
    tokens = int(batch.paged.seq_lens_cpu[index])
    queries = int(batch.q_lens_cpu[index])
    if batch.custom_mask is not None:
        sizes = batch.q_lens_cpu.long() * batch.paged.seq_lens_cpu
        of_request = batch.custom_mask.split(sizes.tolist())
        return of_request[index].view(queries, tokens)
    device = batch.paged.page_table.device
    sees = torch.ones(
        (queries, tokens),
        dtype=torch.bool,
        device=device,
    )
    if batch.mask == "causal":
        return sees.tril(tokens - queries)
    return sees


class ExtendSubject(CallSubject):
    """Measures a call with several queries per request."""

    memory_share = 0.6
    plans = "extend"
    build = staticmethod(build_extend_workload)
    attend = staticmethod(attend_extend)
