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
| `ATTNLIB_SGLANG_GUARD` | `raise`, `log` | each schedule is checked against its call |
| | | (`attnlib.guard`); of FlashInfer one plan in 100 against its lengths |
| `ATTNLIB_SGLANG_CAPTURE` | a file | sampled steps are appended to it, see `capture` |

Metadata and schedule need `--attention-backend fa3` (SGLang's word for the FlashAttention-3
library), decode needs `flashinfer`, the guard one of the two; capture works with any. Without a
variable nothing is hooked.
SGLang logs what a plugin raises and goes on without it, so an unknown word, or a release whose
functions are not those that `sglang_hooks.POINTS` knows, ends the process. A release after
`NEWEST` whose functions are known runs, with one warning.

`one-launch` takes its split cap from the width of the page table, as the attention call (and so
`layer`) does; SGLang's schedule takes it from the longest request of the step. Where the number of
splits differs, the last bits of the output differ. Steps without a CUDA graph, steps of speculative
decoding, and pools with page tables of their own (unified memory) keep SGLang's own metadata and
plan. `arms.STATE.calls` counts what ran.
"""

import inspect
import logging
import os
import pkgutil
import re
from collections.abc import Set
from typing import TYPE_CHECKING

from ..backends.table import installed_version
from ..spec import require_word
from .arms import ARMS, PREFIX, STATE, read, require_together
from .capture import Capture

OLDEST, NEWEST = "0.5.11", "0.5.23"
"""The first and the last release of SGLang whose hook points were read."""
if TYPE_CHECKING:
    from .sglang_hooks import Point

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
        release = require_release(f"unset {variables}")
        STATE.arms, STATE.capture = arms, _capture(path)
        _hook(release)
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


def require_release(remedy: str) -> str:
    """The installed release; RuntimeError with `remedy` unless it is `OLDEST` or later."""
    release = installed_version("sglang")
    if _order(release) < _order(OLDEST):
        raise RuntimeError(f"sglang must be {OLDEST} or later, got {release or 'none'}: {remedy}")
    return release


def _order(release: str) -> tuple[int, ...]:
    """The numbers of a release, in its order: 0.5.12, 0.5.12.post1, 0.5.13."""
    return tuple(map(int, re.findall(r"\d+", release)))


def _capture(path: str) -> Capture | None:
    try:
        return Capture(path) if path else None
    except OSError as error:
        raise ValueError(f"{PREFIX}CAPTURE must be a file to append to, got {error}") from error


def _hook(release: str) -> None:
    """Hook what STATE needs and nothing else; a hook imports the module that it hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    needed = set(STATE.arms)
    if STATE.capture:
        needed.add("capture")
    if _order(release) > _order(NEWEST):
        logger.warning(
            "attnlib: SGLang %s is newer than %s, the last release that was read; its functions "
            "have the known parameters, their meaning is not checked",
            release,
            NEWEST,
        )
    for point in points_of(release):
        if needed.intersection(point.arms):
            target = point.path.replace(":", ".")
            _require_hookable(point, target in HookRegistry._patched)
            HookRegistry.register(target, point.hook, HookType(point.how))
    if mode := STATE.arms.get("guard"):
        from ..schedule.guard import guard

        guard("sglang", mode=mode)


def points_of(release: str) -> list["Point"]:
    """The hook points of a release."""
    from .sglang_hooks import POINTS

    points = [each for each in POINTS if _order(each.since) <= _order(release)]
    return [each for each in points if not each.before or _order(release) < _order(each.before)]


def _require_hookable(point: "Point", patched: bool) -> None:
    """RuntimeError where SGLang would only log that it could not hook, or say nothing."""
    path = point.path
    try:
        target = pkgutil.resolve_name(path)
    except (ImportError, OSError, AttributeError) as error:
        raise RuntimeError(f"{path} must be importable to be hooked, got: {error}") from error
    if patched or not inspect.isfunction(target):
        got = "one that SGLang has hooked already" if patched else repr(target)
        raise RuntimeError(f"{path} must be a function that is not hooked yet, got {got}")
    if words := unfit(point, {*inspect.signature(target).parameters}):
        raise RuntimeError(words)


def unfit(point: "Point", names: Set[str]) -> str:
    """Why a function with the parameters `names` cannot be hooked, or the empty string."""
    reads, knows = {*point.reads.split()}, {*point.knows.split()}
    if missing := reads - names:
        return f"{point.path} must have the parameters {', '.join(sorted(missing))}"
    if knows and (unknown := names - reads - knows):
        words = f"{point.path} must have no parameters but those that were read"
        return f"{words}, got {', '.join(sorted(unknown))}"
    return ""
