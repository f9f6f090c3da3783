"""The tensors that the metadata builders take, and the error for every other one.

Checked on the host, from shapes, dtypes, strides and devices alone: reading a value on the GPU
would synchronise. See each builder's docstring for out-of-range values; no kernel reads or writes
outside a tensor because of one.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ..batch import require_tensor
from ..spec import INT32_MAX, ceil_div, require_between, require_page_size
from .launch import Apart, Bound, Span

EITHER_WIDTH = {"seq_lens", "req_pool_indices", "kv_start", "swa_slot_map"}
"""Tensors that may be int32 or int64; all others are int32."""
IN_ROWS = {"req_to_token", "page_table", "swa_page_table"}
"""Tensors that may be columns of a wider one; all others are contiguous."""


class DecodeTensors(NamedTuple):
    """What `build_decode_metadata` reads and writes; shapes and dtypes are there."""

    seq_lens: Tensor
    req_pool_indices: Tensor
    req_to_token: Tensor
    cache_seqlens: Tensor
    cu_seqlens_k: Tensor
    page_table: Tensor
    swa_slot_map: Tensor | None = None
    swa_page_table: Tensor | None = None


class PageArrays(NamedTuple):
    """What `build_kv_indices` reads and writes; shapes and dtypes are there."""

    seq_lens: Tensor
    req_pool_indices: Tensor
    req_to_token: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor | None = None
    kv_start: Tensor | None = None


INSTEAD = {
    DecodeTensors: (
        "it is FlashAttention-3's page_table as it is, and schedules of it are written by "
        "precompute, or by build_step_schedules with page_table=block_table, max_pages=0 and "
        "req_to_token [1, 1]"
    ),
    PageArrays: "Fa2Planner.plan and build_fa2_plan write page arrays of it",
}
"""What to do with a block table, which the builder of a kind of tensors does not read."""


def tensors_named(kind: Any, tensors: Mapping[str, Any]) -> Any:
    """Tensors of one `kind`; TypeError naming one that is missing, or that there is not."""
    if "block_table" in tensors and "block_table" not in kind._fields:
        words = "block_table must be left out, slots are read here (req_to_token)"
        raise TypeError(f"{words}: {INSTEAD[kind]}")
    for name in kind._fields:
        if name not in tensors and name not in kind._field_defaults:
            raise TypeError(f"{name} must be given, a tensor")
    for name in tensors:
        if name not in kind._fields:
            raise TypeError(f"a tensor must be one of {', '.join(kind._fields)}, got {name!r}")
    return kind(**tensors)


def require_decode(t: DecodeTensors, page_size: int) -> None:
    """Raise unless these are tensors of `build_decode_metadata`."""
    batch = require_requests(t)
    require_shape(t, "cache_seqlens", batch)
    require_shape(t, "cu_seqlens_k", batch + 1)
    require_shape(t, "page_table", batch, None)
    if (t.swa_slot_map is None) != (t.swa_page_table is None):
        missing = "swa_slot_map" if t.swa_slot_map is None else "swa_page_table"
        raise ValueError(f"{missing} must be given where the other one of the SWA pair is")
    if t.swa_page_table is not None:
        require_shape(t, "swa_slot_map", None)
        require_shape(t, "swa_page_table", *t.page_table.shape)
        if row_stride(t.swa_page_table) != row_stride(t.page_table):
            raise ValueError(
                f"swa_page_table must be laid out as page_table, rows {row_stride(t.page_table)} "
                f"words apart, got {row_stride(t.swa_page_table)}"
            )
    require_page_size(page_size)
    require_one_device(t._asdict())


def require_kv_indices(t: PageArrays, page_size: int) -> None:
    """Raise unless these are tensors of `build_kv_indices`."""
    batch = require_requests(t)
    require_shape(t, "kv_indptr", batch + 1)
    require_shape(t, "kv_indices", None)
    for name in ("kv_last_page_len", "kv_start"):
        if getattr(t, name) is not None:
            require_shape(t, name, batch)
    require_page_size(page_size)
    require_one_device(t._asdict())


def require_one_device(tensors: dict[str, Tensor | None]) -> None:
    """Raise unless all given tensors are on the first one's device."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(given))
    device = given[first].device
    for name, tensor in given.items():
        if tensor.device != device:
            raise ValueError(f"{name} must be on {first}'s device {device}, got {tensor.device}")


