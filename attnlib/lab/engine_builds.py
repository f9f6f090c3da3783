"""What an engine has of the backends on record: its own build, another build of it, or none.

A record of another build says little of an engine, so it never stands under the engine's name alone
(`ANOTHER_BUILD`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import pandas as pd

from ..core.backends.limits import LATENT_MODES
from ..core.schedule.caps import BOUNDED, UPSTREAM
from ..core.spec import AttnSpec
from ..run.releases import Version
from ..select import Call, Choice, explain
from ..select.libraries import AUTO, find
from ..studies import random_batches
from .expected import Expected

RECORDED_GPU = "sm90"
"""Of every record."""
SGLANG = "sglang"
FLASHINFER = "flashinfer"
FLASH_ATTN_3 = "flash-attn-3"
PRECOMPUTED = "flash-attn-3-precomputed"
SGLANG_FA3 = "sglang-flash-attn-3"
CAPS_SINCE = Version("0.5.16")
"""The first SGLang whose FlashAttention-3 caps splits by the rows of all requests
(`studies.splits.split_cap`), and in which our plugin may choose the cap (`engines.sglang`)."""
ANOTHER_BUILD = "of another build"
PLANNER = "our planner"
PLUGIN = "our plugin, "
"""What is of ours, not of the engine: our planner, and how the settings of our plugin begin."""
LATENT_SUFFIX = "-mla"
"""How names of backends of MLA end."""
LATENT_NAMES = {
    "sglang": {
        "fa3": f"{SGLANG_FA3}{LATENT_SUFFIX}",
        "flashmla": "flashmla-dense",
        "triton": "sglang-triton-mla",
    },
    "vllm": {"FLASHMLA": "flashmla-dense"},
}
"""Engine -> its words for backends of MLA -> our names of its own builds."""
OWN_NAMES = {
    "sglang": {"fa3": SGLANG_FA3},
    "vllm": {"FLASH_ATTN": "vllm-flash-attn-3", "TRITON_ATTN": "vllm-triton"},
}
"""The same for grouped queries, where the engine calls no FlashInfer."""
SLOWER_BY = 1.05
"""From this ratio on a backend is said to be slower than another on nearby batches."""
FEWEST_BATCHES = 3
"""Batches with both backends from which a mean is told."""
GROUP = ("study", "gpu", "timer", "page_table")
"""Records of a call whose times may be compared."""


def builds(choice: Choice) -> tuple[str, str, str]:
    """What a choice's kernel is called in the records, another build of it last."""
    name = (choice.inner or choice).ours
    return (
        name,
        f"{name}-precomputed",
        f"{name.removeprefix('vllm-')}-precomputed",
    )


def own_build(choice: Choice) -> str:
    """Our name of the build that the library itself runs, or the empty string."""
    engine = choice.library.partition("==")[0]
    if choice.inner is not None or engine == FLASHINFER:
        return (choice.inner or choice).ours
    if choice.gpu != RECORDED_GPU:
        return ""
    names = LATENT_NAMES if choice.mode in LATENT_MODES else OWN_NAMES
    return names.get(engine, {}).get(choice.backend, "")


def run_by_engine(
    layer: AttnSpec,
    call: Call,
    recorded: Collection[str],
    *,
    mode: str,
    **how: str,
) -> dict[str, str] | None:
    """Our names of what an engine has on this GPU, or of another build that is `recorded` in its
    place -> its names; None for FlashInfer. Without cubins it takes FlashInfer's own decode."""
    engine, release = find(how["library"])
    if not engine.calls:
        return None
    runs: dict[str, str] = {}
    policies = [name for name in engine.policies_for(mode) if name != AUTO]
    for policy in policies:
        how["policy"] = policy
        for cubins in (True, False):
            words = policy if cubins else f"{policy}, cubins=no"
            with suppress(RuntimeError):
                facts = replace(call, cubins=cubins)
                choice = explain(
                    layer,
                    mode=mode,
                    call=facts,
                    **how,
                )
                _add_builds(runs, choice, words, recorded)
    if random_batches.FA2 in runs:
        runs[random_batches.PLANNED] = PLANNER
    suffix = LATENT_SUFFIX if mode in LATENT_MODES else ""
    if engine.name == SGLANG and f"{FLASH_ATTN_3}{suffix}" in runs:
        _add_sglangs(runs, suffix, release)
    return runs


def able_to_run(
    layer: AttnSpec,
    call: Call,
    *,
    mode: str,
    **how: str,
) -> list[str]:
    """The backends of a library that can run a call where they are asked for by name."""
    library, _ = find(how["library"])
    able = []
    for policy in library.policies_for(mode):
        if policy == AUTO:
            continue
        how["policy"] = policy
        with suppress(RuntimeError):
            choice = explain(
                layer,
                mode=mode,
                call=call,
                **how,
            )
            if not choice.problem:
                able.append(policy)
    return able


def _add_builds(
    runs: dict[str, str], choice: Choice, words: str, recorded: Collection[str]
) -> None:
    """Add what an engine's backend is called in the records, where an earlier one is not."""
    if choice.problem:
        return
    own = own_build(choice)
    is_latent = choice.mode in LATENT_MODES
    if is_latent and choice.inner is not None and choice.library.startswith(SGLANG):
        # It plans FlashInfer's MLA with pages of 1 (flashinfer_mla_backend.py:959-972, 0.5.23); on
        # record are pages of 64.
        runs.setdefault(own, f"{words}, {ANOTHER_BUILD}")
        return
    if own:
        runs.setdefault(own, words)
    name, precomputed, other_build = builds(choice)
    if not name:
        return
    is_other = is_latent and choice.inner is None and name != own
    runs.setdefault(name, f"{words}, {ANOTHER_BUILD}" if is_other and own else words)
    if is_latent:
        return
    runs.setdefault(precomputed, words)
    if name not in recorded and precomputed not in recorded:
        runs.setdefault(other_build, f"{words}, {ANOTHER_BUILD}")


