"""SGLang's FlashAttention-3 by another cap of splits: what the hooks of ATTNLIB_SGLANG_SPLITS do.

The cap of a call follows from its layer, its requests and the width of its page table, so it is set
around each call of a layer, and is SGLang's again after it. A schedule that is written once per
step and the calls that read it must have the same cap: the number is kept beside the words.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ..core.gpu import HOPPER
from ..core.schedule.caps import MOST_QUERY_TOKENS, num_splits
from ..core.schedule.facts import FULL, SchedulerFacts
from ..core.schedule.flash_attn3 import sm_count
from ..core.schedule.library import sglang_build
from ..core.spec import dtype_name
from .arms import ONE_LAUNCH, PREFIX, STATE
from .plans import OWN
from .points import named, require_met

logger = logging.getLogger(__name__)
SPLITS = f"{OWN}_splits"
"""Attribute of a schedule, or of a graph's metadata: the cap that its words are for."""


def has_no_words(backend: Any) -> bool:
    """Whether there is no schedule of a step, or one for calls that keep SGLang's cap.

    SGLang writes none for MLA and under DP attention, where, to 0.5.20, the backend's heads are
    wrong: an attention call has its layer's.
    """
    return (
        backend.use_mla
        or backend._disable_scheduler_metadata_precompute
        or backend.is_prefill_aware_swa
        or backend.attn_cp_size > 1
    )


