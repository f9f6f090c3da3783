"""Guard an engine's FlashAttention-3: metadata that does not fit an attention call is named.

    attnlib.guard(engine="sglang")     # in the process of the GPU, before the engine loads a model

It wraps `get_scheduler_metadata`, remembers for which call its words were made, and compares that
with the facts of each attention call that gets them, on the host: no kernel, no synchronisation.

Words are known by their address while their memory lives. Engines copy words into a buffer of their
own; those that we hand out tell where they go (`_Words`). A CUDA graph is replayed without Python:
its calls are kept at capture and compared with what lies at their addresses before each replay.

The width of the table may differ, as long as the cap of splits of the metadata is not above the
call's: engines schedule for the longest request and attend over the whole table. Words of unknown
origin are let pass; so are calls that `SchedulerFacts` cannot describe, which the log tells.
"""

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..spec import require_word
from .facts import FULL, SchedulerFacts
from .flash_attn3 import misfit, sm_count

ENGINES = {
    "sglang": (
        "sgl_kernel.flash_attn",
        "sglang.jit_kernel.flash_attention",
        "sglang.kernels.ops.attention.flash_attention",
    ),
    "vllm": ("vllm.vllm_flash_attn",),
    "flash-attn-3": ("flash_attn_interface",),
}
"""Who calls FlashAttention-3 -> modules that have it; a release of SGLang has two of the three."""
MAKES, ATTENDS = "get_scheduler_metadata", ("flash_attn_with_kvcache", "flash_attn_varlen_func")
OFF, MODES = "off", ("raise", "log")
CPU_SMS = 132
Function = Callable[..., Any]
Calls = set[tuple[int, SchedulerFacts]]

_made: dict[int, tuple[StorageWeakRef, SchedulerFacts | None]] = {}
"""Address of words -> what tells whether their memory is alive, and the facts they are made for."""
_active: list["Guard"] = []
# Cached, because every layer asks: equal calls are one object, which is settled once.
_known = lru_cache(maxsize=256)(SchedulerFacts)


class _Words(torch.Tensor):
    """Words that tell where they are copied to, slices too; all else of them is plain tensors."""

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            if func is torch.Tensor.__getitem__ and type(out) is torch.Tensor:
                return out.as_subclass(cls)
            at = {torch.Tensor.copy_: 1, torch.Tensor.__setitem__: 2}.get(func, 0)
            if isinstance(source := args[at] if at else None, cls) and source.data_ptr() in _made:
                into = args[0] if at == 1 else args[0][args[1]]
                _keep(into, _made[source.data_ptr()][1])
        return out


class Guard:
    """What `guard` put in; `remove` takes it off."""

    def __init__(self, engine: str) -> None:
        self.engine, self.mode = engine, OFF
        self._tell = lru_cache(logging.getLogger("attnlib").error)  # each told once
        self._swapped: list[tuple[Function, Function]] = []
        self._captured: Calls | None = None
        self._graphs: WeakKeyDictionary[Any, Calls] = WeakKeyDictionary()
        modules = []
        for name in ENGINES[engine]:
            with suppress(ImportError, OSError):
                modules.append(vars(importlib.import_module(name)))
        if not any(MAKES in module for module in modules):
            raise RuntimeError(f"{ENGINES[engine][0]} must have {MAKES} to guard {engine!r}")
        for name in (MAKES, *ATTENDS):
            for function in {module[name] for module in modules if name in module}:
                if name == MAKES or "scheduler_metadata" in inspect.signature(function).parameters:
                    self._swap(function, self._judges)
        graph = torch.cuda.CUDAGraph
        for function in (graph.capture_begin, graph.capture_end, graph.replay):
            self._swap(function, self._graphs_call)

    def remove(self) -> None:
        """Put back what was there; what an object of the engine still holds no longer checks."""
        for old, new in self._swapped:
            _replace(new, old)
        self.mode = OFF
        _active.clear()

    def _swap(self, old: Function, around: Callable[[Function], Function]) -> None:
        new = wraps(old)(around(old))
        self._swapped.append((old, new))
        _replace(old, new)

    def _judges(self, call: Function) -> Function:
        """Around what makes words, or an attention call that takes them."""
        defaults = {name: each.default for name, each in inspect.signature(call).parameters.items()}

        def judged(*args: Any, **given: Any) -> Any:
            if self.mode == OFF:
                return call(*args, **given)
            told = {**defaults, **dict(zip(defaults, args, strict=False)), **given}
            if "scheduler_metadata" not in told:
                words = call(*args, **given)
                if isinstance(words, torch.Tensor):
                    _keep(words, self._facts(told))
                    words = words.as_subclass(_Words)
                return words
            words = told["scheduler_metadata"]
            if words is not None and (facts := self._facts(told)):
                self._check(words.data_ptr(), facts)
                if self._captured is not None:
                    self._captured.add((words.data_ptr(), facts))
            return call(*args, **given)

        return judged

    def _graphs_call(self, call: Function) -> Function:
        def around(graph: Any, *args: Any, **given: Any) -> Any:
            if call.__name__ == "capture_begin":
                self._captured = self._graphs[graph] = set()
            elif call.__name__ == "capture_end":
                self._captured = None
            else:
                for words, facts in self._graphs.get(graph, ()):
                    self._check(words, facts)
            return call(graph, *args, **given)

        return around

    def _check(self, words: int, call: SchedulerFacts) -> None:
        memory, made = _made.get(words, (None, None))
        if self.mode == OFF or memory is None or made is None or memory.expired():
            return
        if told := _differing(made, call):
            if self.mode == "raise":
                raise ValueError(told)
            self._tell(told)

    def _facts(self, told: dict[str, Any]) -> SchedulerFacts | None:
        try:
            return _facts(told)
        except (TypeError, ValueError) as error:
            self._tell(f"a call of FlashAttention-3 is not judged: {error}")
            return None


