"""The facts of a FlashAttention-3 call that decide its schedule, and what the host makes of them.

Metadata is right only if the call that writes it and the attention that reads it have the same
facts, since each derives tiles, packing and the split cap from its own arguments. Rules read in
hopper/flash_api.cpp, hopper/heuristics.h and hopper/tile_size.h (2025-08 and later), for compute
capability 9.0; float32 where they use float. No torch, no GPU.

Builds differ in their tiles, so a schedule is that of a build:

| build | source | tiles |
|---|---|---|
| upstream | Dao-AILab, tokenspeed-fa3, flash-attn-3 | 2 or 3 warpgroups, 128 or 192 rows |
| vllm | vllm-project/flash-attention 617264c, vLLM 0.33.0 | 64 rows for <= 64 packed, no window |
| sglang, sglang-0.4.4 | sglang-kernel | as vllm, windows too; cap by all rows since 0.4.5 |
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..spec import (
    ELEMENT_BYTES,
    INT32_MAX,
    LATENT_DIM,
    ROPE_DIM,
    AttnSpec,
    Grouped,
    MlaSpec,
    ceil_div,
    require_given,
    require_int,
    require_type,
    require_word,
)

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Head dims that kernels are compiled for; V alone may also have 512."""
MAX_SPLITS = 128
"""What the heuristic gives at most; an explicit num_splits may be larger."""
MAX_NUM_SPLITS = 255
"""The scheduler keeps a split count in 8 bits, so that 256, which the call accepts, wraps."""
L2_BYTES = 50 * 2**20
"""What the heuristic takes an L2 cache to hold, whatever the GPU has."""
FULL = (-1, -1)
BUILDS = ("upstream", "vllm", "sglang", "sglang-0.4.4")
Tile = tuple[int, int]
"""Query rows and tokens of a block."""
VLLM_FP8_TILES = {
    64: (192, 128),
    96: (128, 128),
    128: (128, 192),
    192: (128, 96),
}
ONE_WARPGROUP = 64
"""Query rows of one MMA warpgroup, the tile of short calls (use_one_mma_wg of heuristics.h)."""


