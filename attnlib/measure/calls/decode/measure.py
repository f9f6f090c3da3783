"""Decode attention, one query per request over a paged cache: tensors, oracle, measurement.

The oracle takes one request at a time, in float64. For request i, K and V are the tokens of its
gathered pages, the last `window` of them if the layer has one, of KV head h // group_size for query
head h:

    out[i, h] = softmax(softmax_scale * q[i, h] K^T) V

No batching, no splitting, no online softmax: it shares nothing with the kernels it checks.
"""

from collections.abc import Callable
from functools import cache, partial

import torch

from ....core.backends import create
from ....core.backends.base import require_device
from ....core.backends.table import entry_of
from ....core.batch import DecodeBatch, PagedKV
from ..call import CallSubject
from ..cases import read_case
from ..check import attend_rows
from ..inputs import Workload, draw_inputs, paged_batch
from ..lengths import sample_seq_lens
from .case import DecodeCase


def build_workload(case: DecodeCase, *, device: str) -> Workload:
    """Batch, query and cache on `device`."""
    batch = paged_batch(
        case.spec,
        sample_seq_lens(case),
        seed=case.seed + 1,
        device=device,
        context=case.context,
    )
    q, kv = draw_inputs(
        batch,
        rows=case.batch_size,
        seed=case.seed,
    )
    return Workload(case, batch, q, kv)


def attend(
    q: torch.Tensor,
    kv: PagedKV,
    batch: DecodeBatch,
    *,
    probs_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Attention output [bs, num_qo_heads, head_dim] float64 of `q` over `batch`'s pages.

    With `probs_dtype` the unnormalised probabilities are rounded to it, as kernels do before
    their second matrix product; the result then shows what that rounding alone costs.
    """
    spec = batch.spec
    out = []
    for i, row in enumerate(q.split(1)):
        k, v = gather_tokens(kv, batch, i)
        of_row = attend_rows(
            row,
            k[-spec.window :],  # -0: all
            v[-spec.window :],
            spec.softmax_scale,
            probs_dtype=probs_dtype,
        )
        out.append(of_row)
    return torch.cat(out)


def gather_tokens(
    kv: PagedKV,
    batch: DecodeBatch,
    index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [seq_len, num_kv_heads, head_dim] float64 of one request, in token order."""
    length = int(batch.seq_lens_cpu[index])
    count = -(-length // batch.spec.page_size)
    pages = batch.page_table[index, :count].long()
    k = kv.k_cache[pages].flatten(0, 1)
    v = kv.v_cache[pages].flatten(0, 1)
    return k[:length].double(), v[:length].double()


def decode_call(
    backend: str,
    case: DecodeCase | str,
    *,
    device: str = "cuda",
    cuda_graph: bool = False,
) -> Callable[[], torch.Tensor]:
    """One decode call of a backend at a case, such as `profile` and `compare` take.

    Inputs (seeded, as in the studies) and the plan are made by the first call, so a call can be
    named where its backend cannot run. The first call raises RuntimeError if the backend cannot run
    here.

    Parameters
    ----------
    backend : str
        A decode backend of `attnlib.core.create`.
    case : DecodeCase or str
        The workload, or its text, such as `heads=8/2 head_dim=64 lens=32x2`.
    device : str
        Where the tensors are: `cuda`, or `cpu` for backends that need no GPU.
    cuda_graph : bool
        Whether to plan as for a capture.

    Returns
    -------
    callable
        `call()` is its output [bs, num_qo_heads, head_dim]; its `__name__` is a profile's title.

    Raises
    ------
    ValueError
        For a backend that is unknown, or not of decode, for a text of another call, and for another
        device.

    Examples
    --------
    >>> import attnlib
    >>> case = attnlib.DecodeCase(attnlib.AttnSpec(8, 2, 64, 16), 2, 32)
    >>> call = attnlib.decode_call("sdpa", case, device="cpu")
    >>> call().shape
    torch.Size([2, 8, 64])
    """
    entry_of(backend, "decode")
    require_device(device)
    if isinstance(case, str):
        workload = read_case(case)
    else:
        workload = case
    if not isinstance(workload, DecodeCase):
        raise ValueError(f"case must be a DecodeCase or its text, got {case!r}")

    @cache
    def planned() -> Callable[[], torch.Tensor]:
        made = create(
            backend,
            workload.spec,
            device=device,
            cuda_graph=cuda_graph,
        )
        work = build_workload(workload, device=device)
        return partial(
            made.run,
            work.q,
            work.kv,
            made.plan(work.batch),
        )

    def call() -> torch.Tensor:
        return planned()()

    call.__name__ = f"{backend}, {workload.label}"
    return call


class DecodeSubject(CallSubject):
    """Measures one attention call of a backend."""

    plans = "decode"
    build = staticmethod(build_workload)
    attend = staticmethod(attend)
