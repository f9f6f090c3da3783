"""Page arrays of FlashInfer's decode: SGLang's launches and ours, which is one.

One round: a row says what was measured and has no verdict.
"""

from itertools import product

from ..kinds.metadata.case import MetadataCase
from ..run.study import Grid, Study

CASES = tuple(
    MetadataCase("kv_indices", batch, 1, longest)
    for batch, longest in product((1, 32, 128, 512, 4096), (2048, 8192, 32768))
)
"""(batch, page size, longest request); SGLang's pages are tokens."""
OURS, SGLANG = ("metadata-fused",), ("sglang-metadata",)

STUDY = Study(
    name="page_arrays",
    question="What do the page arrays of a decode step cost?",
    grids=(
        Grid(CASES, OURS, again=OURS),
        Grid(CASES, SGLANG, ("0.5.14",)),
        Grid(CASES, SGLANG, ("0.5.23",), rounds=2),
        Grid(CASES[::4], OURS, headline=True),
    ),
    reference_machine="nvidia-h100-80gb-hbm3-2de5cee9",
    ceilings=(),
)
