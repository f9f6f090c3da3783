"""The check of what pull requests say of Blackwell's `auto`: read in the rules, not measured."""

import pandas as pd

from ...select import explain
from ..evidence import NOT_HERE, Finding
from ..fa3_decode_regression.study import AFFECTED
from .study import RESOLUTION_CASES


def sm100_by_rule(_: pd.DataFrame) -> Finding:
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
