"""FlashInfer's prefill wrappers and FlashAttention-3 with several queries a request, mode by mode.

On the CPU: what they are handed, and refusals. On a GPU: outputs, graphs, kernels.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.extend_fakes import FakeFlashAttention, FakePaged, FakePrefill, FakeRagged

from attnlib.core import backends
from attnlib.core.backends import base, flashinfer
from attnlib.core.backends.base import Backend
from attnlib.core.backends.table import FAMILY_OF
from attnlib.core.batch import PagedKV
from attnlib.core.schedule import library
from attnlib.core.spec import AttnSpec
from attnlib.kinds.call import Workload
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import ExtendCase
from attnlib.kinds.extend.measure import ExtendOracle, build_extend_batch, build_extend_workload
from attnlib.measure.trace import kernel_family, trace_kernels

NAMES = backends.EXTEND_BACKENDS
FLASHINFER = tuple(name for name in NAMES if name.startswith("flashinfer"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = AttnSpec(8, 2, 128, 16)
ONE_TOKEN = replace(SPEC, page_size=1)
CASES = (
    ExtendCase(DecodeCase(SPEC, 5, 200, "ragged"), "prefill_paged", 40),
    ExtendCase(DecodeCase(ONE_TOKEN, 5, 200, "ragged"), "prefill_paged", 40),
    ExtendCase(DecodeCase(SPEC, 5, 200, "ragged"), "target_verify", 6),
    ExtendCase(DecodeCase(ONE_TOKEN, 5, 200, "ragged"), "target_verify", 6),
    ExtendCase(DecodeCase(SPEC, 5, 200, "ragged"), "target_verify", 6, "chain"),
    ExtendCase(DecodeCase(SPEC, 5, 200, "ragged"), "target_verify", 6, "causal"),
    ExtendCase(DecodeCase(SPEC, 5, 200, "ragged"), "draft_extend", 5),
    ExtendCase(DecodeCase(SPEC, 5, 200, "ragged"), "dllm_extend", 32),
    ExtendCase(DecodeCase(ONE_TOKEN, 5, 200, "ragged"), "prefill_ragged", 200),
)
PAIRS = [
    (name, case)
    for case in CASES
    for name in NAMES
    if case.mask not in ("tree", "chain") or name.endswith(("fa2", "auto"))
]
LEFT_OVER = 100.0
NOT_HANDED = [(name, case) for case in CASES for name in NAMES if (name, case) not in PAIRS]


def create(name: str, case: ExtendCase, **options) -> Backend:
    return backends.create(name, case.spec, mask=case.mask, **options)


def named(pair: tuple[str, ExtendCase]) -> str:
    return f"{pair[0]}-{pair[1].key}"


def able(name: str) -> str:
    if reason := backends.unavailable(name):
        pytest.skip(reason)
    return name


def other(case: ExtendCase) -> Workload:
    """Another step of the same engine: as many requests over the same table, other lengths.

    The second step's case is drawn with another seed; its longest request is as long.
    """
    return build_extend_workload(replace(case, cached=replace(case.cached, seed=7)), device=DEVICE)


def first_and_second(case: ExtendCase) -> tuple[Workload, Workload]:
    """Two steps, the one with more query rows first: it sets what a graph has room for."""
    steps = (build_extend_workload(case, device=DEVICE), other(case))
    most, least = sorted(steps, key=lambda work: -work.batch.rows)
    lens = [work.batch.paged.seq_lens_cpu.tolist() for work in steps]
    assert lens[0] != lens[1]
    return most, least


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakePrefill]:
    """The libraries on the CPU; the list of FlashInfer's wrappers that were made."""
    if torch.cuda.is_available():
        pytest.skip("the libraries' stand-ins are for machines without a GPU")
    FakePrefill.made = []
    module = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=FakePaged,
        BatchPrefillWithRaggedKVCacheWrapper=FakeRagged,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(library, "load", FakeFlashAttention)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(backends, "unavailable", lambda name: "")
    return FakePrefill.made


