"""Plans of FlashInfer's wrappers in an engine: ours in their place, or a guard of the engine's.

The guard's samples, of plans and of any backend's page tables, are counted here.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from ..core.fa2.coverage import require_plan
from ..core.fa2.planner import Fa2Planner
from ..core.schedule.pages import require_arrays
from .arms import STATE

logger = logging.getLogger(__name__)
OWN = "attnlib"
"""Our attribute of SGLang's metadata of a batch size, and of FlashInfer's wrappers."""
GUARD_EVERY = 100  # the guard copies words to the host, which synchronises


def take_over(wrapper: Any, *, head_dim: int, max_seq_len: int, page_size: int) -> Fa2Planner:
    """A planner of this wrapper, kept with it from now on."""
    planner = Fa2Planner(
        wrapper,
        head_dim=head_dim,
        max_seq_len=max_seq_len,
        page_size=page_size,
    )
    setattr(wrapper, OWN, planner)
    return planner


def guard_plan(
    wrapper: Any,
    seq_lens: Tensor,
    *,
    page_size: int,
    num_pages: Callable[[], int],
    layers: str,
) -> None:
    """Check plan and page arrays of this wrapper against `seq_lens` [bs], the engine's buffer on
    the GPU, and against a pool of `num_pages()`, 0 while that is not known. Errors name `layers`,
    those that read the plan.

    One in `GUARD_EVERY` of the engine's plans is checked, and one in as many replays of the graph
    that is captured next. With the guard's arm at `raise`, raises as `require_plan` does; else the
    error goes to the log.
    """
    check = partial(_require_wrapper, wrapper, seq_lens, page_size, num_pages, layers)
    sample(f"plans of wrapper {id(wrapper)}", check)
    replays = f"replays of wrapper {id(wrapper)}"
    STATE.guard.next_graph[id(wrapper)] = partial(sample, replays, check)


def sample(of_what: str, check: Callable[[], None]) -> None:
    """Run one check in `GUARD_EVERY` of its name, the first one too.

    What it raises reaches the engine only with the guard's arm at `raise`; else it is logged.
    """
    name = f"guard, {of_what}"
    STATE.calls[name] += 1
    if (STATE.calls[name] - 1) % GUARD_EVERY:
        return
    try:
        check()
    except Exception as error:
        if STATE.arms["guard"] == "raise":
            raise
        logger.error("attnlib: %s", error)
    STATE.ran("guard")


@contextmanager
def guarding() -> Iterator[None]:
    """An error inside, such as of a name that a later release has not, reaches the engine only with
    the guard's arm at `raise`; else it is logged once."""
    try:
        yield
    except Exception as error:
        if STATE.arms["guard"] == "raise":
            raise
        STATE.say(f"attnlib: the guard cannot check this: {error!r}")


def _require_wrapper(
    wrapper: Any,
    seq_lens: Tensor,
    page_size: int,
    num_pages: Callable[[], int],
    layers: str,
) -> None:
    try:
        require_plan(wrapper, seq_lens)
        if pages := num_pages():
            require_arrays(
                wrapper._paged_kv_indptr_buf,
                wrapper._paged_kv_indices_buf,
                wrapper._paged_kv_last_page_len_buf,
                seq_lens,
                page_size=page_size,
                num_pages=pages,
            )
    except RuntimeError as error:
        raise RuntimeError(f"{error} (read by {layers})") from None
