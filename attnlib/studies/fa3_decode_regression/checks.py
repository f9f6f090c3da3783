"""The checks of published claims, by the name that data/claims.yaml gives them.

A check takes the records of its studies, one below the other, and the figure that the claim names
(None for a yes or no), and returns a `Finding`. It computes from records alone: no measured number
stands in this file. Checks about metadata have a module of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from ...run.frame import AUTO, FA2, FA3, GRAPH_AUTO, decode_rows
from ...select import explain
from ..auto_resolution.study import RESOLUTION_CASES
from ..decode_metadata import checks as claim_checks_metadata
from ..engine_modes import checks as claim_checks_modes
from ..evidence import (
    ABOUT,
    CONFIRMED,
    NOT_HERE,
    OPEN,
    REFUTED,
    Finding,
    Judged,
    case_rows,
    figure_word,
    judge_cases,
    ran_rows,
    vote,
)
from ..metadata_mismatch import checks as claim_checks_mismatch
from ..sparse_mla import checks as claim_checks_mla
from .study import AFFECTED, BEFORE, FIXED, HEADLINE, NEWEST, REGRESSED, WIDE

REGRESSION, RESOLUTION = "fa3_decode_regression", "auto_resolution"
BEFORE_FIX, SINCE_FIX = (BEFORE, *AFFECTED), (FIXED, NEWEST)
LONG_KV_LEN = 8192
"""Tokens from which a claim about "long" sequences is judged; its source gives no length."""
FA3_KERNEL, FA2_KERNEL = "PrefillWithKVCacheKernel", "BatchPrefillWithPagedKVCacheKernel"

Check = Callable[[pd.DataFrame, float | None], Finding]


def slower_before_fix(frame: pd.DataFrame, _: float | None) -> Finding:
    """`auto` is slower than the pinned fa2 in every release before the fix."""
    releases = (BEFORE, REGRESSED)
    parts = {r: judge_cases(frame, HEADLINE, (AUTO, FA2), r) for r in releases}
    said = " and ".join(
        f"{part.count('slower')} of {len(part.verdicts)} shapes in {release}"
        for release, part in parts.items()
    )
    found = _slower(parts[BEFORE] + parts[REGRESSED], f"The default, auto, is slower in {said}.")
    medians = ", ".join(f"{p.ratios.median():.2f} x in {release}" for release, p in parts.items())
    # One median over both releases would describe neither.
    return replace(found, measured=f"median {medians}", value=None)


def same_since_fix(frame: pd.DataFrame, _: float | None) -> Finding:
    """Neither wrapper's `auto` is slower than the pinned fa2 in a release since the fix."""
    pairs = [(release, backend) for release in SINCE_FIX for backend in (AUTO, GRAPH_AUTO)]
    found = [judge_cases(frame, HEADLINE, (backend, FA2), r) for r, backend in pairs]
    judged = sum(found[1:], found[0])
    word = vote(judged.count("same", "faster"), judged.count("slower"), judged.count("ambiguous"))
    return judged.finding(word, f"In {' and '.join(SINCE_FIX)} auto is {judged.counts}.")


def graph_wrapper_slower(frame: pd.DataFrame, _: float | None) -> Finding:
    """The CUDA-graph wrapper is slower than a pinned fa2 in the regressed release."""
    judged = judge_cases(frame, HEADLINE, (GRAPH_AUTO, FA2), REGRESSED)
    return _slower(judged, f"The graph wrapper of {REGRESSED} is {judged.counts}.")


def auto_slower(frame: pd.DataFrame, _: float | None) -> Finding:
    """`auto` is slower than a pinned fa2 in the regressed release."""
    judged = judge_cases(frame, HEADLINE, (AUTO, FA2), REGRESSED)
    return _slower(judged, f"The auto of {REGRESSED} is {judged.counts}.")


