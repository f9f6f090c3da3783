"""Guard an engine's FlashAttention-3 against metadata that was made for another call.

    attnlib.guard(engine="sglang")     # in the GPU's process, before the engine loads a model

It wraps `get_scheduler_metadata`, remembers the facts of the call for which words were made, and
compares them with the facts of each attention call that uses the words. It runs on the host: no
kernel, no synchronisation.

Words are identified by their address while their memory lives. Engines copy words into a buffer of
their own; `_Words` follows such copies. A CUDA graph is replayed without Python: its calls are
recorded at capture and checked against the words at their addresses before each replay.

The width of the page table may differ, as long as the split cap of the metadata is not above that
of the call: engines schedule for the longest request and attend over the whole table. Words of
unknown origin pass. Calls that `SchedulerFacts` cannot describe pass too, with a log message.
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
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..spec import dtype_name, require_word
from .facts import FULL, SchedulerFacts
from .flash_attn3 import misfit, sm_count
from .library import sglang_build

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
MAKES = "get_scheduler_metadata"
ATTENDS = ("flash_attn_with_kvcache", "flash_attn_varlen_func")
OFF = "off"
MODES = ("raise", "log")
CPU_SMS = 132
SIZES = (
    "batch_size",
    "max_seqlen_q",
    "max_seqlen_k",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim",
)
Function = Callable[..., Any]
Calls = set[tuple[int, SchedulerFacts]]

_made: dict[int, tuple[StorageWeakRef, SchedulerFacts | None]] = {}
"""Address of words -> a reference to their memory, and the facts they were made for."""
_active: list["Guard"] = []
# Cached, because every layer asks: equal calls are one object, which is settled once.
_known = lru_cache(maxsize=256)(SchedulerFacts)


class _Words(Tensor):
    """Words that remember their facts when an engine copies them, or a slice, into its buffer.

    Results of all other operations are plain tensors.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            if func is Tensor.__getitem__ and type(out) is Tensor:
                return out.as_subclass(cls)
            if func is Tensor.__setitem__:
                # SGLang's graphs: `self._sched_meta_buf[:n] = words`
                buffer, index, words = args
                if isinstance(words, cls):
                    _keep_copy(words, buffer[index])
            if func is Tensor.copy_:
                buffer, words = args[:2]
                if isinstance(words, cls):
                    _keep_copy(words, buffer)
        return out


class Guard:
    """The wrappers that `guard` installed; `remove` takes them out.

    `next_graph` are checks of what is in the graph that is captured next, by any key: they are run
    before each replay of it. A capture or a replay empties it.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.mode = OFF
        self.build = {"sglang": sglang_build(), "vllm": "vllm"}.get(engine, "upstream")
        self._log = lru_cache(logging.getLogger("attnlib").error)  # each message once
        self._swapped: list[tuple[Function, Function]] = []
        self._captured: Calls | None = None
        self._graphs: WeakKeyDictionary[Any, Calls] = WeakKeyDictionary()
        self.next_graph: dict[int, Callable[[], None]] = {}
        self._checks: WeakKeyDictionary[Any, list[Callable[[], None]]] = WeakKeyDictionary()
        modules = []
        for name in ENGINES[engine]:
            with suppress(ImportError, OSError):
                modules.append(vars(importlib.import_module(name)))
        if not any(MAKES in module for module in modules):
            raise RuntimeError(f"{ENGINES[engine][0]} must have {MAKES} to guard {engine!r}")
        for name in (MAKES, *ATTENDS):
            for function in {module[name] for module in modules if name in module}:
                if name == MAKES or "scheduler_metadata" in inspect.signature(function).parameters:
                    self._swap(function, self._checked)
        graph = torch.cuda.CUDAGraph
        for function in (graph.capture_begin, graph.capture_end, graph.replay):
            self._swap(function, self._graphs_call)

    def remove(self) -> None:
        """Restore the library's functions; wrappers that objects still hold no longer check."""
        for old, new in self._swapped:
            _replace(new, old)
        self.mode = OFF
        _active.clear()

    def _swap(self, old: Function, around: Callable[[Function], Function]) -> None:
        new = wraps(old)(around(old))
        self._swapped.append((old, new))
        _replace(old, new)

    def _checked(self, call: Function) -> Function:
        """Wrap a function that makes words, or an attention call that takes them."""
        parameters = inspect.signature(call).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}

        def checked(*args: Any, **options: Any) -> Any:
            if self.mode == OFF:
                return call(*args, **options)
            by_position = dict(zip(defaults, args, strict=False))
            arguments = defaults | by_position | options
            if "scheduler_metadata" not in arguments:
                words = call(*args, **options)
                if isinstance(words, Tensor):
                    _keep(words, self._facts(arguments))
                    words = words.as_subclass(_Words)
                return words
            words = arguments["scheduler_metadata"]
            facts = None if words is None else self._facts(arguments)
            if facts is not None:
                self._check(words.data_ptr(), facts)
                if self._captured is not None:
                    self._captured.add((words.data_ptr(), facts))
            return call(*args, **options)

        return checked

    def _graphs_call(self, call: Function) -> Function:
        def around(graph: Any, *args: Any, **options: Any) -> Any:
            if call.__name__ == "capture_end":
                self._captured = None
                return call(graph, *args, **options)
            if call.__name__ == "capture_begin":
                self._captured = self._graphs[graph] = set()
                self._checks[graph] = [*self.next_graph.values()]
            else:
                for words, facts in self._graphs.get(graph, ()):
                    self._check(words, facts)
                for check in self._checks.get(graph, ()):
                    check()
            self.next_graph.clear()
            return call(graph, *args, **options)

        return around

    def _check(self, words: int, call: SchedulerFacts) -> None:
        memory, made = _made.get(words, (None, None))
        if self.mode == OFF or memory is None or made is None or memory.expired():
            return
        if message := _differing(made, call):
            if self.mode == "raise":
                raise ValueError(message)
            self._log(message)

    def _facts(self, arguments: dict[str, Any]) -> SchedulerFacts | None:
        try:
            return _facts(arguments, self.build)
        except (TypeError, ValueError) as error:
            self._log(f"a call of FlashAttention-3 is not checked: {error}")
            return None


