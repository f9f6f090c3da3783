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
unknown origin pass.

The guard does not end serving for a reason of its own. Functions whose parameters it does not know
are refused, or in mode "log" left alone, when it is made. A call that it fails to check passes,
with one log message.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..spec import require_word
from .calls import ATTENDS, MAKES, Function, defaults, facts_of, named, unfit
from .facts import SchedulerFacts
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
OFF = "off"
RAISE = "raise"
MODES = (RAISE, "log")
MOST_SAID = 1000
"""Different messages that are remembered, so that each is logged once."""
Misfit = tuple[str, int]
"""What does not fit, and the number of the call."""
Calls = dict[tuple[int, SchedulerFacts], int]
"""Address of words and facts of an attention call in a graph -> the number of the first such."""


@dataclass
class _Made:
    """Words that lie in `memory`: the facts they were made for, and attention calls since."""

    memory: StorageWeakRef
    facts: SchedulerFacts | None
    calls: int = 0


_made: dict[int, _Made] = {}
"""By address."""
_active: list["Guard"] = []


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
            try:
                cls._follow(func, args)
            except Exception as error:
                for guarding in _active:
                    guarding.say(f"a copy of a schedule is not followed: {error!r}")
        return out

    @classmethod
    def _follow(cls, func: Function, args: Any) -> None:
        """Remember the facts of words that an engine copies."""
        if func is Tensor.__setitem__:
            # SGLang's graphs: `self._sched_meta_buf[:n] = words`
            buffer, index, words = args
            if isinstance(words, cls):
                _keep_copy(words, buffer[index])
        if func is Tensor.copy_:
            buffer, words = args[:2]
            if isinstance(words, cls):
                _keep_copy(words, buffer)


