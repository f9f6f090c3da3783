"""The paged KV cache, and the lengths and page tables of a decode step."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .spec import AttnSpec, dtype_name, require_between


@dataclass(frozen=True, eq=False)
class PagedKV:
    """The paged KV cache of one layer, in NHD layout.

    Parameters
    ----------
    k_cache, v_cache : Tensor
        [num_pages, page_size, num_kv_heads, head_dim], the layer's `kv_dtype`.

    Raises
    ------
    ValueError
        For another number of dimensions, or two shapes.

    Examples
    --------
    Three pages of 4 tokens, 2 KV heads:

    >>> import torch
    >>> cache = PagedKV(torch.zeros(3, 4, 2, 64), torch.zeros(3, 4, 2, 64))
    >>> cache.k_cache.shape[:2]
    torch.Size([3, 4])
    """

    k_cache: Tensor
    v_cache: Tensor

    def __post_init__(self) -> None:
        if self.k_cache.ndim != 4 or self.k_cache.shape != self.v_cache.shape:
            raise ValueError(
                "k_cache and v_cache must both be [num_pages, page_size, num_kv_heads, head_dim], "
                f"got {tuple(self.k_cache.shape)} and {tuple(self.v_cache.shape)}"
            )

    def require_pages_of(self, spec: AttnSpec) -> None:
        """ValueError unless its pages have the shape of the layer's; reads no tensor."""
        wanted = (spec.page_size, spec.num_kv_heads, spec.head_dim)
        if self.k_cache.shape[1:] != wanted:
            raise ValueError(
                f"cache must have pages of [page_size, num_kv_heads, head_dim] {list(wanted)} as "
                f"the batch, got {list(self.k_cache.shape[1:])}"
            )

    def clone(self) -> "PagedKV":
        """A copy in new memory."""
        return PagedKV(self.k_cache.clone(), self.v_cache.clone())


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """One decode step: lengths and page tables. Make it by `build`, which checks and derives.

    Attributes
    ----------
    spec : AttnSpec
        The layer.
    seq_lens_cpu : Tensor
        [bs] int32 on the host, tokens in the cache after this step.
    page_table : Tensor
        [bs, max_pages] int32; entries past a row's pages are undefined.
    seq_lens : Tensor
        [bs] int32, `seq_lens_cpu` on the device of `page_table`, as all below.
    kv_indptr : Tensor
        [bs + 1] int32, prefix sums in pages.
    kv_indices : Tensor
        [pages used] int32, the live page-table entries, ragged.
    kv_last_page_len : Tensor
        [bs] int32, tokens in the last page, 1..page_size.

    Examples
    --------
    Two requests of 5 and 2 tokens: the first has two pages, the second one.

    >>> import torch
    >>> from attnlib.core import AttnSpec
    >>> spec = AttnSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=4)
    >>> seq_lens = torch.tensor([5, 2], dtype=torch.int32)
    >>> page_table = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
    >>> batch = DecodeBatch.build(spec, seq_lens, page_table)
    >>> batch.kv_indptr.tolist(), batch.kv_indices.tolist(), batch.kv_last_page_len.tolist()
    ([0, 2, 3], [0, 1, 2], [1, 2])
    """

    spec: AttnSpec
    seq_lens_cpu: Tensor
    page_table: Tensor
    seq_lens: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor

    @property
    def batch_size(self) -> int:
        """Requests in the step."""
        return self.seq_lens_cpu.shape[0]

    @property
    def qo_indptr(self) -> Tensor:
        """[bs + 1] int32, prefix sums of one query per request."""
        count = len(self.kv_indptr)
        device = self.kv_indptr.device
        return torch.arange(count, dtype=torch.int32, device=device)

    @classmethod
    def build(cls, spec: AttnSpec, seq_lens: Tensor, page_table: Tensor) -> "DecodeBatch":
        """Check `seq_lens` [bs] int32 and `page_table` [bs, max_pages] int32, derive the rest.

        The result is on `page_table.device`, lengths are copied. Raises ValueError for an empty
        batch, a wrong shape or dtype, a length below 1 or beyond the page table, a negative page.
        """
        require_tensor("page_table", page_table, (None, None), "int32")
        bs, columns = page_table.shape
        device = page_table.device
        require_tensor("seq_lens", seq_lens, (max(1, bs),), "int32")
        lens = seq_lens.detach().to("cpu", copy=True)
        why = " (page_table columns x page_size)"
        require_between(
            name="seq_lens",
            values=lens,
            least=1,
            most=columns * spec.page_size,
            why=why,
        )
        pages = (lens - 1) // spec.page_size + 1
        kv_indptr = lens.new_zeros(lens.shape[0] + 1)
        kv_indptr[1:] = pages.cumsum(0)
        live = torch.arange(columns, device=device) < pages.to(device)[:, None]
        kv_indices = page_table[live].contiguous()
        least = int(kv_indices.min())
        if least < 0:
            raise ValueError(f"page_table must hold pages >= 0 in live columns, got {least}")
        last = (lens - (pages - 1) * spec.page_size).to(device)
        return cls(
            spec=spec,
            seq_lens_cpu=lens,
            page_table=page_table,
            seq_lens=lens.to(device),
            kv_indptr=kv_indptr.to(device),
            kv_indices=kv_indices,
            kv_last_page_len=last,
        )

    def cloned(self) -> "DecodeBatch":
        """The same batch with its own lengths and page table, as a captured graph reads."""
        return replace(
            self,
            seq_lens=self.seq_lens.clone(),
            page_table=self.page_table.clone(),
        )

    def overwrite(self, given: "DecodeBatch") -> None:
        """Copy lengths and page table of `given` into this batch's tensors.

        ValueError unless the layer and the page table's shape are the same.
        """
        self.require_alike(given)
        self.page_table.copy_(given.page_table)
        self.seq_lens.copy_(given.seq_lens)

    def require_query(self, q: object) -> None:
        """ValueError unless `q` is [bs, num_qo_heads, head_dim] in the layer's dtype."""
        shape = (self.batch_size, self.spec.num_qo_heads, self.spec.head_dim)
        require_tensor("q", q, shape, self.spec.dtype)

    def require_alike(self, given: "DecodeBatch") -> None:
        """ValueError unless `given` has this batch's layer and its page table's shape."""
        if self.page_table.shape != given.page_table.shape or self.spec != given.spec:
            raise ValueError(
                f"out must be a plan over page_table {list(given.page_table.shape)} of "
                f"{given.spec}, got {list(self.page_table.shape)} of {self.spec}"
            )


def require_tensor(
    name: str,
    tensor: object,
    shape: tuple[int | None, ...],
    *dtypes: str,
    contiguous: bool = False,
) -> None:
    """ValueError unless `tensor` has this shape (None: any size) and dtype; TypeError if it is no
    tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    sizes = tuple(tensor.shape)
    dtype = dtype_name(tensor.dtype)
    fits = len(sizes) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, sizes, strict=True)
    )
    if dtype not in dtypes or not fits:
        form = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} must be [{form}] {' or '.join(dtypes)}, got {list(sizes)} {dtype}"
        )
    if contiguous and not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous (a copy would not be the caller's buffer), "
            f"got strides {tensor.stride()} for shape {sizes}"
        )
