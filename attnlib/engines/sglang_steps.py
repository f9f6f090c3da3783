"""Around a step of SGLang: write it down if it is due, and say which arms did nothing in it."""

import logging
from collections.abc import Iterator
from typing import Any

from ..core.backends.base import installed_version
from ..core.spec import dtype_name
from .arms import PREFIX, SGLANG, STATE
from .capture import Step, joined
from .points import ending_capture

logger = logging.getLogger(__name__)
NEEDS = {
    "metadata": ("fa3",),
    "schedule": ("fa3",),
    "splits": ("fa3",),
    "decode": ("flashinfer",),
    "guard": ("fa3", "flashinfer"),
}
"""Name of an arm -> the attention backends that it is for, in SGLang's words."""
DECODES = ("DECODE", "TARGET_VERIFY")
"""Steps in which an arm should run; the others are prefills, or idle."""
AT_CAPTURE = ("splits",)
"""Arms that run while a graph is captured: its replays run no Python."""


def judge_step(_: Any, runner: Any, forward_batch: Any, *__: Any, **___: Any) -> None:
    """After a step of the target model that decodes: log each arm that did nothing in it, once."""
    try:
        if not runner.is_draft_worker and forward_batch.forward_mode.name in DECODES:
            for name in STATE.arms:
                _judge(name, runner, forward_batch)
    except Exception as error:
        STATE.say(f"attnlib: what ran in a step is not known: {error!r}")


def _judge(name: str, runner: Any, batch: Any) -> None:
    times = _times(name)
    before = STATE.judged.get(name, 0)
    STATE.judged[name] = times
    if times > before or (times and name in AT_CAPTURE):
        return
    variable = f"{PREFIX}{name.upper()}={STATE.arms[name]}"
    if f"idle {name}" in STATE.said:
        return
    STATE.said.add(f"idle {name}")
    reasons = "; ".join(_reasons(name, runner, batch)) or "no reason is known"
    logger.warning(
        "attnlib: %s is set and did nothing in a decode step of %d requests: %s",
        variable,
        batch.batch_size,
        reasons,
    )


def _times(name: str) -> int:
    """How often an arm has run."""
    if name != "guard":
        return STATE.calls[f"{name}={STATE.arms[name]}"]
    schedules = getattr(STATE.guard, "checks", 0)
    plans = sum(count for word, count in STATE.calls.items() if word.startswith("guard, "))
    return schedules + plans


def _reasons(name: str, runner: Any, batch: Any) -> Iterator[str]:
    """Why an arm may have done nothing in a step."""
    server = runner.server_args
    backend = getattr(runner, "decode_attention_backend_str", server.attention_backend)
    if backend not in NEEDS[name]:
        yield f"it is for the attention backend {' or '.join(NEEDS[name])}, this is {backend}"
        return
    for word in STATE.calls:
        if word.startswith(f"{name}: "):
            yield f"it leaves out {word.removeprefix(f'{name}: ')}"
    if name == "guard" and STATE.arms.get("schedule") == "layer":
        yield f"{PREFIX}SCHEDULE=layer leaves no schedule to check"
    if name == "metadata" and batch.forward_mode.name == "TARGET_VERIFY":
        yield "steps of speculative decoding keep SGLang's own metadata"
    if not decodes_in_graphs(server):
        yield "the server decodes without CUDA graphs"


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


def _described(runner: Any, batch: Any, mode: str) -> Step | None:
    """The step from what the host knows; None on ranks that share their batch with another."""
    rank, of_layer, ranks_of_a_context = ranks()
    if rank:
        return None
    if ranks_of_a_context > 1:
        raise ValueError("a step must have its whole context here, got decode context parallelism")
    config = runner.model_config
    backend = runner.server_args.attention_backend
    return Step(
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
