"""attnlib as a plugin of SGLang: other decode metadata, schedules and plans, by variables.

    pip install attnlib                    # beside SGLang; nothing of SGLang is changed on disk
    ATTNLIB_SGLANG_METADATA=one-launch python -m sglang.launch_server ...

| variable | value | FlashAttention-3 backend (`--attention-backend fa3`) |
|---|---|---|
| `ATTNLIB_SGLANG_METADATA` | `eager` | a decode step's metadata op by op, as SGLang 0.5.9 had it |
| | `sglang` | SGLang's own: to start with, where `use` switches later |
| | `fused` | `attnlib.core.build_decode_metadata`, one launch |
| | `one-launch` | `attnlib.core.build_step_metadata`: FA3's schedule in the same launch |
| `ATTNLIB_SGLANG_SCHEDULE` | `once` | FA3's schedule once a step: SGLang's own |
| | `layer` | in every layer, as before 0.5.11 |

| variable | value | FlashInfer backend (`--attention-backend flashinfer`) |
|---|---|---|
| `ATTNLIB_SGLANG_DECODE` | `fa2` | as SGLang pins it |
| | `fa3` | FlashInfer's Hopper kernels |
| | `planned` | fa2, planned on the GPU by `attnlib.core.Fa2Planner` in one launch |

| variable | value | any backend |
|---|---|---|
| `ATTNLIB_SGLANG_CAPTURE` | a file | sampled steps are appended to it, see `capture` |
| `ATTNLIB_SGLANG_CAPTURE_EVERY` | steps, 10 | one step in so many of each mode |

Without a variable nothing is hooked. A variable or value that is not known, and a release of SGLang
that is not one of `TRIED`, ends the process that loads the plugin: SGLang logs an exception of a
plugin and goes on without it.

| arm | in SGLang's graphs | before each replay, on the engine's stream |
|---|---|---|
| `eager`, `fused` | as ever | its launches, then SGLang's schedule (a kernel, two copies) |
| `one-launch` | as ever | one launch, into the words that SGLang's schedule was captured with |
| `layer` | a prepare kernel in each layer | SGLang's metadata |
| `fa3` | FlashInfer's fa3 | SGLang's page arrays and its plan on the host |
| `planned` | our grid: taken over once planned | one launch: plan and page arrays |

What `planned` leaves out are the cumulative sums on GPU and host, the indices kernel, the plan on
the host and its copy; it reads the graph's `seq_lens` and `req_to_token`, both on the GPU.

`one-launch` takes its split cap from the page table's width, as the attention call itself and so
`layer` do; SGLang's own schedule takes it from the step's longest request. Where the two caps give
other splits, the last bits of outputs differ.

Steps without a graph (prefill, `--disable-cuda-graph`, larger batches) keep SGLang's metadata and
planning; `layer` and `fa3` act there too. A draft step has no schedule: `one-launch` is `fused`
there. `STATE.calls` of `attnlib.core.engines.arms` counts what ran: an arm of another attention
backend than the engine's never does.
"""

import importlib
import logging
import os

from ..spec import require_word
from . import arms
from .arms import ARMS, PREFIX, STATE

TRIED = ("0.5.11",)
"""Releases of SGLang whose hook points were read and whose own code has met our kernels."""
logger = logging.getLogger(__name__)


def register() -> None:
    """The entry point of `sglang.srt.plugins`: hook what the variables ask for.

    Raises SystemExit with the reason where it cannot.
    """
    try:
        asked = arms.read(os.environ)
        if not asked.arms and asked.capture is None:
            return
        _require_release()
        vars(STATE).update(vars(asked))
        _hook()
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"attnlib: {error}") from error
    logger.info("attnlib: %s, capture %s", STATE.arms, STATE.capture and STATE.capture.path)


def use(*, metadata: str) -> None:
    """Run another arm of `ATTNLIB_SGLANG_METADATA` from the next step on, in this process.

        for step, arm in zip(steps, itertools.cycle(("sglang", "fused"))):
            use(metadata=arm)
            decode(step)

    All arms live side by side, since the function is looked up at each step, and leave the same
    words to a graph. Schedule and decode are in the graphs: those arms need a process each.
    Raises ValueError for an unknown arm or one that the schedule forbids, RuntimeError if the
    variable was not set when SGLang loaded its plugins.
    """
    require_word("metadata", metadata, ARMS["metadata"])
    if "metadata" not in STATE.arms:
        raise RuntimeError(
            f"{PREFIX}METADATA must be set when SGLang loads its plugins ('sglang' to start with "
            "its own), got no hook to switch; bench_one_batch loads none by itself, call "
            "sglang.srt.plugins.load_plugins() first"
        )
    arms.require_together(STATE.arms | {"metadata": metadata})
    STATE.arms["metadata"] = metadata


def _require_release() -> None:
    from ..backends.base import installed_version

    found = installed_version("sglang")
    if found not in TRIED:
        raise RuntimeError(
            f"sglang must be a release that was tried ({', '.join(TRIED)}), got {found or 'none'}: "
            f"unset the variables {PREFIX}*"
        )


def _hook() -> None:
    """Register what the arms of STATE need, and nothing else: it imports what it hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import sglang_hooks

    needed = {*STATE.arms, *(("capture",) if STATE.capture else ())}
    for point in sglang_hooks.POINTS:
        if needed & {*point.arms}:
            _require_importable(point.module)
            target = f"{point.module}.{point.name}"
            HookRegistry.register(target, point.hook, HookType(point.how))


def _require_importable(module: str) -> None:
    """SGLang would only log that it could not hook it."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise RuntimeError(f"{module} must be importable to be hooked, got: {error}") from error
