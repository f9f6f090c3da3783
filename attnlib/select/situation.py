"""What a rule may ask of one attention call: the GPU, the mode, the layer and how it is called.

| mode | the call |
|---|---|
| decode | one query token a request (or a few), over a paged cache |
| prefill_paged | whole prompts or their tails, over a paged cache |
| prefill_ragged | the same over keys and values that lie in one row, no cache |
| target_verify | the target model checks drafted tokens (paged; a tree needs a custom mask) |
| draft_extend | the draft model catches up with accepted tokens (paged) |
| dllm_extend | a diffusion model extends by one block (paged) |
| mla | latent attention: all heads over one cache row of 512 + 64 (`head_dim` 576, one KV head) |
| sparse_mla | the same over `topk` chosen tokens |

Records call the modes of `extend_case` the same. GPUs are compute capabilities, with CUDA 12.8 or
newer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.spec import AttnSpec

GPUS = {
    "sm80": "A100",
    "sm89": "L40S, RTX 4090",
    "sm90": "H100, H200",
    "sm100": "B200",
    "sm103": "B300",
    "sm120": "RTX PRO 6000, RTX 5090",
}
DECODE_MODES = ("decode", "mla", "sparse_mla")
LATENT_MODES = ("mla", "sparse_mla")
PAGED_PREFILL_MODES = ("prefill_paged", "target_verify", "draft_extend", "dllm_extend")
PREFILL_MODES = (*PAGED_PREFILL_MODES, "prefill_ragged")
MODES = ("decode", *PREFILL_MODES, "mla", "sparse_mla")


@dataclass(frozen=True)
class Call:
    """How the layer is called, as far as any rule asks. The defaults are the plain call.

    | field | meaning |
    |---|---|
    | `kv_lens` | tokens of each request; most rules never ask |
    | `q_lens` | query tokens of each request; default: 1 in decode and MLA, `kv_lens` in prefill |
    | `head_dim_vo` | V's head_dim where it is not K's (ragged prefill of MLA: 192, 128) |
    | `graph` | planned for a CUDA graph |
    | `tensor_cores` | FlashInfer's use_tensor_cores; an engine's rule decides it itself |
    | `causal`, `custom_mask`, `window` | the mask asked for |
    | `softcap`, `sinks`, `positions` | logits soft cap, attention sinks, position encoding |
    | `fp16_qk` | FP16 reduction of QK allowed |
    | `fixed_split` | KV splits fixed or switched off (batch invariance) |
    | `block_tables` | the caller owns the block table (FlashInfer asks in a graph) |
    | `packed` | query and cache as one tensor each (MLA; the flat `plan` of old takes them split) |
    | `base2_lse` | a base-2 LSE is asked for (MLA) |
    | `topk` | chosen tokens of sparse MLA |
    | `eagle_topk` | branches of speculative decoding; 0 is none |
    | `pinned_page` | the user fixed page_size; else the engine may choose another |
    | `piecewise_graph` | SGLang's piecewise CUDA graph for prefill |
    | `cubins` | NVIDIA's cubins can be downloaded (trtllm-gen, XQA) |
    | `cudnn` | a cuDNN frontend with FROST is there, as FlashInfer 0.7.2 requires |
    """

    kv_lens: tuple[int, ...] = ()
    q_lens: tuple[int, ...] = ()
    head_dim_vo: int = 0
    graph: bool = False
    tensor_cores: bool = True
    causal: bool = True
    custom_mask: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    positions: bool = False
    fp16_qk: bool = False
    fixed_split: bool = False
    block_tables: bool = False
    packed: bool = True
    base2_lse: bool = False
    topk: int = 0
    eagle_topk: int = 0
    pinned_page: bool = False
    piecewise_graph: bool = False
    cubins: bool = True
    cudnn: bool = True

    def __post_init__(self) -> None:
        if self.q_lens and len(self.q_lens) != len(self.kv_lens):
            raise ValueError(
                f"q_lens must have one entry for each of kv_lens ({len(self.kv_lens)}), "
                f"got {len(self.q_lens)}"
            )
        if any(n < 1 for n in (*self.q_lens, *self.kv_lens)):
            raise ValueError(f"kv_lens and q_lens must be >= 1, got {self.kv_lens}, {self.q_lens}")
        for name in ("head_dim_vo", "topk", "eagle_topk"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")


def describe(spec: AttnSpec, call: Call, *, mode: str, gpu: str) -> dict[str, Any]:
    """Every fact of the call by name; None where it follows from lengths that were not given.

    Raises ValueError for a layer or a call that the mode cannot have.
    """
    _check(spec, call, mode)
    flags = {name: value for name, value in vars(call).items() if isinstance(value, bool)}
    head_dim_vo = call.head_dim_vo or spec.head_dim
    return {
        **flags,
        "gpu": gpu,
        "mode": mode,
        "dtype": spec.dtype,
        "kv_dtype": spec.kv_dtype,
        "fp8_query": spec.dtype.startswith("float8"),
        "fp8_kv": spec.kv_dtype.startswith("float8"),
        "one_dtype": spec.dtype == spec.kv_dtype,
        "heads": spec.num_qo_heads,
        "kv_heads": spec.num_kv_heads,
        "group_size": spec.group_size,
        "head_dim": spec.head_dim,
        "head_dims": (spec.head_dim, head_dim_vo),
        "one_head_dim": spec.head_dim == head_dim_vo,
        "page_size": spec.page_size,
        "block_size": spec.page_size if call.pinned_page else 0,
        "topk": call.topk,
        "eagle_topk": call.eagle_topk,
        **_lengths(spec, call, mode),
    }


def _check(spec: AttnSpec, call: Call, mode: str) -> None:
    if mode in LATENT_MODES and spec.num_kv_heads != 1:
        raise ValueError(f"num_kv_heads must be 1 in mode {mode}, got {spec.num_kv_heads}")
    if mode == "sparse_mla" and call.topk < 1:
        raise ValueError(f"topk must be >= 1 in mode {mode}, got {call.topk}")


def _lengths(spec: AttnSpec, call: Call, mode: str) -> dict[str, Any]:
    names = "batch_size total_q max_q min_q one_q_len total_kv min_kv max_kv same_lens work"
    names += " output_work q_tile q_tiles kv_units q_rows near_prefill"
    decode = mode in DECODE_MODES
    if not call.kv_lens:
        guess = {"max_q": 1, "min_q": 1, "one_q_len": True, "q_rows": spec.group_size}
        return dict.fromkeys(names.split()) | (guess if decode else {})
    kv = call.kv_lens
    q = call.q_lens or ((1,) * len(kv) if decode else kv)
    heads, total_q, total_kv = spec.num_qo_heads, sum(q), sum(kv)
    return {
        "batch_size": len(kv),
        "total_q": total_q,
        "max_q": max(q),
        "min_q": min(q),
        "one_q_len": len(set(q)) == 1,
        "total_kv": total_kv,
        "min_kv": min(kv),
        "max_kv": max(kv),
        "same_lens": q == kv,
        "work": heads * sum(a * b for a, b in zip(q, kv, strict=True)),
        "output_work": heads * total_q,
        "q_tile": max(q) * heads,
        "q_tiles": sum(-(-n // 256) for n in q) * heads,
        "kv_units": len(kv) * spec.num_kv_heads,
        "q_rows": max(q) * spec.group_size,
        "near_prefill": (4 if heads <= 8 else 2) * total_q + 32 * len(kv) >= total_kv,
    }
