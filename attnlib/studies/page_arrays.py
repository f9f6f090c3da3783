"""Page arrays of FlashInfer's decode: SGLang's launches, vLLM's copy, and ours, which is one."""

from itertools import product

from ..kinds.metadata.case import MetadataCase
from ..run.study import Grid, Study

CASES = tuple(
    MetadataCase("kv_indices", batch, 1, longest)
    for batch, longest in product((1, 32, 128, 512, 4096), (8192, 32768))
)
"""(batch, page size, longest request); SGLang's pages are tokens."""
OURS, SGLANG = ("metadata-fused", "metadata-fused-alone"), ("sglang-metadata",)

STUDY = Study(
    name="page_arrays",
    question="What do the page arrays of a decode step cost?",
    grids=(
        Grid(CASES, (*OURS, "vllm-metadata"), rounds=3),
        Grid(CASES, SGLANG, ("0.5.14", "0.5.23"), rounds=3),
        Grid(CASES[::3], OURS, headline=True),
    ),
    reference_machine="nvidia-h200-18b4d560",
    ceilings=(),
)