def _add_sglangs(runs: dict[str, str], suffix: str, release: Version | None) -> None:
    """Add SGLang's own FlashAttention-3, and its caps by our plugin; others are other builds."""
    own = f"{SGLANG_FA3}{suffix}"
    word = runs[f"{FLASH_ATTN_3}{suffix}"].partition(",")[0]
    runs[own] = word
    for build in (f"{FLASH_ATTN_3}{suffix}", f"{PRECOMPUTED}{suffix}"):
        runs[build] = f"{word}, {ANOTHER_BUILD}"
    if release and release >= CAPS_SINCE:
        for cap in (UPSTREAM, BOUNDED):
            runs[f"{own}@{cap}"] = f"{PLUGIN}SPLITS={cap}"


def rivals_of(
    own: str,
    recorded: Collection[str],
    runs: Mapping[str, str] | None,
) -> list[str]:
    """The recorded backends that a user of the engine could take in place of its own pick."""
    if runs is None:  # FlashInfer: its own wrappers
        whose = f"{FLASHINFER}{LATENT_SUFFIX}-" if LATENT_SUFFIX in own else f"{FLASHINFER}-"
        names = [name for name in recorded if name.startswith(whose)]
        return [name for name in names if name not in (own, random_batches.PLANNED)]
    names = [name for name in recorded if name in runs and name != own]
    return [name for name in names if not runs[name].endswith(ANOTHER_BUILD)]


def time_on_record(
    own: str,
    same: pd.DataFrame,
    runs: Mapping[str, str] | None,
) -> str:
    """The pick's time over that of the engine's fastest other backend, over this very call, by the
    group of records in which the pick is slowest; empty where no record has both."""
    worst = 0.0
    said = ""
    for (study, gpu, _, _), rows in same.groupby(list(GROUP), sort=False):
        times = rows.set_index("backend").us
        others = rivals_of(own, times.index, runs)
        if own not in times or not others:
            continue
        best = times[others].idxmin()
        ratio = times[own] / times[best]
        if ratio > worst:
            worst = ratio
            said = (
                f"On record of this call {own} has {_slowdown(ratio)} "
                f"{_named(best, runs)} ({study}, {gpu})."
            )
    return said


def slower_nearby(
    own: str,
    speedups: pd.DataFrame,
    runs: Mapping[str, str] | None,
) -> str:
    """That the pick is more than 5 % slower than another backend over the nearest batches, by the
    table of their speedups over it (`advised_times.mean_speedups`)."""
    is_rival = speedups.backend != own
    rows = speedups[is_rival & (speedups.batches >= FEWEST_BATCHES)]
    rows = rows[rows.speedup > SLOWER_BY]
    if not len(rows):
        return ""
    best = rows.sort_values("speedup", kind="stable").iloc[-1]
    return (
        f"Over {best.batches} of the nearest recorded batches {_build(own, runs)} has "
        f"{_slowdown(best.speedup)} {_named(best.backend, runs)} (geometric mean)."
    )


def slower_as_expected(
    own: str,
    expected: Mapping[str, Expected],
    runs: Mapping[str, str] | None,
) -> str:
    """That the pick is expected to be more than 5 % slower than another backend.

    All in `expected` are over one build of the pick, which may be another than `own`.
    """
    rivals = rivals_of(own, list(expected), runs)
    best = min(rivals, key=lambda name: expected[name].ratio, default="")
    if not best:
        return ""
    slowdown = expected[own].ratio / expected[best].ratio
    if slowdown <= SLOWER_BY:
        return ""
    batches = min(expected[own].batches, expected[best].batches)
    return (
        f"By {batches} recorded batches {_build(own, runs)} is expected to have "
        f"{_slowdown(slowdown)} {_named(best, runs)}."
    )


def _build(own: str, runs: Mapping[str, str] | None) -> str:
    """The pick's build by our name, and whether it is another than the engine's."""
    if is_another_build(own, runs):
        return f"{own} (another build of what runs)"
    return own


def is_another_build(own: str, runs: Mapping[str, str] | None) -> bool:
    """Whether records of our name are of another build than the engine's."""
    return (runs or {}).get(own, "").endswith(ANOTHER_BUILD)


def _slowdown(ratio: float) -> str:
    """A ratio of times as a slowdown against what follows, or a speedup over it."""
    return (
        f"a speedup of {1 / ratio:.2f} over" if ratio < 1 else f"a slowdown of {ratio:.2f} against"
    )


def _named(name: str, runs: Mapping[str, str] | None) -> str:
    """A backend, and under which name the engine has it."""
    if not runs or runs[name] == name:
        return name
    return f"{name} (here {runs[name]})"


def preferably_of(card: str, same: pd.DataFrame, cards: Sequence[str]) -> pd.DataFrame:
    """The rows of the card that was named (`cards` are those of the rows), or all."""
    if card:
        of_card = same[[each == card for each in cards]]
    else:
        of_card = same
    return of_card if len(of_card) else same
