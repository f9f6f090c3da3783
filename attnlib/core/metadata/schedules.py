"""All metadata of a step in one launch, with the schedule of each kind of its layers.

    schedules = StepSchedules.reserve({"full": ..., "window": ...}, device)   # once
    build_step_schedules(..., schedules=schedules)    # one kernel per step
    for layer in layers:
        attend(..., metadata=schedules[layer.kind])    # no prepare kernel; still guarded

A step is decode, or verification of drafts: `cu_seqlens_q` then may say how many query tokens a
request has. The kinds share lengths and requests. What differs between them is data, a row of
`schedules.table`: one kernel serves any number of kinds, and none is compiled for new ones.
"""

from typing import Any

from torch import Tensor

from ..batch import require_tensor
from ..schedule.facts import SchedulerFacts
from ..schedule.kinds import COLUMNS, StepSchedules, layout
from ..spec import ceil_div, require_between
from . import decode
from .decode import QUERIES, TABLE, WORDS, Schedules
from .device import ROWS, span_width
from .launch import Launch, Launcher
from .require import (
    DecodeTensors,
    require_decode,
    require_one_device,
    tensors_named,
    values_of,
)


def prepare(
    tensors: tuple[Any, ...],
    page_size: int,
    facts: tuple[SchedulerFacts, ...],
) -> Launch:
    """The launch of `build_step_schedules`, or the error for wrong tensors or facts."""
    *decode_tensors, queries, table, words = tensors
    t = DecodeTensors(*decode_tensors)
    require_decode(t, page_size)
    require_step(facts[0], t, page_size)
    batch = len(t.seq_lens)
    if queries is not None:
        require_tensor(QUERIES, queries, (batch + 1,), "int32", contiguous=True)
        for each in facts:
            each.require_q(QUERIES, queries)
    require_tensor(TABLE, table, (len(facts), COLUMNS), "int32", contiguous=True)
    require_tensor(WORDS, words, (layout(facts)[-1],), "int32", contiguous=True)
    others = {QUERIES: queries, TABLE: table, WORDS: words}
    require_one_device({"seq_lens": t.seq_lens, **others})
    schedules = Schedules(
        tensors=others,
        kinds=len(facts),
        programs=ceil_div(batch, ROWS.value),
        span=span_width(batch),
    )
    return decode.launch_of(t, page_size, schedules)


def require_step(facts: SchedulerFacts, t: DecodeTensors, page_size: int) -> None:
    """ValueError unless `facts` are of a call of this step, as all kinds of a step are or none."""
    batch, columns = t.page_table.shape
    expected = {
        "batch_size": batch,
        "page_size": page_size,
        "max_seqlen_k": columns * page_size,
    }
    for field, value in expected.items():
        if getattr(facts, field) != value:
            raise ValueError(
                f"schedules must be for a decode step of {field} {value}, as page_table "
                f"[{batch}, {columns}] and page_size {page_size} make it, got {field} "
                f"{getattr(facts, field)}"
            )


LAUNCHER = Launcher(decode.decode_metadata_kernel, prepare)