def assert_matches_oracle(name: str, case: ExtendCase, *, cuda_graph: bool = False) -> None:
    work = build_extend_workload(case, device=DEVICE)
    backend = create(name, case, device=DEVICE, cuda_graph=cuda_graph)
    out = backend.run(work.q, work.kv, backend.plan(work.batch))
    assert (out.shape, out.dtype) == (work.q.shape, torch.bfloat16)
    verdict = ExtendOracle(work.q, work.kv, work.batch).check(out)
    assert verdict.passed, f"{name} on {case.label}: {verdict}"


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize(("name", "case"), PAIRS, ids=map(named, PAIRS))
def test_the_library_is_handed_what_the_oracle_attends_to(name, case, cuda_graph, fakes) -> None:
    assert_matches_oracle(name, case, cuda_graph=cuda_graph)


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize(("name", "case"), PAIRS, ids=map(named, PAIRS))
def test_a_replan_in_place_serves_the_new_lengths(name, case, cuda_graph, fakes) -> None:
    first, second = first_and_second(case)
    backend = create(name, case, device="cpu", cuda_graph=cuda_graph)
    plan = backend.plan(first.batch)
    for work in (second, first, second):
        again = backend.plan(work.batch, out=plan)
        assert again.state is plan.state
        out = backend.run(work.q, work.kv, again)
        assert ExtendOracle(work.q, work.kv, work.batch).check(out).passed


@pytest.mark.parametrize(("name", "case"), NOT_HANDED, ids=map(named, NOT_HANDED))
def test_fa3_refuses_a_custom_mask(name, case, fakes) -> None:
    with pytest.raises(RuntimeError, match=f"takes no custom mask, got {case.mask}"):
        create(name, case, device="cpu")


def test_auto_reports_fa2_under_a_custom_mask_and_fa3_without(fakes) -> None:
    reported = {}
    for case in CASES:
        backend = create("flashinfer-prefill-auto", case, device="cpu")
        plan = backend.plan(build_extend_batch(case, device="cpu"))
        reported.setdefault(case.mask, set()).add(plan.reported_backend)
    assert reported == {"tree": {"fa2"}, "chain": {"fa2"}, "causal": {"fa3"}, "full": {"fa3"}}


def test_under_cuda_graphs_buffers_have_room_for_the_whole_table(fakes) -> None:
    case = CASES[2]
    batch = build_extend_batch(case, device="cpu")
    backend = create("flashinfer-prefill-fa2", case, device="cpu", cuda_graph=True)
    backend.plan(batch)
    buffers, columns = fakes[-1].buffers, batch.paged.page_table.shape[1]
    assert len(buffers["paged_kv_indices_buf"]) == 5 * columns
    assert len(buffers["custom_mask_buf"]) == 5 * -(-6 * columns * 16 // 8)


def test_without_a_custom_mask_the_library_is_given_no_buffer_for_one(fakes) -> None:
    for case in (CASES[0], CASES[-1]):
        backend = create("flashinfer-prefill-fa2", case, device="cpu", cuda_graph=True)
        backend.plan(build_extend_batch(case, device="cpu"))
        assert fakes[-1].buffers and "custom_mask_buf" not in fakes[-1].buffers


@pytest.mark.parametrize("name", NAMES)
def test_a_replan_of_another_mask_or_table_is_refused(name, fakes) -> None:
    case = CASES[5]
    backend = create(name, case, device="cpu")
    plan = backend.plan(build_extend_batch(case, device="cpu"))
    for changed in (
        replace(case, mode="dllm_extend", mask="full"),
        replace(case, cached=replace(case.cached, kv_len=300)),
    ):
        with pytest.raises(ValueError, match="out must be a plan of the same spec, mask"):
            backend.plan(build_extend_batch(changed, device="cpu"), out=plan)


def test_flash_attention_refuses_more_queries_than_it_planned_for(fakes) -> None:
    case = CASES[0]
    backend = create("fa3-extend", case, device="cpu")
    plan = backend.plan(build_extend_batch(case, device="cpu"))
    more = build_extend_batch(replace(case, q_len=41), device="cpu")
    with pytest.raises(ValueError, match="at most 40, as first planned, got 41"):
        backend.plan(more, out=plan)


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("flashinfer-prefill-fa2", AttnSpec(8, 2, 96, 16), "head_dim must be"),
        ("flashinfer-prefill-fa3", AttnSpec(8, 2, 80, 16), "head_dim must be"),
        ("flashinfer-prefill-auto", AttnSpec(8, 2, 64, 16, "float8_e4m3fn"), "dtype must be"),
        (
            "flashinfer-prefill-fa3",
            AttnSpec(8, 2, 64, 16, "bfloat16", "float8_e4m3fn"),
            "an FP8 cache needs an FP8 query.*, got bfloat16/float8_e4m3fn",
        ),
        ("fa3-extend", AttnSpec(8, 2, 264, 16), "head_dim must be a multiple of 8 up to 256"),
    ],
)
def test_a_spec_that_the_kernel_cannot_run_is_refused_with_the_reason(name, spec, words, fakes):
    case = ExtendCase(DecodeCase(spec, 2, 100), "prefill_paged", 10)
    with pytest.raises(RuntimeError, match=f"{name} cannot run .*{words}"):
        create(name, case, device="cpu")


