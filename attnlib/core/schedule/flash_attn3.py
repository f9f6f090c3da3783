"""FlashAttention-3's scheduler metadata: precomputed once per step, and guarded against misuse.

    metadata = precompute(facts, seq_lens)                # one kernel, instead of one per layer
    for layer in layers:
        attend(..., metadata=metadata)                    # checks `require_fits`, then launches

`attend` is that of `backends.flash_attn3`. For calls of `flash_attn_with_kvcache` of your own see
the example of `precompute`.

The attention kernel trusts its metadata: with that of another call it reads and writes past its
buffers, often without a crash. So `require_fits` compares the facts of both calls on the host.

- **Lengths may change**: ranges of KV come from the lengths of the call; old splits only balance
  worse. **The split cap may not**: both calls pass the same explicit `num_splits`, so that no
  replay exceeds buffers that were sized at capture.
- **Streams**: the words hold a counter that each attention call uses and resets, so calls that
  share metadata must not overlap. That is not detected.
- **Buffers**: one buffer may serve graphs of many batch sizes, with one metadata object each:
  `renew` the right one before its replay. Words of another one are refused at capture and in eager
  calls, not at replay.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ..batch import require_tensor
from ..spec import require_type
from . import library
from .facts import SchedulerFacts
from .splits import num_words
from .words import require_known_words

COUNTED = {
    "batch_size": "requests",
    "num_qo_heads": "query heads",
    "num_kv_heads": "KV heads",
    "max_seqlen_q": "query tokens",
    "num_sms": "multiprocessors",
}
"""Facts that a message counts -> what they count."""


@dataclass(frozen=True, eq=False)
class SchedulerMetadata:
    """FlashAttention-3's schedule of a step, and the call that it is for.

    Attributes
    ----------
    words : Tensor
        [n] int32 on the GPU: what the library's call takes as `scheduler_metadata`.
    facts : SchedulerFacts
        Of its call, settled: that call's `num_splits` is `facts.num_splits`.

    Examples
    --------
    Reserved words are no schedule yet, and a call of another shape is refused:

    >>> import torch
    >>> from attnlib.core import SchedulerFacts, StepSchedules
    >>> facts = SchedulerFacts(4, 32, 8, 128, 1, 8192, num_sms=132, page_size=16, causal=True)
    >>> metadata = StepSchedules.reserve({"full": facts}, torch.device("cpu"))["full"]
    >>> metadata.require_fits(facts, device=torch.device("cpu"))
    Traceback (most recent call last):
        ...
    ValueError: words must be written before they are used, got words only reserved
    >>> metadata.facts.differences(SchedulerFacts(8, 32, 8, 128, 1, 8192, 132, 16, causal=True))
    {'batch_size': (4, 8)}
    """

    words: Tensor
    facts: SchedulerFacts
    _writes: list[int | None] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.mark_used()

    def require_fits(self, call: SchedulerFacts, *, device: torch.device) -> None:
        """Raise ValueError, naming what differs, unless a call with these facts may use the words.

        The lengths of the call are not looked at.
        """
        if call.settled != self.facts:
            raise ValueError(misfit(self.facts.differences(call)))
        if device != self.words.device:
            raise ValueError(
                f"device must be that of the scheduler metadata, {self.words.device}, got {device}"
            )
        if not self._writes:
            raise ValueError("words must be written before they are used, got words only reserved")
        if self._writes != [writes(self.words)]:
            raise ValueError(
                f"words must be those of this scheduler metadata, written {self._writes[0]} times, "
                f"got a buffer written {writes(self.words)} times: something else is in it now"
            )

    def mark_used(self) -> None:
        """Accept the words as they are now: an attention call has reset the counter.

        `attend` does it. After a call of your own from Python do it too; replays need none.
        """
        self._writes[:] = [writes(self.words)]

    def mark_written(self) -> None:
        """The same after a kernel whose writes PyTorch does not count."""
        torch.autograd.graph.increment_version(self.words)
        self.mark_used()

    def renew(
        self,
        seq_lens: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
    ) -> None:
        """Write the metadata of new lengths into the same words; arguments as for `precompute`."""
        self.words.copy_(_checked_words(self.facts, seq_lens, cu_seqlens_q))
        self.mark_used()


def precompute(
    facts: SchedulerFacts,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    out: Tensor | None = None,
) -> SchedulerMetadata:
    """The schedule of one step, from one kernel of the library on the current stream.

    Parameters
    ----------
    facts : SchedulerFacts
        Of the attention calls that will use it.
    seq_lens : Tensor
        [batch_size] int32 on the GPU, KV tokens of each request; not read here.
    cu_seqlens_q : Tensor, optional
        [batch_size + 1] int32, with `facts.varlen_q`.
    out : Tensor, optional
        [>= words] int32, the caller's buffer (`splits.max_words` sizes it); the words are its head,
        and its tail becomes zero.

    Returns
    -------
    SchedulerMetadata
        For `metadata=` of `attend`, in every layer of the step.

    Raises
    ------
    ValueError
        Before any launch, naming the argument, what it must be and what it was.

    Examples
    --------
    Needs a GPU and FlashAttention-3. A step of `batch` decode requests over a block table of 16
    tokens a page, in an engine that calls the library itself and has a pair of `caches` per layer.
    Here the library's kernel runs before each replay. `build_step_schedules` writes schedules
    inside the graph, and page tables from slots: its example has both::

        import torch
        from flash_attn_interface import flash_attn_with_kvcache

        from attnlib.core import SchedulerFacts, precompute

        # What the calls below say of themselves. `build="sglang"` for sgl_kernel.flash_attn.
        facts = SchedulerFacts(
            batch_size=batch,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=128,
            max_seqlen_q=1,
            max_seqlen_k=page_table.shape[1] * 16,  # the whole width
            num_sms=torch.cuda.get_device_properties("cuda").multi_processor_count,
            page_size=16,
            causal=True,
        )
        metadata = precompute(facts, cache_seqlens)  # once per step, for all layers

        def attend(k_cache, v_cache):
            metadata.require_fits(facts, device=q.device)  # facts of this call, or ValueError
            out = flash_attn_with_kvcache(
                q=q,  # [batch, 1, num_qo_heads, 128] bfloat16
                k_cache=k_cache,  # [num_pages, 16, num_kv_heads, 128]
                v_cache=v_cache,
                cache_seqlens=cache_seqlens,  # [batch] int32
                page_table=page_table,  # [batch, max_pages] int32
                softmax_scale=128**-0.5,
                causal=True,
                window_size=(-1, -1),
                scheduler_metadata=metadata.words,
                num_splits=metadata.facts.num_splits,  # not 0: the number the words are made for
            )
            metadata.mark_used()  # a call from Python has reset a word; replays need none
            return out

        attend(*caches[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [attend(k_cache, v_cache) for k_cache, v_cache in caches]

        # The next step: lengths and pages in place, then the words, then the layers.
        cache_seqlens.copy_(lens)
        page_table[:, : table.shape[1]].copy_(table)
        metadata.renew(cache_seqlens)
        graph.replay()

    >>> metadata = precompute(facts, seq_lens)  # doctest: +SKIP
    >>> metadata.renew(longer_seq_lens)  # the next step  # doctest: +SKIP
    """
    require_type("facts", facts, SchedulerFacts)
    settled = facts.settled
    _require_packing(facts)
    words = _checked_words(settled, seq_lens, cu_seqlens_q, out)
    if out is not None:
        out[len(words) :].zero_()
        words = out[: len(words)].copy_(words)
    return SchedulerMetadata(words, settled)


def unwritten(facts: SchedulerFacts, words: Tensor) -> SchedulerMetadata:
    """`words` [n] int32, zeros, for a schedule that a launch of ours writes; no attention call
    takes them before. ValueError as `precompute`, and for vLLM's build, whose words are not known.
    """
    require_known_words(facts)
    _require_packing(facts)
    _require_sm_count(facts, words.device)
    metadata = SchedulerMetadata(words, facts.settled)
    metadata._writes.clear()
    return metadata


@lru_cache(maxsize=16)
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def ask_library(
    facts: SchedulerFacts, seq_lens: Tensor, cu_seqlens_q: Tensor | None = None
) -> Tensor:
    """The library's call, without any check of the arguments. See `precompute`."""
    return library.import_library().get_scheduler_metadata(
        # Builds agree in the order of these, not in their names.
        facts.batch_size,
        facts.max_seqlen_q,
        facts.max_seqlen_k,
        facts.num_qo_heads,
        facts.num_kv_heads,
        facts.head_dim,
        cache_seqlens=seq_lens,
        qkv_dtype=getattr(torch, facts.dtype),
        headdim_v=facts.head_dim_v,
        cu_seqlens_q=cu_seqlens_q,
        page_size=facts.page_size,
        causal=facts.causal,
        window_size=facts.window,
        has_softcap=facts.has_softcap,
        num_splits=facts.num_splits,
        pack_gqa=facts.pack_gqa,
        sm_margin=facts.sm_margin,
    )


def _checked_words(
    settled: SchedulerFacts,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    require_tensor("seq_lens", seq_lens, (settled.batch_size,), "int32", contiguous=True)
    if out is not None:
        _require_room(out, num_words(settled), seq_lens.device)
    settled.require_q("cu_seqlens_q", cu_seqlens_q)
    if cu_seqlens_q is not None:
        sums = (settled.batch_size + 1,)
        require_tensor("cu_seqlens_q", cu_seqlens_q, sums, "int32", contiguous=True)
    _require_sm_count(settled, seq_lens.device)
    words = ask_library(settled, seq_lens, cu_seqlens_q)
    size = num_words(settled)
    if words.shape != (size,):
        raise RuntimeError(
            f"{library.supplier()} must lay metadata out in {size} words, as FlashAttention-3 does "
            f"since 2025-08, got {list(words.shape)}"
        )
    return words


def writes(words: Tensor) -> int | None:
    """PyTorch's count of writes to the buffer beneath; a tensor of inference mode has none."""
    return None if words.is_inference() else words._version


def misfit(differing: Mapping[str, tuple[object, object]]) -> str:
    """The message for fields that differ: name -> (the metadata's value, the call's)."""
    made_for = ", ".join(_said(name, made) for name, (made, _) in differing.items())
    got = ", ".join(str(call) for _, call in differing.values())
    words = f"the schedule was made for {made_for}; this call has {got}"
    return f"scheduler metadata does not fit the call: {words}"


def _said(name: str, value: object) -> str:
    """`4 query heads`, `num_splits 29`."""
    return f"{value} {COUNTED[name]}" if name in COUNTED else f"{name} {value}"


def _require_packing(facts: SchedulerFacts) -> None:
    if facts.must_pack and not facts.packs:
        raise ValueError(
            "pack_gqa must be None or True where pages are gathered or KV is split, because the "
            f"kernel always packs there, got {facts.pack_gqa}"
        )


def _require_sm_count(facts: SchedulerFacts, device: torch.device) -> None:
    if device.type == "cuda" and facts.num_sms != sm_count(device):
        raise ValueError(
            f"num_sms must be that of {device}, {sm_count(device)}, got {facts.num_sms}"
        )


def _require_room(out: Tensor, size: int, device: torch.device) -> None:
    require_tensor("out", out, (None,), "int32", contiguous=True)
    if len(out) < size:
        raise ValueError(f"out must be [>= {size}] int32, got {list(out.shape)}")
    if out.device != device:
        raise ValueError(f"out must be on the device of the call, {device}, got {out.device}")