def build_step_schedules(
    *,
    page_size: int,
    max_pages: int,
    schedules: StepSchedules,
    cu_seqlens_q: Tensor | None = None,
    seq_len_delta: int = 0,
    check: bool = False,
    **tensors: Tensor | None,
) -> None:
    """`build_decode_metadata`, and the schedule of each kind of layer, in place, in one launch.

    The words of a kind become those that the library would write for `cache_seqlens`, padding zero:
    `schedule_words`. Lengths beyond `max_seqlen_k` are not detected, and neither are sums of tiles
    beyond int32. Where no request has both query tokens and KV, the library divides by zero; a
    request without KV has one split then.

    An engine with a block table in place of slots gives it as `page_table`, with `max_pages=0`: no
    page is written then, and `req_to_token` is not read. It may be [1, 1], and `req_pool_indices`
    zeros.

    Parameters
    ----------
    page_size, max_pages, seq_len_delta, check : int, bool
        As for `build_decode_metadata`. In verification the delta is the number of query tokens.
        With `check`, `cu_seqlens_q` is looked at too.
    schedules : StepSchedules
        For this step: as many requests, pages of `page_size`, and a `max_seqlen_k` of the page
        table's whole width.
    cu_seqlens_q : Tensor, optional
        [bs + 1] int32, first query token of each request, and their sum; every kind has `varlen_q`
        then. Without it a request has `max_seqlen_q` tokens.
    **tensors : Tensor
        Those of `build_decode_metadata`.

    Raises
    ------
    ValueError, TypeError
        Before the launch, naming the argument.

    Examples
    --------
    Under TRITON_INTERPRET=1, without a GPU. One request of 5 tokens, in a layer with full attention
    and in one with a window of two tokens; each needs one split:

    >>> from dataclasses import replace
    >>> import torch
    >>> from attnlib.core import SchedulerFacts, StepSchedules
    >>> full = SchedulerFacts(1, 32, 8, 128, 1, max_seqlen_k=8, num_sms=132, page_size=4)
    >>> facts = {"full": full, "window": replace(full, window=(1, 0))}
    >>> schedules = StepSchedules.reserve(facts, torch.device("cpu"))
    >>> build_step_schedules(
    ...     page_size=4,
    ...     max_pages=2,
    ...     schedules=schedules,
    ...     seq_lens=torch.tensor([5]),
    ...     req_pool_indices=torch.tensor([0]),
    ...     req_to_token=torch.arange(8, dtype=torch.int32)[None],
    ...     cache_seqlens=torch.zeros(1, dtype=torch.int32),
    ...     cu_seqlens_k=torch.zeros(2, dtype=torch.int32),
    ...     page_table=torch.zeros((1, 2), dtype=torch.int32),
    ... )
    >>> [int(kind.words[0]) for kind in schedules.kinds.values()]
    [1, 1]

    On a GPU with FlashAttention-3, complete: a graph of up to `batch` decode requests over pages of
    16 tokens, in an engine that calls the library itself and has a pair of `caches` per layer::

        import torch
        from flash_attn_interface import flash_attn_with_kvcache

        from attnlib.core import SchedulerFacts, StepSchedules, build_step_schedules

        def zeros(*size):
            return torch.zeros(size, dtype=torch.int32, device="cuda")

        # What the calls below say of themselves. `build="sglang"` for sgl_kernel.flash_attn.
        facts = SchedulerFacts(
            batch_size=batch,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=128,
            max_seqlen_q=1,
            max_seqlen_k=max_pages * 16,  # the whole width of page_table
            num_sms=torch.cuda.get_device_properties("cuda").multi_processor_count,
            page_size=16,
            causal=True,
        )
        schedules = StepSchedules.reserve({"full": facts}, torch.device("cuda"))

        # What replays read. A graph keeps addresses: fill these in place, pass no other tensors.
        seq_lens = zeros(batch)  # tokens that queries see, those of this step included
        cache_seqlens = zeros(batch)
        cu_seqlens_k = zeros(batch + 1)  # written too; flash_attn_with_kvcache does not take it
        page_table = zeros(batch, max_pages)
        rows = zeros(batch)
        q = torch.zeros(batch, 1, num_qo_heads, 128, dtype=torch.bfloat16, device="cuda")

        # From slots [pool, max_ctx] the launch writes page_table. A block table is page_table
        # already: the launch leaves it alone.
        slots = {"req_to_token": req_to_token, "req_pool_indices": rows, "max_pages": max_pages}
        blocks = {"req_to_token": zeros(1, 1), "req_pool_indices": rows, "max_pages": 0}

        def schedule_step():
            build_step_schedules(
                page_size=16,
                schedules=schedules,
                seq_lens=seq_lens,
                cache_seqlens=cache_seqlens,
                cu_seqlens_k=cu_seqlens_k,
                page_table=page_table,
                **slots,  # or **blocks
            )

        def attend(k_cache, v_cache):
            full = schedules["full"]
            full.require_fits(facts, device=q.device)  # facts of this call, or ValueError
            out = flash_attn_with_kvcache(
                q=q,
                k_cache=k_cache,  # [num_pages, 16, num_kv_heads, 128]
                v_cache=v_cache,
                cache_seqlens=cache_seqlens,
                page_table=page_table,
                softmax_scale=128**-0.5,
                causal=True,
                window_size=(-1, -1),
                scheduler_metadata=full.words,
                num_splits=full.facts.num_splits,  # not 0: the number the words are made for
            )
            full.mark_used()  # a call from Python has reset a word; replays need none
            return out

        schedule_step()  # compiles, which a capture cannot
        attend(*caches[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            schedule_step()  # once per replay, for all layers
            outs = [attend(k_cache, v_cache) for k_cache, v_cache in caches]

        # A step of `lens`, by slots in rows `req_rows` of the pool, or by a block table `table`.
        # Requests past them are empty.
        seq_lens.zero_()
        seq_lens[: len(lens)].copy_(lens)
        rows[: len(lens)].copy_(req_rows)  # slots
        page_table[: len(lens), : table.shape[1]].copy_(table)  # blocks
        graph.replay()

    Without a graph, a step is `schedule_step()`, then `attend` in each layer. Layers that share a
    schedule run one after the other, since its words hold a counter.

    Where query tokens differ by request, `facts` have `varlen_q=True` and the most tokens of one as
    `max_seqlen_q`. Both calls get `cu_seqlens_q` [batch + 1] int32. The attention call also gets
    that `max_seqlen_q`, and `q` is [query tokens, num_qo_heads, 128].
    """
    if not isinstance(schedules, StepSchedules):
        raise TypeError(f"schedules must be StepSchedules, got {type(schedules).__name__}")
    t: DecodeTensors = tensors_named(DecodeTensors, tensors)
    facts = schedules.facts
    values = None
    if check:
        pages = values_of(t, page_size, max_pages, seq_len_delta)

        def values() -> None:
            pages()
            require_queries(cu_seqlens_q, facts[0].max_seqlen_q)

    LAUNCHER.launch(
        (*t, cu_seqlens_q, schedules.table, schedules.words),
        (page_size, facts),
        (seq_len_delta, max_pages),
        values,
    )
    for kind in schedules.kinds.values():
        kind.mark_written()


def require_queries(cu_seqlens_q: Tensor | None, most: int) -> None:
    """ValueError for a request with fewer than 0 or more than `most` query tokens."""
    if cu_seqlens_q is not None:
        why = " query tokens of a request, which max_seqlen_q bounds"
        require_between(QUERIES, cu_seqlens_q.diff(), 0, most, why)
