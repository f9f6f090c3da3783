"""Random calls for FlashAttention-3's scheduler metadata, and how a vector file is written."""

import json
import lzma
from dataclasses import asdict, fields, replace

import numpy as np
from support.schedule_vectors import KINDS, Call, LengthSpec

from attnlib.core.schedule.caps import CAPS, num_splits
from attnlib.core.schedule.splits import SchedulerFacts, plan_splits

HEADS = (
    *(
        (32, 8),
        (32, 32),
        (8, 1),
        (16, 2),
        (64, 8),
        (28, 4),
        (40, 8),
        (5, 1),
        (6, 6),
        (128, 1),
    ),
    *(
        (16, 16),
        (12, 4),
        (96, 8),
        (1, 1),
        (24, 3),
        (16, 1),
        (2, 2),
        (14, 2),
        (64, 64),
    ),
)
HEAD_DIMS = (64, 64, 128, 128, 128, 128, 256, 192, 96, 80, 112, 32, 160)
VALUE_DIMS = {192: (128,), 64: (256, 512)}
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 80, 96, 112, 160, 176, 192, 224, 512)
QUERY_LENGTHS = (2, 3, 4, 5, 8, 16, 64, 129, 512, 1000, 4096)
LONGEST = 2**20
CALL_LENGTHS = ("fixed", "uniform", "skewed", "zeros", "edges", "few")
GROUPED = (
    (64, 8, 64),
    (8, 1, 64),
    (14, 2, 64),
    (32, 8, 128),
    (32, 16, 128),
    (16, 16, 128),
    (16, 2, 128),
    (8, 1, 128),
    (8, 4, 256),
)
"""Query heads, KV heads and head_dim of a step's full and window layers."""
LATENT_HEADS = (128, 64, 32, 16, 8)
"""Query heads of its MLA layers."""
WINDOWS = (1, 127, 511, 1023, 4095)
"""Tokens to the left of a query that its window layers see."""
MOST_QUERY_TOKENS = 8


def draw_calls(seed, *, num_sms, hdim96, build="upstream"):
    """Random calls without end, the same for the same arguments; all that the model accepts."""
    rng = np.random.default_rng(seed)
    while True:
        try:
            call = _draw_call(rng, num_sms, hdim96, build)
            plan_splits(call.facts, *call.lengths())
        except ValueError:
            continue
        yield call


def draw_steps(seed, *, num_sms, build, most_requests=64):
    """Random steps of decode and verification without end: kind of layer -> its call.

    The calls of a step have the same lengths. Real models have full and window layers, or MLA;
    here a step has all three.
    """
    rng = np.random.default_rng(seed)
    while True:
        step = _draw_step(rng, num_sms, build, most_requests)
        try:
            for call in step.values():
                plan_splits(call.facts, *call.lengths())
        except ValueError:
            continue
        yield step


def draw_step_calls(seed, *, num_sms, build, most_requests):
    """The calls of `draw_steps`, kind by kind, for a vector file."""
    for step in draw_steps(seed, num_sms=num_sms, build=build, most_requests=most_requests):
        yield from step.values()


