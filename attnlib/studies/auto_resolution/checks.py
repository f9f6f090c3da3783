"""The checks of claims about code: read in the rules of the releases, beside records."""

from collections.abc import Callable
from typing import Any

import pandas as pd

from ...select import explain
from ..evidence import CONFIRMED, REFUTED, Finding, counted
from ..expected import ran_rows
from ..fa3_decode_regression.study import AFFECTED, REGRESSED
from .study import RESOLUTION_CASES
from .tables import auto

SPEC = RESOLUTION_CASES[0].spec
BEFORE, AFTER = ("0.5.8", "0.6.1", "sglang<0.5.9"), ("0.5.9", "0.6.3", "sglang")
"""SGLang's release, the FlashInfer that it pins, and its rule of how it calls that."""


def sm100_by_rule(_: pd.DataFrame) -> Finding:
    """On Blackwell `auto` means fa2 in every release that the claim is of, as the pin does."""
    said = {auto(SPEC, release, "sm100").backend for release in AFFECTED}
    releases = f"{AFFECTED[0]} to {AFFECTED[-1]}"
    reason = f"Read in FlashInfer's source: {' and '.join(sorted(said))} there in {releases}."
    return Finding(CONFIRMED if said == {"fa2"} else REFUTED, reason + " No such GPU is on record.")


def hopper_chooses_fa3(frame: pd.DataFrame) -> Finding:
    """The regressed `auto` chooses fa3 for every dtype pair; what was traced is fa3 too."""
    rows = ran_rows(frame, RESOLUTION_CASES, "flashinfer-auto", [REGRESSED])
    chosen = [auto(case.spec, REGRESSED, "sm90").backend for case in rows.case]
    good = rows["ran"] == "fa3"
    failed = int((rows.status != "ok").sum())
    holds = (good | (rows.status != "ok")) & pd.Series(chosen, rows.index).eq("fa3")
    says = f"fa3 was chosen in {{held}} records; {failed} of them failed to compile it."
    return counted(
        rows, holds, says, f"fa3 chosen in {sum(holds)}, ran in {sum(good)} of {len(rows)}"
    )


def _pinned(mode: str, before: str) -> Callable[[pd.DataFrame], Finding]:
    """The check of `backend=` in both releases: `before`, then fa2."""

    def check(_: pd.DataFrame) -> Finding:
        """What both releases pass to the wrapper as its backend."""
        said = []
        for release, flashinfer, policy in (BEFORE, AFTER):
            asked: dict[str, Any] = {"mode": mode, "gpu": "sm90", "policy": policy, "env": {}}
            found = explain(SPEC, library=f"flashinfer=={flashinfer}", **asked)
            row = next(r for r in found.reasons if r.matched)
            said.append((release, row.subject, row.source))
        told = "; ".join(f"{release} passes {name} ({source})" for release, name, source in said)
        held = [name for _, name, _ in said] == [before, "fa2"]
        reason = f"Read in both releases of SGLang: {told}. Its speed is another matter."
        return Finding(CONFIRMED if held else REFUTED, reason)

    return check


paged_prefill_by_rule = _pinned("prefill_paged", "fa2")
paged_decode_by_rule = _pinned("decode", "auto")
prefill_verify_by_rule = _pinned("target_verify", "auto")
draft_extend_by_rule = _pinned("draft_extend", "fa2")
dllm_extend_by_rule = _pinned("dllm_extend", "fa2")
