"""One contract for every backend: right outputs, replans in place, graphs, and honest refusals.

On the CPU the libraries are stand-ins that read what the libraries read, on a GPU they run.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from support import backend_calls as calls
from support.backend_calls import (
    CALLS,
    DECODE,
    DENSE,
    EXTEND,
    MLA,
    MODES,
    PAGED,
    PLANNED,
    SPARSE,
    SPEC,
    WINDOWS,
)

from attnlib.core import DecodeBatch, PagedKV, backends
from attnlib.core.backends import base, planned
from attnlib.core.backends.table import FAMILIES, Entry, entry_of, family_of
from attnlib.core.fa2.library import RELEASES
from attnlib.core.schedule import library
from attnlib.core.spec import CUSTOM_MASKS, AttnSpec, MlaSpec
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.extend.case import ExtendCase
from attnlib.measure.trace import kernel_family, trace_kernels

FLASHINFER = tuple(name for name in backends.BACKENDS if name.startswith("flashinfer"))


def named(value):
    return getattr(value, "key", str(value))


def each(pairs):
    return pytest.mark.parametrize("name, case", pairs, ids=named)


def ways(at, name):
    """Eager and in a graph; by turns where a backend has many modes, or fixed buffers in both."""
    heeds = name == "flashinfer-fa2" or name.startswith("flashinfer-mla")
    return (False, True) if heeds else (at % 2 == 1,)


STEPS = [(*call, graph) for at, call in enumerate(CALLS) for graph in ways(at, call[0])]


@pytest.mark.parametrize("name, case, cuda_graph", STEPS, ids=named)
def test_a_replan_in_place_serves_the_new_step(name, case, cuda_graph, libraries):
    first, second = calls.two_steps(case, "cpu")
    backend = calls.backend_for(name, case, "cpu", cuda_graph=cuda_graph)
    plan = backend.plan(first.batch)
    first.assert_right(backend.run(first.q, first.cache, plan))
    for step in (second, first):
        again = backend.plan(step.batch, out=plan)
        # The first plan's buffers hold the new step: they are what a captured graph reads.
        step.assert_right(backend.run(step.q, step.cache, plan))
    step.assert_right(backend.run(step.q, step.cache, again))


@each([(name, case) for name, case in CALLS if case in (DECODE, MODES[5]) or (name, case) in MLA])
def test_a_replan_of_another_shape_is_refused(name, case, libraries):
    backend = calls.backend_for(name, case, "cpu")
    plan = backend.plan(calls.call_of(case, "cpu").batch)
    several = isinstance(case, ExtendCase)
    longer = replace(case, cached=PAGED) if several else replace(case, kv_len=300)
    if getattr(case, "context", 0):
        longer = replace(case, context=2 * case.context)
    changed = [replace(longer, cached=replace(PAGED, kv_len=300))] if several else [longer]
    changed += [replace(case, mode="dllm_extend", mask="full")] if several else []
    for other in changed:
        with pytest.raises(ValueError, match="out must be a plan o(ver|f the same spec, mask)"):
            backend.plan(calls.call_of(other, "cpu").batch, out=plan)


CUSTOM = [(name, case) for name, case in calls.ALL_MODES if case.mask in CUSTOM_MASKS]


@each([pair for pair in CUSTOM if pair not in EXTEND])
def test_fa3_and_a_plan_on_the_gpu_refuse_a_custom_mask(name, case, libraries):
    with pytest.raises(RuntimeError, match=f"takes no custom mask, got {case.mask}"):
        calls.backend_for(name, case, "cpu")


def test_a_plan_on_the_gpu_refuses_what_its_words_cannot_say(libraries):
    cases = {case.mode: case for case in MODES}
    backend = calls.backend_for(PLANNED, MODES[0], "cpu")
    plan = backend.plan(calls.call_of(MODES[0], "cpu").batch)
    fewer = replace(MODES[0], q_len=39)
    for case, out, words in (
        (cases["draft_extend"], None, r"5 queries of each request.* a paged one and \[5, "),
        (cases["prefill_ragged"], None, r"must have a paged cache.* got a contiguous one"),
        (fewer, plan, r"40 queries of each request.* got a paged one and \[39, 39"),
    ):
        with pytest.raises(ValueError, match=words):
            backend.plan(calls.call_of(case, "cpu").batch, out=out)
    with pytest.raises(RuntimeError, match="must be 64, 128 or 256, got 512"):
        backends.create(PLANNED, replace(SPEC, head_dim=512))


@pytest.mark.parametrize("name", ["flashinfer-fa2-planned", PLANNED])
def test_a_release_whose_plan_was_not_read_is_refused(name, monkeypatch):
    unread = f"{RELEASES[-1]} and older is known, got 9.9.9"
    for release, words in (("9.9.9", unread), ("0.7.2", "")):
        monkeypatch.setattr(planned, "installed_version", lambda _, found=release: found)
        assert backends.unsupported(name, SPEC).endswith(words)
        assert bool(backends.unsupported(name, SPEC)) == bool(words)


SDPA_SPECS = [calls.spec_of(group, page, 64) for group in range(1, 9) for page in (1, 16, 64)]
SDPA_SPECS += [
    calls.spec_of(4, 16, *kind) for kind in product((64, 128, 256), ("bfloat16", "float16"))
]


@pytest.mark.parametrize("spec", SDPA_SPECS)
def test_sdpa_matches_the_oracle_for_every_page_group_head_dim_and_dtype(spec):
    calls.assert_matches_oracle("sdpa", DecodeCase(spec, 3, 70, "ragged"), "cpu")


def test_what_lies_in_unused_pages_never_reaches_sdpas_output():
    case = DecodeCase(calls.spec_of(1, 4, 64), 2, 8, "ragged")
    call = calls.call_of(case, "cpu")
    k, v = (torch.cat([torch.full_like(c[:1], float("nan")), c]) for c in call.tensors[1:])
    table = torch.tensor([[1, 0], [2, 3]]).int()
    batch = DecodeBatch.build(case.spec, torch.tensor([3, 8]).int(), table)
    backend = calls.backend_for("sdpa", case, "cpu")
    assert torch.isfinite(backend.run(call.q, PagedKV(k, v), backend.plan(batch))).all()


@pytest.mark.parametrize(
    "plans, words",
    [
        ("", "one of .*sdpa, .*got 'fa9'"),
        ("decode", "one of .*sdpa.* for decode, got 'fa9'"),
        ("mla", "one of .*flashinfer-mla-fa2.* for mla, got 'fa9'"),
        ("extend", "one of .*flashinfer-prefill-auto.* for extend, got 'fa9'"),
    ],
)
def test_an_unknown_backend_lists_the_valid_names(plans, words):
    with pytest.raises(ValueError, match=words):
        entry_of("fa9", plans)
    for name in [e.name for e in backends.TABLE.values() if plans not in ("", e.plans)]:
        with pytest.raises(ValueError, match=f"for {plans}, got '{name}'"):
            entry_of(name, plans)


def test_a_mask_that_is_none_and_a_layer_of_another_mode_are_refused():
    with pytest.raises(ValueError, match="mask must be one of causal, .*, got 'casual'"):
        backends.create("sdpa", SPEC, mask="casual")
    for name, spec in (("sdpa", MlaSpec(16)), ("flashinfer-mla-fa2", SPEC)):
        with pytest.raises(
            TypeError, match=f"spec must be an .* for {name}, got {type(spec).__name__}"
        ):
            backends.unsupported(name, spec)


def test_a_backend_on_a_gpu_that_is_not_here_is_refused(without_gpu):
    with pytest.raises(RuntimeError, match="device must be cpu for sdpa here .*, got cuda"):
        backends.create("sdpa", SPEC)


@pytest.mark.parametrize("name", backends.TABLE)
def test_a_missing_library_or_gpu_or_one_that_is_no_hopper_is_said(name, monkeypatch, without_gpu):
    monkeypatch.setattr(base, "installed_version", lambda _: "")
    monkeypatch.setattr(library, "find_module", lambda name: "")
    if not backends.unavailable(name):
        assert not name.startswith(("flash", "sglang", "vllm"))
        pytest.skip(f"{name} needs PyTorch alone")
    spec = MlaSpec(16) if "mla" in name else SPEC
    install = f"pip install {backends.TABLE[name].distribution}"
    with pytest.raises(RuntimeError, match=f"{name} cannot run .*{install}"):
        backends.create(name, spec)
    monkeypatch.setattr(base, "installed_version", lambda _: "99")
    monkeypatch.setattr(library, "find_module", lambda name: "flash_attn_interface")
    lacks_gpu = "needs a CUDA GPU (torch.cuda.is_available() is False)"
    assert backends.unavailable(name) == lacks_gpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    if backends.TABLE[name].hopper:
        lacks = "needs compute capability 9.x (Hopper), got 10.0"
        assert backends.unavailable(name) == lacks
    if name == "flashinfer-xqa":
        for older, lacks in (
            ((10, 0), ""),
            ((8, 9), "needs compute capability 9.x, 10.x or 12.x, got 8.9"),
        ):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=older: found)
            assert backends.unavailable(name) == lacks


@pytest.mark.parametrize(
    "name, release, since",
    [
        ("fa2", "0.3.1", "0.5.0"),
        ("fa3", "0.5.3", "0.6.0"),
        ("xqa", "0.5.2", "0.5.3"),
        ("prefill-fa2-uniform", "0.7.2", "0.7.2.post1"),
    ],
)
def test_a_release_that_lacks_what_is_asked_for_is_refused(name, release, since, monkeypatch):
    monkeypatch.setattr(base, "installed_version", lambda _: release)
    with pytest.raises(RuntimeError, match=rf"{release} has no flashinfer-{name}:.*>={since}"):
        backends.create(f"flashinfer-{name}", SPEC)


FP8 = {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"}
MIXED = {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"}


@pytest.mark.parametrize(
    "name, spec, words",
    [
        ("flashinfer-cuda-cores", calls.spec_of(5, 16), "group size must be"),
        ("flashinfer-fa2", calls.spec_of(1, 16, 96), "head_dim must be"),
        ("flashinfer-fa2", replace(SPEC, **FP8), "no FP8 query"),
        ("sdpa", replace(SPEC, **FP8), "no FP8 tensors"),
        ("flashinfer-xqa", calls.spec_of(4, 1), "page size must be 16, 32, 64 or 128, got 1"),
        ("flashinfer-xqa", calls.spec_of(33, 16, 256), "group size must be at most 32, got 33"),
        ("flashinfer-xqa", calls.spec_of(4, 16, 72), "head_dim must be a multiple of 16 up to"),
        ("flashinfer-xqa", replace(SPEC, kv_dtype="float16"), "has the query's dtype, got b"),
        ("flashinfer-xqa", replace(SPEC, **FP8), "takes no FP8 query"),
        (
            "flashinfer-xqa",
            replace(SPEC, **MIXED),
            "kernel rounds the query to FP8 over an FP8 cache",
        ),
        ("flashinfer-batch-attention", replace(SPEC, window=64), "window must be 0, got 64"),
        ("flashinfer-batch-attention", replace(SPEC, **FP8), "dtype must be bfloat16 or float16"),
        ("flashinfer-batch-attention", replace(SPEC, head_dim=512), "head_dim must be 64, 128 or"),
        ("flashinfer-prefill-fa3", replace(SPEC, head_dim=80), "head_dim must be"),
        ("flashinfer-prefill-auto", replace(SPEC, **FP8), "dtype must be"),
        ("flashinfer-prefill-fa3", replace(SPEC, **MIXED), "got bfloat16/float8_e4m3fn"),
        ("flash-attn-3", replace(SPEC, **MIXED), "must share a dtype"),
        ("flash-attn-3", replace(SPEC, head_dim=320), "multiple of 8 up to 256, got 320"),
        ("flash-attn-3", replace(SPEC, head_dim=72, **FP8), "head_dim must be a multiple of 16"),
        ("flash-attn-3-extend", replace(SPEC, head_dim=264), "multiple of 8 up to 256"),
        *((n, replace(SPEC, window=64), "window must be 0") for n in backends.EXTEND_BACKENDS),
        ("flashinfer-mla-fa2", MlaSpec(16, 64, 64, "fp8-656"), "must be bfloat16 or fp8-576, got"),
        (
            "flash-attn-3-mla",
            MlaSpec(16, 64, 64, "fp8-576"),
            "kv_format must be bfloat16, got fp8-576",
        ),
        ("flashmla-sparse-bf16", MlaSpec(16, 64, 64, "fp8-656"), "must be bfloat16, got fp8-656"),
        ("flashmla-dense", MlaSpec(16, 64), "top_k must be 0, got 64"),
        ("flashmla-dense", MlaSpec(16, 0, 16), "page_size must be 64, got 16"),
        ("flashmla-dense", MlaSpec(16, 0, 64, "fp8-656"), "kv_format must be bfloat16"),
        ("flashmla-sparse-fp8", MlaSpec(16, 0, 64, "fp8-656"), "top_k must be at least 1, got 0"),
        ("flashmla-sparse-fp8", MlaSpec(129, 64, 64, "fp8-656"), "at most 128, got 129"),
        ("flashmla-sparse-fp8", MlaSpec(16, 64), "kv_format must be fp8-656, got bfloat16"),
    ],
)
def test_a_spec_that_a_library_cannot_run_is_refused_with_the_reason(name, spec, words, libraries):
    assert words in backends.unsupported(name, spec)
    with pytest.raises(RuntimeError, match=f"{name} cannot run"):
        backends.create(name, spec, device="cpu")


def test_a_build_that_says_it_lacks_the_latent_kernel_is_refused(libraries, monkeypatch):
    assert backends.unsupported("flash-attn-3-mla", MlaSpec(16, 64)) == ""
    flags = {"FLASH_ATTENTION_DISABLE_HDIMDIFF64": True}
    monkeypatch.setattr(library, "_build_flags", lambda: flags)
    refusal = "64 and values of 512 dims.*install sglang-kernel"
    with pytest.raises(RuntimeError, match=refusal):
        backends.create("flash-attn-3-mla", MlaSpec(16, 64), device="cpu")
    with pytest.raises(pytest.skip.Exception, match=refusal):
        calls.able("flash-attn-3-mla", calls.mla_case("flash-attn-3-mla"))


def test_every_dtype_and_head_dim_of_decode_is_taken_by_fa3():
    for head_dim, dtype in product((64, 128, 256), ("bfloat16", "float16", "float8_e4m3fn")):
        assert backends.unsupported("flash-attn-3", AttnSpec(8, 2, head_dim, 1, dtype)) == ""


@pytest.mark.parametrize("name", backends.TABLE)
def test_every_entry_has_its_class_and_a_family_that_a_kernel_proves(name):
    entry = backends.TABLE[name]
    assert issubclass(backends.backend_class(name), base.Backend)
    assert entry.family in ("", *FAMILIES)
    if any(word in name for word in ("fa3", "flashmla", "flash-attn-3")):
        assert entry.hopper, f"FAMILIES[{entry.family!r}] must have hopper=True"
    kernels = FAMILIES[entry.family].kernels if entry.family else ()
    for pattern in kernels:
        kernel = pattern.replace("*", "x")
        assert family_of(kernel) == entry.family, f"another pattern of FAMILIES takes {pattern}"


def test_a_backend_of_no_library_is_refused_by_name():
    with pytest.raises(KeyError, match="unlisted must begin with a key of LIBRARIES"):
        _ = Entry("unlisted", "decode", "unlisted:Unlisted").library


SGLANG_TRITON = "sglang-triton-mla"


def gpu_calls():
    """Every backend over the shapes that its library says it takes."""
    # XQA is built for every group and page size, in minutes.
    decode = [n for n in FLASHINFER if not n.endswith(("graph-auto", "xqa"))]
    shapes = [(group, page) for group in (*range(1, 9), 16) for page in (1, 16, 64)]
    found = [(n, DecodeCase(calls.spec_of(*s), 7, 1500, "ragged")) for n in decode for s in shapes]
    for kind in (*calls.KINDS, (512, "bfloat16")):
        # The library's own choice for an FP8 cache does not compile: limits.py.
        names = decode if len(kind) == 2 else [n for n in decode if "fa2" in n]
        spec = AttnSpec(8, 2, kind[0], 16, *kind[1:])
        found += [(n, DecodeCase(spec, 5, 999, "ragged")) for n in names]
    found += [
        (n, case)
        for n in (*decode, "sdpa", "flash-attn-3", "flash-attn-3-precomputed")
        for case in WINDOWS
    ]
    long = DecodeCase(AttnSpec(32, 8, 128, 16), 4, 20000, "skewed")
    fa2 = ("flashinfer-fa2", "flashinfer-fa2-planned")
    found += [(n, long) for n in (*fa2, "flashinfer-cuda-cores", "flashinfer-xqa", "sdpa")]
    found += calls.XQA
    wide = (("prefill_paged", 300), ("prefill_ragged", 3000), ("dllm_extend", 32))
    for heads in ((32, 8), (8, 1), (16, 2)):
        cached = DecodeCase(AttnSpec(*heads, 128, 1), 3, 3000, "ragged")
        cases = [ExtendCase(cached, mode, q_len) for mode, q_len in wide]
        told = replace(cached, batch_size=5, lengths="3000+1+2999+700+1500")
        cases.append(ExtendCase(told, "prefill_paged", 700, q_lengths="1+1+300+700+33"))
        pairs = product(calls.EXTEND_FAKED, cases)
        found += [pair for pair in pairs if calls.takes(*pair)]
    kinds = product((64, 128, 256), (1, 16, 64, 256), ("bfloat16", "float16", "float8_e4m3fn"))
    cases = [DecodeCase(AttnSpec(16, 2, *kind), 7, 3000, "ragged") for kind in kinds]
    found += [(n, case) for n in ("flash-attn-3", "flash-attn-3-precomputed") for case in cases]
    return found + list(mla_gpu_calls())


UNJUDGED = {"flashinfer-graph-auto": "what FlashInfer chooses in a CUDA graph: fa2 or fa3"}
"""Backends that no call compares with the oracle, and why."""


def calls_of_new_backends():
    """Standard calls of each backend that no table above names."""
    named = {name.partition("@")[0] for name, _ in (*CALLS, *gpu_calls())} | {*UNJUDGED}
    new = [entry for entry in backends.TABLE.values() if entry.name not in named]
    return [call for entry in new for call in calls.standard_calls(entry)]


def mla_gpu_calls():
    sizes = {"batch_size": 9, "kv_len": 3000}
    sparse = [
        (128, 2048),
        (64, 512),
        (32, 512),
        (16, 70),
        (8, 1),
    ]
    dense = [(heads, 0) for heads in (128, 64, 32, 16, 8)]
    found = []
    for lengths in ("fixed", "ragged", "skewed"):
        for names, shapes in ((SPARSE, sparse), (DENSE, dense)):
            found += [
                (n, calls.mla_case(n, *s, lengths=lengths, **sizes)) for n in names for s in shapes
            ]
    for name in SPARSE:
        for batch_size, kv_len in ((1, 131072), (64, 8192)):
            large = {"batch_size": batch_size, "kv_len": kv_len, "lengths": "fixed"}
            found.append((name, calls.mla_case(name, 16, 2048, **large)))
        case = calls.mla_case(name)
        specs = [replace(case.spec, page_size=n) for n in (1, 16, 256)]
        found += [(name, replace(case, spec=spec)) for spec in specs]
    for heads in (16, 128):
        case = calls.mla_case(SGLANG_TRITON, heads, 0, **sizes)
        found.append((SGLANG_TRITON, replace(case, spec=replace(case.spec, page_size=1))))
    return found


def test_every_backend_is_compared_with_the_oracle():
    judged = {name.partition("@")[0] for name, _ in (*CALLS, *gpu_calls(), *NEW)}
    assert {*backends.TABLE} - judged == {*UNJUDGED}, "it must take a call of calls.STANDARD"


NEW = calls_of_new_backends()


@each(NEW)
def test_a_new_backend_matches_the_oracle_wherever_it_runs(name, case):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls.assert_matches_oracle(calls.able(name, case), case, device)


@pytest.mark.gpu
@each(gpu_calls())
def test_on_a_gpu_a_backend_matches_the_oracle(name, case):
    calls.assert_matches_oracle(calls.able(name, case), case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, case, cuda_graph", [s for s in STEPS if isinstance(s[1], ExtendCase)], ids=named
)
def test_on_a_gpu_every_mode_matches_the_oracle_and_says_its_family(name, case, cuda_graph):
    calls.assert_matches_oracle(calls.able(name, case), case, "cuda", cuda_graph=cuda_graph)
    if name.startswith("flashinfer") and not cuda_graph:
        call = calls.call_of(case, "cuda")
        backend = calls.backend_for(name, case, "cuda")
        plan = backend.plan(call.batch)
        kernels = trace_kernels(lambda: backend.run(call.q, call.cache, plan))
        family = kernel_family((kernel.name for kernel in kernels), family_of)
        assert family == plan.reported_backend


@pytest.mark.gpu
@each(
    [(n, DecodeCase(calls.spec_of(4, 16), 7, 1500, "ragged")) for n in backends.BACKENDS]
    + [(n, case) for n in backends.BACKENDS for case in WINDOWS]
    + NEW
    + EXTEND
    + [(name, replace(case, batch_size=7, kv_len=3000)) for name, case in MLA]
)
def test_a_graph_replays_with_a_step_changed_in_place(name, case):
    calls.assert_replays(calls.able(name, case), case)


ONE_CALL = {name: (name, case) for name, case in CALLS}
"""The last call of each backend."""


def wrong_queries(q):
    """Queries of another batch, of other heads or head_dim, and of another dtype."""
    rows, heads, _ = q.shape
    yield q[: rows - 1]
    yield torch.cat([q, q])
    yield q[:1]
    yield q[:, : heads // 2]
    yield torch.cat([q, q], 1)
    yield q[:, 0]
    yield q[..., :-8]
    yield q.double()


@each(ONE_CALL.values())
def test_a_query_of_another_batch_or_of_other_heads_is_refused(name, case, libraries):
    call = calls.call_of(case, "cpu")
    backend = calls.backend_for(name, case, "cpu")
    plan = backend.plan(call.batch)
    for q in wrong_queries(call.q):
        with pytest.raises(ValueError, match=r"q must be \[\d+, \d+, \d+\] \w+, got \["):
            backend.run(q, call.cache, plan)
    call.assert_right(backend.run(call.q, call.cache, plan))