class Guard:
    """The wrappers that `guard` installed; `remove` takes them out.

    `unfit` says which functions it cannot check. `checks` counts schedules that were compared with
    a call. `next_graph` are checks of what is in the graph that is captured next, by any key: they
    are run before each replay of it. A capture or a replay empties it.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.mode = OFF
        self.build = {"sglang": sglang_build(), "vllm": "vllm"}.get(engine, "upstream")
        self.checks = 0
        self._said: set[str] = set()
        self._swapped: list[tuple[Function, Function]] = []
        self._captured: Calls | None = None
        self._graphs: WeakKeyDictionary[Any, Calls] = WeakKeyDictionary()
        self.next_graph: dict[int, Callable[[], None]] = {}
        self._checks: WeakKeyDictionary[Any, list[Callable[[], None]]] = WeakKeyDictionary()
        self.unfit: list[str] = []
        self._functions: list[tuple[str, Function]] = []
        for name, function in _functions(engine):
            if reason := unfit(name, function):
                self.unfit.append(reason)
            else:
                self._functions.append((name, function))

    def install(self) -> None:
        """Put the wrappers in."""
        for name, function in self._functions:
            self._swap(function, self._making if name == MAKES else self._attending)
        graph = torch.cuda.CUDAGraph
        for function in (graph.capture_begin, graph.capture_end, graph.replay):
            self._swap(function, self._graphs_call)

    def remove(self) -> None:
        """Restore the library's functions; wrappers that objects still hold no longer check."""
        for old, new in self._swapped:
            _replace(new, old)
        self.mode = OFF
        _active.clear()

    def say(self, message: str, key: str = "") -> None:
        """Log a message, once for each `key`, which is the message unless given."""
        key = key or message
        if key in self._said:
            return
        if len(self._said) >= MOST_SAID:
            self._said.clear()
        self._said.add(key)
        logging.getLogger("attnlib").error(message)

    def _swap(self, old: Function, around: Callable[[Function], Function]) -> None:
        new = wraps(old)(around(old))
        self._swapped.append((old, new))
        _replace(old, new)

    def _making(self, call: Function) -> Function:
        """Wrap a function that makes words."""
        parameters = defaults(call)

        def making(*args: Any, **options: Any) -> Any:
            words = call(*args, **options)
            if self.mode == OFF or not isinstance(words, Tensor):
                return words
            try:
                remember(words, self._facts(named(parameters, args, options)))
                return words.as_subclass(_Words)
            except Exception as error:
                self._fail(error)
                return words

        return making

    def _attending(self, call: Function) -> Function:
        """Wrap an attention call, which may take words."""
        parameters = defaults(call)

        def attending(*args: Any, **options: Any) -> Any:
            if self.mode != OFF:
                try:
                    misfit = self._judged(named(parameters, args, options))
                except Exception as error:
                    misfit = None
                    self._fail(error)
                self._tell(misfit)
            return call(*args, **options)

        return attending

    def _judged(self, arguments: dict[str, Any]) -> Misfit | None:
        """What does not fit in an attention call, and its number; it is noted for its graph."""
        words = arguments["scheduler_metadata"]
        facts = None if words is None else self._facts(arguments)
        if facts is None:
            return None
        address = words.data_ptr()
        number = 1
        if address in _made:
            _made[address].calls += 1
            number = _made[address].calls
        if self._captured is not None:
            self._captured.setdefault((address, facts), number)
        return self._misfit(address, facts, number)

    def _graphs_call(self, call: Function) -> Function:
        def around(graph: Any, *args: Any, **options: Any) -> Any:
            try:
                misfits = self._note(call.__name__, graph)
            except Exception as error:
                misfits = []
                self._fail(error)
            for misfit in misfits:
                self._tell(misfit)
            if call.__name__ == "replay" and self.mode != OFF:
                for check in self._checks.get(graph, ()):
                    self._run(check)
            return call(graph, *args, **options)

        return around

    def _note(self, event: str, graph: Any) -> list[Misfit | None]:
        """Note what a graph holds; of a replay what does not fit."""
        if event == "capture_end":
            self._captured = None
            return []
        checks = [*self.next_graph.values()]
        self.next_graph.clear()
        if event == "capture_begin":
            self._captured = self._graphs[graph] = {}
            self._checks[graph] = checks
            return []
        calls = self._graphs.get(graph, {})
        return [self._misfit(*call, number) for call, number in calls.items()]

    def _run(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Exception as error:
            if self.mode == RAISE:
                raise
            self._fail(error)

    def _misfit(
        self,
        address: int,
        call: SchedulerFacts,
        number: int,
    ) -> Misfit | None:
        made = _made.get(address)
        if self.mode == OFF or made is None:
            return None
        if made.facts is None or made.memory.expired():
            return None
        self.checks += 1
        words = _differing(made.facts, call)
        return (words, number) if words else None

    def _tell(self, misfit: Misfit | None) -> None:
        """Raise for a call that does not fit, or log it once, whatever its number."""
        if misfit is None:
            return
        words, number = misfit
        message = f"{words} (call {number} that reads the schedule, one a layer)"
        if self.mode == RAISE:
            raise ValueError(message)
        self.say(message, key=words)

    def _fail(self, error: Exception) -> None:
        self.say(f"a call of FlashAttention-3 is not checked: {error!r}")

    def _facts(self, arguments: dict[str, Any]) -> SchedulerFacts | None:
        try:
            return facts_of(arguments, self.build)
        except Exception as error:
            self._fail(error)
            return None


def guard(engine: str, *, mode: str = "raise") -> Guard:
    """Check the metadata of every attention call of an engine from now on.

    A second call only sets the mode.

    Parameters
    ----------
    engine : str
        One of `ENGINES`.
    mode : str
        `raise`: a call whose metadata was made for another call raises ValueError, which names the
        fields, both values and which of the calls it is. `log`: that goes to the logger `attnlib`,
        each message once, and no failure of the guard's own reaches the call.

    Returns
    -------
    Guard
        What is active; its `remove` ends it.

    Raises
    ------
    ValueError
        For an unknown engine or mode, or while another engine is guarded.
    RuntimeError
        If the engine's FlashAttention-3 is not installed. If it has a function whose parameters
        are not known; with `mode="log"` that is logged, and the function is not checked.

    Examples
    --------
    >>> import attnlib
    >>> attnlib.guard("tensorrt")
    Traceback (most recent call last):
    ValueError: engine must be one of sglang, vllm, flash-attn-3, got 'tensorrt'
    """
    require_word("engine", engine, ENGINES)
    require_word("mode", mode, MODES)
    active = _active[0] if _active else Guard(engine)
    if active.engine != engine:
        raise ValueError(
            f"engine must be {active.engine!r} until its guard is removed, got {engine!r}"
        )
    if mode == RAISE and active.unfit:
        raise RuntimeError("; ".join(active.unfit))
    for words in active.unfit:
        active.say(f"the guard does not check a function: {words}")
    if not _active:
        active.install()
    _active[:] = [active]
    active.mode = mode
    return active


def _functions(engine: str) -> list[tuple[str, Function]]:
    """The functions of an engine that make words or take them, each with its name."""
    modules = []
    for name in ENGINES[engine]:
        with suppress(ImportError, OSError):
            modules.append(vars(importlib.import_module(name)))
    if not any(MAKES in module for module in modules):
        raise RuntimeError(f"{ENGINES[engine][0]} must have {MAKES} to guard {engine!r}")
    found: dict[Function, str] = {}
    for name in (MAKES, *ATTENDS):
        for module in modules:
            function = module.get(name)
            if function and (name == MAKES or "scheduler_metadata" in defaults(function)):
                found[function] = name
    return [(name, function) for function, name in found.items()]


def _replace(old: Function, new: Function) -> None:
    """Replace `old` by `new` in every loaded module, under whatever name it was imported."""
    for owner in (torch.cuda.CUDAGraph, *sys.modules.values()):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if value is old:
                setattr(owner, name, new)


def remember(words: Tensor, facts: SchedulerFacts | None) -> None:
    """From now on calls that read these words are held to `facts`; None: they pass."""
    for address, made in list(_made.items()):
        if made.memory.expired():
            _made.pop(address, None)  # another thread may have
    _made[words.data_ptr()] = _Made(StorageWeakRef(words.untyped_storage()), facts)


def _keep_copy(words: Tensor, into: Tensor) -> None:
    if words.data_ptr() in _made:
        remember(into, _made[words.data_ptr()].facts)


@lru_cache(maxsize=256)
def _differing(made: SchedulerFacts, call: SchedulerFacts) -> str:
    """Why the words do not fit the call, or the empty string."""
    differing = made.differences(call)
    differing.pop("max_seqlen_k", None)
    if made.element_bytes > 1:  # tiles of 16 bits do not ask for it, and vLLM does not tell
        differing.pop("has_softcap", None)
    if made.split_cap <= call.split_cap:
        differing.pop("num_splits", None)
    if not differing:
        return ""
    made_for = ", ".join(f"{name} {mine!r}" for name, (mine, _) in differing.items())
    called = ", ".join(f"{name} {theirs!r}" for name, (_, theirs) in differing.items())
    return f"the schedule was made for {made_for}; the attention call has {called}"
