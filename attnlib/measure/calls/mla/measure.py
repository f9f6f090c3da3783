"""Multi-head latent attention: tensors, oracle, measurement.

`plan_us` holds the check of chosen tokens and their slots; FlashMLA's schedule is made once, by the
checked call before any timing. Chosen tokens are uniform over the request and in no order: an
indexer's are clustered, so this is the hardest case for the memory system.

The oracle attends over the tokens K [n, 576] of the dequantised cache (all of a request's, or the
chosen ones in their order), in float64:

    out[i, h] = softmax(softmax_scale * q[i, h] K^T) K[:, :512]

where of several queries a request the last sees all n tokens and each one before it one less;
from page table and places, not from the slots that the kernels are given.
"""

import numpy as np
import torch

from ....core.mla import NO_TOKEN, MlaBatch
from ....core.spec import LATENT_DIM, MLA_HEAD_DIM, MlaSpec
from ..call import CallSubject
from ..check import attend_rows
from ..inputs import Workload, normal_values
from ..lengths import sample_seq_lens, shuffled_pages
from .case import MlaCase, sample_mla_lens
from .format import in_format, values_of

CHUNK_TOKENS = 2**18
"""Tokens drawn and quantised at a time: the float32 copies must not need the cache's room again."""
DTYPES = {
    "bfloat16": torch.bfloat16,
    "fp8-576": torch.float8_e4m3fn,
    "fp8-656": torch.uint8,
}
"""Format of a cache -> dtype of its elements."""


def sample_chosen(case: MlaCase) -> np.ndarray:
    """Chosen places [bs, top_k] int32: distinct, below the request's length, -1 after the last."""
    rng = np.random.default_rng(case.seed + 2)
    shape = (case.batch_size, case.spec.top_k)
    chosen = np.full(shape, NO_TOKEN, dtype=np.int32)
    for row, length in zip(chosen, sample_seq_lens(case).tolist(), strict=True):
        count = min(len(row), length)
        row[:count] = rng.choice(length, count, replace=False)
    return chosen


def build_mla_workload(case: MlaCase, *, device: str) -> Workload:
    """Batch, query and cache on `device`; values are standard normal before any quantisation.

    All cache formats of a shape and seed hold the same tokens, two of them quantised.
    """
    batch = _batch_of(case, device)
    generator = torch.Generator(device=device).manual_seed(case.seed)
    rows = case.batch_size * case.q_len
    q_shape = (rows, case.spec.num_qo_heads, MLA_HEAD_DIM)
    q = normal_values(q_shape, "bfloat16", generator)
    cache = _draw_cache(
        spec=case.spec,
        pages=len(batch.paged.kv_indices),
        generator=generator,
    )
    return Workload(case, batch, q, cache)


def _batch_of(case: MlaCase, device: str) -> MlaBatch:
    """Requests of the case's lengths over shuffled pages, with their chosen tokens."""
    lens = sample_mla_lens(case)
    pages = shuffled_pages(
        lens,
        case.spec.page_size,
        case.seed + 1,
        case.context,
    )
    chosen = None
    if case.spec.top_k:
        chosen = torch.from_numpy(sample_chosen(case)).to(device)
    return MlaBatch.build(
        case.spec,
        torch.from_numpy(lens),
        torch.from_numpy(pages).to(device),
        chosen,
        q_len=case.q_len,
    )


def _draw_cache(
    spec: MlaSpec,
    pages: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """A cache of so many pages in the layer's format, on the generator's device."""
    dtype = DTYPES[spec.kv_format]
    width = spec.token_bytes // dtype.itemsize
    shape = (pages, spec.page_size, width)
    cache = torch.empty(
        shape,
        dtype=dtype,
        device=generator.device,
    )
    chunk_pages = max(1, CHUNK_TOKENS // spec.page_size)
    for chunk in cache.split(chunk_pages):
        drawn_shape = (len(chunk), spec.page_size, MLA_HEAD_DIM)
        tokens = normal_values(drawn_shape, "bfloat16", generator)
        chunk.copy_(in_format(tokens, spec.kv_format))
    return cache


def attend_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: MlaBatch,
    *,
    probs_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Output [bs * q_len, num_qo_heads, 512] float64 of `q` over `cache`, both as in `core.mla`.

    With `probs_dtype` the unnormalised probabilities are rounded to it, as for decode.
    """
    out = []
    q_len = batch.q_len
    for i, rows in enumerate(q.split(q_len)):
        k = gather_latent(cache, batch, i)[:, None]
        sees = None
        if q_len > 1:
            # The last query sees the last token, the one before it one token less.
            shape = (q_len, len(k))
            every = torch.ones(
                shape,
                dtype=torch.bool,
                device=k.device,
            )
            sees = every.tril(len(k) - q_len)
        of_request = attend_rows(
            rows,
            k,
            k[..., :LATENT_DIM],
            batch.spec.softmax_scale,
            probs_dtype=probs_dtype,
            sees=sees,
        )
        out.append(of_request)
    return torch.cat(out)


def gather_latent(
    cache: torch.Tensor,
    batch: MlaBatch,
    index: int,
) -> torch.Tensor:
    """Attended tokens [n, 576] float64 of one request, dequantised."""
    page_size = batch.spec.page_size
    length = int(batch.paged.seq_lens_cpu[index])
    places = torch.arange(length, device=cache.device)
    if batch.chosen is not None:
        row = batch.chosen[index]
        places = row[row != NO_TOKEN].long()
    table = batch.paged.page_table[index].long()
    pages = table[places // page_size]
    return values_of(cache[pages, places % page_size])


class MlaSubject(CallSubject):
    """Measures one MLA call of a backend."""

    plans = "mla"
    build = staticmethod(build_mla_workload)
    attend = staticmethod(attend_mla)
