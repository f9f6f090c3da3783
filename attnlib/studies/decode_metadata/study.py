"""The metadata of a decode step: designs side by side, over batch, context and page size.

The rival `metadata-serial` is the design that SGLang shipped, written anew; SGLang's own kernels
join where a `sglang` distribution is given as an overlay.
"""

from itertools import product

from ...kinds.metadata.case import MetadataCase
from ...run.study import Grid, Study

METADATA_SIZES = (
    (1, 1, 8192),
    (32, 1, 8192),
    (128, 1, 8192),
    (512, 1, 8192),
    (1024, 1, 8192),
    (2048, 16, 32768),
    (4096, 16, 32768),
    (32, 1, 131072),
)
"""(batch, page_size, max_ctx); the second is the case of SGLang's pull request."""
METADATA = tuple(MetadataCase("decode", *sizes) for sizes in METADATA_SIZES)
METADATA_SWEEP = tuple(
    MetadataCase("decode", batch, page, ctx)
    for batch, page, ctx in product((1, 8, 64, 512, 4096), (1, 16, 256), (128, 2048, 16384, 131072))
)
PAGE_ARRAYS = tuple(
    MetadataCase("kv_indices", batch, page, ctx)
    for batch, page, ctx in product((1, 32, 128, 512, 4096), (1, 16), (2048, 8192, 32768))
)
DRAFTS = tuple(
    MetadataCase("draft", batch, page, 8192, topk=topk, draft_tokens=5)
    for batch, page, topk in product((1, 32, 256, 1024), (1, 16), (1, 4, 8))
)
VERIFIES = tuple(
    MetadataCase("verify", batch, 1, 8192, draft_tokens=4) for batch in (1, 32, 256, 1024, 4096)
)
WINDOWED = tuple(MetadataCase("decode", 32, 2**bits, 8192, swa=True) for bits in range(8))
"""The page sizes of SGLang's tests, with the table of a sliding window."""
EAGER_OR_FUSED = ("metadata-eager", "metadata-fused")
DESIGNS = ("metadata-eager", "metadata-serial", "metadata-fused")
SGLANG = ("sglang-metadata",)
SGLANG_RELEASES = ("0.5.14", "0.5.23")
"""0.5.14 has the kernels as they were merged, in a file that loads alone; 0.5.23 is the newest."""

STUDY = Study(
    name="decode_metadata",
    question="What does the metadata of a decode step cost, and what must it cost?",
    grids=(
        Grid(METADATA, DESIGNS, rounds=4),
        Grid(METADATA, SGLANG, SGLANG_RELEASES, rounds=4),
        Grid(METADATA_SWEEP, DESIGNS, rounds=4),
        Grid(METADATA_SWEEP, SGLANG, SGLANG_RELEASES, rounds=4),
        Grid(WINDOWED, DESIGNS[2:], rounds=4),
        Grid(WINDOWED, SGLANG, SGLANG_RELEASES, rounds=4),
        Grid((*PAGE_ARRAYS, *DRAFTS, *VERIFIES), EAGER_OR_FUSED, rounds=4),
        Grid(METADATA_SWEEP[::4], (), rounds=4, again=DESIGNS[2:]),
        Grid(METADATA[:6], DESIGNS, rounds=3, headline=True),
        Grid(WINDOWED, DESIGNS[2:], rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-a9a9b6cc",
    ceilings=("copy", "launch", "gather"),
)
