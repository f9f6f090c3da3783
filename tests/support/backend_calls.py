"""Calls of backends, one form for decode, extend and MLA: batch, query, cache, and the oracle."""

from dataclasses import replace
from functools import cached_property, lru_cache

import pytest
import torch
from support.workloads import judge_of, work_of

from attnlib.core import DecodeBatch, MlaBatch, PagedKV, backends
from attnlib.core.backends.table import library_of
from attnlib.core.spec import CUSTOM_MASKS, AttnSpec, MlaSpec
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.extend.case import ExtendCase
from attnlib.measure.calls.inputs import Workload
from attnlib.measure.calls.mla.case import MlaCase

SPEC = AttnSpec(8, 2, 128, 16)
DECODE = DecodeCase(AttnSpec(8, 2, 64, 16), 3, 90, "ragged")
PAGED, ONE_TOKEN = (DecodeCase(replace(SPEC, page_size=n), 5, 200, "ragged") for n in (16, 1))
RAGGED = 200 if torch.cuda.is_available() else 60
"""Queries and tokens: the stand-ins have no tiles that many of them fill."""
BESIDE = replace(PAGED, batch_size=4, lengths="200+60+75+130")
MODES = (
    ExtendCase(PAGED, "prefill_paged", 40),
    ExtendCase(ONE_TOKEN, "prefill_paged", 40),
    ExtendCase(PAGED, "target_verify", 6),
    ExtendCase(ONE_TOKEN, "target_verify", 6),
    ExtendCase(PAGED, "target_verify", 6, "chain"),
    ExtendCase(PAGED, "target_verify", 6, "causal"),
    ExtendCase(PAGED, "draft_extend", 5),
    ExtendCase(PAGED, "dllm_extend", 32),
    ExtendCase(replace(ONE_TOKEN, kv_len=RAGGED), "prefill_ragged", RAGGED),
    ExtendCase(BESIDE, "prefill_paged", 40, q_lengths="1+1+30+40"),
)
"""Every mode with several queries per request, over its masks; last, chunks beside decodes."""
_STAND_INS = ("flashinfer", "flash-attn-3", "sglang-flash-attn-3")
"""Libraries whose calls with several queries `library_fakes` has."""
EXTEND_FAKED = [name for name in backends.EXTEND_BACKENDS if library_of(name) in _STAND_INS]
ALL_MODES = [(name, case) for case in MODES for name in EXTEND_FAKED]
PLANNED, UNIFORM = (f"flashinfer-prefill-fa2-{how}" for how in ("planned", "uniform"))
SGLANG, SGLANG_MLA, SGLANG_EXTEND = (
    f"sglang-flash-attn-3{mode}" for mode in ("", "-mla", "-extend")
)


def takes(name, case):
    """Some plans are for as many queries of each request."""
    alike = not case.q_lengths and case.mode not in ("draft_extend", "prefill_ragged")
    paged = case.mode != "prefill_ragged"
    needs = {PLANNED: alike, UNIFORM: alike, SGLANG_EXTEND: paged}
    return needs.get(name, True)


EXTEND = [
    (name, case)
    for name, case in ALL_MODES
    if takes(name, case)
    and (case.mask not in CUSTOM_MASKS or name.endswith(("fa2", "auto", "uniform")))
]
KINDS = (
    *((64, "float16"), (256, "bfloat16"), (64, "float16", "float8_e4m3fn")),
    *((dim, "bfloat16", "float8_e4m3fn") for dim in (128, 256)),
)
"""head_dim, dtype of the query and of the cache."""
XQA_KINDS = (
    (1, 64),
    (8, 16),
    (16, 32, 128, "float16"),
    (4, 128, 256),
)
"""Group and page size, head_dim, dtype: the library builds a module for each."""
_BOTH = ("flashinfer-mla-fa2", "flashinfer-mla-fa3", "flash-attn-3-mla")
SPARSE = (*_BOTH, "flashmla-sparse-fp8", "flashmla-sparse-bf16")
DENSE = (*_BOTH, "flashmla-dense", SGLANG_MLA)


def mla_case(name, heads=16, top_k=70, kv_format="bfloat16", **changes):
    kv_format = "fp8-656" if name == "flashmla-sparse-fp8" else kv_format
    sizes = {"batch_size": 3, "kv_len": 200, "lengths": "ragged"} | changes
    return MlaCase(MlaSpec(heads, top_k, 64, kv_format), **sizes)


