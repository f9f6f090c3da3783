"""attnlib as a plugin of SGLang: other decode metadata, schedules and plans, by variables.

    ATTNLIB_SGLANG_METADATA=one-launch python -m sglang.launch_server ...

| variable | value | what runs |
|---|---|---|
| `ATTNLIB_SGLANG_METADATA` | `eager` | decode metadata op by op, as in SGLang 0.5.9 |
| | `sglang` | SGLang's own kernel: the start for a process that switches by `use` |
| | `fused` | `core.build_decode_metadata`, one launch; SGLang's schedule after it |
| | `one-launch` | `core.build_step_metadata`: the schedule in the same launch |
| `ATTNLIB_SGLANG_SCHEDULE` | `once` | FlashAttention-3's schedule once per step: SGLang's own |
| | `layer` | in every layer, as before 0.5.11 |
| `ATTNLIB_SGLANG_DECODE` | `fa2` | FlashInfer's fa2, which SGLang pins |
| | `fa3` | FlashInfer's fa3 |
| | `planned` | fa2; plan and page arrays by `core.Fa2Planner`, one launch on the GPU |
| `ATTNLIB_SGLANG_GUARD` | `raise`, `log` | `attnlib.guard` checks each schedule against its call |
| `ATTNLIB_SGLANG_CAPTURE` | a file | sampled steps are appended to it, see `capture` |

Metadata, schedule and guard need `--attention-backend fa3` (SGLang's word for the FlashAttention-3
library), decode needs `flashinfer`; capture works with any. Without a variable nothing is hooked.
SGLang logs what a plugin raises and goes on without it, so an unknown word, or a release that is
not in `TRIED`, ends the process.

`one-launch` takes its split cap from the width of the page table, as the attention call (and so
`layer`) does; SGLang's schedule takes it from the longest request of the step. Where the number of
splits differs, the last bits of the output differ. Steps without a CUDA graph, and steps of
speculative decoding, keep SGLang's own metadata and plan. `arms.STATE.calls` counts what ran.
"""

import inspect
import logging
import os
import pkgutil

from ..backends.table import installed_version
from ..spec import require_word
from .arms import ARMS, PREFIX, STATE, read, require_together
from .capture import Capture

TRIED = ("0.5.11",)
"""Releases of SGLang whose hook points were read and whose code ran with our kernels. To try
another one, run `tests/core/test_sglang_plugin.py` with its wheel on PYTHONPATH."""
logger = logging.getLogger(__name__)


def register() -> None:
    """The entry point of `sglang.srt.plugins`: hook what the variables ask for.

    Raises SystemExit with the reason where it cannot.
    """
    try:
        arms, path = read(os.environ)
        if not arms and not path:
            return
        variables = " and ".join(name for name in os.environ if name.startswith(PREFIX))
        require_release(f"unset {variables}")
        STATE.arms, STATE.capture = arms, _capture(path)
        _hook()
    except Exception as error:
        raise SystemExit(f"attnlib: {error}") from error
    # SGLang sets its log level later: anything below a warning would not be shown.
    logger.warning("attnlib is on: %s, capture %s", arms, path or None)


def use(**arms: str) -> None:
    """Run other arms from the next step on, in this process: `use(metadata="fused")`.

    All arms of metadata leave the same words to a graph. Schedule and decode are captured in
    graphs: `kinds.engine.serve.GraphSets` holds a set of graphs per arm. Raises ValueError for an
    unknown arm or two that exclude each other, RuntimeError if its variable was not set when
    SGLang loaded its plugins.
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
    """RuntimeError with `remedy` unless the installed SGLang was tried."""
    release = installed_version("sglang")
    if release not in TRIED:
        raise RuntimeError(
            f"sglang must be a release that was tried ({', '.join(TRIED)}), got "
            f"{release or 'none'}: {remedy}"
        )


def _capture(path: str) -> Capture | None:
    try:
        return Capture(path) if path else None
    except OSError as error:
        raise ValueError(f"{PREFIX}CAPTURE must be a file to append to, got {error}") from error


def _hook() -> None:
    """Hook what STATE needs and nothing else; a hook imports the module that it hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .sglang_hooks import POINTS

    needed = set(STATE.arms)
    if STATE.capture:
        needed.add("capture")
    for point in POINTS:
        if needed.intersection(point.arms):
            target = point.path.replace(":", ".")
            _require_hookable(point.path, target in HookRegistry._patched)
            HookRegistry.register(target, point.hook, HookType(point.how))
    if mode := STATE.arms.get("guard"):
        from ..schedule.guard import guard

        guard("sglang", mode=mode)


def _require_hookable(path: str, patched: bool) -> None:
    """RuntimeError where SGLang would only log that it could not hook, or say nothing."""
    try:
        target = pkgutil.resolve_name(path)
    except (ImportError, OSError, AttributeError) as error:
        raise RuntimeError(f"{path} must be importable to be hooked, got: {error}") from error
    if patched or not inspect.isfunction(target):
        got = "one that SGLang has hooked already" if patched else repr(target)
        raise RuntimeError(f"{path} must be a function that is not hooked yet, got {got}")
