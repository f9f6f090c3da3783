"""What the plugin puts into SGLang: one function a hook point, in the order of `POINTS`.

SGLang's `around` hooks get the function that they wrap first, `before` hooks its arguments, `after`
hooks its result. Arguments are read by SGLang's names and order, as `Point.arguments` says.
"""

import logging
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.base import installed_version
from ..fa2.planner import Fa2Planner
from ..metadata.decode import build_decode_metadata
from ..metadata.eager import write_decode_metadata
from ..metadata.require import StepTensors
from ..metadata.step import build_step_metadata
from ..schedule.fa3 import SchedulerMetadata, reserve, sm_count
from ..schedule.facts import SchedulerFacts
from .arms import STATE
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
CaptureCall = namedtuple(
    "CaptureCall",
    "bs num_tokens req_pool_indices seq_lens encoder_lens forward_mode spec_info",
)
"""Of `init_forward_metadata_capture_cuda_graph`."""
BeginCall = namedtuple(
    "BeginCall",
    "wrapper req_pool_indices paged_kernel_lens paged_kernel_lens_sum kv_indptr kv_start_idx "
    "spec_info seq_lens_cpu use_sliding_window_kv_pool fixed_split_size disable_split_kv",
    defaults=(False, None, None),
)
"""Of `FlashInferIndicesUpdaterDecode.call_begin_forward`."""


def prepare_step(backend: Any, *_: Any, **__: Any) -> None:
    """Before a backend prepares a replay: it is the one whose schedule `one-launch` writes."""
    STATE.backend, STATE.scheduled = backend, False


