"""The least that a call must move and compute: counted from its lengths, before it is measured.

Each case has its `cost`. A GPU's ceilings turn it into times.
"""

from dataclasses import dataclass

from ...core.spec import ELEMENT_BYTES, AttnSpec

INT32_BYTES = 4
INT64_BYTES = 8


@dataclass(frozen=True)
class Ceilings:
    """Rates measured on one GPU: copy (read + write) in GB/s, bf16 matmul in TFLOP/s.

    NaN where a study did not measure one.
    """

    copy_gbps: float
    matmul_tflops: float


@dataclass(frozen=True)
class CallCost:
    """Bytes and useful FLOPs of one attention call.

    `kv_bytes` reads every K and V element once, `io_bytes` adds query, output and indices. `flops`
    are those of QK^T and PV. `cache_bytes` is what memory holds: more than `kv_bytes` where a
    window or chosen tokens leave less to read.
    """

    kv_bytes: int
    io_bytes: int
    flops: int
    cache_bytes: int


def attention_cost(
    spec: AttnSpec,
    *,
    held: int,
    read: int,
    queries: int,
    pairs: int,
    index_bytes: int,
) -> CallCost:
    """The cost of a call over `held` cached tokens, of which it must read `read`.

    `pairs` are those of a query row and a token that it sees, of all `queries` rows.
    """
    kv_width = 2 * spec.num_kv_heads * spec.head_dim  # K and V
    token_bytes = kv_width * ELEMENT_BYTES[spec.kv_dtype]
    width = spec.num_qo_heads * spec.head_dim
    q_bytes = ELEMENT_BYTES[spec.dtype]
    out_bytes = ELEMENT_BYTES[spec.out_dtype]
    qo_bytes = queries * width * (q_bytes + out_bytes)
    return CallCost(
        kv_bytes=token_bytes * read,
        io_bytes=token_bytes * read + qo_bytes + index_bytes,
        flops=4 * width * pairs,
        cache_bytes=token_bytes * held,
    )