def figure_at_long_lengths(frame: pd.DataFrame, figure: float | None) -> Finding:
    """The graph wrapper takes about `figure` times fa2's time, at every long headline shape."""
    assert figure is not None, "load_claims lets no such claim through"
    cases = [case for case in HEADLINE if case.kv_len >= LONG_KV_LEN]
    judged = judge_cases(frame, cases, (GRAPH_AUTO, FA2), REGRESSED)
    near = int(judged.ratios.between(figure / ABOUT, figure * ABOUT).sum())
    within = judged.ratios.min() <= figure <= judged.ratios.max()
    where = "inside" if within else "outside"
    return judged.finding(
        figure_word(judged.ratios.tolist(), figure),
        f"The figure {figure:g} x lies {where} the range, and {near} of {len(judged.verdicts)} "
        f"shapes of {LONG_KV_LEN:,} tokens or more are within a quarter of it.",
    )


def fa3_slower(frame: pd.DataFrame, _: float | None) -> Finding:
    """fa3 is slower than fa2 at every shape of the wide grid."""
    judged = judge_cases(frame, WIDE, (FA3, FA2), REGRESSED)
    return _slower(judged, f"In {REGRESSED} fa3 is {judged.counts}.")


def fa3_slower_somewhere(frame: pd.DataFrame, _: float | None) -> Finding:
    """fa3 is slower than fa2 at one shape of the wide grid at least."""
    return _somewhere(judge_cases(frame, WIDE, (FA3, FA2), REGRESSED), "slower")


def pin_runs_fa2(frame: pd.DataFrame, _: float | None) -> Finding:
    """A wrapper pinned to fa2 runs fa2 in the regressed release, and saves what `auto` costs."""
    judged = judge_cases(frame, HEADLINE, (AUTO, FA2), REGRESSED)
    pinned = frame[frame.id.isin(judged.records) & (frame.backend == FA2)]
    held = int((pinned.kernel_family == "fa2").sum())
    reason = f"Pinned, {held} of {len(pinned)} records ran fa2, and auto is {judged.counts}."
    return _slower(judged, reason) if held == len(pinned) else judged.finding(REFUTED, reason)


def fa3_kernel_name(frame: pd.DataFrame, _: float | None) -> Finding:
    """A decode pinned to fa3 is this one kernel."""
    return _kernel_named(frame, FA3, FA3_KERNEL)


def fa2_kernel_name(frame: pd.DataFrame, _: float | None) -> Finding:
    """A decode pinned to fa2 runs this kernel."""
    return _kernel_named(frame, FA2, FA2_KERNEL)


def fa3_before_fix(frame: pd.DataFrame, _: float | None) -> Finding:
    """`auto` ran fa3 in every release on record before the fix, bf16."""
    ran = ran_rows(frame, RESOLUTION_CASES[:1], AUTO, BEFORE_FIX)
    return _resolved(ran, ran.ran == "fa3", f"Before {FIXED} fa3 ran in")


def fa3_since_06(frame: pd.DataFrame, _: float | None) -> Finding:
    """`auto` ran fa2 before 0.6 and fa3 in 0.6.0 to 0.6.3, bf16."""
    ran = ran_rows(frame, RESOLUTION_CASES[:1], AUTO, BEFORE_FIX)
    expected = ran.release.map(lambda release: "fa2" if release == BEFORE else "fa3")
    return _resolved(ran, ran.ran == expected, "It is as claimed in")


def fa3_for_every_dtype(frame: pd.DataFrame, _: float | None) -> Finding:
    """`auto` ran fa3 for every dtype pair in the regressed release."""
    ran = ran_rows(frame, RESOLUTION_CASES, AUTO, (REGRESSED,))
    return _resolved(ran, ran.ran == "fa3", f"In {REGRESSED} fa3 ran in")


def fa2_since_fix(frame: pd.DataFrame, _: float | None) -> Finding:
    """`auto` ran fa2 for every dtype pair in the releases since the fix."""
    ran = ran_rows(frame, RESOLUTION_CASES, AUTO, SINCE_FIX)
    return _resolved(ran, ran.ran == "fa2", f"In {' and '.join(SINCE_FIX)} fa2 ran in")


