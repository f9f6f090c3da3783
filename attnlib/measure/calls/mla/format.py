"""FP8 tokens: FlashInfer's of 576 bytes, `fp8-576`, and FlashMLA's of 656, `fp8-656`.

The first is a bfloat16 token over one scale (`MLA_SCALE`, a power of two under which no drawn value
overflows), cast to float8_e4m3fn. The second is DeepSeek-V3.2's KV cache format:

| bytes | what |
|---|---|
| 0..511 | 512 latent values, float8_e4m3fn, divided by their tile's scale |
| 512..527 | 4 float32 scales, one for each tile of 128 latent values |
| 528..655 | 64 rotary values, bfloat16, as they are |

Layout: FlashMLA's README, "FP8 KV Cache". Scales are powers of two, the smallest that keeps a tile
within e4m3's 448, at least 1e-4 rounded up: FlashMLA's tests/quant.py. Its kernel rounds a scale to
bfloat16 and multiplies in that (sm90/decode/sparse_fp8/splitkv_mla.cuh), so only powers of two
are exact there. An e4m3 value has 4 significant bits and bfloat16 has 8: what `dequantize` gives is
the bfloat16 tensor that the kernel sees, to the bit.
"""

import torch

from ....core.spec import LATENT_DIM, MLA_SCALE

TILE = 128
TILES = LATENT_DIM // TILE
E4M3_MAX = 448.0
LEAST_SCALE = 1e-4

ROPE_START = LATENT_DIM + 4 * TILES


def in_format(tokens: torch.Tensor, kv_format: str) -> torch.Tensor:
    """Tokens [..., 576] bfloat16 as a cache of `kv_format` holds them."""
    if kv_format == "fp8-576":
        scaled = tokens.float() / MLA_SCALE
        return scaled.to(torch.float8_e4m3fn)
    if kv_format == "fp8-656":
        return quantize(tokens)
    return tokens


def values_of(tokens: torch.Tensor) -> torch.Tensor:
    """What a cache's tokens stand for, by its dtype: [..., 576] float64."""
    if tokens.dtype == torch.float8_e4m3fn:
        return tokens.double() * MLA_SCALE
    if tokens.dtype == torch.uint8:
        tokens = dequantize(tokens)
    return tokens.double()


def quantize(tokens: torch.Tensor) -> torch.Tensor:
    """[..., 576] bfloat16 -> [..., 656] uint8; the latent part loses precision, the rest none."""
    latent = tokens[..., :LATENT_DIM].float()
    rope = tokens[..., LATENT_DIM:].contiguous()
    tiles = latent.unflatten(-1, (TILES, TILE))
    scales = tile_scales(tiles.abs().amax(-1))
    scaled = tiles / scales[..., None]
    fp8 = scaled.flatten(-2).to(torch.float8_e4m3fn)
    parts = (fp8, scales, rope)
    packed = [part.view(torch.uint8) for part in parts]
    return torch.cat(packed, dim=-1)


def dequantize(packed: torch.Tensor) -> torch.Tensor:
    """[..., 656] uint8 -> [..., 576] bfloat16, exact where scales are powers of two."""
    latent = packed[..., :LATENT_DIM].contiguous()
    scales = packed[..., LATENT_DIM:ROPE_START].contiguous()
    rope = packed[..., ROPE_START:].contiguous()
    values = latent.view(torch.float8_e4m3fn).float()
    tiles = values.unflatten(-1, (TILES, TILE))
    scaled = tiles * scales.view(torch.float32)[..., None]
    values = scaled.flatten(-2).bfloat16()
    return torch.cat(
        [values, rope.view(torch.bfloat16)],
        dim=-1,
    )


def tile_scales(largest: torch.Tensor) -> torch.Tensor:
    """Scales float32 of tiles whose largest magnitudes are `largest` float32: powers of two."""
    least = (largest / E4M3_MAX).clamp(min=LEAST_SCALE)
    fraction, exponent = torch.frexp(least)
    is_power = fraction == 0.5
    exponent = exponent - is_power.int()
    # A power of two by its bits: pow and exp2 need not be exact on every device.
    bits = (exponent + 127) << 23
    return bits.int().view(torch.float32)
