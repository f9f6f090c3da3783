"""Where FlashInfer 0.6.4's MLA leaves 32 bits: two caches, a request apart, on either side of the
token that `sparse_mla.first_lost_token` predicts.
"""

from ...core.spec import MlaSpec
from ...kinds.mla.case import MlaCase
from ...run.study import Grid, Study

SPEC = MlaSpec(16, top_k=2048)
KV_LEN = 131072
EITHER_SIDE = tuple(MlaCase(SPEC, requests, KV_LEN) for requests in (56, 57))
"""7,340,032 and 7,471,104 tokens; the first that is lost is 7,456,541."""

RELEASES = ("0.6.4", "0.6.13")

STUDY = Study(
    name="mla_overflow",
    question="At which token does FlashInfer 0.6.4's MLA begin to read others?",
    grids=(
        Grid(EITHER_SIDE, ("flashinfer-mla-fa2", "flashinfer-mla-fa3"), RELEASES, rounds=3),
        Grid(EITHER_SIDE, ("flashinfer-mla-fa3",), RELEASES, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-2ef2f3bb",
    ceilings=(),
)