def only_fa2_or_fa3(frame: pd.DataFrame, _: float | None) -> Finding:
    """Where `auto` ran at all, it ran fa2 or fa3."""
    ran = ran_rows(frame, RESOLUTION_CASES[:1], AUTO, (*BEFORE_FIX, *SINCE_FIX))
    return _resolved(ran, ran.ran.isin(("fa2", "fa3")), "One of the two ran in")


def sm100_by_rule(_: pd.DataFrame, __: float | None) -> Finding:
    """What the rule table says of Blackwell; no record can confirm it."""
    spec = RESOLUTION_CASES[0].spec
    said = {
        explain(spec, mode="decode", gpu="sm100", library=f"flashinfer=={release}", env={}).backend
        for release in AFFECTED
    }
    releases = f"{AFFECTED[0]} to {AFFECTED[-1]}"
    return Finding(
        NOT_HERE,
        f"No SM100 GPU is on record; the rules read in FlashInfer's source give "
        f"{' and '.join(sorted(said))} there in {releases}.",
    )


CHECKS: dict[str, tuple[tuple[str, ...], Check]] = (
    {
        check.__name__: ((study,), check)
        for study, checks in {
            REGRESSION: (
                slower_before_fix,
                same_since_fix,
                graph_wrapper_slower,
                auto_slower,
                figure_at_long_lengths,
                fa3_slower,
                fa3_slower_somewhere,
                pin_runs_fa2,
                fa3_kernel_name,
                fa2_kernel_name,
            ),
            RESOLUTION: (
                fa3_before_fix,
                fa3_since_06,
                fa3_for_every_dtype,
                fa2_since_fix,
                only_fa2_or_fa3,
                sm100_by_rule,
            ),
        }.items()
        for check in checks
    }
    | claim_checks_metadata.CHECKS
    | claim_checks_mismatch.CHECKS
    | claim_checks_mla.CHECKS
    | claim_checks_modes.CHECKS
)
"""Name in data/claims.yaml -> the studies it reads and the check."""


def _slower(judged: Judged, reason: str) -> Finding:
    against, undecided = judged.count("same", "faster"), judged.count("ambiguous")
    return judged.finding(vote(judged.count("slower"), against, undecided), reason)


def _somewhere(judged: Judged, *words: str) -> Finding:
    found, undecided = judged.count(*words), judged.count("ambiguous")
    word = CONFIRMED if found else OPEN if undecided else REFUTED
    return judged.finding(word, f"In {REGRESSED} fa3 is {judged.counts}.")


def _kernel_named(frame: pd.DataFrame, backend: str, name: str) -> Finding:
    rows = decode_rows(case_rows(frame, HEADLINE, (backend,), REGRESSED))
    kernels = rows.kernels.map(lambda ran: [kernel.name for kernel in ran])
    held = int(sum(name in row for row in kernels))
    seen = ", ".join(sorted({kernel for row in kernels for kernel in row}))
    reason = f"The kernel is in {held} of {len(rows)} traces of {backend} {REGRESSED}."
    return Finding(vote(held, len(rows) - held), reason, seen, records=tuple(rows.id))


def _resolved(rows: pd.DataFrame, holds: pd.Series, reason: str) -> Finding:
    support = int(holds.sum())
    both = rows["dtype"] + "/" + rows.kv_dtype
    dtypes = both.where(rows["dtype"] != rows.kv_dtype, rows["dtype"])
    seen = (rows.release if dtypes.nunique() == 1 else dtypes).groupby(rows["ran"]).unique()
    measured = "; ".join(f"{name}: {', '.join(found)}" for name, found in seen.items())
    word = vote(support, len(rows) - support)
    said = f"{reason} {support} of {len(rows)} records."
    return Finding(word, said, measured, records=tuple(rows.id))
