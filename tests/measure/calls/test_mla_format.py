"""The 656-byte token: where its bytes lie, what is exact, how far a value is off."""

import struct

import pytest
import torch

from attnlib.measure.calls.mla.format import (
    TILE,
    TILES,
    dequantize,
    quantize,
    tile_scales,
)

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = E4M3[torch.isfinite(E4M3.float())]
POSITIVE_BFLOAT16 = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)


def tokens(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, 576, generator=generator).bfloat16()


def test_the_bytes_lie_where_the_format_says():
    token = tokens(seed=1)
    token[:4] = torch.tensor([448.0, 1.0, -2.0, 0.0])
    token[4:128] = 0
    token[512:514] = torch.tensor([1.0, -3.0])
    packed = bytes(quantize(token).tolist())
    assert len(packed) == 656
    assert packed[:4] == bytes([0x7E, 0x38, 0xC0, 0x00])
    assert struct.unpack("<4f", packed[512:528])[0] == 1.0
    assert packed[528:532] == bytes([0x80, 0x3F, 0x40, 0xC0])


@pytest.mark.parametrize("exponent", [-13, -3, 0, 1, 7, 20])
def test_every_e4m3_value_at_every_scale_survives_the_round_trip(exponent):
    latent = FINITE.float().repeat(3)[: TILES * TILE].view(TILES, TILE)
    latent[:, 0] = 448  # a tile's largest value decides its scale
    latent = latent.flatten() * 2.0**exponent
    token = torch.cat([latent, torch.zeros(64)]).bfloat16()
    again = dequantize(quantize(token))
    assert torch.equal(again[:512].float(), latent)


def test_the_rotary_part_is_kept_to_the_bit_whatever_it_holds():
    bits = (
        torch.arange(
            -(2**15),
            2**15,
            dtype=torch.int32,
        )
        .short()
        .view(-1, 64)
    )
    token = torch.zeros(len(bits), 576, dtype=torch.bfloat16)
    token[:, 512:] = bits.view(torch.bfloat16)
    rotary = dequantize(quantize(token))[:, 512:]
    assert torch.equal(rotary.view(torch.int16), bits)


def test_every_scale_is_the_least_power_of_two_that_fits_or_the_floor():
    largest = POSITIVE_BFLOAT16.float()
    scales = tile_scales(largest)
    fraction, _ = torch.frexp(scales)
    assert bool((fraction == 0.5).all())
    assert bool((largest / scales <= 448).all())
    above = scales > 2.0**-13
    assert bool((largest[above].double() / (scales[above].double() / 2) > 448).all())
    assert scales.min() == 2.0**-13
