"""The schedules of all kinds of layers of a CUDA graph in SGLang, written by one launch per replay:
what the hooks of ATTNLIB_SGLANG_METADATA=one-launch do.

Layers differ in kind: full attention, windows, MLA. While a graph is warmed up each layer says the
facts of its call, and a layer of a new kind gets words of its own (`StepSchedules`). While the
graph is captured each layer's call is given the words of its kind. From then on a launch writes
them all before each replay. A layer that is left alone prepares its schedule itself, or reads
SGLang's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.metadata.schedules import build_step_schedules
from ..core.schedule.facts import SchedulerFacts
from ..core.schedule.kinds import StepSchedules
from . import sglang_splits as splits
from .arms import PREFIX, STATE
from .plans import OWN
from .points import Function, named

GRAPH = f"{OWN}_graph"
"""Attribute of SGLang's metadata of a graph: its `Graph`."""


@dataclass
class Graph:
    """The schedules of a graph: one for each kind of layer that its warm-up has met.

    `captured`: a layer of the graph reads them. `whole`: no layer reads SGLang's own schedule.
    """

    facts: dict[str, SchedulerFacts] = field(default_factory=dict)
    names: dict[SchedulerFacts, str] = field(default_factory=dict)
    made: StepSchedules | None = None
    captured: bool = False
    whole: bool = True

    def add(self, facts: SchedulerFacts, device: torch.device) -> None:
        """A new kind of layer; the words of all kinds are reserved anew, as no capture has them."""
        name = f"{_word(facts)}, kind {len(self.facts) + 1}"
        self.names[facts] = name
        self.facts[name] = facts
        self.made = StepSchedules.reserve(self.facts, device)

    def words_of(self, facts: SchedulerFacts) -> Tensor | None:
        """What a call that is captured reads; None if the warm-up has not met its kind."""
        name = self.names.get(facts)
        if name is None or self.made is None:
            return None
        self.captured = True
        return self.made[name].words


def _word(facts: SchedulerFacts) -> str:
    if facts.head_dim_v != facts.head_dim:
        return "MLA"
    return f"a window of {facts.window[0]}" if facts.is_local else "full attention"


def graphs_of(backend: Any, batch: Any) -> Any:
    """SGLang's metadata of the graphs of this step, by requests; None for steps whose schedules are
    SGLang's: draft steps, and verification of several drafts of a token."""
    mode = batch.forward_mode
    if mode.is_target_verify():
        if backend.topk <= 1:
            return backend.target_verify_metadata
        return None
    if mode.is_decode_or_idle() and batch.spec_info is None:
        return backend.decode_cuda_graph_metadata
    return None


def written(call: dict[str, Any], tensors: dict[str, Any]) -> bool:
    """Whether one launch has written metadata and schedules of a step; `call` are the arguments of
    SGLang's `normal_decode_set_metadata`. Of a capture: its layers may name their kinds now."""
    graphs, STATE.graphs = STATE.graphs, None
    metadata = (graphs or {}).get(len(call["page_table"]))
    if metadata is None:
        return False
    if STATE.backend is None:
        setattr(metadata, GRAPH, Graph())
        return False
    graph = getattr(metadata, GRAPH, None)
    if graph is None or not graph.captured:
        return False
    has_drafts = metadata.max_seq_len_q > 1
    build_step_schedules(
        **tensors,
        page_size=call["page_size"],
        max_pages=min(call["max_seq_pages"], call["page_table"].shape[1]),
        seq_len_delta=call["seq_len_delta"],
        schedules=graph.made,
        cu_seqlens_q=metadata.cu_seqlens_q if has_drafts else None,
    )
    STATE.scheduled = graph.whole
    STATE.say(f"attnlib: one launch writes the schedules of: {'; '.join(graph.facts)}")
    return True


def require_written(call: dict[str, Any]) -> None:
    """RuntimeError where the layers of a graph read words that nothing writes before its replay."""
    metadata = (STATE.graphs or {}).get(len(call["page_table"]))
    graph = getattr(metadata, GRAPH, None)
    if STATE.backend is not None and graph is not None and graph.captured:
        raise RuntimeError(
            f"{PREFIX}METADATA=one-launch must have the pool that a graph was captured with, got "
            "page tables that only SGLang knows: use fused"
        )


def attend(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Around the attention of a layer, in decode and in an extend."""
    call = named(original, args, kwargs)
    backend = call["self"]
    graph = getattr(backend.forward_metadata, GRAPH, None)
    if graph is None:
        return original(*args, **kwargs)
    words = _words_of_layer(graph, backend, call)
    if words is None:
        return original(*args, **kwargs)
    with _given(words):
        return original(*args, **kwargs)


def _words_of_layer(graph: Graph, backend: Any, call: dict[str, Any]) -> Tensor | None:
    """The words for a layer's call; None where it keeps SGLang's."""
    layer = call["layer"]
    reason = splits.left_alone(backend, layer, call["forward_batch"])
    if not reason:
        facts = splits.facts_of_layer(backend, layer, call["q"])
        if not torch.cuda.is_current_stream_capturing():
            if facts not in graph.names:
                graph.add(facts, torch.device(backend.device))
            return None
        words = graph.words_of(facts)
        if words is not None:
            return words
        reason = "a graph without a warm-up"
    graph.whole = False
    STATE.leave("metadata", f"the schedule of {reason}")
    return None


@contextmanager
def _given(words: Tensor) -> Iterator[None]:
    """The library's calls in the block read `words`."""
    STATE.words = words
    try:
        yield
    finally:
        STATE.words = None


def give_words(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Around the library's call."""
    if STATE.words is not None:
        kwargs["scheduler_metadata"] = STATE.words
    return original(*args, **kwargs)
