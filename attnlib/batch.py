"""The nouns: what a decode step attends over, with every shape documented here, once.

| noun | what it is |
|---|---|
| `AttnSpec` | the attention layer: head counts, head_dim, page_size, dtypes |
| `DecodeCase` | a named, seeded workload: an `AttnSpec`, a batch size and a length distribution |
| `DecodeBatch` | one step's lengths and page tables on a device |
| `PagedKV` | the paged cache, k_cache and v_cache [num_pages, page_size, num_kv_heads, head_dim] |

All are frozen. `AttnSpec` and `DecodeCase` need no torch, so records and reports can hold them on
any laptop. Glossary of the names: DESIGN.md section 9.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
LENGTHS = ("fixed", "ragged", "skewed")
FP8_OUT_DTYPE = "bfloat16"


@dataclass(frozen=True)
class AttnSpec:
    """One attention layer of a decode step.

    `dtype` is the query's, `kv_dtype` the cache's (default: the same); both are torch dtype names
    out of `ELEMENT_BYTES`. `page_size` is the tokens of a KV page, a power of two.
    Raises ValueError naming the argument, what it must be and what it was.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    kv_dtype: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_dtype", self.kv_dtype or self.dtype)
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size"):
            _require_positive_int(name, getattr(self, name))
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of num_kv_heads ({self.num_kv_heads}), "
                f"got {self.num_qo_heads}"
            )
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        for name in ("dtype", "kv_dtype"):
            if getattr(self, name) not in ELEMENT_BYTES:
                raise ValueError(
                    f"{name} must be one of {', '.join(ELEMENT_BYTES)}, got {getattr(self, name)!r}"
                )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (1 is MHA, num_qo_heads is MQA)."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def out_dtype(self) -> str:
        """Output dtype: the query's, and bfloat16 where the query is FP8."""
        return FP8_OUT_DTYPE if self.dtype.startswith("float8") else self.dtype

    @property
    def heads(self) -> str:
        """Head counts as people write them, `32/8`."""
        return f"{self.num_qo_heads}/{self.num_kv_heads}"

    @property
    def dtypes(self) -> str:
        """The query's dtype, and the cache's behind it where it is another: `bfloat16/...`."""
        return self.dtype if self.dtype == self.kv_dtype else f"{self.dtype}/{self.kv_dtype}"


@dataclass(frozen=True)
class DecodeCase:
    """A seeded decode workload: who it is, not its tensors (`workload` builds those).

    `kv_len` is the longest request's length in tokens; `lengths` is one of
    fixed (all `kv_len`), ragged (uniform in 1..kv_len) or skewed (one `kv_len`, the others 1/32).
    """

    spec: AttnSpec
    batch_size: int
    kv_len: int
    lengths: str = "fixed"
    seed: int = 0

    def __post_init__(self) -> None:
        _require_positive_int("batch_size", self.batch_size)
        _require_positive_int("kv_len", self.kv_len)
        if self.lengths not in LENGTHS:
            raise ValueError(f"lengths must be one of {', '.join(LENGTHS)}, got {self.lengths!r}")

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        s = self.spec
        tail = "" if self.lengths == "fixed" else f" {self.lengths}"
        return (
            f"{s.heads} d{s.head_dim} {s.dtypes} page {s.page_size} "
            f"batch {self.batch_size} kv_len {self.kv_len}{tail}"
        )

    @property
    def key(self) -> str:
        """A name without spaces for command lines, `32/8,d128,p16,b16,k8192`; stable.

        What is usual goes unsaid: dtype bfloat16, lengths fixed, seed 0.
        """
        s = self.spec
        parts = [s.heads, f"d{s.head_dim}", f"p{s.page_size}"]
        parts += [f"b{self.batch_size}", f"k{self.kv_len}"]
        parts += [s.dtypes] if s.dtypes != "bfloat16" else []
        parts += [self.lengths] if self.lengths != "fixed" else []
        return ",".join([*parts, f"seed{self.seed}"] if self.seed else parts)

    def to_dict(self) -> dict[str, Any]:
        """Flat dict of the case: the spec's fields and its own."""
        flat = asdict(self)
        return {**flat.pop("spec"), **flat}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> DecodeCase:
        """Inverse of `to_dict`; raises ValueError on a missing or unknown field."""
        names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "dtype", "kv_dtype")
        own = ("batch_size", "kv_len", "lengths", "seed")
        if set(fields) != {*names, *own}:
            raise ValueError(
                f"case must have the fields {sorted((*names, *own))}, got {sorted(fields)}"
            )
        spec = AttnSpec(**{name: fields[name] for name in names})
        return cls(spec, **{name: fields[name] for name in own})


