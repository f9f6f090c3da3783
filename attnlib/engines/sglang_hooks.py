"""The hooks of the SGLang plugin: one function per hook point, in the order of `POINTS`.

SGLang calls `around` hooks with the wrapped function first, `before` hooks with its arguments and
`after` hooks with its result first. Arguments are read in SGLang's order.
"""

from functools import partial
from typing import Any

from ..core.metadata.decode import build_decode_metadata
from ..core.metadata.eager import write_decode_metadata
from ..core.metadata.require import DecodeTensors
from . import sglang_schedules as schedules
from . import sglang_splits as splits
from . import sglang_steps as steps
from .arms import ARMS, ONE_LAUNCH, OWN_CAP, PREFIX, STATE
from .plans import OWN, guard_plan, guarding, take_over
from .points import Function, Point, defaults_of, named, require_met

PLAIN = (
    "v2p_page_table",
    "kernel_page_multiplier",
    "src_is_read_table",
    "swa_src_table",
    "skip_page_table",
    "full_v2p",
    "swa_v2p",
    "zero_tail",
)
"""Parameters of `normal_decode_set_metadata` for pools that our kernels do not know: where one is
not at its default, SGLang's own kernel runs, and is counted."""


def prepare_step(backend: Any, *args: Any, **kwargs: Any) -> None:
    """Before a backend prepares a replay: remember whose metadata an arm writes.

    From 0.5.13 on the function is called for a capture, too, whose metadata stays SGLang's own.
    """
    in_capture = kwargs.get("in_capture", len(args) == 2 and args[1])
    STATE.backend = None if in_capture else backend
    STATE.scheduled = False
    STATE.graphs = None
    if STATE.arms.get("metadata") == ONE_LAUNCH:
        batch = args[0] if args else kwargs["forward_batch"]
        STATE.graphs = schedules.graphs_of(backend, batch)


def set_metadata(original: Function, *args: Any, **kwargs: Any) -> None:
    """Around SGLang's metadata of a decode step, or of verification of drafts. Draft steps keep
    SGLang's own; verification keeps it in all arms but `one-launch`."""
    call = named(original, args, kwargs)
    if not _is_written(call, defaults_of(original)):
        original(*args, **kwargs)
    if "guard" in STATE.arms:
        steps.guard_tables(call)


def _is_written(call: dict[str, Any], defaults: dict[str, Any]) -> bool:
    """Whether one of our arms has written the metadata of a step, the control aside."""
    arm = STATE.arms.get("metadata")
    if arm is None:
        return False
    if not all(call[name] is defaults[name] for name in PLAIN if name in call):
        STATE.leave("metadata", "a pool that only SGLang knows")
        if arm == ONE_LAUNCH:
            schedules.require_written(call)
        return False
    if arm == ONE_LAUNCH:
        is_ours = schedules.written(call, _tensors(call))
    else:
        # Without a backend it is a capture, with a delta a step of speculative decoding.
        is_ours = STATE.backend is not None and not call["seq_len_delta"]
    if not is_ours:
        return False
    if arm in ("eager", "fused"):
        _write_metadata(arm, call)
    STATE.ran("metadata")
    return arm != "sglang"


def _write_metadata(arm: str, call: dict[str, Any]) -> None:
    """Metadata of a step, without its schedule, by one of our arms."""
    tensors = _tensors(call)
    page_size = call["page_size"]
    max_pages = min(call["max_seq_pages"], call["page_table"].shape[1])
    if arm == "eager":
        first_tokens = STATE.backend.decode_cuda_graph_metadata["strided_indices"][:max_pages]
        write_decode_metadata(
            t=DecodeTensors(**tensors),
            first_tokens=first_tokens,
            page_size=page_size,
            seq_len_delta=0,
        )
    else:
        build_decode_metadata(**tensors, page_size=page_size, max_pages=max_pages)