def spec_of(group_size, page_size, head_dim=128, dtype="bfloat16"):
    return AttnSpec(2 * group_size, 2, head_dim, page_size, dtype)


MLA = [(n, mla_case(n)) for n in SPARSE] + [(n, mla_case(n, top_k=0)) for n in DENSE]
MLA += [(_BOTH[1], mla_case(_BOTH[1], 16, top_k, "fp8-576")) for top_k in (0, 70)]
MLA += [(name, mla_case(name, top_k=0, q_len=4, context=4096)) for name in DENSE]
MLA += [
    (f"{SGLANG_MLA}@{cap}", mla_case(SGLANG_MLA, heads, 0, q_len=q_len, context=4096))
    for cap, heads, q_len in (("bounded", 128, 1), ("upstream", 16, 4), ("3", 16, 8))
]
PLANNED_DECODE = [
    ("flashinfer-fa2-planned", DecodeCase(spec, 3, 1500, "skewed"))
    for spec in (
        *(spec_of(group, page) for group, page in ((1, 64), (5, 16), (7, 1), (16, 16))),
        *(AttnSpec(8, 2, dim, 16, *dtypes) for dim, *dtypes in KINDS),
    )
]
"""Plans of our own for every kind of layer that they take."""
FAKED = (
    "sdpa",
    "flash-attn-3",
    "flash-attn-3-precomputed",
    "flashinfer-fa2-planned",
    "flashinfer-batch-attention",
)
WINDOWS = [
    DecodeCase(replace(spec_of(4, page), window=window), 7, 800, "ragged")
    for page, window in ((16, 100), (64, 1), (1, 400), (16, 800))
]
"""Layers with a window: inside a page and across pages, shorter and longer than requests."""
WINDOWED = [(n, c) for n in (*FAKED[:-1], "flashinfer-fa2") for c in WINDOWS]
XQA = [
    ("flashinfer-xqa", case)
    for case in (
        DECODE,
        *(DecodeCase(spec_of(*kind), 3, 1500, "skewed") for kind in XQA_KINDS),
        *(case for case in WINDOWS if case.spec.page_size > 1),
    )
]
VLLM = [(n, c) for n in ("vllm-triton", "vllm-flash-attn-3") for c in (DECODE, *WINDOWS[::3])]
WIDE = DecodeCase(spec_of(8, 1), 5, 3000, "ragged", context=8192)
"""Over a page table as wide as an engine's context."""
OF_SGLANG = [
    *((SGLANG, case) for case in (DECODE, WIDE, *WINDOWS)),
    *((f"{SGLANG}@{cap}", WIDE) for cap in ("upstream", "bounded", "7")),
    *(
        (f"{SGLANG_EXTEND}@{cap}", ExtendCase(WIDE, "target_verify", 4, "causal"))
        for cap in ("upstream", "bounded", "7")
    ),
]
"""SGLang's FlashAttention-3 by each cap of splits."""
CALLS = [
    *((name, DECODE) for name in FAKED),
    *PLANNED_DECODE,
    *WINDOWED,
    *XQA,
    *VLLM,
    *OF_SGLANG,
    *EXTEND,
    *MLA,
]
"""A call of every backend that has a stand-in, or needs none."""
STANDARD = {
    "decode": [
        DECODE,
        *(
            DecodeCase(spec_of(group, page), 7, 1500, "ragged")
            for group in (1, 4)
            for page in (1, 16, 64)
        ),
        *(DecodeCase(AttnSpec(8, 2, dim, 16, *dtypes), 5, 999, "ragged") for dim, *dtypes in KINDS),
        *WINDOWS,
    ],
    "extend": [case for case in MODES if case.mode != "prefill_ragged"],
    "mla": [mla_case("", top_k=top_k) for top_k in (0, 70)],
}
"""Of each mode the calls of a backend that has none above: those that it says it can run."""


def standard_calls(entry):
    """The standard calls of an entry that its library takes."""
    return [
        (entry.name, case)
        for case in STANDARD[entry.plans]
        if not backends.unsupported(entry.name, case.spec, mask=getattr(case, "mask", "causal"))
    ]


