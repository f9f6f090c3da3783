"""Plans of FlashInfer's wrappers in an engine: ours in their place, or a guard of the engine's."""

import logging
from functools import partial
from typing import Any

from torch import Tensor

from ..core.fa2.coverage import require_plan
from ..core.fa2.planner import Fa2Planner
from .arms import STATE

logger = logging.getLogger(__name__)
OWN = "attnlib"
"""Our attribute of SGLang's metadata of a batch size, and of FlashInfer's wrappers."""
GUARD_EVERY = 100  # the guard copies a plan's words to the host, which synchronises


def take_over(wrapper: Any, *, head_dim: int, max_seq_len: int, page_size: int) -> Fa2Planner:
    """A planner of this wrapper, kept with it from now on."""
    planner = Fa2Planner(wrapper, head_dim=head_dim, max_seq_len=max_seq_len, page_size=page_size)
    setattr(wrapper, OWN, planner)
    return planner


def guard_plan(wrapper: Any, seq_lens: Tensor) -> None:
    """Check plans of this wrapper against `seq_lens` [bs], the engine's buffer on the GPU.

    One in `GUARD_EVERY` of the engine's plans is checked, and one in as many replays of the graph
    that is captured next. With the guard's arm at `raise`, raises as `require_plan` does; else the
    error goes to the log.
    """
    _hold(wrapper, seq_lens, "plans")
    STATE.guard.next_graph[id(wrapper)] = partial(_hold, wrapper, seq_lens, "replays")


def _hold(wrapper: Any, seq_lens: Tensor, of_what: str) -> None:
    name = f"guard, {of_what} of wrapper {id(wrapper)}"
    STATE.calls[name] += 1
    if (STATE.calls[name] - 1) % GUARD_EVERY:
        return
    try:
        require_plan(wrapper, seq_lens)
    except Exception as error:
        if STATE.arms["guard"] == "raise":
            raise
        logger.error("attnlib: %s", error)
    STATE.ran("guard")
