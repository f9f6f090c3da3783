"""Around a step of SGLang: write it down if it is due, and say which arms did nothing in it."""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ..core.backends.base import installed_version
from ..core.schedule.pages import require_table
from ..core.spec import dtype_name
from .arms import PREFIX, SGLANG, SGLANG_ARMS, STATE, Pool
from .capture import CapturedStep, joined
from .known import decode_mode_of, warn_once
from .plans import guarding, sample
from .points import ending_capture

logger = logging.getLogger(__name__)
DECODES = ("DECODE", "TARGET_VERIFY")
"""Steps in which an arm should run; the others are prefills, or idle."""
SLOTS = "guard, slots of decode steps"
"""Counts what the guard does whatever the attention backend."""
AT_CAPTURE = ("splits",)
"""Arms that run while a graph is captured: its replays run no Python."""


def guard_step(runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    """Before a decode step of the target model: hold the slots of its requests to the pool, one
    step in 100, whatever the attention backend."""
    with guarding():
        if runner.is_draft_worker or forward_batch.forward_mode.name != "DECODE":
            return
        if getattr(runner.server_args, "enable_unified_memory", False):
            STATE.leave("guard", "page tables of unified memory, whose ids are virtual")
            return
        sample(SLOTS.removeprefix("guard, "), partial(_require_slots, runner, forward_batch))


def _require_slots(runner: Any, batch: Any) -> None:
    """RuntimeError unless `req_to_token` has slots of the pool for every token of a step."""
    if ranks()[2] > 1:
        STATE.leave("guard", "slots under decode context parallelism, whose ids are of all ranks")
        return
    full = getattr(runner, "full_max_total_num_tokens", None) or runner.max_total_num_tokens
    of_window = getattr(runner, "swa_max_total_num_tokens", None)
    STATE.pool = Pool(
        slots=full + runner.page_size,
        window_slots=of_window + runner.page_size if of_window else 0,
        window=getattr(runner, "sliding_window_size", None) or 0,
    )
    table = runner.req_to_token_pool.req_to_token
    rows = batch.req_pool_indices.long()
    is_outside = (rows < 0) | (rows >= len(table))
    if bool(is_outside.any()):
        raise RuntimeError(
            f"req_pool_indices must lie in 0..{len(table) - 1}, got {rows.tolist()[:8]}..."
        )
    longest = int(batch.seq_lens.max())
    require_table(
        table[:, :longest][rows],
        batch.seq_lens,
        page_size=1,
        num_pages=STATE.pool.slots,
        name="req_to_token",
    )


def guard_tables(call: dict[str, Any]) -> None:
    """Hold the page tables that FlashAttention reads in a step to lengths and pools, one time in
    100; `call` are the arguments of SGLang's `normal_decode_set_metadata`."""
    if STATE.pool is not None:
        sample("page tables of FlashAttention", partial(_require_tables, call, STATE.pool))


def _require_tables(call: dict[str, Any], pool: Pool) -> None:
    page_size = call["page_size"]
    require_table(
        call["page_table"],
        call["cache_seqlens_int32"],
        page_size=page_size,
        num_pages=pool.slots // page_size,
    )
    if call["swa_page_table"] is not None:
        require_table(
            call["swa_page_table"],
            call["cache_seqlens_int32"],
            page_size=page_size,
            num_pages=(pool.window_slots or pool.slots) // page_size,
            window=pool.window,
            name="swa_page_table, of the layers with a window,",
        )


def judge_step(_: Any, runner: Any, forward_batch: Any, *__: Any, **___: Any) -> None:
    """After a step of the target model that decodes: log each arm that did nothing in it, and the
    known problems of the server, once."""
    try:
        if not runner.is_draft_worker and forward_batch.forward_mode.name in DECODES:
            for name in STATE.arms:
                _judge(name, runner, forward_batch)
            if ranks()[0] == 0:
                warn_once(SGLANG, "this server", partial(server_facts, runner))
    except Exception as error:
        STATE.say(f"attnlib: what ran in a step is not known: {error!r}")


def _judge(name: str, runner: Any, batch: Any) -> None:
    times = _times(name)
    before = STATE.judged.get(name, 0)
    STATE.judged[name] = times
    if times > before or (times and name in AT_CAPTURE):
        return
    if f"idle {name}" in STATE.said:
        return
    STATE.said.add(f"idle {name}")
    reasons = "; ".join(_reasons(name, runner, batch)) or "no reason is known"
    did = "did nothing"
    if STATE.calls[SLOTS] and name == "guard":
        did = "checked slots alone"
    logger.warning(
        "attnlib: %s%s=%s is set and %s in a decode step of %d requests: %s",
        PREFIX,
        name.upper(),
        STATE.arms[name],
        did,
        batch.batch_size,
        reasons,
    )


def _times(name: str) -> int:
    """How often an arm has run."""
    if name != "guard":
        return STATE.calls[f"{name}={STATE.arms[name]}"]
    schedules = getattr(STATE.guard, "checks", 0)
    plans = 0
    for word, count in STATE.calls.items():
        if word.startswith("guard, ") and word != SLOTS:
            plans += count
    return schedules + plans


def _reasons(name: str, runner: Any, batch: Any) -> Iterator[str]:
    """Why an arm may have done nothing in a step."""
    server = runner.server_args
    backend = getattr(runner, "decode_attention_backend_str", server.attention_backend)
    able = SGLANG_ARMS[name].backends
    if backend not in able:
        yield f"it is for the attention backend {' or '.join(able)}, this is {backend}"
        return
    for word in STATE.calls:
        if word.startswith(f"{name}: "):
            yield f"it leaves out {word.removeprefix(f'{name}: ')}"
    if name == "guard" and STATE.arms.get("schedule") == "layer":
        yield f"{PREFIX}SCHEDULE=layer leaves no schedule to check"
    if name == "metadata" and batch.forward_mode.name == "TARGET_VERIFY":
        yield "steps of speculative decoding keep SGLang's own metadata (one-launch: to 0.5.21)"
    if not decodes_in_graphs(server):
        yield "the server decodes without CUDA graphs"


def server_facts(runner: Any) -> dict[str, Any]:
    """What is known of a server, as an example of a known problem says it."""
    config = runner.model_config
    server = runner.server_args
    is_latent = config.attention_arch.name == "MLA"
    backend = str(getattr(runner, "decode_attention_backend_str", server.attention_backend))
    _rank, of_layer, _ = ranks()
    heads = config.num_attention_heads // of_layer
    kv_heads = 1 if is_latent else config.get_num_kv_heads(of_layer)
    facts = {
        "stack": f"sglang=={installed_version('sglang')}",
        "mode": decode_mode_of(SGLANG, backend, is_latent),
        "gpu": torch.cuda.get_device_name(),
        "backend": backend,
        "heads": f"{heads}/{kv_heads}",
        "page_size": runner.page_size,
        "dtype": dtype_name(runner.dtype),
        "kv_dtype": dtype_name(runner.kv_cache_dtype),
        "graph": decodes_in_graphs(server),
        "speculative": bool(server.speculative_algorithm),
        "dp_attention": bool(getattr(server, "enable_dp_attention", False)),
        "context": config.context_len,
    }
    if not is_latent:
        facts["head_dim"] = config.head_dim
    if drafts := getattr(server, "speculative_num_draft_tokens", 0):
        facts["draft_tokens"] = drafts
    return facts


def decodes_in_graphs(server_args: Any) -> bool:
    """Whether this server captures decode steps."""
    try:
        from sglang.srt.model_executor import cuda_graph_config as config
    except ImportError:  # before 0.5.14
        return not server_args.disable_cuda_graph
    return not config.check_cuda_graph_backend(config.Phase.DECODE, config.Backend.DISABLED)


def capture_step(runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    """Before a step: write it down if it is due. An error ends the capture, not the engine."""
    capture = STATE.capture
    if capture is None:
        return
    with ending_capture(SGLANG, capture):
        mode = forward_batch.forward_mode.name.lower()
        if not capture.due(mode):
            return
        step = _described(runner, forward_batch, mode)
        if step is not None:
            capture.write(step)


def _described(runner: Any, batch: Any, mode: str) -> CapturedStep | None:
    """The step from what the host knows; None on ranks that share their batch with another."""
    rank, of_layer, ranks_of_a_context = ranks()
    if rank:
        return None
    if ranks_of_a_context > 1:
        raise ValueError("a step must have its whole context here, got decode context parallelism")
    config = runner.model_config
    backend = runner.server_args.attention_backend
    return CapturedStep(
        mode=mode,
        batch_size=batch.batch_size,
        lengths=joined(batch.seq_lens_cpu),
        q_lengths=joined(batch.extend_seq_lens_cpu),
        num_qo_heads=config.num_attention_heads // of_layer,
        num_kv_heads=config.get_num_kv_heads(of_layer),
        head_dim=config.head_dim,
        page_size=runner.page_size,
        dtype=dtype_name(runner.dtype),
        kv_dtype=dtype_name(runner.kv_cache_dtype),
        kind=config.attention_arch.name.lower(),
        backend=str(getattr(runner, "decode_attention_backend_str", backend)),
        release=installed_version("sglang"),
        draft=bool(runner.is_draft_worker),
    )


def ranks() -> tuple[int, int, int]:
    """This rank among those that share an attention layer, and their number; how many hold parts of
    one request's tokens (decode context parallelism)."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:  # before 0.5.14
        from sglang.srt.layers.dp_attention import get_attention_tp_rank, get_attention_tp_size

        return get_attention_tp_rank(), get_attention_tp_size(), 1
    parallel = get_parallel()
    return parallel.attn_tp_rank, parallel.attn_tp_size, getattr(parallel, "attn_dcp_size", 1)