def guard(engine: str, *, mode: str = "raise") -> Guard:
    """Guard `engine` (of `ENGINES`) from now on; a second call only sets the mode.

    An attention call whose metadata was made for another raises ValueError, which names the fields
    and both values; with `mode="log"` it is an error of the logger `attnlib`, each told once.
    Raises ValueError for unknown words, or while another engine is guarded, RuntimeError if the
    engine's FlashAttention-3 is not installed.
    """
    require_word("engine", engine, ENGINES)
    require_word("mode", mode, MODES)
    found = _active[0] if _active else Guard(engine)
    if found.engine != engine:
        raise ValueError(
            f"engine must be {found.engine!r} until its guard is removed, got {engine!r}"
        )
    _active[:], found.mode = [found], mode
    return found


def _replace(old: Function, new: Function) -> None:
    """Put `new` wherever a loaded module has `old`, under whatever name it imported it."""
    for owner in (torch.cuda.CUDAGraph, *sys.modules.values()):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if value is old:
                setattr(owner, name, new)


def _keep(words: torch.Tensor, facts: SchedulerFacts | None) -> None:
    for address in [at for at, (memory, _) in list(_made.items()) if memory.expired()]:
        _made.pop(address, None)  # another thread may have
    _made[words.data_ptr()] = StorageWeakRef(words.untyped_storage()), facts


@lru_cache(maxsize=256)
def _differing(made: SchedulerFacts, call: SchedulerFacts) -> str:
    """What of the words does not fit the call, or the empty string."""
    differing = made.differences(call)
    differing.pop("max_seqlen_k", None)
    if made.split_cap <= call.split_cap:
        differing.pop("num_splits", None)
    return misfit(differing) if differing else ""


def _facts(told: dict[str, Any]) -> SchedulerFacts:
    """The facts of a call that makes words or takes them."""
    if isinstance(told["causal"], torch.Tensor):
        raise TypeError("causal must be a bool, got a tensor")
    if "q" in told:
        q, k = told["q"], told["k_cache" if "k_cache" in told else "k"]
        table, sums = told.get("page_table", told.get("block_table")), told["cu_seqlens_q"]
        page = k.shape[1] if table is not None else None
        width = table.shape[1] * k.shape[1] if table is not None else k.shape[1]
        batch, longest = (len(sums) - 1, told["max_seqlen_q"]) if sums is not None else q.shape[:2]
        sizes = (batch, longest, told.get("max_seqlen_k") or width, q.shape[-2], *k.shape[-2:])
        dim_v = told["v_cache" if "v_cache" in told else "v"].shape[-1]
        device, dtype, softcap = q.device, q.dtype, told["softcap"] > 0
    else:
        # Builds differ in the names of the first six, not in their order.
        sizes = tuple(told.values())[:6]
        page, dim_v, device = told["page_size"], told["headdim_v"], told["cache_seqlens"].device
        dtype, softcap = told["qkv_dtype"], told["has_softcap"]
    names = ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_qo_heads", "num_kv_heads")
    return _known(
        **dict(zip((*names, "head_dim"), sizes, strict=True)),
        num_sms=sm_count(device) if device.type == "cuda" else CPU_SMS,
        page_size=page,
        dtype=str(dtype).removeprefix("torch."),
        head_dim_v=dim_v or 0,
        causal=told["causal"],
        window=tuple(told["window_size"] or FULL),
        has_softcap=softcap,
        varlen_q=told["cu_seqlens_q"] is not None,
        pack_gqa=told.get("pack_gqa"),
        num_splits=told["num_splits"],
        sm_margin=told.get("sm_margin", 0),
    )
