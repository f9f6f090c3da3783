"""Inputs of the metadata builders, seeded; outputs poisoned, so that a word left alone shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attnlib.kinds.metadata import oracle

POISON = -77
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    """One call: sizes, and what is unusual about it."""

    batch: int
    max_seq_len: int
    page_size: int = 1
    delta: int = 0
    swa: bool = False
    lens_dtype: torch.dtype = torch.int64
    rows_dtype: torch.dtype = torch.int32
    extra_columns: int = 10
    extra_tokens: int = 8
    holes: bool = False
    shuffled: bool = True
    seed: int = 0

    @property
    def max_pages(self) -> int:
        """Columns for the longest request."""
        return -(-(self.max_seq_len + self.delta) // self.page_size)


def arguments(shape: Shape, lens: list[int] | None = None) -> dict[str, Any]:
    """Keyword arguments of `build_decode_metadata` for `shape`, on the device under test."""
    rng = np.random.default_rng(shape.seed)
    low = max(0, shape.max_seq_len // 2)
    lens = lens or rng.integers(low, shape.max_seq_len + 1, shape.batch).tolist()
    width = shape.max_pages * shape.page_size + shape.extra_tokens
    pool_rows = shape.batch + 3
    slots = rng.integers(0, 10_000, (pool_rows, width))
    if shape.holes:
        slots[rng.random(slots.shape) < 0.2] = -1
    rows = rng.permutation(pool_rows) if shape.shuffled else np.arange(pool_rows)
    table = (shape.batch, shape.max_pages + shape.extra_columns)
    given = {
        "seq_lens": torch.tensor(lens, dtype=shape.lens_dtype),
        "req_pool_indices": torch.tensor(rows[: shape.batch], dtype=shape.rows_dtype),
        "req_to_token": torch.tensor(slots, dtype=torch.int32),
        "cache_seqlens": torch.full((shape.batch,), POISON, dtype=torch.int32),
        "cu_seqlens_k": torch.full((shape.batch + 1,), POISON, dtype=torch.int32),
        "page_table": torch.full(table, POISON, dtype=torch.int32),
    }
    if shape.swa:
        slot_map = np.append(rng.integers(0, 10_000, 10_000), -1)
        given["swa_slot_map"] = torch.tensor(slot_map, dtype=torch.int32)
        given["swa_page_table"] = torch.full(table, POISON, dtype=torch.int32)
    numbers = {"page_size": shape.page_size, "max_pages": shape.max_pages}
    tensors = {name: tensor.to(DEVICE) for name, tensor in given.items()}
    return {**tensors, **numbers, "seq_len_delta": shape.delta}


def assert_right(call: dict[str, Any], *, all_columns: bool = False) -> None:
    """Every word of the outputs of `call`: the oracle's where live, poison everywhere else.

    With `all_columns`, only the live words are compared: the baseline fills the others.
    """
    have = {k: v.cpu().numpy() if torch.is_tensor(v) else v for k, v in call.items()}
    cache_seqlens, cu_seqlens_k, full, swa = oracle.decode_metadata(
        have["seq_lens"],
        have["req_pool_indices"],
        have["req_to_token"],
        page_size=have["page_size"],
        max_pages=have["max_pages"],
        seq_len_delta=have["seq_len_delta"],
        swa_slot_map=have.get("swa_slot_map"),
    )
    np.testing.assert_array_equal(have["cache_seqlens"], cache_seqlens)
    np.testing.assert_array_equal(have["cu_seqlens_k"], cu_seqlens_k)
    tables = {"page_table": full} | ({"swa_page_table": swa} if swa else {})
    for name, rows in tables.items():
        for row, pages in zip(have[name], rows, strict=True):
            np.testing.assert_array_equal(row[: len(pages)], pages, err_msg=name)
            if not all_columns:
                assert (row[len(pages) :] == POISON).all(), f"{name}: a tail was written"


def upstream_shapes() -> dict[str, Shape]:
    """The configurations of the sixteen tests that came with SGLang's fused kernel."""
    plain = Shape(1, 1, shuffled=False)
    sizes = {
        "page_size_1_small": (2, 128, 1),
        "page_size_1_medium": (16, 256, 1),
        "page_size_1_large": (64, 512, 1),
        "page_size_1_with_seq_len_delta": (8, 200, 1, 5),
        "page_size_16_small": (4, 256, 16),
        "page_size_16_medium": (16, 512, 16),
        "page_size_64_small": (4, 512, 64),
        "page_size_64_medium": (32, 1024, 64),
        "page_size_64_with_delta": (8, 512, 64, 3),
        "page_size_16_with_swa": (8, 256, 16, 0, True),
        "page_size_64_with_swa": (16, 512, 64, 0, True),
        "page_size_64_with_swa_and_delta": (8, 400, 64, 2, True),
        "batch_size_1": (1, 128, 1),
        "batch_size_1_page_size_64": (1, 256, 64),
        "max_seq_pages_small": (2, 10, 64),
        "varied_sequence_lengths": (8, 512, 64),
    }
    sizes |= {f"page_size_{2**n}": (4, 256, 2**n) for n in range(8)}
    fields = ("batch", "max_seq_len", "page_size", "delta", "swa")
    return {
        name: replace(plain, **dict(zip(fields, size, strict=False)))
        for name, size in sizes.items()
    }