def guard(engine: str, *, mode: str = "raise") -> Guard:
    """Guard `engine` (one of `ENGINES`) from now on; a second call only sets the mode.

    An attention call whose metadata was made for another call raises ValueError, which names the
    fields and both values. With `mode="log"` the message goes to the logger `attnlib` instead, each
    message once. Raises ValueError for an unknown engine or mode, or while another engine is
    guarded; RuntimeError if the engine's FlashAttention-3 is not installed.
    """
    require_word("engine", engine, ENGINES)
    require_word("mode", mode, MODES)
    active = _active[0] if _active else Guard(engine)
    if active.engine != engine:
        raise ValueError(
            f"engine must be {active.engine!r} until its guard is removed, got {engine!r}"
        )
    _active[:] = [active]
    active.mode = mode
    return active


def _replace(old: Function, new: Function) -> None:
    """Replace `old` by `new` in every loaded module, under whatever name it was imported."""
    for owner in (torch.cuda.CUDAGraph, *sys.modules.values()):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if value is old:
                setattr(owner, name, new)


def _keep(words: Tensor, facts: SchedulerFacts | None) -> None:
    for address, (memory, _) in list(_made.items()):
        if memory.expired():
            _made.pop(address, None)  # another thread may have
    _made[words.data_ptr()] = StorageWeakRef(words.untyped_storage()), facts


def _keep_copy(words: Tensor, into: Tensor) -> None:
    if words.data_ptr() in _made:
        _, facts = _made[words.data_ptr()]
        _keep(into, facts)


@lru_cache(maxsize=256)
def _differing(made: SchedulerFacts, call: SchedulerFacts) -> str:
    """Why the words do not fit the call, or the empty string."""
    differing = made.differences(call)
    differing.pop("max_seqlen_k", None)
    if made.element_bytes > 1:  # tiles of 16 bits do not ask for it, and vLLM does not tell
        differing.pop("has_softcap", None)
    if made.split_cap <= call.split_cap:
        differing.pop("num_splits", None)
    return misfit(differing) if differing else ""


def _facts(arguments: dict[str, Any], build: str) -> SchedulerFacts:
    """The facts of a call that makes words or takes them, of this build."""
    if isinstance(arguments["causal"], Tensor):
        raise TypeError("causal must be a bool, got a tensor")
    sizes = _attention_facts(arguments) if "q" in arguments else _metadata_facts(arguments)
    device = sizes.pop("device")
    return _known(
        **sizes,
        num_sms=sm_count(device) if device.type == "cuda" else CPU_SMS,
        causal=arguments["causal"],
        window=tuple(arguments["window_size"] or FULL),
        varlen_q=arguments["cu_seqlens_q"] is not None,
        pack_gqa=arguments.get("pack_gqa"),
        num_splits=arguments["num_splits"],
        sm_margin=arguments.get("sm_margin", 0),
        build=build,
    )


def _attention_facts(arguments: dict[str, Any]) -> dict[str, Any]:
    """Sizes of an attention call, from its tensors: SGLang's names, or vLLM's."""
    q = arguments["q"]
    k = arguments["k_cache"] if "k_cache" in arguments else arguments["k"]
    v = arguments["v_cache"] if "v_cache" in arguments else arguments["v"]
    table = arguments.get("page_table", arguments.get("block_table"))
    sums = arguments["cu_seqlens_q"]
    if sums is None:
        batch_size, max_seqlen_q = q.shape[:2]
    else:
        batch_size = len(sums) - 1
        max_seqlen_q = arguments["max_seqlen_q"]
    width = k.shape[1]
    page_size = None
    if table is not None:
        width *= table.shape[1]
        page_size = k.shape[1]
    return {
        "batch_size": batch_size,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": arguments.get("max_seqlen_k") or width,
        "num_qo_heads": q.shape[-2],
        "num_kv_heads": k.shape[-2],
        "head_dim": k.shape[-1],
        "head_dim_v": v.shape[-1],
        "page_size": page_size,
        "dtype": dtype_name(q.dtype),
        "has_softcap": arguments["softcap"] > 0,
        "device": q.device,
    }


def _metadata_facts(arguments: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a metadata call. Builds differ in the names of the first six, not in the order."""
    return {
        **dict(zip(SIZES, arguments.values(), strict=False)),
        "head_dim_v": arguments["headdim_v"] or 0,
        "page_size": arguments["page_size"],
        "dtype": dtype_name(arguments["qkv_dtype"]),
        "has_softcap": arguments["has_softcap"],
        "device": arguments["cache_seqlens"].device,
    }