class Call(Workload):
    """What a backend is given, and whether its output is right."""

    cache = property(lambda self: self.kv)

    @cached_property
    def oracle(self):
        return judge_of(self)

    def assert_right(self, out):
        dtype = getattr(self.case.spec, "out_dtype", "bfloat16")
        assert out.dtype == getattr(torch, dtype)
        verdict = self.oracle.check(out)
        assert verdict.passed, f"{self.case.label}: {verdict}"

    @property
    def tensors(self):
        """Query and cache."""
        paged = isinstance(self.kv, PagedKV)
        return (self.q, *((self.kv.k_cache, self.kv.v_cache) if paged else (self.kv,)))


# Eager and in a graph, and for each backend in a row: one case, one oracle.
@lru_cache(maxsize=4)
def call_of(case, device):
    return Call(**vars(work_of(case, device)))


@lru_cache(maxsize=4)
def two_steps(case, device):
    """Steps over one table, with other lengths; the one with more query rows first.

    With several queries a second seed draws the other step, told lengths turn around and a chunk
    becomes a decode; else requests change places, and dense MLA's second step has more pages.
    """
    first = call_of(case, device)
    if isinstance(case, ExtendCase):
        turned = "+".join(reversed(case.cached.lengths.split("+")))
        cached = replace(case.cached, seed=7, lengths=turned)
        told = case.q_lengths.replace("30", "1")
        other = call_of(replace(case, cached=cached, q_lengths=told), device)
        assert not torch.equal(first.batch.paged.seq_lens_cpu, other.batch.paged.seq_lens_cpu)
        return sorted((first, other), key=lambda step: -step.batch.rows)
    if isinstance(case, MlaCase):
        paged = first.batch.paged
        chosen = first.batch.chosen
        chosen = None if chosen is None else chosen.flip(0).contiguous()
        table = paged.page_table.flip(0).contiguous()
        lens = paged.seq_lens_cpu.flip(0)
        lens = lens if case.spec.top_k else (lens // 3 + 1).int()
        lens = lens.clamp(min=case.q_len)
        shorter = MlaBatch.build(case.spec, lens, table, chosen, q_len=case.q_len)
        return replace(first, batch=shorter), first
    lens = first.batch.seq_lens_cpu.flip(0) // 3 + 1
    table = first.batch.page_table.flip(0).contiguous()
    turned = DecodeBatch.build(case.spec, lens.int(), table)
    return first, replace(first, batch=turned)


def backend_for(name, case, device, *, cuda_graph=False):
    options = {"mask": case.mask} if isinstance(case, ExtendCase) else {}
    return backends.create(name, case.spec, device=device, cuda_graph=cuda_graph, **options)


def able(name, case):
    """The name, unless its backend cannot run here, or not the case: then the test is skipped."""
    mask = getattr(case, "mask", "causal")
    if reason := backends.unavailable(name) or backends.unsupported(name, case.spec, mask=mask):
        pytest.skip(reason)
    return name


def assert_matches_oracle(name, case, device, *, cuda_graph=False):
    call = call_of(case, device)
    backend = backend_for(name, case, device, cuda_graph=cuda_graph)
    call.assert_right(backend.run(call.q, call.cache, backend.plan(call.batch)))


def assert_replays(name, case):
    """A CUDA graph over the first step's plan serves each step that is planned into it."""
    first, second = two_steps(case, "cuda")
    backend = backend_for(name, case, "cuda", cuda_graph=True)
    plan = backend.plan(first.batch)
    pairs = zip(first.tensors, second.tensors, strict=True)
    q, *caches = (torch.zeros_like(max(pair, key=len)) for pair in pairs)
    held = replace(first, q=q, kv=PagedKV(*caches) if len(caches) > 1 else caches[0])
    load(held, first)
    backend.run(held.q, held.cache, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.run(held.q, held.cache, plan)
    for step in (first, second, first):
        backend.plan(step.batch, out=plan)
        load(held, step)
        out.fill_(float("nan"))
        graph.replay()
        step.assert_right(out[: len(step.q)])


def load(held, step):
    """Put a step where the graph reads it, and behind it what would win every softmax."""
    for mine, given in zip(held.tensors, step.tensors, strict=True):
        mine.fill_(100)
        mine[: len(given)].copy_(given)
