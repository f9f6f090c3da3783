"""Which backend decodes fastest, shape by shape: cases to learn a policy from, others to judge it.

No shape is round. Batch sizes and lengths are spread evenly over the logarithms of both (Roberts'
R2 sequence); the held-out ones are drawn at random and are in none of the policy's records.
"""

import random
from dataclasses import replace

from ...core.spec import ELEMENT_BYTES, AttnSpec
from ...kinds.cost import decode_cost
from ...kinds.decode.case import DecodeCase
from ...run.study import Grid, Study

_SIZES = (
    *((32, 32, 16), (16, 8, 1), (24, 8, 16), (32, 8, 1), (40, 8, 16)),
    *((12, 2, 16), (28, 4, 1), (8, 1, 16), (16, 2, 64), (64, 4, 16)),
)
SPECS = tuple(AttnSpec(qo, kv, head_dim=128, page_size=page) for qo, kv, page in _SIZES)
"""Groups of 1 to 8 and 16, odd ones too; four of them the CUDA cores refuse."""
BATCHES, KV_LENS = (1, 256), (64, 65536)
KV_BYTES_LIMIT = 4 * 2**30
LEAST_COLD = 2**18
"""Of a smaller cache no 512 copies, as many as a replay takes, fill an L2 of 60 MiB twice."""
LENGTHS = ("fixed", "ragged", "skewed")
KNOWN, HELD_OUT = 140, 8
"""Cases a spec. Both counts are of cases whose longest possible cache fits the limit."""
HELD_OUT_ROUNDS = 3
"""Known cases take one round: more cases teach a policy more than more rounds of each."""
R2 = (0.7548776662466927, 0.5698402909980532)
"""1/g and 1/g^2 of the plastic number g: steps that fill a square evenly (M. Roberts, 2018)."""


def known_cases(spec: AttnSpec) -> tuple[DecodeCase, ...]:
    """`KNOWN` cases, spread evenly; the length distributions take turns."""
    found: list[DecodeCase] = []
    step = 0
    while len(found) < KNOWN:
        step += 1
        place = [(0.5 + step * stride) % 1.0 for stride in R2]
        found += _fitting(_case(spec, place, LENGTHS[len(found) % len(LENGTHS)]))
    return tuple(found)


def held_out_cases(spec: AttnSpec) -> tuple[DecodeCase, ...]:
    """`HELD_OUT` cases at random places, none of them a known one."""
    draw = random.Random(f"held out {spec.heads}")
    known = set(known_cases(spec))
    found: list[DecodeCase] = []
    while len(found) < HELD_OUT:
        case = _case(spec, [draw.random(), draw.random()], draw.choice(LENGTHS))
        found += [] if case in known else _fitting(case)
    return tuple(found)


def drawn_cases(
    specs: tuple[AttnSpec, ...], count: int, seed: str, lengths: tuple[str, ...]
) -> tuple[DecodeCase, ...]:
    """`count` cases of each spec at random places, no two alike, that can be timed cold."""
    found: dict[DecodeCase, None] = {}
    for number, spec in enumerate(specs, 1):
        draw = random.Random(f"{seed} {spec}")
        while len(found) < number * count:
            case = _case(spec, [draw.random(), draw.random()], draw.choice(lengths))
            if _fitting(case) and decode_cost(case).kv_bytes >= LEAST_COLD:
                found[case] = None
    return tuple(found)


def _case(spec: AttnSpec, place: list[float], lengths: str) -> DecodeCase:
    """The case at `place` in the unit square of log batch size and log kv_len."""
    batch, kv_len = (
        round(low * (high / low) ** share)
        for (low, high), share in zip((BATCHES, KV_LENS), place, strict=True)
    )
    return DecodeCase(spec, batch, kv_len, lengths)


def _fitting(case: DecodeCase) -> list[DecodeCase]:
    spec = case.spec
    token = 2 * spec.num_kv_heads * spec.head_dim * ELEMENT_BYTES[spec.kv_dtype]
    return [case] if case.batch_size * case.kv_len * token <= KV_BYTES_LIMIT else []


POLICY_RELEASE = "0.6.4"
FLASHINFER = ("flashinfer-fa2", "flashinfer-fa3", "flashinfer-cuda-cores")
KNOWN_CASES = tuple(case for spec in SPECS for case in known_cases(spec))
HELD_OUT_CASES = tuple(case for spec in SPECS for case in held_out_cases(spec))
HEADLINE_KNOWN, HEADLINE_HELD_OUT = KNOWN_CASES[:: KNOWN // 10], HELD_OUT_CASES[::HELD_OUT]
"""For a live notebook: ten cases a spec to learn from, one to judge by."""


def _grids(known: tuple[DecodeCase, ...], held_out: tuple[DecodeCase, ...]) -> tuple[Grid, ...]:
    """Both sets of cases on FlashInfer's backends and on FlashAttention-3, which has no release."""
    sets = ((known, 1), (held_out, HELD_OUT_ROUNDS))
    return tuple(
        Grid(cases, backends, releases, rounds=rounds)
        for cases, rounds in sets
        for backends, releases in ((FLASHINFER, (POLICY_RELEASE,)), (("fa3",), ("",)))
    )


STUDY = Study(
    name="backend_policy",
    question="Which backend decodes fastest, and how much does a rule lose that does not measure?",
    grids=(
        *_grids(KNOWN_CASES, HELD_OUT_CASES),
        *(replace(grid, headline=True) for grid in _grids(HEADLINE_KNOWN, HEADLINE_HELD_OUT)),
    ),
    reference_machine="nvidia-h200-73a3cc9a",
    ceilings=("copy", "read", "launch"),
)
