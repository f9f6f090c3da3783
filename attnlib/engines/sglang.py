"""attnlib as a plugin of SGLang: other decode metadata, schedules and plans, by variables.

    ATTNLIB_SGLANG_METADATA=one-launch python -m sglang.launch_server ...

| variable | value | what runs |
|---|---|---|
| `ATTNLIB_SGLANG_METADATA` | `eager` | decode metadata op by op, as in SGLang 0.5.9 |
| | `sglang` | SGLang's own kernel, counted: a control |
| | `fused` | `core.build_decode_metadata`, one launch; SGLang's schedule after it |
| | `one-launch` | `core.build_step_schedules`: the schedules of all kinds of layers in the |
| | | same launch, in decode and in verification of drafts |
| `ATTNLIB_SGLANG_SCHEDULE` | `once` | FlashAttention-3's schedule once per step: SGLang's own |
| | `layer` | in every layer, as before 0.5.11 |
| `ATTNLIB_SGLANG_SPLITS` | `upstream` | upstream's cap of splits, which many short requests do |
| | | not lower, in decode and verification of drafts |
| | `bounded` | the same, while the partial outputs fit in 256 MiB |
| | `1` to `255` | this number of splits |
| `ATTNLIB_SGLANG_DECODE` | `fa2` | FlashInfer's fa2, which SGLang pins |
| | `fa3` | FlashInfer's fa3 |
| | `planned` | fa2; plan and page arrays by `core.Fa2Planner`, one launch on the GPU |
| `ATTNLIB_SGLANG_GUARD` | `raise`, `log` | each schedule is checked against its call |
| | | (`attnlib.guard`); of FlashInfer one plan and one replay in 100 against the lengths; |
| | | of any backend one step in 100: its slots against the pool |
| `ATTNLIB_SGLANG_CAPTURE` | a file | sampled steps are appended to it, see `capture` |

Metadata, schedule and splits need `--attention-backend fa3` (SGLang's word for the FlashAttention-3
library), decode needs `flashinfer`, the guard one of the two; capture works with any. The first
decode step in which a variable does nothing is named in the log, with the reason, and there the
known problems of this server (`known`), each once. Without a variable nothing is hooked.
SGLang logs what a plugin raises and goes on without it, so an unknown word, or a release whose
functions are not those that `sglang_hooks.POINTS` knows, ends the process. A release after
`NEWEST` whose functions are known runs, with one warning.

`SPLITS` is for SGLang 0.5.16 and later, whose own cap counts the query rows of all requests; rules
are in `core.schedule.caps`. It holds for grouped queries and MLA, with tensor parallelism and DP
attention, in decode (draft steps too) and in verification of up to 8 tokens a request. A prefill
keeps SGLang's cap: there, a higher one once allocated 16 GiB. So do, counted under a name in
`arms.STATE.calls`: cross, encoder-only and chunked attention, drafts with topk above 1, windows
that know the prefill, context parallelism. FlashAttention-4, `--enable-deterministic-inference` and
other GPUs than Hopper end the process. A graph keeps the number that it was captured with, and the
schedule of a step has the number of the attention calls that read it.

`one-launch` is for SGLang 0.5.16 and later, and for CUDA graphs. It serves grouped queries, layers
with a window and MLA, with tensor parallelism and DP attention, and since 0.5.22 verification of
drafts: a layer says its kind while its graph is warmed up. Draft steps, verification with topk
above 1 and what SPLITS leaves alone (above) keep SGLang's schedule. Its split cap is that of the
attention call, by the width of the page table or from SPLITS; SGLang's schedule of a step takes it
from the longest request. Where the number of splits differs, the last bits of the output differ.
Steps without a CUDA graph and pools with page tables of their own (unified memory) keep SGLang's
own metadata and plan. `arms.STATE.calls` counts what ran.
"""

from ..core.releases import read_releases
from . import points
from .arms import ONE_LAUNCH, OWN_CAP, PREFIX, SGLANG, STATE

OLDEST = "0.5.11"
"""The first release of SGLang whose hook points were read."""
NEWEST = [*read_releases("sglang")][-1]
"""The last one."""


def register() -> None:
    """The entry point of `sglang.srt.plugins`: hook what the variables ask for.

    Raises SystemExit with the reason where it cannot.
    """
    points.start(SGLANG, OLDEST, NEWEST, _hook)


def _hook(release: str) -> None:
    """Hook what STATE needs and nothing else; a hook imports the module that it hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .sglang_hooks import POINTS

    if "splits" in STATE.arms and points.order(release) < points.order(OWN_CAP):
        raise ValueError(
            f"{PREFIX}SPLITS must have SGLang {OWN_CAP} or later: the kernels of earlier ones cap "
            f"splits as upstream does, got {release}"
        )
    is_older = points.order(release) < points.order(OWN_CAP)
    if STATE.arms.get("metadata") == ONE_LAUNCH and is_older:
        raise ValueError(
            f"{PREFIX}METADATA={ONE_LAUNCH} must have SGLang {OWN_CAP} or later, got {release}: "
            "use fused"
        )
    for point in points.needed(points.known_in(release, POINTS)):
        target = point.path.replace(":", ".")
        points.require_hookable(point, "SGLang" if target in HookRegistry._patched else "")
        HookRegistry.register(target, point.hook, HookType(point.how))