def of_words(call: dict[str, Any]) -> int:
    """The cap of a step's schedule, which must be that of the attention calls that read it."""
    backend = call["self"]
    page_size = backend.page_size
    graph = backend.decode_cuda_graph_metadata.get(call["batch_size"])
    of_graph = graph is not None and graph.cache_seqlens_int32 is call["cache_seqlens"]
    # A replay runs no Python at its attention calls: they have the number of the capture.
    if of_graph and hasattr(graph, SPLITS):
        return getattr(graph, SPLITS)
    # SGLang passes the longest request; a call caps by the width of its page table.
    pages = -(-call["max_seq_len_k"] // page_size)
    if of_graph:
        pages = graph.page_table.shape[1]
    facts = _call(
        batch_size=call["batch_size"],
        num_qo_heads=backend.num_attention_heads,
        num_kv_heads=backend.num_kv_heads,
        head_dim=backend.head_dim,
        head_dim_v=backend.head_dim,
        max_seqlen_q=1,
        max_seqlen_k=pages * page_size,
        page_size=page_size,
        dtype=dtype_name(backend.kv_cache_dtype),
        window=FULL,
        has_softcap=backend.has_softcap,
        num_sms=sm_count(torch.device(backend.device)),
        build=getattr(backend, OWN),
    )
    number = _number(facts, STATE.arms["splits"])
    if of_graph:
        setattr(graph, SPLITS, number)
    return number


def ready_splits(
    _: None,
    backend: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """After a FlashAttention backend is made: refuse by name what SPLITS, and METADATA where it is
    one-launch, cannot reach."""
    has_cap = "splits" in STATE.arms
    asked = f"SPLITS={STATE.arms['splits']}" if has_cap else f"METADATA={ONE_LAUNCH}"
    gpu = torch.cuda.get_device_properties(torch.device(backend.device))
    not_met = {
        "FlashAttention-3": backend.fa_impl_ver != 3,
        "a Hopper GPU": gpu.major != HOPPER,
        "no splits of SGLang's own (no --enable-deterministic-inference)": has_cap
        and backend.num_splits,
    }
    require_met(PREFIX + asked, not_met)
    setattr(backend, OWN, sglang_build())  # read once: it looks at files


def cap_decode(
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around the attention of a layer in a decode step, drafts' steps included."""
    call = named(original, args, kwargs)
    has_drafts = call["forward_batch"].spec_info is not None
    kind = "draft decode" if has_drafts else "decode"
    return _with_cap(kind, original, call, args, kwargs)


def cap_verification(
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around the attention of a layer in an extend: of these, verification of drafts alone."""
    call = named(original, args, kwargs)
    # A prefill, also of a draft model, keeps SGLang's cap: its partial outputs may be 16 GiB.
    if not call["forward_batch"].forward_mode.is_target_verify():
        return original(*args, **kwargs)
    return _with_cap("verification", original, call, args, kwargs)


def _with_cap(
    kind: str,
    original: Callable[..., Any],
    call: dict[str, Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Run the attention of a layer under the arm's cap, or under SGLang's where it is not ours."""
    backend = call["self"]
    layer = call["layer"]
    reason = left_alone(backend, layer, call["forward_batch"])
    if reason:
        STATE.leave("splits", reason)
        return original(*args, **kwargs)
    number = _splits_of_call(backend, layer, call["q"])
    with given(backend, number):
        output = original(*args, **kwargs)
    STATE.ran("splits")
    layers = "MLA " if backend.use_mla else ""
    _count(f"splits in {layers}{kind}", number, backend.forward_metadata)
    return output


def left_alone(
    backend: Any,
    layer: Any,
    batch: Any,
) -> str:
    """Why a layer keeps SGLang's cap and schedule, or the empty string. None of these calls reads
    words that were written for ours: SGLang gives them none, `has_no_words`, or it is no decode."""
    metadata = backend.forward_metadata
    has_chunks = backend.has_local_attention and metadata.local_attn_metadata is not None
    has_drafts = batch.spec_info is not None
    reasons = {
        "cross attention": layer.is_cross_attention,
        "an encoder's attention": layer.attn_type.value == "encoder_only",
        "chunked attention": has_chunks and layer.use_irope,
        "drafts with topk above 1": has_drafts and backend.topk > 1,
        "windows that know the prefill": backend.is_prefill_aware_swa,
        "context parallelism": backend.attn_cp_size > 1,
        f"more than {MOST_QUERY_TOKENS} tokens": metadata.max_seq_len_q > MOST_QUERY_TOKENS,
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    return ""


def _splits_of_call(
    backend: Any,
    layer: Any,
    q: torch.Tensor,
) -> int:
    """The cap of a layer's call: that of the words it reads, or by the layer's own facts."""
    metadata = backend.forward_metadata
    window = _window(backend, layer)
    words = metadata.scheduler_metadata
    if words is not None and window == FULL:
        # The words of a graph are a copy: the number is beside them.
        owner = metadata if hasattr(metadata, SPLITS) else words
        return getattr(owner, SPLITS)
    return _number(_facts(backend, layer, q), STATE.arms["splits"])


def facts_of_layer(
    backend: Any,
    layer: Any,
    q: torch.Tensor,
) -> SchedulerFacts:
    """The call of a layer over a graph's page table, with the number of splits that it passes."""
    facts = _facts(backend, layer, q)
    number = backend.num_splits
    if "splits" in STATE.arms:
        number = _splits_of_call(backend, layer, q)
    return replace(facts, num_splits=number)


def _facts(
    backend: Any,
    layer: Any,
    q: torch.Tensor,
) -> SchedulerFacts:
    """The call of a layer, with no cap given."""
    metadata = backend.forward_metadata
    latent = layer.v_head_dim if backend.use_mla else 0
    # SGLang casts queries to the cache's dtype, and the cache to the queries' beyond 256.
    if layer.head_dim <= 256:
        dtype = backend.kv_cache_dtype
    else:
        dtype = q.dtype
    return _call(
        batch_size=metadata.cu_seqlens_q.shape[0] - 1,
        num_qo_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.head_dim - latent,
        head_dim_v=layer.v_head_dim,
        max_seqlen_q=metadata.max_seq_len_q,
        max_seqlen_k=metadata.page_table.shape[1] * backend.page_size,
        page_size=backend.page_size,
        dtype=dtype_name(dtype),
        window=_window(backend, layer),
        has_softcap=layer.logit_cap > 0,
        num_sms=sm_count(torch.device(backend.device)),
        build=getattr(backend, OWN),
    )


def _window(backend: Any, layer: Any) -> tuple[int, int]:
    """(left, right) of a layer's call; calls of MLA pass none."""
    size = layer.sliding_window_size
    if backend.use_mla or size is None or size < 0:
        return FULL
    return size, 0


@lru_cache(maxsize=1024)
def _call(**facts: Any) -> SchedulerFacts:
    """The facts of a call, kept: layers and steps repeat them."""
    return SchedulerFacts(**facts, causal=True, varlen_q=True)


@lru_cache(maxsize=1024)
def _number(call: SchedulerFacts, arm: str) -> int:
    """`caps.num_splits` of a call, kept."""
    return num_splits(call, arm)


@contextmanager
def given(backend: Any, number: int) -> Iterator[None]:
    """Calls in the block pass `number`; what SGLang had is back at the end, whatever happens."""
    before = {}
    for name in ("num_splits", "decode_num_splits"):  # the second since 0.5.18
        if hasattr(backend, name):
            before[name] = getattr(backend, name)
    vars(backend).update(dict.fromkeys(before, number))
    try:
        yield
    finally:
        vars(backend).update(before)


def _count(
    kind: str,
    number: int,
    metadata: Any,
) -> None:
    """Count a call of this kind; the first one says in the log what it was given."""
    if kind not in STATE.calls:
        requests = metadata.cu_seqlens_q.shape[0] - 1
        tokens = metadata.max_seq_len_q
        words = "attnlib: %s: %d for %d requests of %d query tokens"
        logger.warning(words, kind, number, requests, tokens)
    STATE.calls[kind] += 1