def _draw_step(rng, num_sms, build, most_requests):
    def pick(options):
        return options[rng.integers(len(options))]

    heads, kv_heads, head_dim = pick(GROUPED)
    page_size = pick((1, 1, 16, 64, 128))
    columns = 1 + _log_uniform(rng, 2**17 // page_size)
    tokens = 1 if rng.random() < 0.4 else int(rng.integers(2, MOST_QUERY_TOKENS + 1))
    full = SchedulerFacts(
        batch_size=int(rng.integers(1, most_requests + 1)),
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_seqlen_q=tokens,
        max_seqlen_k=columns * page_size,
        num_sms=num_sms,
        page_size=page_size,
        dtype=pick(("bfloat16", "bfloat16", "float8_e4m3fn")),
        causal=True,
        has_softcap=bool(rng.random() < 0.1),
        varlen_q=bool(rng.random() < 0.7),
        build=build,
    )
    latent = replace(
        full,
        num_qo_heads=pick(LATENT_HEADS),
        num_kv_heads=1,
        head_dim=64,
        head_dim_v=512,
        dtype="bfloat16",
        has_softcap=False,
    )
    kinds = {
        "full": full,
        "window": replace(full, window=(pick(WINDOWS), 0)),
        "mla": latent,
    }
    seq_lens = LengthSpec(
        pick([*KINDS]),
        full.max_seqlen_k,
        int(rng.integers(2**31)),
    )
    q_lens = None
    if full.varlen_q:
        q_lens = LengthSpec(pick(("fixed", "fixed", "uniform", "zeros")), tokens, 1)
    step = {}
    for name, facts in kinds.items():
        cap = pick((*CAPS, str(rng.integers(1, 256))))
        capped = replace(facts, num_splits=num_splits(facts, cap))
        step[name] = Call(capped, seq_lens, q_lens)
    return step


def write(path, lines):
    """Write JSON lines, xz; the same lines give the same bytes."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def to_line(call):
    """JSON form; what is usual goes unsaid."""
    unusual = {}
    for field in fields(call.facts):
        value = getattr(call.facts, field.name)
        if value != field.default:
            unusual[field.name] = value
    return {
        "facts": unusual,
        "seq_lens": asdict(call.seq_lens),
        "q_lens": asdict(call.q_lens) if call.q_lens else None,
    }


def _draw_call(rng, num_sms, hdim96, build):
    def pick(options):
        return options[rng.integers(len(options))]

    def chance(share):
        return bool(rng.random() < share)

    heads = pick(HEADS)
    head_dim = pick(HEAD_DIMS)
    dtype = pick(("bfloat16", "bfloat16", "bfloat16", "float16", "float8_e4m3fn"))
    head_dim_v = pick(VALUE_DIMS[head_dim]) if head_dim in VALUE_DIMS and chance(0.1) else head_dim
    page_size = pick(PAGE_SIZES) if chance(0.75) else None
    most = 1 + _log_uniform(rng, LONGEST if chance(0.1) else 2**17)
    if page_size and chance(0.8):
        most = -(-most // page_size) * page_size
    max_q = 1 if chance(0.6) else pick(QUERY_LENGTHS)
    window = (-1, -1)
    if chance(0.25):
        window = (_log_uniform(rng, most) if chance(0.9) else -1, pick((0, 0, -1, 3, 100)))
    facts = SchedulerFacts(
        batch_size=_draw_batch_size(rng),
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        max_seqlen_q=max_q,
        max_seqlen_k=most,
        num_sms=num_sms,
        page_size=page_size,
        dtype=dtype,
        head_dim_v=head_dim_v,
        causal=chance(0.6),
        window=window,
        has_softcap=chance(0.1),
        varlen_q=chance(0.25),
        pack_gqa=None if chance(0.88) else chance(0.5),
        num_splits=0 if chance(0.7) else int(rng.integers(1, 256)) if chance(0.8) else 1,
        sm_margin=0 if chance(0.85) else int(rng.integers(1, num_sms)),
        hdim96=hdim96,
        build=build,
    )
    q_lens = (
        LengthSpec(
            pick(CALL_LENGTHS),
            max_q,
            int(rng.integers(2**31)),
        )
        if facts.varlen_q
        else None
    )
    return Call(
        facts,
        LengthSpec(pick(CALL_LENGTHS), most, int(rng.integers(2**31))),
        q_lens,
    )


def _draw_batch_size(rng):
    share = rng.random()
    bounds = (
        (0.6, 1, 17),
        (0.85, 17, 129),
        (0.94, 129, 601),
        (1.0, 601, 2001),
    )
    low, high = next((low, high) for upto, low, high in bounds if share < upto)
    return int(rng.integers(low, high))


def _log_uniform(rng, high):
    """An integer in 0..high - 1, every order of magnitude as likely."""
    return int(np.exp(rng.uniform(0, np.log(high)))) - 1 if high > 1 else 0
