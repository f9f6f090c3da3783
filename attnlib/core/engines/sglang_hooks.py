"""What the plugin puts into SGLang: one function a hook point, in the order of `POINTS`.

SGLang's `around` hooks get the function that they wrap first, `before` hooks its arguments, `after`
hooks its result. Arguments are read by SGLang's order.
"""

import logging
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch

from ..backends.base import installed_version
from ..fa2.planner import Fa2Planner
from ..metadata.decode import build_decode_metadata
from ..metadata.eager import write_decode_metadata
from ..metadata.require import StepTensors
from ..metadata.step import build_step_metadata
from ..schedule.facts import SchedulerFacts
from ..schedule.flash_attn3 import SchedulerMetadata, reserve, sm_count
from .arms import PREFIX, STATE
from .capture import Step

logger = logging.getLogger(__name__)
OWN = "attnlib"
"""The attribute that we give to SGLang's metadata of a batch size, and to FlashInfer's wrappers."""

MetadataCall = namedtuple(
    "MetadataCall",
    "cache_seqlens_int32 cu_seqlens_k page_table req_to_token req_pool_indices strided_indices "
    "max_seq_pages seq_lens seq_len_delta page_size swa_page_table token_to_kv_pool",
    defaults=(None, None),
)
"""Of `normal_decode_set_metadata`."""


def prepare_step(backend: Any, *_: Any, **__: Any) -> None:
    """Before a backend prepares a replay: it is the one whose schedule `one-launch` writes."""
    STATE.backend, STATE.scheduled = backend, False