@pytest.mark.parametrize("name", FLASHINFER)
def test_a_missing_library_is_refused_with_its_install_line(name, monkeypatch) -> None:
    monkeypatch.setattr(base, "installed_version", lambda _: "")
    with pytest.raises(RuntimeError, match="pip install flashinfer-python"):
        create(name, CASES[0])


@pytest.mark.parametrize("name", ["flashinfer-prefill-fa3", "fa3-extend"])
def test_another_gpu_than_hopper_is_refused(name, monkeypatch) -> None:
    monkeypatch.setattr(base, "installed_version", lambda _: "0.6.4")
    monkeypatch.setattr(library, "find_module", lambda: "flash_attn_interface")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    reason = backends.unavailable(name)
    assert reason == "needs compute capability 9.x (Hopper), got 10.0"


def test_an_unknown_backend_lists_the_valid_names() -> None:
    with pytest.raises(ValueError, match="one of flashinfer-prefill-auto.*got 'flashinfer-fa2'"):
        backends.entry_of("flashinfer-fa2", "extend")


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("name", "case"), PAIRS, ids=map(named, PAIRS))
def test_every_mode_matches_the_oracle(name, case, cuda_graph) -> None:
    assert_matches_oracle(able(name), case, cuda_graph=cuda_graph)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (16, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_wide_heads_and_long_requests_match_the_oracle(name, heads) -> None:
    spec = AttnSpec(*heads, 128, 1)
    for mode, q_len in (("prefill_paged", 300), ("prefill_ragged", 3000), ("dllm_extend", 32)):
        cached = DecodeCase(spec, 3, 3000, "ragged")
        assert_matches_oracle(able(name), ExtendCase(cached, mode, q_len))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), PAIRS, ids=map(named, PAIRS))
def test_a_graph_replays_with_lengths_changed_in_place(name, case) -> None:
    first, second = first_and_second(case)
    backend = create(able(name), case, cuda_graph=True)
    plan = backend.plan(first.batch)
    q, kv = first.q.clone(), held_cache(first, second)
    load(first, q, kv)
    backend.run(q, kv, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.run(q, kv, plan)
    for work in (first, second, first):
        backend.plan(work.batch, out=plan)
        load(work, q, kv)
        graph.replay()
        verdict = ExtendOracle(work.q, work.kv, work.batch).check(out[: work.batch.rows])
        assert verdict.passed, f"{name} on {work.case.label}: {verdict}"


def held_cache(*steps: Workload) -> PagedKV:
    """A cache with room for the pages of each step."""
    most = max(steps, key=lambda work: work.kv.num_pages).kv
    return PagedKV(torch.zeros_like(most.k_cache), torch.zeros_like(most.v_cache))


def load(work: Workload, q: torch.Tensor, kv: PagedKV) -> None:
    """Put a step's query and cache where the graph reads them.

    What is left over would win every softmax that saw it.
    """
    for held, given in ((q, work.q), (kv.k_cache, work.kv.k_cache), (kv.v_cache, work.kv.v_cache)):
        held.fill_(LEFT_OVER)
        held[: len(given)].copy_(given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLASHINFER)
def test_the_family_of_every_mode_is_what_the_library_says(name) -> None:
    for case in (case for other, case in PAIRS if other == able(name)):
        work = build_extend_workload(case, device="cuda")
        backend = create(name, case)
        plan = backend.plan(work.batch)
        kernels = trace_kernels(lambda: backend.run(work.q, work.kv, plan))  # noqa: B023 - run now
        assert (
            kernel_family((kernel.name for kernel in kernels), FAMILY_OF) == plan.reported_backend
        )
