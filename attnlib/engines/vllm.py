"""attnlib as a plugin of vLLM: captured steps, checked schedules, plans on the GPU, by variables.

    ATTNLIB_VLLM_GUARD=raise vllm serve ...

| variable | value | what runs |
|---|---|---|
| `ATTNLIB_VLLM_CAPTURE` | a file | sampled steps are appended to it, see `capture` |
| `ATTNLIB_VLLM_GUARD` | `raise`, `log` | FlashAttention-3's schedule against its call |
| | | (`attnlib.guard`); of FlashInfer's graphs one plan and one replay in 100 against the |
| | | lengths; of any backend's layers one block table in 100 against lengths and pool |
| `ATTNLIB_VLLM_DECODE` | `planned` | FlashInfer's fa2 in graphs of decode: plan and page arrays |
| | | by `core.Fa2Planner`, from lengths and block table on the GPU |

Decode needs the attention backend FLASHINFER with `use_trtllm_attention=false`, and raises an error
that names what it does not support. An unknown word, or a release whose functions are not those of
`POINTS`, ends the process; a later one whose functions are known runs, with one warning. If
VLLM_PLUGINS is set, it must name attnlib, or vLLM does not load it. `arms.STATE.calls` counts what
ran or was left out. With guard or decode the known problems of each kind of layers (`known`) are
named in the log, once.

A captured step is that of the first layers with full attention on the first rank of an engine,
without the rows that pad a graph; warm-up and Ray's steps are not seen. `mode` is by query tokens:
`decode` one for each request, `mixed` for some, `extend` for none. `lengths` are the host's
`seq_lens_cpu_upper_bound`, which is exact without speculative decoding: with it, none is captured.
"""

import importlib.util
from functools import partial
from typing import Any

import numpy as np

from ..core.backends.table import installed_version
from ..core.releases import read_releases
from ..core.spec import dtype_name
from . import points
from .arms import STATE, VLLM
from .capture import Capture, CapturedStep, joined
from .known import decode_mode_of, warn_once
from .points import Function, Point

OLDEST = "0.33.0"
NEWEST = [*read_releases("vllm")][-1]
"""The first and the last release of vLLM whose hook points were read."""
FULL_ATTENTION = {"FullAttentionSpec": "mha", "MLAAttentionSpec": "mla"}
"""vLLM's specs of layers that see all tokens -> the kind of a captured step."""
FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""vLLM's words for a cache -> torch's names."""


def register() -> None:
    """The entry point of `vllm.general_plugins`: hook what the variables ask for.

    Raises SystemExit with the reason where it cannot. A second call in a process does nothing.
    """
    if not STATE.arms and not STATE.capture:
        points.start(VLLM, OLDEST, NEWEST, _hook)


def _hook(release: str) -> None:
    """Hook what STATE needs and nothing else; what is hooked is imported."""
    has_flashinfer = importlib.util.find_spec("flashinfer") is not None
    for point in points.needed(points.known_in(release, POINTS)):
        if has_flashinfer or "decode" in STATE.arms or not point.path.startswith(_FLASHINFER):
            points.hook_in_place(point)


def run_step(original: Function, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a step that the scheduler asked for: the first rank may write it down."""
    is_ours = STATE.capture is not None and wrapper.worker.rank == 0
    STATE.worker = wrapper.worker if is_ours else None
    try:
        return original(wrapper, *args, **kwargs)
    finally:
        STATE.worker = None


