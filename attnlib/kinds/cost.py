"""What a call must cost, counted before it is measured: `decode_cost` and its like.

`kv_bytes` reads every K and V element once, `io_bytes` adds query, output and indices: the least a
kernel can move. `flops` are those of QK^T and PV, useful ones only.

FlashInfer's fa3 decode, predicted from its schedule (scheduler.cuh, the same in 0.6.3 and 0.7.2):
one work item per request and query head, in tiles of 128 query rows of which decode fills one, no
split of the KV axis. Items go to the SM with the least cost so far, heads outermost, each head's
requests longest first. Query heads of a KV head that run at once share one read of its cache, later
ones read it again. Rates are those measured on the same GPU; no constant is fitted.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from ..core.gpu import FETCH_BYTES, SECTOR_BYTES
from ..core.spec import CUSTOM_MASKS, ELEMENT_BYTES, LATENT_DIM, MLA_HEAD_DIM, AttnSpec
from .decode.case import DecodeCase
from .extend.case import ExtendCase
from .lengths import sample_drafts, sample_extend_lens, sample_seq_lens
from .metadata.case import MetadataCase
from .mla.case import MlaCase

FA2_TILES = ((64, 128), (16, 64), (0, 16))
"""(packed query rows, tile): more rows than the first take the second; FA2DetermineCtaTileQ."""
FA2_WIDE_TILE_BELOW = 256
"""head_dim from which fa2 has no tile of 128 rows."""
INT32_BYTES = 4
FA3_TILES = {64: (192, 96), 128: (128, 96), 256: (128, 32)}
"""(query rows, KV tokens) of a tile of FlashInfer's fa3 by head_dim: prefill_sm90.cuh."""


@dataclass(frozen=True)
class Ceilings:
    """Rates measured on one GPU: copy (read + write) and read in GB/s, bf16 matmul in TFLOP/s.

    `launch_us` is what an empty kernel costs in a graph, `gather_per_us` the words that a bare
    strided gather fetches in a microsecond. NaN where a study did not measure one.
    """

    copy_gbps: float
    matmul_tflops: float
    num_sms: int
    read_gbps: float = float("nan")
    launch_us: float = float("nan")
    gather_per_us: float = float("nan")


@dataclass(frozen=True)
class DecodeCost:
    """Bytes and useful FLOPs of one attention call."""

    kv_bytes: int
    io_bytes: int
    flops: int

    def floor_us(self, ceilings: Ceilings) -> float:
        """Microseconds the bytes take at the measured copy bandwidth."""
        return self.io_bytes / (ceilings.copy_gbps * 1e3)


@dataclass(frozen=True)
class Fa3Prediction:
    """What FlashInfer's fa3 decode schedule implies for a case, before any measurement."""

    work_items: int
    busy_sms: int
    kv_reads: int
    tensor_us: float
    traffic_us: float

    @property
    def run_us(self) -> float:
        """The longer of padded tensor-core work and reads from memory."""
        return max(self.tensor_us, self.traffic_us)


