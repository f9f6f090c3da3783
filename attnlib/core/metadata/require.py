"""What the metadata builders accept, and the one clear error for everything else.

Checked on the host, before anything is launched, from shapes, dtypes, strides and devices alone: a
value on the GPU cannot be looked at without waiting for it. What the kernels do about values out of
range stands in their docstrings; none of them reads or writes outside a tensor because of one.
"""

from __future__ import annotations

from typing import Any

import torch

INT32 = (torch.int32,)
INTEGERS = (torch.int32, torch.int64)
MAX_INT32 = 2**31 - 1


def signature(tensors: tuple[Any, ...], page_size: Any) -> tuple[Any, ...] | None:
    """All of a call that the checks on tensors look at, but values and addresses; hashable.

    None where something cannot be right (no tensor, holes, several devices), and off CUDA devices:
    then there is nothing to remember. Short, because every step that no graph replays makes it.
    """
    parts = [type(page_size), page_size]
    say = parts.append
    try:
        device = tensors[0].get_device()
        say(device)
        for tensor in tensors:
            if tensor is None:
                say(None)
                continue
            if not tensor.is_contiguous() or tensor.get_device() != device:
                return None
            say(tensor.shape)
            say(tensor.dtype)
    except AttributeError:
        return None
    return tuple(parts) if device >= 0 else None


def require_tensor(
    name: str, tensor: object, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise unless `tensor` has this shape (None: any size), one of `dtypes`, no holes."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    sizes = tuple(tensor.shape)
    fits = len(sizes) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, sizes, strict=True)
    )
    if tensor.dtype not in dtypes or not fits:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        form = ", ".join("any" if size is None else str(size) for size in shape)
        got = f"[{', '.join(map(str, sizes))}] {str(tensor.dtype).removeprefix('torch.')}"
        raise ValueError(f"{name} must be [{form}] {wanted}, got {got}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous (a copy would not be the caller's buffer), "
            f"got strides {tensor.stride()} for shape {sizes}"
        )


def require_one_device(tensors: dict[str, torch.Tensor]) -> None:
    """Raise unless all tensors are on the same device."""
    first, device = next((name, tensor.device) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} must be on {first}'s device {device}, got {tensor.device}")