def set_metadata(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Around SGLang's metadata of a decode step."""
    arm = STATE.arm("metadata")
    if arm == "sglang":
        original(*args, **kwargs)
    else:
        WRITERS[arm](MetadataCall(*args, **kwargs))


def compute_schedule(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around FA3's schedule of a step: None leaves it out."""
    if STATE.scheduled:
        STATE.scheduled = False
        return None
    return None if STATE.arm("schedule") == "layer" else original(*args, **kwargs)


def _pages(call: MetadataCall) -> int:
    """At most the columns of the table; a draft step of SGLang may ask for more."""
    return min(call.max_seq_pages, call.page_table.shape[1])


def _tensors(call: MetadataCall) -> dict[str, Any]:
    """By the names of `StepTensors`."""
    pool = call.token_to_kv_pool
    has_swa = pool is not None and call.swa_page_table is not None
    return {
        "seq_lens": call.seq_lens,
        "req_pool_indices": call.req_pool_indices,
        "req_to_token": call.req_to_token,
        "cache_seqlens": call.cache_seqlens_int32,
        "cu_seqlens_k": call.cu_seqlens_k,
        "page_table": call.page_table,
        "swa_slot_map": pool.full_to_swa_index_mapping if has_swa else None,
        "swa_page_table": call.swa_page_table if has_swa else None,
    }


def _eager(call: MetadataCall) -> None:
    first_tokens = call.strided_indices[: _pages(call)]
    t = StepTensors(**_tensors(call))
    write_decode_metadata(t, first_tokens, call.page_size, call.seq_len_delta)


def _fused(call: MetadataCall) -> None:
    build_decode_metadata(
        **_tensors(call),
        page_size=call.page_size,
        max_pages=_pages(call),
        seq_len_delta=call.seq_len_delta,
    )


def _one_launch(call: MetadataCall) -> None:
    if call.seq_len_delta:  # a draft step
        _fused(call)
        return
    build_step_metadata(
        **_tensors(call),
        page_size=call.page_size,
        max_pages=_pages(call),
        scheduler=_scheduler(call),
    )
    STATE.scheduled = True


WRITERS = {"eager": _eager, "fused": _fused, "one-launch": _one_launch}


def _scheduler(call: MetadataCall) -> SchedulerMetadata:
    """The words that the graph of this batch size reads, reserved at its first step."""
    own = STATE.backend.decode_cuda_graph_metadata[len(call.seq_lens)]
    if not hasattr(own, OWN):
        setattr(own, OWN, _reserved(STATE.backend, own.scheduler_metadata, call))
    return getattr(own, OWN)


def _reserved(backend: Any, words: torch.Tensor | None, call: MetadataCall) -> SchedulerMetadata:
    if words is None:
        raise ValueError(
            "metadata one-launch must have a schedule to write, which SGLang keeps for "
            "FlashAttention-3 without MLA, got none: use fused"
        )
    batch, columns = call.page_table.shape
    facts = SchedulerFacts(
        batch_size=batch,
        num_qo_heads=backend.num_attention_heads,
        num_kv_heads=backend.num_kv_heads,
        head_dim=backend.head_dim,
        max_seqlen_q=1,
        # The width that the attention call sees, of which it takes its split cap.
        max_seqlen_k=columns * call.page_size,
        num_sms=sm_count(words.device),
        page_size=call.page_size,
        dtype=_name(backend.kv_cache_dtype),
        causal=True,
        has_softcap=backend.has_softcap,
        num_splits=backend.num_splits,
    )
    made = reserve(facts, words.device, out=words)
    if made.words.shape != words.shape:
        raise ValueError(
            f"SGLang's schedule of {batch} requests must have {len(made.words)} words, as "
            f"FlashAttention-3 lays it out since 2025-08, got {len(words)}"
        )
    return made


def pin_decode(_: None, backend: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """After a FlashInfer backend is made: the kernels of its decode wrappers."""
    arm = STATE.arm("decode")
    if arm == "fa2":
        return
    if not backend.decode_use_tensor_cores:
        raise ValueError(
            f"decode {arm} must have tensor cores, which SGLang takes from 4 query heads a KV head "
            "on (SGLANG_FLASHINFER_USE_TENSOR_CORE=true: always), got none"
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
    }
    if missing := [name for name, lacks in reasons.items() if lacks]:
        raise ValueError(f"decode planned must have {' and '.join(missing)}")


def take_over(_: None, backend: Any, *args: Any, **kwargs: Any) -> None:
    """After FlashInfer's wrapper of a batch size is made and planned, before its graph is."""
    call = CaptureCall(*args, **kwargs)
    if STATE.arms["decode"] != "planned" or not call.forward_mode.is_decode_or_idle():
        return
    if call.spec_info is not None:
        raise ValueError("decode planned must be without draft tokens, got speculative decoding")
    updater = backend.indices_updater_decode
    for wrapper in backend.decode_cuda_graph_metadata[call.bs]:
        planner = Fa2Planner(
            wrapper,
            head_dim=updater.head_dim,
            max_seq_len=backend.max_context_len,
            page_size=1,  # SGLang's indices for FlashInfer are slots, whatever its pages are
        )
        setattr(wrapper, OWN, planner)
        _plan(planner, call.seq_lens, call.req_pool_indices, updater.req_to_token)


def begin_forward(original: Callable[..., None], updater: Any, *args: Any, **kwargs: Any) -> None:
    """Around the page arrays and the plan of one wrapper."""
    call = BeginCall(*args, **kwargs)
    planner = getattr(call.wrapper, OWN, None)
    if planner is None:
        original(updater, *args, **kwargs)
        return
    STATE.calls["decode=planned, steps"] += 1
    _plan(planner, call.paged_kernel_lens, call.req_pool_indices, updater.req_to_token)


def _plan(planner: Fa2Planner, lens: torch.Tensor, rows: torch.Tensor, pool: torch.Tensor) -> None:
    """Embedding, norm and projection come before the first attention call: no fence."""
    planner.plan(lens, req_pool_indices=rows, req_to_token=pool, fence=False)


def capture_step(runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    """Before a step: write it down if it is due. Never breaks the engine."""
    capture = STATE.capture
    if capture is None:
        return
    try:
        mode = forward_batch.forward_mode.name.lower()
        number = capture.due(mode)
        if number is not None and (step := _described(runner, forward_batch, mode, number)):
            capture.write(step)
    except Exception:
        STATE.capture = None
        logger.exception("attnlib: no further step is captured, SGLang goes on")


def _described(runner: Any, batch: Any, mode: str, number: int) -> Step | None:
    """From what the host knows; None on ranks that share their batch with another one."""
    from sglang.srt.layers.dp_attention import get_attention_tp_rank, get_attention_tp_size

    if get_attention_tp_rank():
        return None
    config, ranks = runner.model_config, get_attention_tp_size()
    lens, queries = batch.seq_lens_cpu, batch.extend_seq_lens_cpu
    return Step(
        mode=mode,
        number=number,
        batch_size=batch.batch_size,
        lengths=None if lens is None else tuple(lens.tolist()),
        q_lengths=None if queries is None else tuple(torch.as_tensor(queries).tolist()),
        num_qo_heads=config.num_attention_heads // ranks,
        num_kv_heads=config.get_num_kv_heads(ranks),
        head_dim=config.head_dim,
        page_size=runner.page_size,
        dtype=_name(runner.dtype),
        kv_dtype=_name(runner.kv_cache_dtype),
        kind=config.attention_arch.name.lower(),
        backend=str(runner.server_args.attention_backend),
        release=installed_version("sglang"),
        rank=runner.tp_rank,
        draft=bool(runner.is_draft_worker),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Point:
    """A hook point: for which `arms`, where, how, with what, and the `arguments` relied on."""

    arms: tuple[str, ...]
    module: str
    name: str
    how: str
    hook: Callable[..., Any]
    arguments: tuple[str, ...]


_FA3 = "sglang.srt.layers.attention.flashattention_backend"
_FLASHINFER = "sglang.srt.layers.attention.flashinfer_backend"
POINTS = (
    Point(
        ("metadata",),
        _FA3,
        "FlashAttentionBackend.init_forward_metadata_replay_cuda_graph",
        *("before", prepare_step, ("self",)),
    ),
    Point(
        ("metadata",),
        _FA3,
        "normal_decode_set_metadata",
        *("around", set_metadata, MetadataCall._fields),
    ),
    Point(
        ("metadata", "schedule"),
        _FA3,
        "FlashAttentionBackend._compute_scheduler_metadata",
        *("around", compute_schedule, ("self",)),
    ),
    Point(
        ("decode",),
        _FLASHINFER,
        "FlashInferAttnBackend.__init__",
        *("after", pin_decode, ("self", "model_runner")),
    ),
    Point(
        ("decode",),
        _FLASHINFER,
        "FlashInferAttnBackend.init_forward_metadata_capture_cuda_graph",
        *("after", take_over, ("self", *CaptureCall._fields)),
    ),
    Point(
        ("decode",),
        _FLASHINFER,
        "FlashInferIndicesUpdaterDecode.call_begin_forward",
        *("around", begin_forward, ("self", *BeginCall._fields)),
    ),
    Point(
        ("capture",),
        "sglang.srt.model_executor.model_runner",
        "ModelRunner.forward",
        *("before", capture_step, ("self", "forward_batch")),
    ),
)
"""All of them, the same in every release of `sglang.TRIED`."""
