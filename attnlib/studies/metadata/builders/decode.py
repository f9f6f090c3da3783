"""Lengths, prefix sums and page tables of a decode step."""

from ....core.metadata.decode import OUTPUTS, build_decode_metadata
from .. import eager, oracle, sglang
from . import Builder

BUILDER = Builder(
    designs={
        "metadata-eager": eager.build_decode_metadata,
        "metadata-fused": build_decode_metadata,
        "metadata-fused-alone": build_decode_metadata,
        sglang.BACKEND: sglang.build_decode_metadata,
    },
    outputs=OUTPUTS,
    oracle=oracle.decode_metadata,
)
