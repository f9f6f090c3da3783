"""Tile sizes of FlashAttention-3's forward kernels on compute capability 9.0.

`block_m` is query rows (query heads of a group packed in, where they are packed), `block_n` is KV
tokens. The table is that of hopper/tile_size.h, the head dims those of hopper/flash_api.cpp, since
2025-08; `paged_gather` is a paged cache that is gathered by address instead of loaded by TMA.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIMS = (64, 96, 128, 192, 256)
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class TileTraits:
    """What the tile depends on: rounded head dims, element bytes, mask, and how KV is read."""

    head_dim: int
    head_dim_v: int
    element_bytes: int
    causal: bool
    local: bool
    paged_gather: bool
    softcap: bool


def round_head_dim(head_dim: int, *, hdim96: bool) -> int:
    """The compiled head_dim that serves `head_dim`; without `hdim96` the build has no 96."""
    compiled = (dim for dim in HEAD_DIMS if dim >= head_dim and (hdim96 or dim != 96))
    return next(compiled, MAX_HEAD_DIM)


def round_head_dim_v(head_dim_v: int) -> int:
    """The same for V where its head_dim differs from K's; 512 is the largest."""
    return next((dim for dim in HEAD_DIMS if dim >= head_dim_v), 512)


def tile_size(traits: TileTraits) -> tuple[int, int]:
    """(block_m, block_n) of the kernel for `traits`."""
    return _tile_fp8(traits) if traits.element_bytes == 1 else _tile_16_bit(traits)


def _tile_16_bit(t: TileTraits) -> tuple[int, int]:
    short = t.causal or t.local or t.paged_gather
    if t.head_dim <= 64:
        wide_v = {512: (64, 64), 256: (128, 96)}
        return wide_v.get(t.head_dim_v, (192, 128 if short else 192))
    if t.head_dim <= 96:
        return 192, 128 if t.local or t.paged_gather else 144
    if t.head_dim <= 128:
        return 128, 128 if short else 176
    if t.head_dim <= 192:
        plain = 128 if t.head_dim_v <= 128 else 112
        return 128, 96 if t.local or t.paged_gather else plain
    return 128, 64 if t.local else 80


def _tile_fp8(t: TileTraits) -> tuple[int, int]:
    if t.head_dim <= 64:
        return 192, 160
    if t.head_dim <= 96:
        return 192, 128
    if t.head_dim <= 128:
        plain = 192 if t.softcap and t.local else 224
        return 128, 160 if t.paged_gather else plain
    if t.head_dim <= 192:
        return 128, 128 if t.local and (t.paged_gather or t.softcap) else 160
    return 128, 64 if t.local else 128