def decode_cost(case: DecodeCase) -> DecodeCost:
    """Bytes and useful FLOPs of `case`, from its lengths: of the tokens that a window leaves."""
    spec, seq_lens = case.spec, sample_seq_lens(case)
    hidden = np.maximum(seq_lens - spec.window, 0) if spec.window else 0 * seq_lens
    tokens = int((seq_lens - hidden).sum())
    kv_bytes = 2 * ELEMENT_BYTES[spec.kv_dtype] * spec.head_dim * spec.num_kv_heads * tokens
    rows = case.batch_size * spec.num_qo_heads * spec.head_dim
    qo_bytes = rows * (ELEMENT_BYTES[spec.dtype] + ELEMENT_BYTES[spec.out_dtype])
    pages = -(-seq_lens // spec.page_size) - hidden // spec.page_size
    index_bytes = INT32_BYTES * int(pages.sum())
    flops = 4 * spec.head_dim * spec.num_qo_heads * tokens
    return DecodeCost(kv_bytes, kv_bytes + qo_bytes + index_bytes, flops)


def extend_cost(case: ExtendCase) -> DecodeCost:
    """Bytes and useful FLOPs of a call with several queries per request.

    FLOPs are those of the (query, token) pairs that the mask lets through. A custom mask is read
    once, a bit a pair; K and V that are not paged have no page-table entries.
    """
    spec, custom_bytes = case.spec, 0
    q_lens, kv_lens = (lens.astype(np.int64) for lens in sample_extend_lens(case))
    pairs = int((q_lens * kv_lens).sum())
    if case.mask in CUSTOM_MASKS:
        custom_bytes = int((-(-q_lens * kv_lens // 8)).sum())
        pairs -= int((~sample_drafts(case)).sum())
    elif case.mask == "causal":
        pairs -= int((q_lens * (q_lens - 1) // 2).sum())
    width = ELEMENT_BYTES[spec.kv_dtype] * spec.head_dim * spec.num_kv_heads
    kv_bytes = 2 * width * int(kv_lens.sum())
    rows = int(q_lens.sum()) * spec.num_qo_heads * spec.head_dim
    qo_bytes = rows * (ELEMENT_BYTES[spec.dtype] + ELEMENT_BYTES[spec.out_dtype])
    pages = 0 if case.ragged else int((-(-kv_lens // spec.page_size)).sum())
    io_bytes = kv_bytes + qo_bytes + INT32_BYTES * pages + custom_bytes
    return DecodeCost(kv_bytes, io_bytes, 4 * spec.head_dim * spec.num_qo_heads * pairs)


def mla_cost(case: MlaCase) -> DecodeCost:
    """Bytes and useful FLOPs of one MLA call: each attended token once, for all heads together.

    A dense call reads its page-table entries, a sparse one an index for each of `top_k` columns.
    """
    spec, seq_lens = case.spec, sample_seq_lens(case).astype(np.int64)
    tokens = int((np.minimum(seq_lens, spec.top_k) if spec.top_k else seq_lens).sum())
    indices = case.batch_size * spec.top_k or int((-(-seq_lens // spec.page_size)).sum())
    width = MLA_HEAD_DIM + LATENT_DIM
    kv_bytes = spec.token_bytes * tokens
    qo_bytes = ELEMENT_BYTES["bfloat16"] * case.batch_size * spec.num_qo_heads * width
    flops = 2 * spec.num_qo_heads * width * tokens
    return DecodeCost(kv_bytes, kv_bytes + qo_bytes + INT32_BYTES * indices, flops)


def mla_cache_bytes(case: MlaCase) -> int:
    """Bytes of the whole cache of a case, pages and all: what memory holds, not what is read."""
    pages = -(-sample_seq_lens(case).astype(np.int64) // case.spec.page_size)
    return int(pages.sum()) * case.spec.page_size * case.spec.token_bytes


def predict_fa3(case: DecodeCase, ceilings: Ceilings) -> Fa3Prediction:
    """Busy SMs, reads of the cache and time of FlashInfer's fa3 decode, from its schedule alone."""
    spec, seq_lens = case.spec, sample_seq_lens(case)
    items = case.batch_size * spec.num_qo_heads
    tokens = fa3_sm_tokens(seq_lens, spec, num_sms=ceilings.num_sms)
    tile_rows, _ = FA3_TILES[spec.head_dim]
    flops_per_us = ceilings.matmul_tflops * 1e6 / ceilings.num_sms
    tensor_us = 4 * spec.head_dim * tile_rows * int(tokens.max()) / flops_per_us
    kv_reads = -(-spec.group_size // max(1, ceilings.num_sms // case.batch_size))
    return Fa3Prediction(
        work_items=items,
        busy_sms=min(ceilings.num_sms, items),
        kv_reads=kv_reads,
        tensor_us=tensor_us,
        traffic_us=decode_cost(case).kv_bytes * kv_reads / (ceilings.copy_gbps * 1e3),
    )


def fa3_sm_tokens(seq_lens: np.ndarray, spec: AttnSpec, *, num_sms: int) -> np.ndarray:
    """KV tokens in whole tiles that FlashInfer's fa3 plan gives each SM: [num_sms].

    PrefillSM90Plan: the heads are the outer loop, each head's longest request comes first, and each
    item goes to the SM with the least cost, 2 tile rows + KV length per item.
    """
    if spec.head_dim not in FA3_TILES:
        raise ValueError(f"head_dim must be one of {[*FA3_TILES]}, got {spec.head_dim}")
    tile_rows, tile_tokens = FA3_TILES[spec.head_dim]
    heap = [(0, sm) for sm in range(num_sms)]
    tokens = np.zeros(num_sms, np.int64)
    for length in sorted(seq_lens.tolist(), reverse=True) * spec.num_qo_heads:
        cost, sm = heapq.heappop(heap)
        heapq.heappush(heap, (cost + 2 * tile_rows + length, sm))
        tokens[sm] += -(-length // tile_tokens) * tile_tokens
    return tokens


def fa2_tile_rows(case: ExtendCase, *, cuda_graph: bool) -> int:
    """Query rows of the tiles that FlashInfer's fa2 plan (0.6.4) cuts for a call.

    Query heads of a group are rows of one tile. Eager plans go by the mean over requests; a plan
    for a CUDA graph by the most that one request could have, all rows but one for each other.
    """
    q_lens, _ = sample_extend_lens(case)
    longest = q_lens.sum() - len(q_lens) + 1 if cuda_graph else q_lens.mean()
    packed = int(longest * case.spec.group_size)
    wide = case.spec.head_dim < FA2_WIDE_TILE_BELOW
    return next(tile for above, tile in FA2_TILES if packed > above and (wide or tile < 128))


@dataclass(frozen=True)
class MetadataCost:
    """Bytes of one decode step's metadata: what it needs, and what memory moves for it.

    A page's word lies page_size words after its neighbour's: from 8 on each costs a sector of its
    own, from 16 on a memory fetch.
    """

    words: int
    needed_bytes: int
    sector_bytes: int
    fetch_bytes: int


def metadata_cost(case: MetadataCase) -> MetadataCost:
    """Bytes of a step's metadata: live words gathered and stored, lengths read and written.

    A window's table counts as stored; the map of its slots, as it is read, does not.
    """
    pages = -(-sample_seq_lens(case).astype(np.int64) // case.page_size)
    words = int(pages.sum())
    rest = INT32_BYTES * words * (2 if case.swa else 1) + case.batch_size * (16 + 2 * INT32_BYTES)

    def gathered(granule: int) -> int:
        span = (pages - 1) * case.page_size * INT32_BYTES + INT32_BYTES
        return int(np.minimum(-(-span // granule), pages).sum()) * granule

    return MetadataCost(
        words=words,
        needed_bytes=rest + INT32_BYTES * words,
        sector_bytes=rest + gathered(SECTOR_BYTES),
        fetch_bytes=rest + gathered(FETCH_BYTES),
    )
