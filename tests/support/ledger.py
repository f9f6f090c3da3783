"""What a published claim says of records that a test has made up."""

from functools import cache

import pandas as pd

from attnlib.studies import claims
from attnlib.studies.evidence import Finding


@cache
def published() -> dict[str, claims.Claim]:
    """The claims of data/claims.yaml by id."""
    return {claim.id: claim for claim in claims.load_claims()}


def judged(slug: str, frame: pd.DataFrame, figure: float | None = None) -> Finding:
    """The finding of the claim that ends with `slug`; `figure` in place of its own."""
    (claim,) = [each for name, each in published().items() if name.endswith(f"-{slug}")]
    check, own = claims.check_of(claim), claim.figure.value if claim.figure else None
    assert check is not None
    return check.find(frame, own if figure is None else figure)


def verdict(slug: str, frame: pd.DataFrame, figure: float | None = None) -> str:
    """The verdict of `judged`."""
    return judged(slug, frame, figure).verdict