MISSED = {
    "page_size_1_with_swa": Shape(8, 300, 1, swa=True),
    "int32_lengths_and_int64_rows": Shape(9, 70, 4, lens_dtype=torch.int32, rows_dtype=torch.int64),
    "slots_of_minus_one": Shape(5, 90, 4, swa=True, holes=True),
    "slots_of_minus_one_page_size_1": Shape(5, 90, 1, swa=True, holes=True),
    "odd_widths": Shape(3, 37, 1, extra_columns=1, extra_tokens=2),
    "widths_of_one_vector": Shape(3, 36, 1, extra_columns=0, extra_tokens=0),
    "odd_widths_swa": Shape(3, 75, 2, swa=True, extra_columns=1, extra_tokens=1),
    "several_blocks": Shape(3, 2900, 1),
    "several_turns": Shape(2, 1024 * 2 * 300, 1, extra_columns=0),
    "delta_beyond_a_page": Shape(4, 50, 8, delta=21),
    "page_size_256": Shape(4, 1000, 256),
    "batch_beyond_one_scan": Shape(4100, 3, 1, extra_columns=0),
}
"""What the sixteen leave out."""


def kv_arguments(
    shape: Shape, lens: list[int] | None = None, capacity: int | None = None
) -> dict[str, Any]:
    """Keyword arguments of `build_kv_indices`; by default with room for `extra_columns` more."""
    call = arguments(replace(shape, swa=False), lens)
    sizes = {
        "kv_indptr": shape.batch + 1,
        "kv_indices": shape.batch * shape.max_pages + shape.extra_columns
        if capacity is None
        else capacity,
        "kv_last_page_len": shape.batch,
    }
    for name in ("cache_seqlens", "cu_seqlens_k", "page_table"):
        del call[name]
    for name, size in sizes.items():
        call[name] = torch.full((size,), POISON, dtype=torch.int32, device=DEVICE)
    return call


def poison(call: dict[str, Any], names: tuple[str, ...]) -> None:
    """Fill these outputs of `call` with poison."""
    for name in names:
        call[name].fill_(POISON)


def assert_kv_right(call: dict[str, Any]) -> None:
    """Every word of the three arrays: the oracle's where live and within, poison after."""
    have = {k: v.cpu().numpy() if torch.is_tensor(v) else v for k, v in call.items()}
    kv_indptr, pages, last_page_len = oracle.kv_indices(
        have["seq_lens"],
        have["req_pool_indices"],
        have["req_to_token"],
        page_size=have["page_size"],
        max_pages=have["max_pages"],
        seq_len_delta=have["seq_len_delta"],
    )
    np.testing.assert_array_equal(have["kv_indptr"], kv_indptr)
    np.testing.assert_array_equal(have["kv_last_page_len"], last_page_len)
    written = have["kv_indices"][: len(pages)]
    np.testing.assert_array_equal(written, pages[: len(written)])
    assert (have["kv_indices"][len(pages) :] == POISON).all(), "words past the end were written"
