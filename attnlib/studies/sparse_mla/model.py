"""What an MLA call must take at least, and which tokens of a cache 32-bit offsets reach.

Bytes are read once at the measured bandwidth; FLOPs run at the bf16 matmul rate, for FP8 caches
too: their tokens become bfloat16 before they are multiplied. Heads are rounded up to tiles of 64
query rows: `cta_tile_q` in FlashInfer's MLAPlan (scheduler.cuh), and the least number of heads of
FlashMLA's sparse kernel.

FlashInfer before pull request #3136 computed `index * page_stride` of an int32 and a uint32
(mla.cuh, mla_hopper.cuh). The product wraps at 2^32, so in a cache whose tokens are 576 elements
apart the kernel reads other tokens from `first_lost_token` on.
"""

from dataclasses import dataclass

from ...core.spec import MLA_HEAD_DIM
from ...kinds.cost import Ceilings, mla_cache_bytes, mla_cost
from ...kinds.mla.case import MlaCase

TILE_ROWS = 64
OFFSETS = 2**32


@dataclass(frozen=True)
class MlaPrediction:
    """Microseconds that bytes and padded matrix products take at least, each by itself."""

    memory_us: float
    tensor_us: float

    @property
    def bound_us(self) -> float:
        """The longer of the two: no kernel that pads so can be faster."""
        return max(self.memory_us, self.tensor_us)


def predict_mla(case: MlaCase, ceilings: Ceilings) -> MlaPrediction:
    """The bounds of one call of `case` on the GPU that `ceilings` were measured on."""
    return MlaPrediction(
        memory_us=mla_cost(case).io_bytes / (ceilings.read_gbps * 1e3),
        tensor_us=padded_flops(case) / (ceilings.matmul_tflops * 1e6),
    )


def padded_flops(case: MlaCase) -> float:
    """FLOPs of a call with its heads rounded up to whole tiles."""
    heads = case.spec.num_qo_heads
    return mla_cost(case).flops / heads * -(-heads // TILE_ROWS) * TILE_ROWS


def pool_tokens(case: MlaCase) -> int:
    """Tokens of the whole cache of a case, whole pages."""
    return mla_cache_bytes(case) // case.spec.token_bytes


def first_lost_token() -> int:
    """The first token of a bfloat16 cache whose offset in elements does not fit 32 bits."""
    return -(-OFFSETS // MLA_HEAD_DIM)


def lost_share(case: MlaCase) -> float:
    """Share of the cache's tokens that 32-bit offsets take for others, 0 to 1.

    Pages are shuffled over the whole cache, so it is also the share of a request's tokens.
    """
    tokens = pool_tokens(case)
    return max(0, tokens - first_lost_token()) / tokens
