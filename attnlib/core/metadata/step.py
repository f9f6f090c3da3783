"""All metadata of a decode step in one launch: lengths, page table, FlashAttention-3's schedule.

    scheduler = reserve(facts, device)               # memory for the schedule, once
    build_step_metadata(..., scheduler=scheduler)    # one kernel per step
    for layer in layers:
        attend(..., metadata=scheduler)              # no prepare kernel; still guarded

The schedule is that of `splits.plan_splits`, word for word; words that the library never writes are
0. FlashAttention-3 with metadata starts after the previous kernel has ended.
"""

from typing import Any

from torch import Tensor

from ..batch import require_tensor
from ..schedule.facts import SchedulerFacts
from ..schedule.flash_attn3 import SchedulerMetadata
from ..schedule.kinds import KernelFacts
from ..schedule.splits import num_words
from ..spec import ceil_div
from . import decode
from .device import ROWS, span_width
from .launch import Launch, Launcher
from .require import DecodeTensors, require_decode, require_one_device, values_of


def prepare(tensors: tuple[Any, ...], page_size: int, facts: SchedulerFacts) -> Launch:
    """The launch of `build_step_metadata`, or the error for wrong tensors or facts."""
    *decode_tensors, words = tensors
    t = DecodeTensors(*decode_tensors)
    require_decode(t, page_size)
    require_step("scheduler", facts, t, page_size, max_seqlen_q=1)
    require_tensor("scheduler.words", words, (num_words(facts),), "int32", contiguous=True)
    require_one_device({"seq_lens": t.seq_lens, "scheduler.words": words})
    batch = len(t.seq_lens)
    schedule = decode.Schedule(
        tensors={decode.WORDS: words},
        programs=ceil_div(batch, ROWS.value),
        facts=KernelFacts.of(facts),
        flags=(
            not facts.is_local,
            facts.is_causal or facts.is_local,
            span_width(batch),
        ),
    )
    return decode.launch_of(t, page_size, schedule)


def require_step(
    name: str,
    facts: SchedulerFacts,
    t: DecodeTensors,
    page_size: int,
    *,
    max_seqlen_q: int,
) -> None:
    """ValueError unless `facts` are of a call of this step; `name` is who has them."""
    batch, columns = t.page_table.shape
    expected = {
        "batch_size": batch,
        "page_size": page_size,
        "max_seqlen_k": columns * page_size,
        "max_seqlen_q": max_seqlen_q,
    }
    for field, value in expected.items():
        if getattr(facts, field) != value:
            raise ValueError(
                f"{name} must be for a decode step of {field} {value}, as page_table "
                f"[{batch}, {columns}] and page_size {page_size} make it, got {field} "
                f"{getattr(facts, field)}"
            )


LAUNCHER = Launcher(decode.decode_metadata_kernel, prepare)


def build_step_metadata(
    *,
    page_size: int,
    max_pages: int,
    scheduler: SchedulerMetadata,
    seq_len_delta: int = 0,
    check: bool = False,
    **tensors: Tensor | None,
) -> None:
    """`build_decode_metadata`, and the schedule of `cache_seqlens`, in place, in one launch.

    The words of the scheduler become those that the library would write for these lengths, padding
    zero. Lengths beyond `max_seqlen_k` are not detected. If all lengths are 0 every request gets
    one split, where the library divides by zero.

    Parameters
    ----------
    page_size, max_pages, seq_len_delta, check : int, bool
        As for `build_decode_metadata`.
    scheduler : SchedulerMetadata
        From `reserve` (or `precompute`) for the facts of the step's attention calls: one query
        token a request, `batch_size` requests, pages of `page_size`, and a `max_seqlen_k` of the
        page table's whole width; causal or not, with a window or not; with `cu_seqlens_q` or not,
        which then counts one token a request.
    **tensors : Tensor
        Those of `build_decode_metadata`.

    Raises
    ------
    ValueError, TypeError
        Before the launch, naming the argument.

    Examples
    --------
    Under TRITON_INTERPRET=1, without a GPU. One request of 5 tokens, which needs one split:

    >>> import torch
    >>> from attnlib.core import SchedulerFacts, reserve
    >>> facts = SchedulerFacts(1, 32, 8, 128, 1, max_seqlen_k=8, num_sms=132, page_size=4)
    >>> scheduler = reserve(facts, torch.device("cpu"))
    >>> build_step_metadata(
    ...     page_size=4,
    ...     max_pages=2,
    ...     scheduler=scheduler,
    ...     seq_lens=torch.tensor([5]),
    ...     req_pool_indices=torch.tensor([0]),
    ...     req_to_token=torch.arange(8, dtype=torch.int32)[None],
    ...     cache_seqlens=torch.zeros(1, dtype=torch.int32),
    ...     cu_seqlens_k=torch.zeros(2, dtype=torch.int32),
    ...     page_table=torch.zeros((1, 2), dtype=torch.int32),
    ... )
    >>> int(scheduler.words[0])
    1
    """
    if not isinstance(scheduler, SchedulerMetadata):
        raise TypeError(f"scheduler must be SchedulerMetadata, got {type(scheduler).__name__}")
    t = DecodeTensors(**tensors)
    values = None
    if check:
        values = values_of(t, page_size, max_pages, seq_len_delta)
    LAUNCHER.launch(
        (*t, scheduler.words),
        (page_size, scheduler.facts),
        (seq_len_delta, max_pages),
        values,
    )
    scheduler.mark_written()
