"""Page arrays: every request's pages, one after the other, as FlashInfer's plans take them."""

from ....core.metadata.kv_indices import OUTPUTS, build_kv_indices
from .. import oracle, sglang
from . import Builder

BUILDER = Builder(
    designs={
        "metadata-fused": build_kv_indices,
        "metadata-fused-alone": build_kv_indices,
        sglang.BACKEND: sglang.build_kv_indices,
    },
    outputs=OUTPUTS,
    oracle=oracle.kv_indices,
)