@dataclass(frozen=True)
class SchedulerFacts(Grouped):
    """One call, as FlashAttention-3 sees it.

    Parameters
    ----------
    batch_size : int
        Requests, padding too.
    num_qo_heads, num_kv_heads : int
        Heads of this GPU.
    head_dim : int
        Of Q and K.
    max_seqlen_q : int
        Tokens of the longest query.
    max_seqlen_k : int
        Tokens: of the page table's width x page_size, or of a contiguous cache.
    num_sms : int
        Multiprocessors of the GPU.
    page_size : int or None
        Tokens of a KV page; None for a contiguous cache.
    dtype : str
        Of query and cache.
    head_dim_v : int
        Of V; 0 means K's.
    causal : bool
        Whether a query sees its own token and those before it alone.
    window : tuple of int
        (left, right) tokens, -1 unlimited; the call's `window_size`.
    has_softcap : bool
        Whether scores are capped: the call's `softcap` is above 0.
    varlen_q : bool
        Whether cu_seqlens_q is passed.
    pack_gqa : bool or None
        None lets the library decide.
    num_splits : int
        0 lets the library decide.
    sm_margin : int
        Multiprocessors that are left to others.
    hdim96 : bool
        Whether the build has kernels of head_dim 96.
    build : str
        `upstream`, `vllm`, `sglang` or `sglang-0.4.4`.

    Raises
    ------
    ValueError
        Naming the field, what it must be and what it was.

    Examples
    --------
    Llama-3.1-8B on an H100: a decode step of 4 requests, in a context of 8,192 tokens. Upstream's
    build takes tiles of 128 query rows, SGLang's of 64:

    >>> facts = SchedulerFacts(4, 32, 8, 128, 1, 8192, num_sms=132, page_size=16, causal=True)
    >>> facts.tile, facts.split_cap
    ((128, 128), 15)
    >>> from dataclasses import replace
    >>> replace(facts, build="sglang").tile
    (64, 128)
    """

    batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    max_seqlen_q: int
    max_seqlen_k: int
    num_sms: int
    page_size: int | None = None
    dtype: str = "bfloat16"
    head_dim_v: int = 0
    causal: bool = False
    window: tuple[int, int] = FULL
    has_softcap: bool = False
    varlen_q: bool = False
    pack_gqa: bool | None = None
    num_splits: int = 0
    sm_margin: int = 0
    hdim96: bool = True
    build: str = BUILDS[0]

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)
        require_type("window", self.window, tuple | list, such_as="(127, 0)")
        object.__setattr__(self, "window", tuple(self.window))
        for name in ("batch_size", "num_qo_heads", "num_kv_heads", "max_seqlen_q", "max_seqlen_k"):
            require_int(name, getattr(self, name))
        for name in ("causal", "has_softcap", "varlen_q", "hdim96"):
            require_type(name, getattr(self, name), bool)
        require_type("pack_gqa", self.pack_gqa, bool | None)
        require_int("head_dim", self.head_dim, most=HEAD_DIMS[-1])
        require_int("head_dim_v", self.head_dim_v, most=512)
        require_int("num_splits", self.num_splits, least=0, most=MAX_NUM_SPLITS)
        require_int("num_sms", self.num_sms)
        require_int("sm_margin", self.sm_margin, least=0, most=self.num_sms - 1)
        if len(self.window) != 2:
            raise ValueError(f"window must be (left, right), got {self.window}")
        for side in self.window:
            require_int("window", side, least=-1)
        require_int("page_size", 1 if self.page_size is None else self.page_size)
        self.require_groups()
        require_word("dtype", self.dtype, ELEMENT_BYTES)
        require_word("build", self.build, BUILDS)
        if self.kv_head_bytes > INT32_MAX:
            most = INT32_MAX // (self.kv_head_bytes // self.max_seqlen_k)
            raise ValueError(
                f"max_seqlen_k must be at most {most}, where FA3's int32 byte count overflows, "
                f"got {self.max_seqlen_k}"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the query and the cache."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def kv_head_bytes(self) -> int:
        """Bytes of K and V of one head at the full width."""
        return self.max_seqlen_k * (self.head_dim + self.head_dim_v) * self.element_bytes

    @property
    def packed_rows(self) -> int:
        """Query rows of a KV head for the longest query, with a group's heads packed."""
        return self.max_seqlen_q * self.group_size

    @property
    def usable_sms(self) -> int:
        """Multiprocessors that the schedule counts on."""
        return self.num_sms - self.sm_margin

    @cached_property
    def mask(self) -> tuple[bool, tuple[int, int] | None]:
        """(causal, window) after normalisation; the window is None unless attention is local.

        A window that reaches past the ends is none. One query token without a window needs no
        causal mask, and it is dropped except for head_dim 65..128 over pages.
        """
        left = -1 if self.window[0] >= self.max_seqlen_k - 1 else self.window[0]
        right = -1 if self.window[1] >= self.max_seqlen_q - 1 else self.window[1]
        causal = self.causal
        if self.max_seqlen_q == 1 and (left, right) == FULL:
            causal = causal and 64 < self.head_dim <= 128 and self.page_size is not None
        right = 0 if causal else right
        if left < 0 and right == 0:
            return True, None
        if (left, right) == FULL:
            return False, None
        if left < 0:
            left = self.max_seqlen_k - 1
        if right < 0:
            right = self.max_seqlen_q - 1
        return False, (left, right)

    @property
    def is_causal(self) -> bool:
        """Whether the causal kernel runs."""
        return self.mask[0]

    @property
    def is_local(self) -> bool:
        """Whether the sliding-window kernel runs."""
        return self.mask[1] is not None

    @cached_property
    def paged_gather(self) -> bool:
        """Whether pages are gathered by address, as nearly every decode does.

        TMA loads them where a page is whole tiles and there are more rows than those of one tile.
        """
        if self.page_size is None:
            return False
        if self.build != "upstream" and self.is_local:
            return True
        block_m, block_n = self._tile(gathers=False)
        return self.page_size % block_n != 0 or self.packed_rows <= block_m

    @cached_property
    def tile(self) -> Tile:
        """(block_m, block_n) of the kernel that runs: query rows, with packed heads, and tokens."""
        return self._tile(gathers=self.paged_gather)

    @cached_property
    def split_cap(self) -> int:
        """The most splits of a request: `num_splits`, or the heuristic's, which pretends that the
        batch is one request of full width, with the query rows of one (SGLang's build: of all)."""
        return self.num_splits or _heuristic_cap(self)

    @property
    def one_warpgroup(self) -> bool:
        """Whether all query rows fit the 64-row tile that the engines' builds have."""
        if self.build == "upstream" or self.head_dim not in (64, 128):
            return False
        if self.build == "vllm" and self.is_local:
            return False
        return self.packed_rows <= ONE_WARPGROUP

    @property
    def must_pack(self) -> bool:
        """Whether only kernels with packed query heads exist, whatever `pack_gqa` is."""
        return self.paged_gather or self.split_cap > 1

    @cached_property
    def packs(self) -> bool:
        """Whether the metadata call counts a group's query heads as rows of one tile. vLLM's build
        does, whatever `pack_gqa` is, where K and V have one head_dim."""
        if self.build == "vllm" and self.head_dim == self.head_dim_v:
            return self.group_size > 1
        if self.pack_gqa is not None:
            return self.pack_gqa
        if self.must_pack:
            return True
        if self.varlen_q or self.group_size == 1:
            return self.group_size > 1
        # Packing pays where it leaves less of the tiles idle.
        alone = _filled(self.max_seqlen_q, self.tile[0])
        together = _filled(self.packed_rows, self.tile[0])
        return alone < 0.9 * together

    @cached_property
    def settled(self) -> "SchedulerFacts":
        """The same call with all that the host decides written out: what two calls must share."""
        causal, window = self.mask
        return replace(
            self,
            causal=causal,
            window=window or FULL,
            pack_gqa=self.packs,
            num_splits=self.split_cap,
        )

    def differences(self, other: "SchedulerFacts") -> dict[str, tuple[object, object]]:
        """Fields that differ once both are settled: name -> (this one's, the other's)."""
        differing = {}
        for field in fields(self):
            mine = getattr(self.settled, field.name)
            others = getattr(other.settled, field.name)
            if mine != others:
                differing[field.name] = (mine, others)
        return differing

    def require_q(self, name: str, given: object) -> None:
        """ValueError unless query tokens by request are given with `varlen_q`, and only then."""
        here = f"varlen_q={self.varlen_q}"
        require_given(name, given, self.varlen_q, "if facts.varlen_q", here)

    def _tile(self, *, gathers: bool) -> Tile:
        compiled = [dim for dim in HEAD_DIMS if self.hdim96 or dim != 96]
        dim = next(dim for dim in compiled if dim >= self.head_dim)
        if self.element_bytes == 1:
            return _tile_fp8(self, dim, gathers)
        dim_v = dim
        if self.head_dim_v != self.head_dim:
            dim_v = next((each for each in HEAD_DIMS if each >= self.head_dim_v), 512)
        return _tile_16_bit(self, dim, dim_v, gathers)


def _filled(rows: int, block_m: int) -> float:
    """Share of the tiles that rows fill; in float32, as the library does."""
    in_tiles = ceil_div(rows, block_m) * block_m
    return float(np.float32(rows) / np.float32(in_tiles))


def _tile_16_bit(call: SchedulerFacts, dim: int, dim_v: int, gathers: bool) -> Tile:
    vllm = call.build == "vllm"
    narrow = call.is_local or gathers
    if dim <= 64:
        if dim_v == 512:
            return 64, 64
        if dim_v == 256:
            return 128, 96
        if call.one_warpgroup:
            return ONE_WARPGROUP, 192
        if vllm and narrow and not call.is_causal:
            return 192, 160
        if call.is_local and call.build.startswith("sglang"):
            return 192, 192
        return 192, 128 if narrow or call.is_causal else 192
    if dim <= 96:
        return 192, 128 if narrow else 144
    if dim <= 128:
        rows = ONE_WARPGROUP if call.one_warpgroup else 128
        plain = 160 if vllm and not call.one_warpgroup else 176
        return rows, 128 if narrow or call.is_causal else plain
    if dim <= 192:
        if narrow:
            return 128, 96
        if dim_v <= 128:
            return 128, 128
        return 128, 96 if vllm else 112
    return 128, 64 if call.is_local else 80


def _tile_fp8(call: SchedulerFacts, dim: int, gathers: bool) -> Tile:
    if call.one_warpgroup:
        return ONE_WARPGROUP, 128 if dim <= 96 else 96
    if call.build == "vllm" and dim <= 192:  # Its accumulation in two levels takes registers.
        return VLLM_FP8_TILES[dim]
    if dim <= 96:
        return 192, 160 if dim <= 64 else 128
    if dim <= 128:
        plain = 192 if call.has_softcap and call.is_local else 224
        return 128, 160 if gathers else plain
    if dim <= 192:
        return 128, 128 if call.is_local and (gathers or call.has_softcap) else 160
    return 128, 64 if call.is_local else 128


def layer_facts(
    spec: AttnSpec,
    *,
    columns: int,
    window: tuple[int, int] | None = None,
    **call: Any,
) -> SchedulerFacts:
    """A call of a layer over a page table of `columns` pages; `call` are the other facts.

    `window` is the layer's unless given.
    """
    if window is None:
        window = (spec.window - 1, 0) if spec.window else FULL
    return SchedulerFacts(
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_seqlen_k=columns * spec.page_size,
        page_size=spec.page_size,
        dtype=spec.dtype,
        window=window,
        **call,
    )


def latent_facts(
    spec: MlaSpec,
    *,
    columns: int,
    **call: Any,
) -> SchedulerFacts:
    """The same of MLA: one latent KV head, whose keys are rotary and whose values are latent."""
    return SchedulerFacts(
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=1,
        head_dim=ROPE_DIM,
        head_dim_v=LATENT_DIM,
        max_seqlen_k=columns * spec.page_size,
        page_size=spec.page_size,
        **call,
    )


def _heuristic_cap(facts: SchedulerFacts) -> int:
    """`num_splits_heuristic` of heuristics.h, and what flash_api.cpp passes to it."""
    block_m, block_n = facts.tile
    sms = facts.usable_sms
    requests = facts.batch_size if facts.build == "sglang" else 1
    tiles = facts.num_kv_heads * math.ceil(requests * facts.packed_rows / block_m)
    # The rule for KV beyond the L2 takes the query blocks of one request, whatever the build.
    m_blocks = math.ceil(facts.packed_rows / block_m)
    if np.float32(tiles) >= np.float32(0.8) * np.float32(sms):
        is_masked = facts.is_causal or facts.is_local
        fits_l2 = facts.kv_head_bytes <= L2_BYTES
        if is_masked or fits_l2 or m_blocks < 2 * sms:
            return 1
        return min(math.ceil(facts.kv_head_bytes / L2_BYTES), MAX_SPLITS)
    loaded = facts.max_seqlen_k
    window = facts.mask[1]
    if window is not None:
        loaded = max(0, min(loaded, sum(window) + 1 + block_m))
    n_blocks = math.ceil(loaded / block_n)
    if n_blocks <= 4:
        return 1
    splits = np.arange(1, min(MAX_SPLITS, sms, n_blocks) + 1)
    waves = (tiles * splits).astype(np.float32) / np.float32(sms)
    efficiency = waves / np.ceil(waves)
    good = efficiency.astype(np.float64) >= 0.85 * np.float64(efficiency.max())
    return int(splits[np.argmax(good)])
