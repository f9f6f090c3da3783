"""What the metadata builders accept, and the one clear error for everything else.

Checked on the host, from shapes, dtypes, strides and devices alone: a value on the GPU cannot be
looked at without waiting for it. What the kernels do about values out of range stands in their
docstrings; none of them reads or writes outside a tensor because of one.

A builder's tensors travel in one bundle, in the order of its kernel's first parameters. The
`require_` function of a bundle raises ValueError or TypeError naming the argument, or returns what
must be looked at in every call.
"""

from collections import namedtuple
from itertools import product
from typing import Any, NamedTuple

import torch

from ..batch import require_tensor
from ..spec import INT32_MAX, require_int, require_page_size

IN_EITHER = {*("seq_lens", "req_pool_indices", "kv_start", "swa_slot_map")}
"""Tensors of engines that may be int32 or int64; all others are int32."""
IN_ROWS = {"req_to_token", "page_table", "swa_page_table"}
"""Tensors that may be columns of a wider one; all others are contiguous."""


class StepTensors(NamedTuple):
    """Of `build_decode_metadata` and `build_step_metadata`; the window's pair and `words` may be
    absent."""

    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    req_to_token: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor
    swa_slot_map: torch.Tensor | None = None
    swa_page_table: torch.Tensor | None = None
    words: torch.Tensor | None = None


PageArrays = namedtuple(
    "PageArrays",
    "seq_lens req_pool_indices req_to_token kv_indptr kv_indices kv_last_page_len kv_start",
    defaults=(None, None),
)
"""Of `build_kv_indices`; the last two may be absent."""


class EveryCall(NamedTuple):
    """What shapes do not tell, so that every call is looked at for it.

    `bounds` are the least and the largest value of each number. `apart` are pairs of positions in
    the bundle whose tensors must not start at one address, because other programs still read the
    one while the other is written; True: they may where the first number, a delta, is 0.
    """

    bounds: tuple[tuple[int, int], ...]
    apart: tuple[tuple[int, int, bool], ...]


def require_decode(t: StepTensors, page_size: int, seq_len_delta: int, max_pages: int) -> EveryCall:
    """Raise unless these are arguments of `build_decode_metadata`."""
    batch = _require_requests(t)
    sums = (batch + 1,)
    _require_sizes(t, cache_seqlens=(batch,), cu_seqlens_k=sums, page_table=(batch, None))
    if (t.swa_slot_map is None) != (t.swa_page_table is None):
        missing = "swa_slot_map" if t.swa_slot_map is None else "swa_page_table"
        raise ValueError(f"{missing} must be given where the other one of the SWA pair is")
    if t.swa_slot_map is not None:
        _require_sizes(t, swa_slot_map=(None,), swa_page_table=tuple(t.page_table.shape))
        if (stride := row_stride(t.swa_page_table)) != (other := row_stride(t.page_table)):
            raise ValueError(
                f"swa_page_table must be laid out as page_table, rows {other} words apart, "
                f"got {stride}"
            )
    columns = t.page_table.shape[1]
    because = f"page_table has {columns} columns"
    bounds = _require_page_numbers(t, page_size, (seq_len_delta, max_pages), columns, because)
    require_one_device(t._asdict())
    # Without a delta int32 lengths are written as they are: who reads them meanwhile sees the same.
    added = seq_len_delta if t.seq_lens.dtype == torch.int32 else None
    return EveryCall(bounds, (_require_apart(t, "seq_lens", "cache_seqlens", added),))


def require_kv_indices(
    t: PageArrays, page_size: int, seq_len_delta: int, max_pages: int
) -> EveryCall:
    """Raise unless these are arguments of `build_kv_indices`."""
    batch = _require_requests(t)
    sums = (batch + 1,)
    _require_sizes(t, kv_indptr=sums, kv_indices=(None,))
    read = [name for name in ("seq_lens", "kv_start") if getattr(t, name) is not None]
    written = [n for n in ("kv_indptr", "kv_last_page_len") if getattr(t, n) is not None]
    _require_sizes(t, **dict.fromkeys([*read[1:], *written[1:]], (batch,)))
    room, because = INT32_MAX // max(1, batch), f"int32 counts the pages of {batch} requests"
    bounds = _require_page_numbers(t, page_size, (seq_len_delta, max_pages), room, because)
    require_one_device(t._asdict())
    return EveryCall(bounds, tuple(_require_apart(t, *pair) for pair in product(read, written)))


def require_one_device(tensors: dict[str, torch.Tensor | None]) -> None:
    """Raise unless all tensors, or those that are given, are on the first one's device."""
    first, device = next((name, t.device) for name, t in tensors.items() if t is not None)
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} must be on {first}'s device {device}, got {tensor.device}")


def _require_sizes(bundle: Any, **sizes: tuple[int | None, ...]) -> None:
    for name, size in sizes.items():
        tensor = getattr(bundle, name)
        dtypes = ("int32", "int64") if name in IN_EITHER else ("int32",)
        in_rows = name in IN_ROWS and _lies_in_rows(tensor)
        require_tensor(name, tensor, size, *dtypes, contiguous=not in_rows)


def row_stride(tensor: torch.Tensor) -> int:
    """Words from a row of a tensor in rows to the next: its width, unless columns were cut off."""
    return tensor.stride(0) if len(tensor) > 1 else tensor.shape[1]


def _lies_in_rows(tensor: Any) -> bool:
    """Whether each row is contiguous, and no row begins in another one."""
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 2:
        return False
    (rows, columns), (down, along) = tensor.shape, tensor.stride()
    return (along == 1 or columns < 2) and (down >= columns or rows < 2)


def _require_requests(t: StepTensors | PageArrays) -> int:
    """Check what the builders of page tables read from; the batch size."""
    _require_sizes(t, seq_lens=(None,))
    batch = t.seq_lens.shape[0]
    _require_sizes(t, req_pool_indices=(batch,), req_to_token=(None, None))
    return batch


def _require_page_numbers(
    t: StepTensors | PageArrays, page_size: int, numbers: tuple[int, int], room: int, because: str
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Check page size, length delta and `max_pages`: there must be `room` for so many pages, and
    `req_to_token` must hold their first tokens. Returns the values that both numbers may have."""
    seq_len_delta, max_pages = numbers
    require_page_size(page_size)
    require_int("seq_len_delta", seq_len_delta, least=0)
    require_int("max_pages", max_pages, least=0)
    max_ctx = t.req_to_token.shape[1]
    reachable = min(room, -(-max_ctx // page_size))
    if max_pages > reachable:
        raise ValueError(
            f"max_pages must be <= {reachable} ({because}, req_to_token "
            f"{max_ctx} tokens a request, page_size {page_size}), got {max_pages}"
        )
    return (0, INT32_MAX), (0, reachable)


def _require_apart(
    bundle: Any, source: str, target: str, delta: int | None = None
) -> tuple[int, int, bool]:
    """Raise if an output is its own input, unless it is that and 0 is added; a pair of `apart`."""
    read, written = getattr(bundle, source), getattr(bundle, target)
    if delta != 0 and read.numel() and read.data_ptr() == written.data_ptr():
        raise ValueError(f"{target} must not share memory with {source}, both start at one address")
    return bundle._fields.index(source), bundle._fields.index(target), delta is not None
