"""A chunk of a prompt among decoding requests (chunked prefill): one call of attention, or two.

vLLM's batches are such; SGLang's are with `--enable-mixed-chunk`. Planned eagerly and timed by the
profiler, as prefill is in `engine_modes`.
"""

from dataclasses import replace
from itertools import product

from ...core.spec import AttnSpec
from ...kinds.decode.case import DecodeCase
from ...kinds.extend.case import ExtendCase
from ...run.study import Grid, Study

SPEC = AttnSpec(32, 8, 128, 16)
"""A layer of Llama-3.1-8B."""
KV_LEN = 8192
EAGER = ("profiler",)
DECODE = ("flashinfer-fa2", "flash-attn-3-precomputed")
MANY = ("flashinfer-prefill-fa2", "flashinfer-prefill-fa3", "flash-attn-3-extend")
SIZES = tuple(product((4, 8, 16, 32), (128, 512, 2048)))
"""(decoding requests, tokens of the chunk); the chunk ends at `KV_LEN` tokens as they do."""


def decodes(requests: int) -> DecodeCase:
    """The decoding requests alone."""
    return DecodeCase(SPEC, requests, KV_LEN)


def chunk(tokens: int) -> ExtendCase:
    """The chunk alone."""
    return ExtendCase(decodes(1), "prefill_paged", tokens)


def both(requests: int, tokens: int) -> ExtendCase:
    """Both in one batch, the chunk last."""
    said = "+".join([str(KV_LEN)] * (requests + 1))
    batch = replace(decodes(requests + 1), lengths=said)
    queries = "+".join([*["1"] * requests, str(tokens)])
    return ExtendCase(batch, "prefill_paged", tokens, q_lengths=queries)


MIXED = {both(*sizes): sizes for sizes in SIZES}
DECODES, CHUNKS = (tuple(dict.fromkeys(part)) for part in zip(*SIZES, strict=True))
CASES = (*MIXED, *map(chunk, CHUNKS))

STUDY = Study(
    name="mixed_batch",
    question="Is a chunk of a prompt among decoding requests one call of attention, or two?",
    grids=(
        Grid(CASES, MANY, timers=EAGER, rounds=4, again=MANY[:1]),
        Grid(tuple(map(decodes, DECODES)), DECODE, timers=EAGER, rounds=4, again=DECODE),
        Grid((*MIXED,)[1:2], MANY, timers=EAGER, rounds=3, headline=True),
        Grid((chunk(512),), MANY, timers=EAGER, rounds=3, headline=True),
        Grid((decodes(8),), DECODE, timers=EAGER, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-f9835d78",
    ceilings=(),
)
