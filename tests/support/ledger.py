"""Records that a test makes up, and what a published claim says of them."""

from functools import cache

from support import frames

from attnlib.studies import claims


def row(case, backend, run_us, **more):
    """One record as `store.frame` has it: of round 0, without a release unless told so."""
    told = frames.row(case, backend, 0, run_us, **{"release": "", "kernel_family": "", **more})
    named = (told[name] for name in ("backend", "release", "timer", "round"))
    return {"id": " ".join([case.label, *map(str, named)]), **told}


@cache
def published():
    """The claims of data/claims.yaml by id."""
    return {claim.id: claim for claim in claims.load_claims()}


def judged(slug, frame, figure=None):
    """The finding of the claim that ends with `slug`; `figure` in place of its own."""
    (claim,) = [each for name, each in published().items() if name.endswith(f"-{slug}")]
    check, own = claims.check_of(claim), claim.figure.value if claim.figure else None
    assert check is not None
    return check.find(frame, own if figure is None else figure)


def verdict(slug, frame, figure=None):
    """The verdict of `judged`."""
    return judged(slug, frame, figure).verdict