def require_int(name: str, value: object, low: int, high: int = MAX_INT32) -> None:
    """Raise unless `value` is an int in low..high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in {low}..{high}, got {value!r}")


def require_page_size(page_size: object) -> None:
    """Raise unless `page_size` is a power of two."""
    require_int("page_size", page_size, 1)
    if page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, got {page_size}")


def require_apart(source: str, sources: torch.Tensor, target: str, targets: torch.Tensor) -> None:
    """Raise if an output is its own input: other programs still read what one has written."""
    if sources.numel() and sources.data_ptr() == targets.data_ptr():
        raise ValueError(f"{target} must not share memory with {source}, both start at one address")


def require_rows(
    seq_lens: torch.Tensor, req_pool_indices: torch.Tensor, req_to_token: torch.Tensor
) -> int:
    """Check what every builder reads from; the batch size."""
    require_tensor("seq_lens", seq_lens, (None,), INTEGERS)
    batch = seq_lens.shape[0]
    require_tensor("req_pool_indices", req_pool_indices, (batch,), INTEGERS)
    require_tensor("req_to_token", req_to_token, (None, None), INT32)
    return batch


def require_reachable(
    max_pages: object, page_size: int, max_ctx: int, room: int, because: str
) -> int:
    """Raise unless there is room for `max_pages` and `req_to_token` holds their first tokens.

    Returns the largest value that passes.
    """
    require_int("max_pages", max_pages, 0)
    reachable = min(room, -(-max_ctx // page_size))
    if max_pages > reachable:
        raise ValueError(
            f"max_pages must be <= {reachable} ({because}, req_to_token "
            f"{max_ctx} tokens a request, page_size {page_size}), got {max_pages}"
        )
    return reachable


def require_decode(
    *,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_pages: int,
    seq_len_delta: int,
    swa_slot_map: torch.Tensor | None,
    swa_page_table: torch.Tensor | None,
) -> int:
    """Raise ValueError or TypeError unless these are arguments of `build_decode_metadata`.

    Returns the largest `max_pages` that these tensors have room for.
    """
    batch = require_rows(seq_lens, req_pool_indices, req_to_token)
    require_tensor("cache_seqlens", cache_seqlens, (batch,), INT32)
    require_tensor("cu_seqlens_k", cu_seqlens_k, (batch + 1,), INT32)
    require_tensor("page_table", page_table, (batch, None), INT32)
    require_page_size(page_size)
    require_int("seq_len_delta", seq_len_delta, 0)
    max_ctx, columns = req_to_token.shape[1], page_table.shape[1]
    because = f"page_table has {columns} columns"
    reachable = require_reachable(max_pages, page_size, max_ctx, columns, because)
    tensors = {
        "seq_lens": seq_lens,
        "req_pool_indices": req_pool_indices,
        "req_to_token": req_to_token,
        "cache_seqlens": cache_seqlens,
        "cu_seqlens_k": cu_seqlens_k,
        "page_table": page_table,
    }
    if (swa_slot_map is None) != (swa_page_table is None):
        missing = "swa_slot_map" if swa_slot_map is None else "swa_page_table"
        raise ValueError(f"{missing} must be given where the other one of the SWA pair is")
    if swa_slot_map is not None:
        require_tensor("swa_slot_map", swa_slot_map, (None,), INT32)
        require_tensor("swa_page_table", swa_page_table, tuple(page_table.shape), INT32)
        tensors |= {"swa_slot_map": swa_slot_map, "swa_page_table": swa_page_table}
    require_one_device(tensors)
    require_apart("seq_lens", seq_lens, "cache_seqlens", cache_seqlens)
    return reachable


_CHECKED: set[tuple[Any, ...]] = set()


def require_decode_once(
    *, page_size: int, max_pages: int, seq_len_delta: int, **tensors: torch.Tensor | None
) -> None:
    """`require_decode`, for a signature and these numbers once: rivals are timed without it."""
    form = signature(tuple(tensors.values()), page_size)
    lens, out = tensors["seq_lens"], tensors["cache_seqlens"]
    key = (form, type(max_pages), max_pages, type(seq_len_delta), seq_len_delta)
    if form is None or key not in _CHECKED or lens.data_ptr() == out.data_ptr():
        numbers = {"max_pages": max_pages, "seq_len_delta": seq_len_delta}
        require_decode(**tensors, page_size=page_size, **numbers)
        if form is not None:
            _CHECKED.add(key)


def require_kv_indices(
    *,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    page_size: int,
    max_pages: int,
    seq_len_delta: int,
) -> int:
    """Raise ValueError or TypeError unless these are arguments of `build_kv_indices`.

    Returns the largest `max_pages` that these tensors have room for.
    """
    batch = require_rows(seq_lens, req_pool_indices, req_to_token)
    require_tensor("kv_indptr", kv_indptr, (batch + 1,), INT32)
    require_tensor("kv_indices", kv_indices, (None,), INT32)
    require_tensor("kv_last_page_len", kv_last_page_len, (batch,), INT32)
    require_page_size(page_size)
    require_int("seq_len_delta", seq_len_delta, 0)
    because = f"int32 counts the pages of {batch} requests"
    max_ctx, room = req_to_token.shape[1], MAX_INT32 // max(1, batch)
    reachable = require_reachable(max_pages, page_size, max_ctx, room, because)
    require_one_device(
        {
            "seq_lens": seq_lens,
            "req_pool_indices": req_pool_indices,
            "req_to_token": req_to_token,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_last_page_len": kv_last_page_len,
        }
    )
    require_apart("seq_lens", seq_lens, "kv_indptr", kv_indptr)
    require_apart("seq_lens", seq_lens, "kv_last_page_len", kv_last_page_len)
    return reachable


def require_vector(name: str, tensor: torch.Tensor, length: int) -> None:
    """Raise unless `tensor` is [length] int32, contiguous."""
    if tensor.shape != (length,) or tensor.dtype != torch.int32 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be [{length}] int32, contiguous, got {list(tensor.shape)} "
            f"{tensor.dtype}{'' if tensor.is_contiguous() else ', not contiguous'}"
        )


def require_room(out: torch.Tensor, size: int, device: torch.device) -> None:
    """Raise unless `out` is a contiguous buffer of at least `size` int32 on `device`."""
    if out.ndim != 1 or out.dtype != torch.int32 or not out.is_contiguous() or len(out) < size:
        raise ValueError(
            f"out must be [>= {size}] int32, contiguous, got {list(out.shape)} {out.dtype}"
            f"{'' if out.is_contiguous() else ', not contiguous'}"
        )
    if out.device != device:
        raise ValueError(f"out must be on the device of seq_lens, {device}, got {out.device}")