@dataclass(frozen=True)
class PagedKV:
    """The paged cache: `k_cache` and `v_cache` [num_pages, page_size, num_kv_heads, head_dim]."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def __post_init__(self) -> None:
        if self.k_cache.ndim != 4 or self.k_cache.shape != self.v_cache.shape:
            raise ValueError(
                "k_cache and v_cache must both be [num_pages, page_size, num_kv_heads, head_dim], "
                f"got {tuple(self.k_cache.shape)} and {tuple(self.v_cache.shape)}"
            )

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.k_cache.shape[0]


@dataclass(frozen=True)
class DecodeBatch:
    """One decode step. Build it with `DecodeBatch.build`, which checks and derives.

    | field | shape, dtype | where |
    |---|---|---|
    | `seq_lens_cpu` | [bs] int32, tokens in the cache after this step | host |
    | `page_table` | [bs, max_pages] int32; columns past a row's pages are unspecified | device |
    | `seq_lens` | [bs] int32, `seq_lens_cpu` | device |
    | `kv_indptr` | [bs + 1] int32, prefix sums in pages | device |
    | `kv_indices` | [pages used] int32, the live page-table entries, ragged | device |
    | `kv_last_page_len` | [bs] int32, tokens in the last page, 1..page_size | device |
    """

    spec: AttnSpec
    seq_lens_cpu: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor

    @property
    def batch_size(self) -> int:
        """Requests in the step."""
        return self.seq_lens_cpu.shape[0]

    @classmethod
    def build(cls, spec: AttnSpec, seq_lens: torch.Tensor, page_table: torch.Tensor) -> DecodeBatch:
        """Check `seq_lens` [bs] int32 and `page_table` [bs, max_pages] int32, derive the rest.

        The result lives on `page_table.device`. Raises ValueError for an empty batch, a wrong
        shape or dtype, a length below 1 or beyond the page table, a negative live page.
        """
        lens = seq_lens.detach().cpu()
        _require_table("seq_lens", lens, ndim=1)
        _require_table("page_table", page_table, ndim=2)
        _require_lengths(spec, lens, page_table)
        device = page_table.device
        pages = (lens + spec.page_size - 1) // spec.page_size
        kv_indptr = lens.new_zeros(lens.shape[0] + 1)
        kv_indptr[1:] = pages.cumsum(0)
        columns = page_table.new_ones(page_table.shape).cumsum(1) - 1
        kv_indices = page_table[columns < pages.to(device)[:, None]].contiguous()
        if kv_indices.min().item() < 0:
            raise ValueError(
                f"page_table must hold pages >= 0 in live columns, got {kv_indices.min().item()}"
            )
        last = lens - (pages - 1) * spec.page_size
        return cls(
            spec,
            lens,
            page_table,
            lens.to(device),
            kv_indptr.to(device),
            kv_indices,
            last.to(device),
        )

    def query_rows(self, q_len: int) -> DecodeBatch:
        """What each of `q_len` causal queries of a request sees, as a batch of one-query requests.

        Row i * q_len + j is query j of request i; the last query sees the whole length. Raises
        ValueError where a request is shorter than `q_len`.
        """
        _require_positive_int("q_len", q_len)
        unseen = self.seq_lens_cpu.new_tensor(range(q_len - 1, -1, -1))
        lens = (self.seq_lens_cpu[:, None] - unseen).flatten()
        return DecodeBatch.build(self.spec, lens, self.page_table.repeat_interleave(q_len, 0))

    def check_inputs(self, q: torch.Tensor, kv: PagedKV) -> None:
        """Raise ValueError unless `q` [bs, num_qo_heads, head_dim] and `kv` fit this batch."""
        s = self.spec
        require_tensor("q", q, (self.batch_size, s.num_qo_heads, s.head_dim), s.dtype)
        shape = (kv.num_pages, s.page_size, s.num_kv_heads, s.head_dim)
        require_tensor("k_cache", kv.k_cache, shape, s.kv_dtype)
        require_tensor("v_cache", kv.v_cache, shape, s.kv_dtype)
        devices = [t.device for t in (q, kv.k_cache, kv.v_cache, self.page_table)]
        if len(set(devices)) > 1:
            raise ValueError(
                f"q, k_cache, v_cache and page_table must be on one device, "
                f"got {', '.join(str(device) for device in devices)}"
            )


def _require_positive_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def _require_table(name: str, tensor: torch.Tensor, *, ndim: int) -> None:
    if tensor.ndim != ndim or str(tensor.dtype) != "torch.int32":
        raise ValueError(
            f"{name} must be a {ndim}-d int32 tensor, got {tensor.ndim}-d {tensor.dtype}"
        )


def _require_lengths(spec: AttnSpec, lens: torch.Tensor, page_table: torch.Tensor) -> None:
    bs, capacity = page_table.shape[0], page_table.shape[1] * spec.page_size
    if lens.shape[0] < 1 or lens.shape[0] != bs:
        raise ValueError(
            f"seq_lens must have one entry for each of page_table's rows, at least one, "
            f"got {lens.shape[0]} for {bs} rows"
        )
    low, high = int(lens.min()), int(lens.max())
    if low < 1 or high > capacity:
        raise ValueError(
            f"seq_lens must lie in 1..{capacity} (page_table columns x page_size), "
            f"got {low}..{high}"
        )


def require_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str) -> None:
    """Raise ValueError unless `tensor`, called `name`, has this shape and torch dtype name."""
    if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{dtype}":
        raise ValueError(
            f"{name} must be {list(shape)} {dtype}, got {list(tensor.shape)} {tensor.dtype}"
        )
