"""The batch of a multi-head latent attention (MLA) call, dense or over chosen tokens.

| what | shape, dtype |
|---|---|
| `q` | [bs * q_len, num_qo_heads, 576] bfloat16, absorbed: 512 latent values, 64 rotary ones |
| cache, `bfloat16` | [num_pages, page_size, 576] bfloat16, tokens laid out as a query head is |
| cache, `fp8-656` | [num_pages, page_size, 656] uint8: latent in FP8, 4 scales, rotary bfloat16 |
| cache, `fp8-576` | [num_pages, page_size, 576] float8_e4m3fn, all by one scale, `MLA_SCALE` |
| output | [bs * q_len, num_qo_heads, 512] bfloat16 |

The queries of a request are its last `q_len` tokens, in a row; each sees its own token and all
before it.

Kernels take slots, places in the cache (page * page_size + offset), and read any slot unchecked:
`slots` makes them from chosen tokens and raises for those out of range.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import DecodeBatch, require_tensor
from .spec import MLA_HEAD_DIM, AttnSpec, MlaSpec, require_given, require_one_query

NO_TOKEN = -1
"""Fills a row of `chosen` where a request has fewer than `top_k` tokens."""


@dataclass(frozen=True, eq=False)
class MlaBatch:
    """One MLA step, decode or verification. Make it by `build`, which checks and derives.

    Attributes
    ----------
    spec : MlaSpec
        The layer.
    paged : DecodeBatch
        Lengths and pages.
    highest_page : int
        The last page of the cache that a request has.
    chosen : Tensor or None
        [bs, top_k] int32 on the page table's device, tokens by their place in the request, -1 for
        none; None where `top_k` is 0.
    q_len : int
        Query tokens of each request.

    Examples
    --------
    Two requests of which each attends to at most three chosen tokens:

    >>> import torch
    >>> from attnlib.core import MlaSpec
    >>> spec = MlaSpec(num_qo_heads=128, top_k=3, page_size=4)
    >>> seq_lens = torch.tensor([5, 2], dtype=torch.int32)
    >>> page_table = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
    >>> chosen = torch.tensor([[4, 0, 2], [1, -1, -1]], dtype=torch.int32)
    >>> batch = MlaBatch.build(spec, seq_lens, page_table, chosen)
    >>> batch.slots().tolist()
    [[4, 0, 2], [9, -1, -1]]
    """

    spec: MlaSpec
    paged: DecodeBatch
    highest_page: int
    chosen: Tensor | None = None
    q_len: int = 1

    @property
    def batch_size(self) -> int:
        """Requests in the step."""
        return self.paged.batch_size

    @classmethod
    def build(
        cls,
        spec: MlaSpec,
        seq_lens: Tensor,
        page_table: Tensor,
        chosen: Tensor | None = None,
        *,
        q_len: int = 1,
    ) -> "MlaBatch":
        """Check `seq_lens` [bs] and `page_table` [bs, max_pages] int32 as `DecodeBatch` does.

        Only shape, dtype and device of `chosen` are checked here, its values in `slots`. ValueError
        for a request of fewer tokens than `q_len`, and for `chosen` with more than one query.
        """
        require_one_query(spec, q_len)
        attention = AttnSpec(spec.num_qo_heads, 1, MLA_HEAD_DIM, spec.page_size)
        paged = DecodeBatch.build(attention, seq_lens, page_table)
        if int(paged.seq_lens_cpu.min()) < q_len:
            shortest = int(paged.seq_lens_cpu.min())
            raise ValueError(f"seq_lens must be at least q_len ({q_len}), got {shortest}")
        require_given(
            "chosen",
            chosen,
            due=bool(spec.top_k),
            when="where top_k is not 0",
            here=f"top_k {spec.top_k}",
        )
        if chosen is not None:
            require_tensor("chosen", chosen, (page_table.shape[0], spec.top_k), "int32")
            if chosen.device != page_table.device:
                raise ValueError(
                    f"chosen must be on page_table's device, {page_table.device}, "
                    f"got {chosen.device}"
                )
        return cls(spec, paged, int(paged.kv_indices.max()), chosen, q_len)

    def require_query(self, q: object) -> None:
        """ValueError unless `q` is [bs * q_len, num_qo_heads, 576] bfloat16."""
        shape = (self.batch_size * self.q_len, self.spec.num_qo_heads, MLA_HEAD_DIM)
        require_tensor("q", q, shape, "bfloat16")

    def require_alike(self, given: "MlaBatch") -> None:
        """ValueError unless `given` has this batch's layer and its page table's shape."""
        self.paged.require_alike(given.paged)
        mine = (self.spec, self.q_len)
        others = (given.spec, given.q_len)
        if mine != others:
            raise ValueError(f"out must be a plan over {others} (layer, q_len), got {mine}")

    def slots(self) -> Tensor:
        """Cache slot of every chosen token, [bs, top_k] int32; -1 stays -1. Synchronises.

        Raises ValueError that names request, value and limit for a place outside the request, and
        for a request without any token.
        """
        chosen = self.chosen
        page_size = self.spec.page_size
        if chosen is None:
            raise ValueError("chosen must be given for slots, got None (top_k 0)")
        lens = self.paged.seq_lens
        wrong = (chosen < NO_TOKEN) | (chosen >= lens[:, None])
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            length = int(lens[row])
            raise ValueError(
                f"chosen must lie in 0..{length - 1} for request {row} of {length} tokens, or be "
                f"{NO_TOKEN} for none, got {int(chosen[row, column])} in column {column}"
            )
        empty = (chosen == NO_TOKEN).all(1)
        if bool(empty.any()):
            raise ValueError(
                "chosen must name at least one token of every request, "
                f"got none for request {int(empty.nonzero()[0])}"
            )
        places = chosen.clamp(min=0).long()
        pages = self.paged.page_table.long().gather(1, places // page_size)
        slots = pages * page_size + places % page_size
        return torch.where(chosen == NO_TOKEN, NO_TOKEN, slots).int()


def attended_pages(batch: MlaBatch) -> tuple[Tensor, Tensor, Tensor, int]:
    """The pages that requests attend to, ragged; chosen tokens are pages of one token.

    Returns prefix sums in pages [bs + 1], pages [n], tokens per request [bs], all int32, and the
    tokens of a page. A sparse batch is checked by `slots`.
    """
    paged = batch.paged
    if batch.chosen is None:
        return paged.kv_indptr, paged.kv_indices, paged.seq_lens, batch.spec.page_size
    slots = batch.slots()
    live = slots != NO_TOKEN
    counts = live.sum(1, dtype=torch.int32)
    kv_indptr = torch.zeros_like(paged.kv_indptr)
    kv_indptr[1:] = counts.cumsum(0)
    return kv_indptr, slots[live], counts, 1


def require_pages(cache: Tensor, highest: int) -> None:
    """ValueError unless page `highest` lies in `cache` [num_pages, ...]; reads no tensor."""
    if highest >= cache.shape[0]:
        raise ValueError(
            f"cache must have the pages that the plan names, up to {highest}, "
            f"got {cache.shape[0]} pages"
        )