def describe_layers(original: Function, group: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the metadata of layers alike: write the step down if it is due, once."""
    if STATE.capture and STATE.worker is not None:
        with points.ending_capture(VLLM, STATE.capture):
            if reason := _left_out(group):
                STATE.leave("capture", reason)
            else:
                STATE.worker = None
                call = points.named(original, (group, *args), kwargs)
                _write_if_due(STATE.capture, group, call["common_attn_metadata"])
    if "guard" in STATE.arms:
        from .plans import guarding, sample

        with guarding():
            call = points.named(original, (group, *args), kwargs)
            layers = f"{group.layer_names[0]} to {group.layer_names[-1]}"
            check = partial(_require_blocks, group, call["common_attn_metadata"], layers)
            sample(f"block tables of {layers}", check)
    return original(group, *args, **kwargs)


def _require_blocks(group: Any, batch: Any, layers: str) -> None:
    """RuntimeError unless the block table of layers alike holds blocks of the pool for every token
    that they see, whatever their backend."""
    from ..core.schedule.pages import require_table

    spec = group.kv_cache_spec
    config = group.metadata_builders[0].vllm_config
    num_pages = config.cache_config.num_gpu_blocks
    ranks = config.parallel_config.decode_context_parallel_size
    if not hasattr(spec, "num_kv_heads") or not num_pages or ranks > 1:
        STATE.leave("guard", f"block tables of {type(spec).__name__}, or of a part of a context")
        return
    require_table(
        batch.block_table_tensor,
        batch.seq_lens,
        page_size=spec.block_size,
        num_pages=num_pages,
        window=getattr(spec, "sliding_window", None) or 0,
        name=f"block_table of layers {layers}",
    )


def _left_out(group: Any) -> str:
    """Why a captured step cannot be that of these layers, or the empty string."""
    spec = group.kv_cache_spec
    kind = "mla" if group.backend.is_mla() else "mha"
    if FULL_ATTENTION.get(type(spec).__name__) != kind:
        return type(spec).__name__
    if spec.sliding_window or spec.attention_chunk_size or spec.non_causal:
        return "layers that are not causal over all tokens"
    config = group.metadata_builders[0].vllm_config
    parallel = config.parallel_config
    if config.speculative_config is not None or parallel.use_ubatching:
        return "speculative decoding, or microbatches"
    ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    return "" if ranks == 1 else "context parallelism"


def _write_if_due(capture: Capture, group: Any, batch: Any) -> None:
    # In NumPy: this runs in every step, and a dozen small operations of torch take 0.1 ms.
    q_lens = np.diff(batch.query_start_loc_cpu.numpy())
    is_request = q_lens > 0  # the others pad a CUDA graph
    single = int((q_lens == 1).sum())
    requests = int(is_request.sum())
    if single == requests:
        mode = "decode"
    else:
        mode = "mixed" if single else "extend"
    if not capture.due(mode):
        return
    lens = batch.seq_lens_cpu_upper_bound.numpy()[: len(q_lens)][is_request]
    q_lens = q_lens[is_request]
    from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers

    builder = group.metadata_builders[0]
    config = builder.vllm_config
    spec = builder.kv_cache_spec
    step = CapturedStep(
        mode=mode,
        batch_size=requests,
        lengths=joined(lens),
        q_lengths=joined(None if mode == "decode" else q_lens),
        num_qo_heads=get_num_attention_heads_from_layers(config, group.layer_names),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        page_size=spec.block_size,
        dtype=dtype_name(config.model_config.dtype),
        kv_dtype=_cache_dtype(spec, config),
        kind=FULL_ATTENTION[type(spec).__name__],
        backend=group.backend.get_name(),
        release=installed_version("vllm"),
        draft=False,
    )
    capture.write(step)


def require_builders(original: Function, group: Any, *args: Any, **kwargs: Any) -> None:
    """Around the builders of layers alike: raise for those that an arm does not support."""
    original(group, *args, **kwargs)
    name = group.backend.get_name()
    arm = f"{VLLM.prefix}DECODE=planned"
    if not hasattr(group.kv_cache_spec, "num_kv_heads"):
        return
    layers = f"layers {group.layer_names[0]} to {group.layer_names[-1]}"
    warn_once(VLLM, layers, partial(server_facts, group))
    for builder in group.metadata_builders:
        has_plan = not getattr(builder, "use_trtllm_decode_attention", True)
        has_schedule = getattr(builder, "aot_schedule", getattr(builder, "fa_aot_schedule", False))
        if "guard" in STATE.arms and not has_plan and not has_schedule:
            STATE.say(
                f"attnlib: the guard has no schedule or plan of {name} to check, its block tables "
                "alone"
            )
        if "decode" not in STATE.arms:
            continue
        if name != "FLASHINFER":
            raise ValueError(f"{arm} must have the attention backend FLASHINFER, got {name}")
        config = builder.vllm_config
        not_met = {
            "FlashInfer's own decode (use_trtllm_attention=false)": not has_plan,
            "full attention (no sliding window)": builder.window_left >= 0,
            "no decode context parallelism": builder.use_dcp,
            "no speculative decoding": config.speculative_config is not None,
            "full CUDA graphs of decode": not builder.enable_cuda_graph,
            "splits (no VLLM_BATCH_INVARIANT)": builder.disable_split_kv,
            "no microbatches": config.parallel_config.use_ubatching,
        }
        points.require_met(arm, not_met)


def server_facts(group: Any) -> dict[str, Any]:
    """What is known of a server's layers alike, as an example of a known problem says it."""
    import torch
    from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers

    builder = group.metadata_builders[0]
    config = builder.vllm_config
    spec = builder.kv_cache_spec
    backend = group.backend.get_name()
    heads = get_num_attention_heads_from_layers(config, group.layer_names)
    kv_dtype = _cache_dtype(spec, config)
    facts = {
        "stack": f"vllm=={installed_version('vllm')}",
        "mode": decode_mode_of(VLLM, backend, group.backend.is_mla()),
        "gpu": torch.cuda.get_device_name(),
        "backend": backend,
        "heads": f"{heads}/{spec.num_kv_heads}",
        "head_dim": spec.head_size,
        "page_size": spec.block_size,
        "dtype": dtype_name(config.model_config.dtype),
        "kv_dtype": kv_dtype,
        "speculative": config.speculative_config is not None,
        "context": config.model_config.max_model_len,
    }
    if spec.sliding_window:
        facts["window"] = True
    return facts


def _cache_dtype(spec: Any, config: Any) -> str:
    """The dtype of the KV cache, by torch's name."""
    if spec.kv_quant_mode.name == "NONE":
        return dtype_name(spec.dtype)
    cached_as = config.cache_config.cache_dtype  # stored as bytes
    return FP8.get(cached_as, cached_as)


def build_metadata(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Around FlashInfer's metadata of a step: remember whose lengths and pages are planned.

    Not of microbatches, whose metadata is built side by side, or of a part of the context.
    """
    call = points.named(original, args, kwargs)
    builder = call["self"]
    batch = call["common_attn_metadata"]
    whole = not builder.use_dcp and not builder.vllm_config.parallel_config.use_ubatching
    STATE.step = (builder, batch) if whole else None
    return original(*args, **kwargs)


def plan_decode(original: Function, *args: Any, **kwargs: Any) -> None:
    """Around the plan of one decode wrapper: vLLM's once, then ours if it has a graph."""
    from .plans import OWN, guard_plan, guarding, take_over

    call = points.named(original, args, kwargs)
    wrapper = call["self"]
    planner = getattr(wrapper, OWN, None)
    if planner is None:
        original(*args, **kwargs)
    if not wrapper.is_cuda_graph_enabled or STATE.step is None:
        for arm in STATE.arms:
            STATE.leave(arm, "plans without a CUDA graph, or of a part of a batch")
        return
    builder, batch = STATE.step
    rows = len(call["last_page_len_cpu"])
    seq_lens = batch.seq_lens[:rows]
    if "decode" in STATE.arms:
        planner = planner or take_over(
            wrapper,
            head_dim=call["head_dim"],
            max_seq_len=builder.model_config.max_model_len,
            page_size=call["page_size"],
        )
        # Embedding or norm, and projection, run before the first attention call: no fence.
        planner.plan(seq_lens, block_table=batch.block_table_tensor[:rows], fence=False)
        STATE.ran("decode")
    if "guard" in STATE.arms:
        with guarding():
            guard_plan(
                wrapper,
                seq_lens,
                page_size=call["page_size"],
                num_pages=partial(_pages_of, builder),
                layers=f"layers {builder.layer_names[0]} to {builder.layer_names[-1]}",
            )


def _pages_of(builder: Any) -> int:
    """Pages of the pool; 0 where a window leaves some of a request's pages out."""
    if builder.window_left >= 0:
        return 0
    return int(builder.vllm_config.cache_config.num_gpu_blocks or 0)


_GROUP = "vllm.v1.worker.utils:AttentionGroup"
_STEP = "vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model"
_LAYERS = f"{_GROUP}.build_metadata"
_BUILDERS = f"{_GROUP}.create_metadata_builders"
_FLASHINFER = "vllm.v1.attention.backends.flashinfer"
_BUILD = f"{_FLASHINFER}:FlashInferMetadataBuilder.build"
_PLAN = f"{_FLASHINFER}:fast_plan_decode"
_SELF = ("self",)
_BATCH = ("self", "common_attn_metadata")
_SIZES = ("self", "last_page_len_cpu", "head_dim", "page_size")
_OF_STEP = ("scheduler_output",)
_OF_LAYERS = ("ubatch_idx", "common_prefix_len", "kwargs")
_OF_BUILDERS = ("vllm_config", "device", "kernel_block_size", "num_metadata_builders")
_OF_BUILD = ("common_prefix_len", "fast_build")
_OF_PLAN = (
    "indptr_cpu",
    "indices",
    "seq_lens_cpu",
    "num_qo_heads",
    "num_kv_heads",
    "pos_encoding_mode",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "data_type",
    "sm_scale",
    "rope_scale",
    "rope_theta",
    "non_blocking",
    "fixed_split_size",
    "disable_split_kv",
    "q_len_per_req",
)
_CAPTURE = ("capture",)
_EACH_STEP = ("capture", "guard")
_ANY_PLAN = ("decode", "guard")
POINTS = (
    Point(_CAPTURE, _STEP, "around", run_step, _SELF, _OF_STEP),
    Point(_EACH_STEP, _LAYERS, "around", describe_layers, _BATCH, _OF_LAYERS),
    Point(_ANY_PLAN, _BUILDERS, "around", require_builders, _SELF, _OF_BUILDERS),
    Point(_ANY_PLAN, _BUILD, "around", build_metadata, _BATCH, _OF_BUILD),
    Point(_ANY_PLAN, _PLAN, "around", plan_decode, _SIZES, _OF_PLAN),
)
"""Read in 0.33.0; tests hold it to what its wheel has."""
