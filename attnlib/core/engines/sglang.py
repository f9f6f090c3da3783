"""attnlib as a plugin of SGLang: other decode metadata, schedules and plans, by variables.

    ATTNLIB_SGLANG_METADATA=one-launch python -m sglang.launch_server ...

| variable | value | what runs |
|---|---|---|
| `ATTNLIB_SGLANG_METADATA` | `eager` | a decode step's metadata op by op, as SGLang 0.5.9 had it |
| | `sglang` | SGLang's own: to start with, where `use` switches later |
| | `fused` | `core.build_decode_metadata`, one launch; SGLang's schedule after it |
| | `one-launch` | `core.build_step_metadata`: FA3's schedule in the same launch |
| `ATTNLIB_SGLANG_SCHEDULE` | `once` | FA3's schedule once a step: SGLang's own |
| | `layer` | in every layer, as before 0.5.11 |
| `ATTNLIB_SGLANG_DECODE` | `fa2` | FlashInfer as SGLang pins it |
| | `fa3` | FlashInfer's Hopper kernels |
| | `planned` | fa2; plan and page arrays by `core.Fa2Planner`, one launch on the GPU |
| `ATTNLIB_SGLANG_GUARD` | `raise`, `log` | `attnlib.guard` holds FA3's schedule to each call |
| `ATTNLIB_SGLANG_CAPTURE` | a file | sampled steps are appended to it, see `capture` |

Metadata and schedule are those of `--attention-backend fa3`, decode that of `flashinfer`; captures
work with any. Without a variable nothing is hooked. What is not known, and a release of SGLang that
is not one of `TRIED`, ends the process: SGLang logs what a plugin raises and goes on without it.

`one-launch` takes its split cap from the page table's width, as the attention call itself and so
`layer` do; SGLang's schedule takes it from the step's longest request. Where the two give other
splits, the last bits of outputs differ. Steps without a graph keep SGLang's metadata and planning,
drafts its schedule. `arms.STATE.calls` counts what ran: an arm of another backend never does.
"""

import inspect
import logging
import os
import pkgutil

from ..spec import require_word
from .arms import ARMS, PREFIX, STATE, read, require_together, require_tried

TRIED = ("0.5.11",)
"""Releases of SGLang whose hook points were read and whose own code has met our kernels. To try
another one, run `tests/core/test_sglang_plugin.py` with its wheel on PYTHONPATH."""
logger = logging.getLogger(__name__)


def register() -> None:
    """The entry point of `sglang.srt.plugins`: hook what the variables ask for.

    Raises SystemExit with the reason where it cannot.
    """
    try:
        asked = read(os.environ)
        if not asked.arms and asked.capture is None:
            return
        given = " and ".join(name for name in os.environ if name.startswith(PREFIX))
        require_release(f"unset {given}")
        vars(STATE).update(vars(asked))
        _hook()
    except Exception as error:
        raise SystemExit(f"attnlib: {error}") from error
    # SGLang sets its level of logging later: what is less than a warning would not be seen.
    logger.warning(
        "attnlib is on: %s, capture %s", asked.arms, asked.capture and asked.capture.path
    )


def use(**arms: str) -> None:
    """Run other arms from the next step on, in this process: `use(metadata="fused")`.

    All of metadata leave the same words to a graph. Schedule and decode lie in the graphs, which
    must be captured anew: `sglang_graphs.GraphSets` holds them side by side. Raises ValueError for
    an unknown arm or two that cannot be, RuntimeError if its variable was not set when SGLang
    loaded its plugins.
    """
    for name, value in arms.items():
        require_word("an arm", name, ARMS)
        require_word(name, value, ARMS[name])
        if name not in STATE.arms:
            raise RuntimeError(
                f"{PREFIX}{name.upper()} must be set when SGLang loads its plugins, got no hook to "
                "switch; for bench_one_batch call sglang.srt.plugins.load_plugins() first"
            )
    require_together(STATE.arms | arms)
    STATE.arms.update(arms)


def require_release(remedy: str) -> None:
    """RuntimeError with `remedy` unless the SGLang that is installed was tried."""
    require_tried("sglang", TRIED, remedy)


def _hook() -> None:
    """Register what STATE needs, and nothing else: it imports what it hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .sglang_hooks import POINTS

    needed = {*STATE.arms, *(("capture",) if STATE.capture else ())}
    for point in POINTS:
        if needed.intersection(point.arms.split()):
            target = point.path.replace(":", ".")
            _require_hookable(point.path, target in HookRegistry._patched)
            HookRegistry.register(target, point.hook, HookType(point.how))
    if mode := STATE.arms.get("guard"):
        from ..schedule.guard import guard

        guard("sglang", mode=mode)


def _require_hookable(path: str, patched: bool) -> None:
    """SGLang would only log that it could not hook it, or say nothing where it did so before."""
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, OSError, AttributeError) as error:
        raise RuntimeError(f"{path} must be importable to be hooked, got: {error}") from error
    if patched or not inspect.isfunction(found):
        got = "one that SGLang has hooked already" if patched else repr(found)
        raise RuntimeError(f"{path} must be a function that is not hooked yet, got {got}")