def compute_schedule(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Around FlashAttention-3's schedule of a step; None: each layer prepares its own."""
    written = STATE.scheduled
    STATE.scheduled = False
    if written:
        return None
    call = named(original, args, kwargs)
    backend = call["self"]
    if backend.use_mla and "schedule" in STATE.arms:
        STATE.leave("schedule", "MLA, for which SGLang writes no schedule")
    elif STATE.arms.get("schedule") == "layer":
        STATE.ran("schedule")
        return None
    if "splits" not in STATE.arms or splits.has_no_words(backend):
        words = original(*args, **kwargs)
    else:
        number = splits.of_words(call)
        with splits.given(backend, number):
            words = original(*args, **kwargs)
        if words is not None:
            setattr(words, splits.SPLITS, number)  # for the calls of a step without a graph
    if words is not None:
        STATE.ran("schedule")
    return words


def _tensors(call: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a call by the names of `DecodeTensors`."""
    window = call["swa_page_table"]
    pool = call.get("token_to_kv_pool")
    slots = call.get("full_to_swa_index_mapping", getattr(pool, "full_to_swa_index_mapping", None))
    return {
        "seq_lens": call["seq_lens"],
        "req_pool_indices": call["req_pool_indices"],
        "req_to_token": call["req_to_token"],
        "cache_seqlens": call["cache_seqlens_int32"],
        "cu_seqlens_k": call["cu_seqlens_k"],
        "page_table": call["page_table"],
        "swa_slot_map": None if window is None else slots,
        "swa_page_table": None if slots is None else window,
    }


def pin_decode(
    _: None,
    backend: Any,
    model_runner: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """After a FlashInfer backend is made: set the kernels of its decode wrappers."""
    arm = STATE.arms["decode"]
    if not backend.decode_use_tensor_cores:
        raise ValueError(
            f"{PREFIX}DECODE={arm} must have tensor cores, which SGLang uses from 4 query heads "
            "per KV head on (SGLANG_FLASHINFER_USE_TENSOR_CORE=true: always), got none"
        )
    if arm == "fa3":
        backend.decode_backend = "fa3"
        backend.decode_wrappers = [
            type(wrapper)(
                backend.workspace_buffer,
                kv_layout="NHD",
                backend="fa3",
                use_tensor_cores=True,
            )
            for wrapper in backend.decode_wrappers
        ]
    if arm != "planned":
        return
    server = model_runner.server_args
    _rank, _number, ranks_of_a_context = steps.ranks()
    not_met = {
        "full self-attention alone": backend.num_wrappers != 1,
        "splits (no --enable-deterministic-inference)": backend.enable_deterministic,
        "CUDA graphs": not steps.decodes_in_graphs(server),
        "no draft tokens": server.speculative_algorithm,
        "no --enable-unified-memory": getattr(server, "enable_unified_memory", False),
        "no decode context parallelism": ranks_of_a_context > 1,
    }
    require_met(f"{PREFIX}DECODE=planned", not_met)


def begin_forward(original: Function, *args: Any, **kwargs: Any) -> None:
    """Around page arrays and plan of one wrapper: SGLang's once, then ours if it has a graph.

    With the guard on, plans of wrappers with a graph, not of drafts, are held to the lengths on the
    GPU: `plans.guard_plan`.
    """
    call = named(original, args, kwargs)
    updater = call["self"]
    wrapper = call["wrapper"]
    planner = getattr(wrapper, OWN, None)
    if planner is None:
        original(*args, **kwargs)
        if STATE.arms.get("decode") == "planned" and wrapper.is_cuda_graph_enabled:
            # SGLang gives FlashInfer slots as page indices, whatever its own page size is.
            planner = take_over(
                wrapper,
                head_dim=updater.head_dim,
                max_seq_len=updater.attn_backend.max_context_len,
                page_size=1,
            )
        elif "decode" in STATE.arms:
            _count_plan(wrapper)
    if planner is not None:
        view = call.get("kv_view")  # 0.5.19 alone
        rows = view.row_ids if view else call["req_pool_indices"]
        has_pool = hasattr(updater, "req_to_token")
        pool = updater if has_pool else updater.attn_backend.req_to_token_pool
        # Embedding, norm and projection run before the first attention call: no fence.
        planner.plan(
            call["paged_kernel_lens"],
            req_pool_indices=rows,
            req_to_token=pool.req_to_token,
            fence=False,
        )
        STATE.ran("decode")
    if "guard" not in STATE.arms:
        return
    if wrapper.is_cuda_graph_enabled and call.get("spec_info") is None:
        has_window = call.get("use_sliding_window_kv_pool", False)
        with guarding():
            guard_plan(
                wrapper,
                call["paged_kernel_lens"],
                page_size=1,
                num_pages=partial(_slots, has_window),
                layers="the layers with a window" if has_window else "the layers of this wrapper",
            )
    else:
        STATE.leave("guard", "plans of FlashInfer without a CUDA graph, or of drafts")


def _slots(has_window: bool) -> int:
    """KV slots of the pool that a wrapper reads; 0 before the first step."""
    if STATE.pool is None:
        return 0
    if has_window:
        return STATE.pool.window_slots
    return STATE.pool.slots


def _count_plan(wrapper: Any) -> None:
    """Count a plan of SGLang's own: as the arm wants it, or left as it is."""
    arm = STATE.arms["decode"]
    if arm == "planned":
        STATE.leave("decode", "plans of steps without a CUDA graph")
    elif wrapper._backend == arm:
        STATE.ran("decode")
    else:
        STATE.leave("decode", f"a wrapper of {wrapper._backend}")


_FLASH = "sglang.srt.layers.attention.flashattention_backend"
_BACKEND = f"{_FLASH}:FlashAttentionBackend"
_FLASHINFER = "sglang.srt.layers.attention.flashinfer_backend"
_REPLAY = f"{_BACKEND}.init_forward_metadata_replay_cuda_graph"
_PREPARE = f"{_BACKEND}.init_forward_metadata_out_graph"
_SET = f"{_FLASH}:normal_decode_set_metadata"
_SCHEDULE = f"{_BACKEND}._compute_scheduler_metadata"
_MAKE = f"{_FLASHINFER}:FlashInferAttnBackend.__init__"
_BEGIN = f"{_FLASHINFER}:FlashInferIndicesUpdaterDecode.call_begin_forward"
_FORWARD = "sglang.srt.model_executor.model_runner:ModelRunner.forward"
_TENSORS = (
    "cache_seqlens_int32",
    "cu_seqlens_k",
    "page_table",
    "req_to_token",
    "req_pool_indices",
    "max_seq_pages",
    "seq_lens",
    "seq_len_delta",
    "page_size",
    "swa_page_table",
)
_POOLS = ("strided_indices", "token_to_kv_pool", "full_to_swa_index_mapping", *PLAIN)
_DECODE = f"{_BACKEND}.forward_decode"
_EXTEND = f"{_BACKEND}.forward_extend"
_WORDS = ("self", "batch_size", "max_seq_len_k", "cache_seqlens")
_CALL = ("self", "q", "layer", "forward_batch")
_STEP = ("self", "forward_batch", "in_capture")
_KVCACHE = f"{_FLASH}:flash_attn_with_kvcache"
_LENGTHS = ("self", "wrapper", "paged_kernel_lens")
_PLANS = (
    "req_pool_indices",
    "kv_view",
    "plan",
    "paged_kernel_lens_sum",
    "kv_indptr",
    "kv_start_idx",
    "spec_info",
    "seq_lens_cpu",
    "use_sliding_window_kv_pool",
    "fixed_split_size",
    "disable_split_kv",
)
_INIT = ("self", "model_runner")
_BATCH = ("self", "forward_batch")
_WORDS_OF_CALL = ("scheduler_metadata",)
_ONE_LAUNCH = (f"metadata={ONE_LAUNCH}",)
_OF_LAYERS = (*_ONE_LAUNCH, "splits")
_ANY_SCHEDULE = ("metadata", "schedule", "splits")
POINTS = (
    Point(("metadata",), _REPLAY, "before", prepare_step, before="0.5.13"),
    Point(("metadata",), _PREPARE, "before", prepare_step, _STEP, since="0.5.13"),
    Point(("metadata", "guard"), _SET, "around", set_metadata, _TENSORS, _POOLS),
    Point(_ANY_SCHEDULE, _SCHEDULE, "around", compute_schedule, _WORDS),
    Point(_OF_LAYERS, f"{_BACKEND}.__init__", "after", splits.ready_splits, since=OWN_CAP),
    Point(("splits",), _DECODE, "around", splits.cap_decode, _CALL, since=OWN_CAP),
    Point(("splits",), _EXTEND, "around", splits.cap_verification, _CALL, since=OWN_CAP),
    Point(_ONE_LAUNCH, _DECODE, "around", schedules.attend, _CALL, since=OWN_CAP),
    Point(_ONE_LAUNCH, _EXTEND, "around", schedules.attend, _CALL, since=OWN_CAP),
    Point(_ONE_LAUNCH, _KVCACHE, "around", schedules.give_words, _WORDS_OF_CALL, since=OWN_CAP),
    Point(("decode",), _MAKE, "after", pin_decode, _INIT),
    Point(("decode", "guard"), _BEGIN, "around", begin_forward, _LENGTHS, _PLANS),
    Point(tuple(ARMS), _FORWARD, "after", steps.judge_step, _BATCH),
    Point(("guard",), _FORWARD, "before", steps.guard_step, _BATCH),
    Point(("capture",), _FORWARD, "before", steps.capture_step, _BATCH),
)
"""Read in all releases from 0.5.11 to 0.5.23; tests hold it to the wheels of both."""
