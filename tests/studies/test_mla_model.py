"""The model of MLA calls: bounds counted by hand, and 32-bit offsets computed in 32 bits."""

from dataclasses import replace

import numpy as np
import pytest

from attnlib.core.spec import MlaSpec
from attnlib.kinds.cost import Ceilings
from attnlib.kinds.mla.case import MlaCase
from attnlib.studies.sparse_mla import first_lost_token, lost_share, pool_tokens
from attnlib.studies.sparse_mla.model import padded_flops, predict_mla

# 1,000 bytes and 1,000,000 FLOPs a microsecond.
CEILINGS = Ceilings(copy_gbps=9.0, matmul_tflops=1.0, num_sms=1, read_gbps=1.0)
CASE = MlaCase(MlaSpec(16, top_k=100), batch_size=2, kv_len=1000)


def test_bytes_and_products_are_those_counted_by_hand():
    found = predict_mla(CASE, CEILINGS)
    read = 2 * 100 * 1152 + 2 * 16 * 2 * (576 + 512) + 2 * 100 * 4  # tokens, q and out, indices
    assert found.memory_us == pytest.approx(read / 1000)
    # QK^T over 576 values and PV over 512, of a tile of 64 rows for 16 heads.
    assert found.tensor_us == pytest.approx(2 * 100 * 64 * 2 * (576 + 512) / 1e6)
    assert found.bound_us == found.memory_us > found.tensor_us
    fast = predict_mla(CASE, replace(CEILINGS, read_gbps=1e6))
    assert fast.bound_us == fast.tensor_us > fast.memory_us


def test_an_fp8_cache_halves_the_bytes_and_leaves_the_products():
    fp8 = replace(CASE, spec=replace(CASE.spec, kv_format="fp8-656"))
    less = predict_mla(CASE, CEILINGS).memory_us - predict_mla(fp8, CEILINGS).memory_us
    assert less == pytest.approx(2 * 100 * (1152 - 656) / 1000)
    assert padded_flops(fp8) == padded_flops(CASE)


@pytest.mark.parametrize(("heads", "rows"), [(1, 64), (64, 64), (65, 128), (128, 128)])
def test_heads_are_padded_to_whole_tiles(heads, rows):
    case = replace(CASE, spec=replace(CASE.spec, num_qo_heads=heads))
    assert padded_flops(case) == 2 * rows * (576 + 512) * 200


def test_the_first_lost_token_is_where_unsigned_32_bit_products_first_differ():
    tokens = np.arange(first_lost_token() - 3, first_lost_token() + 3, dtype=np.uint32)
    narrow = (tokens * np.uint32(576)).astype(np.uint64)
    right = tokens.astype(np.uint64) * np.uint64(576)
    assert (narrow == right).tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize(("batch", "kv_len"), [(64, 32768), (113, 65984), (256, 32768)])
def test_the_lost_share_is_that_of_all_products_in_32_bits(batch, kv_len):
    case = MlaCase(MlaSpec(16, top_k=512), batch, kv_len)
    tokens = np.arange(batch * kv_len, dtype=np.uint32)
    wide = tokens.astype(np.uint64) * np.uint64(576)
    lost = (tokens * np.uint32(576)).astype(np.uint64) != wide
    assert lost_share(case) == pytest.approx(lost.mean(), abs=1e-12)


def test_a_cache_has_whole_pages():
    assert pool_tokens(replace(CASE, kv_len=65)) == 2 * 128