def set_metadata(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Around SGLang's metadata of a decode step."""
    arm = STATE.arm("metadata")
    if arm == "sglang":
        original(*args, **kwargs)
        return
    call = MetadataCall(*args, **kwargs)
    tensors, page_size = _tensors(call), call.page_size
    # At most the table's columns: a draft step of SGLang may ask for more.
    max_pages = min(call.max_seq_pages, call.page_table.shape[1])
    if arm == "eager":
        t, first_tokens = StepTensors(**tensors), call.strided_indices[:max_pages]
        write_decode_metadata(t, first_tokens, page_size, call.seq_len_delta)
        return
    sizes = {"page_size": page_size, "max_pages": max_pages, "seq_len_delta": call.seq_len_delta}
    if arm == "fused" or call.seq_len_delta:  # a draft step has no schedule
        build_decode_metadata(**tensors, **sizes)
    else:
        build_step_metadata(**tensors, **sizes, scheduler=_scheduler(call))
        STATE.scheduled = True


def compute_schedule(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around FA3's schedule of a step: None leaves it out."""
    written, STATE.scheduled = STATE.scheduled, False
    if written or STATE.arm("schedule") == "layer":
        return None
    return original(*args, **kwargs)


def _tensors(call: MetadataCall) -> dict[str, Any]:
    """By the names of `StepTensors`."""
    pool = call.token_to_kv_pool
    has_swa = pool is not None and call.swa_page_table is not None
    same = ("seq_lens", "req_pool_indices", "req_to_token", "cu_seqlens_k", "page_table")
    return {
        **{name: getattr(call, name) for name in same},
        "cache_seqlens": call.cache_seqlens_int32,
        "swa_slot_map": pool.full_to_swa_index_mapping if has_swa else None,
        "swa_page_table": call.swa_page_table if has_swa else None,
    }


def _scheduler(call: MetadataCall) -> SchedulerMetadata:
    """The words that the graph of this batch size reads, reserved at its first step."""
    backend, (batch, columns) = STATE.backend, call.page_table.shape
    own = backend.decode_cuda_graph_metadata[batch]
    if hasattr(own, OWN):
        return getattr(own, OWN)
    words = own.scheduler_metadata
    if words is None:
        raise ValueError(
            f"{PREFIX}METADATA=one-launch must have a schedule to write, which SGLang keeps for "
            "FlashAttention-3 without MLA, got none: use fused"
        )
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled

    if is_dp_attention_enabled():
        raise ValueError(
            f"{PREFIX}METADATA=one-launch must know the layers' heads, got DP attention, for which "
            "SGLang's backend divides them by ranks that share none: use fused"
        )
    heads = (backend.num_attention_heads, backend.num_kv_heads, backend.head_dim)
    # The width that the attention call sees, of which it takes its split cap.
    sizes = (batch, *heads, 1, columns * call.page_size, sm_count(words.device), call.page_size)
    own_facts = {name: getattr(backend, name) for name in ("has_softcap", "num_splits")}
    dtype = _name(backend.kv_cache_dtype)
    facts = SchedulerFacts(*sizes, dtype=dtype, causal=True, **own_facts)
    made = reserve(facts, words.device, out=words)
    if made.words.shape != words.shape:
        raise ValueError(
            f"SGLang's schedule of {batch} requests must have {len(made.words)} words, as "
            f"FlashAttention-3 lays it out since 2025-08, got {len(words)}"
        )
    setattr(own, OWN, made)
    return made


def pin_decode(_: None, backend: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """After a FlashInfer backend is made: the kernels of its decode wrappers."""
    arm = STATE.arm("decode")
    if arm == "fa2":
        return
    if not backend.decode_use_tensor_cores:
        raise ValueError(
            f"{PREFIX}DECODE={arm} must have tensor cores, which SGLang takes from 4 query heads a "
            "KV head on (SGLANG_FLASHINFER_USE_TENSOR_CORE=true: always), got none"
        )
    if arm == "fa3":
        backend.decode_backend = "fa3"
        backend.decode_wrappers = [
            type(old)(backend.workspace_buffer, "NHD", backend="fa3", use_tensor_cores=True)
            for old in backend.decode_wrappers
        ]
        return
    reasons = {
        "full self-attention alone": backend.num_wrappers != 1,
        "splits (no --enable-deterministic-inference)": backend.enable_deterministic,
        "CUDA graphs": model_runner.server_args.disable_cuda_graph,
        "no draft tokens": model_runner.server_args.speculative_algorithm,
    }
    if missing := [name for name, lacks in reasons.items() if lacks]:
        raise ValueError(f"{PREFIX}DECODE=planned must have {' and '.join(missing)}")


def begin_forward(
    original: Callable[..., None], updater: Any, wrapper: Any, *args: Any, **kwargs: Any
) -> None:
    """Around the page arrays and the plan of one wrapper; a graph's is taken over once planned."""
    planner = getattr(wrapper, OWN, None)
    if planner is None:
        original(updater, wrapper, *args, **kwargs)
        if STATE.arms["decode"] != "planned" or not wrapper.is_cuda_graph_enabled:
            return
        longest = updater.attn_backend.max_context_len
        # SGLang's indices for FlashInfer are slots, whatever its pages are.
        planner = Fa2Planner(wrapper, head_dim=updater.head_dim, max_seq_len=longest, page_size=1)
        setattr(wrapper, OWN, planner)
    else:
        STATE.calls["decode=planned, steps"] += 1
    rows, lens, *_ = args
    # Embedding, norm and projection come before the first attention call: no fence.
    planner.plan(lens, req_pool_indices=rows, req_to_token=updater.req_to_token, fence=False)


def capture_step(runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    """Before a step: write it down if it is due. Never breaks the engine."""
    capture = STATE.capture
    if capture is None:
        return
    try:
        mode = forward_batch.forward_mode.name.lower()
        if capture.due(mode) and (step := _described(runner, forward_batch, mode)):
            capture.write(step)
    except Exception:
        STATE.capture = None
        said = f"{PREFIX}CAPTURE must be a file to append to, got {capture.path}"
        logger.exception("attnlib: %s: no further step is captured, SGLang goes on", said)


def _described(runner: Any, batch: Any, mode: str) -> Step | None:
    """From what the host knows; None on ranks that share their batch with another one."""
    from sglang.srt.layers.dp_attention import get_attention_tp_rank, get_attention_tp_size

    if get_attention_tp_rank():
        return None
    config, ranks = runner.model_config, get_attention_tp_size()
    attention = getattr(runner, "attn_backend", None)
    heads = [getattr(attention, f"num_{name}_heads", 0) for name in ("attention", "kv")]
    return Step(
        mode=mode,
        batch_size=batch.batch_size,
        lengths=_said(batch.seq_lens_cpu),
        q_lengths=_said(batch.extend_seq_lens_cpu),
        num_qo_heads=config.num_attention_heads // ranks,
        num_kv_heads=config.get_num_kv_heads(ranks),
        head_dim=config.head_dim,
        page_size=runner.page_size,
        dtype=_name(runner.dtype),
        kv_dtype=_name(runner.kv_cache_dtype),
        kind=config.attention_arch.name.lower(),
        backend=str(runner.server_args.attention_backend),
        release=installed_version("sglang"),
        draft=bool(runner.is_draft_worker),
        told="/".join(map(str, heads)) if all(heads) else "",
    )


def _said(lengths: Any) -> str:
    return "" if lengths is None else "+".join(map(str, torch.as_tensor(lengths).tolist()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Point = namedtuple("Point", "arms path how hook")
_FA3 = "sglang.srt.layers.attention.flashattention_backend"
_FLASHINFER = "sglang.srt.layers.attention.flashinfer_backend"
_PREPARE = f"{_FA3}:FlashAttentionBackend.init_forward_metadata_replay_cuda_graph"
_SCHEDULE = f"{_FA3}:FlashAttentionBackend._compute_scheduler_metadata"
_BEGIN = f"{_FLASHINFER}:FlashInferIndicesUpdaterDecode.call_begin_forward"
_FORWARD = "sglang.srt.model_executor.model_runner:ModelRunner.forward"
POINTS = (
    Point("metadata", _PREPARE, "before", prepare_step),
    Point("metadata", f"{_FA3}:normal_decode_set_metadata", "around", set_metadata),
    Point("metadata schedule", _SCHEDULE, "around", compute_schedule),
    Point("decode", f"{_FLASHINFER}:FlashInferAttnBackend.__init__", "after", pin_decode),
    Point("decode", _BEGIN, "around", begin_forward),
    Point("capture", _FORWARD, "before", capture_step),
)
"""For which arms, where, how and with what; the same in every release of `sglang.TRIED`."""