def require_values(
    tensors: Mapping[str, Tensor | None],
    *,
    page_size: int,
    most_tokens: int,
    seq_len_delta: int,
) -> None:
    """ValueError for values that a builder takes as its module says, and that are mostly mistakes:
    a request below 0 or above `most_tokens`, one that is not in the pool, and pages that
    `kv_indices` has no room for. It reads the tensors, which synchronises."""
    lens = tensors["seq_lens"]
    if lens is None or not len(lens):
        return
    lens = lens.long() + seq_len_delta
    why = f" with seq_len_delta {seq_len_delta}, for the pages that are written"
    require_between("seq_lens", lens, 0, most_tokens, why)
    rows = tensors["req_pool_indices"]
    pool = tensors["req_to_token"]
    if rows is not None and pool is not None:
        require_between("req_pool_indices", rows, 0, len(pool) - 1, " (rows of req_to_token)")
    room = tensors.get("kv_indices")
    pages = int(ceil_div(lens, page_size).sum())
    if room is not None and pages > len(room):
        raise ValueError(f"kv_indices must have room for {pages} pages, got {len(room)}")


def values_of(
    t: Any,
    page_size: int,
    max_pages: int,
    seq_len_delta: int,
) -> Callable[[], None]:
    """`require_values` for these tensors of a builder."""
    return partial(
        require_values,
        t._asdict(),
        page_size=page_size,
        most_tokens=max_pages * page_size,
        seq_len_delta=seq_len_delta,
    )


def page_bounds(t: Any, page_size: int, room: int, reason: str) -> tuple[Bound, Bound]:
    """Bounds of `seq_len_delta` and `max_pages`: the output holds `room` pages, and `req_to_token`
    must hold their first tokens."""
    max_ctx = t.req_to_token.shape[1]
    reason = f" ({reason}, req_to_token {max_ctx} tokens a request, page_size {page_size})"
    largest = min(room, ceil_div(max_ctx, page_size))
    return Bound("seq_len_delta", INT32_MAX), Bound("max_pages", largest, reason)


def kept_apart(
    tensors: Mapping[str, Tensor | None],
    outputs: Collection[str],
    *,
    same_if_zero: tuple[str, str] | None = None,
) -> tuple[Apart, ...]:
    """The rules that none of `outputs` shares memory with another of a kernel's `tensors`, which
    are in its order. `same_if_zero` are an input and the output that it may be."""
    places = {name: place for place, name in enumerate(tensors)}
    rules = []
    for name, tensor in tensors.items():
        for output in outputs:
            written = tensors[output]
            is_pair_again = name in outputs and places[name] >= places[output]
            if tensor is None or written is None or is_pair_again:
                continue
            rule = Apart(
                other=places[name],
                output=places[output],
                names=(name, output),
                spans=(Span.of(tensor), Span.of(written)),
                same_if_zero=(name, output) == same_if_zero,
            )
            rules.append(rule)
    return tuple(rules)


def row_stride(tensor: Tensor) -> int:
    """Words from one row of a tensor to the next: its width, unless it is part of a wider one."""
    return tensor.stride(0) if len(tensor) > 1 else tensor.shape[1]


def require_requests(t: Any) -> int:
    """Check what all builders read; the batch size."""
    require_shape(t, "seq_lens", None)
    batch = len(t.seq_lens)
    require_shape(t, "req_pool_indices", batch)
    require_shape(t, "req_to_token", None, None)
    return batch


def require_shape(bundle: Any, name: str, *size: int | None) -> None:
    """Raise unless a tensor of a builder's has this size (None: any), its dtype and its layout."""
    tensor = getattr(bundle, name)
    dtypes = ("int32", "int64") if name in EITHER_WIDTH else ("int32",)
    contiguous = name not in IN_ROWS or not has_separate_rows(tensor)
    require_tensor(name, tensor, size, *dtypes, contiguous=contiguous)


def has_separate_rows(tensor: Any) -> bool:
    """Whether each row is contiguous, and no row begins in another one."""
    if not isinstance(tensor, Tensor) or tensor.ndim != 2:
        return False
    rows, columns = tensor.shape
    down, along = tensor.stride()
    return (along == 1 or columns < 2) and (down >= columns or rows < 2)
