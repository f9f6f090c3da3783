"""Page arrays of FlashInfer's decode: SGLang's launches, and ours, which is one."""

from itertools import product

from ...run.study import Grid, Study
from .case import MetadataCase

BATCHES = (1, 32, 128, 512, 4096)
LONGEST = (8192, 32768)


def _case(batch: int, longest: int) -> MetadataCase:
    # SGLang's pages are tokens.
    return MetadataCase(
        "kv_indices",
        batch_size=batch,
        page_size=1,
        max_ctx=longest,
    )


CASES = tuple(_case(batch, longest) for batch, longest in product(BATCHES, LONGEST))
LIVE = (
    _case(1, 8192),
    _case(32, 32768),
    _case(512, 8192),
    _case(4096, 32768),
)
OURS = ("metadata-fused", "metadata-fused-alone")
SGLANG = ("sglang-metadata",)

STUDY = Study(
    name="page_arrays",
    question="What do the page arrays of a decode step cost?",
    grids=(
        Grid(CASES, OURS, rounds=3),
        Grid(CASES, SGLANG, releases=("0.5.14", "0.5.23"), rounds=3),
        Grid(LIVE, OURS, headline=True),
    ),
    reference_machine="nvidia-h200-18b4d560",
    ceilings=(),
)
