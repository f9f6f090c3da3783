"""The batch of an attention call with several query tokens per request.

| what | shape, dtype |
|---|---|
| `q` | [rows, num_qo_heads, head_dim], the queries of a request in a row, requests in order |
| cache | `PagedKV`; of a ragged prefill pages of one token, in order: K and V as they are |
| output | like `q` |

The queries of a request are its last tokens. Under a causal mask a query sees its own token and all
before it, under a full one every token; a custom mask has a bit per query and token.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .batch import DecodeBatch, require_tensor
from .spec import CUSTOM_MASKS, MASKS, AttnSpec, require_given, require_word


@dataclass(frozen=True, eq=False)
class ExtendBatch:
    """One call with several query tokens per request. Make it by `build`, which checks and derives.

    Attributes
    ----------
    paged : DecodeBatch
        The tokens after the call.
    q_lens_cpu : Tensor
        [bs] int32 on the host, queries per request.
    qo_indptr : Tensor
        [bs + 1] int32 on the device, their prefix sums.
    mask : str
        `causal`, `full`, `tree` or `chain`.
    custom_mask : Tensor or None
        [sum of queries x tokens] bool, row by row; only for `tree` and `chain`.
    ragged : bool
        Whether the pages are single tokens in order: K and V as they are.

    Examples
    --------
    Prefill of the last 3 and 2 tokens of two requests:

    >>> import torch
    >>> from attnlib.core import AttnSpec, DecodeBatch
    >>> spec = AttnSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=4)
    >>> seq_lens = torch.tensor([5, 2], dtype=torch.int32)
    >>> page_table = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
    >>> paged = DecodeBatch.build(spec, seq_lens, page_table)
    >>> batch = ExtendBatch.build(paged, torch.tensor([3, 2], dtype=torch.int32))
    >>> batch.rows, batch.qo_indptr.tolist()
    (5, [0, 3, 5])
    """

    paged: DecodeBatch
    q_lens_cpu: Tensor
    qo_indptr: Tensor
    mask: str
    custom_mask: Tensor | None
    ragged: bool

    @property
    def spec(self) -> AttnSpec:
        """The attention layer."""
        return self.paged.spec

    @cached_property
    def rows(self) -> int:
        """Queries of all requests."""
        return int(self.q_lens_cpu.sum())

    @property
    def max_q_len(self) -> int:
        """The most queries of a request."""
        return int(self.q_lens_cpu.max())

    @classmethod
    def build(
        cls,
        paged: DecodeBatch,
        q_lens: Tensor,
        *,
        mask: str = "causal",
        drafts: Tensor | None = None,
        ragged: bool = False,
    ) -> "ExtendBatch":
        """Check `q_lens` [bs] int32 against `paged`, and derive the rest.

        `drafts` [bs, q_len, q_len] bool, for custom masks only: which drafts a draft sees; every
        request then has `q_len` queries. Raises ValueError that names what does not fit.
        """
        require_word("mask", mask, MASKS)
        paged.spec.require_no_window("several queries per request")
        require_tensor("q_lens", q_lens, (paged.batch_size,), "int32")
        lens = q_lens.detach().to("cpu", copy=True)
        wrong = (lens < 1) | (lens > paged.seq_lens_cpu)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"q_lens must lie in 1..{int(paged.seq_lens_cpu[row])} (tokens) for request {row}, "
                f"got {int(lens[row])}"
            )
        if ragged:
            _require_in_order(lens, paged)
        _require_drafts(mask, drafts, lens)
        qo_indptr = torch.zeros_like(paged.kv_indptr)
        qo_indptr[1:] = lens.cumsum(0)
        custom = None if drafts is None else _custom_mask(paged, drafts)
        return cls(paged, lens, qo_indptr, mask, custom, ragged)

    def cloned(self) -> "ExtendBatch":
        """The same batch with its own lengths, prefix sums and page table."""
        paged = replace(self.paged.cloned(), kv_indptr=self.paged.kv_indptr.clone())
        return replace(self, paged=paged, qo_indptr=self.qo_indptr.clone())

    def overwrite(self, given: "ExtendBatch") -> None:
        """Copy the tensors of `given` into this batch's; its host lengths stay as they are.

        ValueError unless it fits (`require_alike`) and has no more queries per request.
        """
        self.require_alike(given)
        if given.max_q_len > self.max_q_len:
            raise ValueError(
                f"q_lens must be at most {self.max_q_len}, as first planned, got {given.max_q_len}"
            )
        self.qo_indptr.copy_(given.qo_indptr)
        self.paged.seq_lens.copy_(given.paged.seq_lens)
        self.paged.kv_indptr.copy_(given.paged.kv_indptr)
        if not self.ragged:
            self.paged.page_table.copy_(given.paged.page_table)

    def require_query(self, q: object) -> None:
        """ValueError unless `q` is [rows, num_qo_heads, head_dim] in the layer's dtype."""
        shape = (self.rows, self.spec.num_qo_heads, self.spec.head_dim)
        require_tensor("q", q, shape, self.spec.dtype)

    def require_alike(self, given: "ExtendBatch") -> None:
        """ValueError unless only the lengths of `given` differ from this batch's."""

        def traits(batch: ExtendBatch) -> tuple[Any, ...]:
            if batch.ragged:
                columns = 0
            else:
                columns = batch.paged.page_table.shape[1]
            return (batch.spec, batch.mask, batch.ragged, batch.paged.batch_size, columns)

        if traits(self) != traits(given):
            raise ValueError(
                "out must be a plan of the same spec, mask, form, batch_size and page_table "
                f"columns, {traits(given)}, got {traits(self)}"
            )


def _custom_mask(paged: DecodeBatch, drafts: Tensor) -> Tensor:
    """What the queries of each request see: all before the drafts, and of the drafts as given."""
    before = paged.seq_lens_cpu - drafts.shape[1]
    parts = []
    for sees, tokens in zip(drafts, before.tolist(), strict=True):
        whole = pad(sees, (tokens, 0), value=True)
        parts.append(whole.flatten())
    return torch.cat(parts).to(paged.page_table.device)


def _require_in_order(lens: Tensor, paged: DecodeBatch) -> None:
    """ValueError unless the pages are single tokens in order, and all tokens are queries."""
    pages = paged.kv_indices.long()
    in_order = torch.arange(len(pages), device=pages.device)
    if paged.spec.page_size != 1 or not torch.equal(pages, in_order):
        raise ValueError(
            "page_table must name pages of one token in order for a ragged call, got page_size "
            f"{paged.spec.page_size} and pages {paged.kv_indices[:4].tolist()}..."
        )
    if not torch.equal(lens, paged.seq_lens_cpu):
        raise ValueError(
            f"q_lens must be the requests' tokens for a ragged call, got {lens.tolist()[:4]}... "
            f"of {paged.seq_lens_cpu.tolist()[:4]}..."
        )


def _require_drafts(mask: str, drafts: Tensor | None, lens: Tensor) -> None:
    when = f"for the masks {', '.join(CUSTOM_MASKS)}"
    require_given(
        name="drafts",
        value=drafts,
        due=mask in CUSTOM_MASKS,
        when=when,
        here=f"mask {mask!r}",
    )
    if drafts is None:
        return
    q_len = int(lens.max())
    require_tensor("drafts", drafts, (len(lens), q_len, q_len), "bool")
    if int(lens.min()) != q_len:
        raise ValueError(f"q_lens must be alike for a custom mask, got {lens.tolist()[:4]}...")
