"""MLA backends: refusals, what they hand to the libraries, and on a GPU their outputs."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.mla_fakes import FakeFlashMla, FakeWrapper

from attnlib.core import backends
from attnlib.core.backends import base
from attnlib.core.mla import MlaBatch
from attnlib.core.schedule import flashmla
from attnlib.core.spec import MlaSpec
from attnlib.kinds.call import Workload
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.mla.measure import MlaOracle, build_mla_batch, build_mla_workload

FLASHINFER = ("flashinfer-mla-fa2", "flashinfer-mla-fa3")
SPARSE = (*FLASHINFER, "flashmla-sparse-fp8")
DENSE = (*FLASHINFER, "flashmla-dense")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case_for(name: str, heads: int = 16, top_k: int = 70, **changes) -> MlaCase:
    kv_format = "fp8-656" if name == "flashmla-sparse-fp8" else "bfloat16"
    sizes = {"batch_size": 3, "kv_len": 200, "lengths": "ragged"} | changes
    return MlaCase(MlaSpec(heads, top_k, 64, kv_format), **sizes)


def flipped(batch: MlaBatch) -> MlaBatch:
    """The same requests in the other order."""
    paged = batch.paged
    chosen = None if batch.chosen is None else batch.chosen.flip(0).contiguous()
    table = paged.page_table.flip(0).contiguous()
    return MlaBatch.build(batch.spec, paged.seq_lens_cpu.flip(0), table, chosen)


def able(name: str) -> str:
    if reason := backends.unavailable(name):
        pytest.skip(reason)
    return name


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeFlashMla:
    """Both libraries, on the CPU."""
    if torch.cuda.is_available():
        pytest.skip("the libraries' stand-ins are for machines without a GPU")
    FakeWrapper.made = []
    module = SimpleNamespace(BatchMLAPagedAttentionWrapper=FakeWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    library = FakeFlashMla()
    monkeypatch.setattr(flashmla, "load", lambda: library)
    monkeypatch.setattr(backends, "unavailable", lambda name: "")
    return library


def assert_matches_oracle(name: str, case: MlaCase) -> None:
    work = build_mla_workload(case, device=DEVICE)
    backend = backends.create(name, case.spec, device=DEVICE)
    out = backend.run(work.q, work.kv, backend.plan(work.batch))
    assert (out.shape, out.dtype) == ((*work.q.shape[:2], 512), torch.bfloat16)
    verdict = MlaOracle(work.q, work.kv, work.batch).check(out)
    assert verdict.passed, f"{name} on {case.label}: {verdict}"


@pytest.mark.parametrize("top_k", [1, 64, 70, 300])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_backends_hand_over_what_the_oracle_attends_to(name, top_k, fakes) -> None:
    assert_matches_oracle(name, case_for(name, top_k=top_k))


@pytest.mark.parametrize("name", DENSE)
def test_dense_backends_hand_over_what_the_oracle_attends_to(name, fakes) -> None:
    assert_matches_oracle(name, case_for(name, top_k=0))


@pytest.mark.parametrize(("heads", "run"), [(16, 64), (64, 64), (65, 128), (128, 128)])
def test_flashmla_sparse_pads_heads_to_what_its_kernel_has(heads, run, fakes) -> None:
    assert_matches_oracle("flashmla-sparse-fp8", case_for("flashmla-sparse-fp8", heads))
    assert fakes.heads == [run]


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize(("name", "top_k"), [*((n, 70) for n in SPARSE), *((n, 0) for n in DENSE)])
def test_a_replan_in_place_serves_the_new_batch(name, top_k, cuda_graph, fakes) -> None:
    case = case_for(name, top_k=top_k)
    work = build_mla_workload(case, device="cpu")
    backend = backends.create(name, case.spec, device="cpu", cuda_graph=cuda_graph)
    plan = backend.plan(work.batch)
    backend.run(work.q, work.kv, plan)
    other = flipped(work.batch)
    again = backend.plan(other, out=plan)
    oracle = MlaOracle(work.q, work.kv, other)
    # The first plan's buffers hold the new batch: they are what a captured graph reads.
    for held in (again, plan):
        assert oracle.check(backend.run(work.q, work.kv, held)).passed


def test_under_cuda_graphs_flashinfer_has_room_for_every_token(fakes) -> None:
    for top_k, room in ((70, 3 * 70), (0, 3 * 4)):
        case = case_for("flashinfer-mla-fa2", top_k=top_k)
        backend = backends.create("flashinfer-mla-fa2", case.spec, device="cpu", cuda_graph=True)
        backend.plan(build_mla_batch(case, device="cpu"))
        assert len(FakeWrapper.made[-1].buffers["kv_indices"]) == room


@pytest.mark.parametrize(("name", "top_k"), [*((n, 70) for n in SPARSE), ("flashmla-dense", 0)])
def test_a_replan_of_another_shape_is_refused(name, top_k, fakes) -> None:
    case = case_for(name, top_k=top_k)
    backend = backends.create(name, case.spec, device="cpu")
    plan = backend.plan(build_mla_batch(case, device="cpu"))
    longer = build_mla_batch(replace(case, kv_len=300), device="cpu")
    with pytest.raises(ValueError, match=r"out must be a plan over page_table \[3, 5\]"):
        backend.plan(longer, out=plan)


def with_wrong_index(work: Workload) -> tuple[MlaBatch, int]:
    """A batch whose first request names the token after its last."""
    length = int(work.batch.paged.seq_lens_cpu[0])
    chosen = work.batch.chosen.clone()
    chosen[0, 1] = length
    return replace(work.batch, chosen=chosen), length


def assert_refuses_wrong_index(name: str) -> None:
    work = build_mla_workload(case_for(name), device=DEVICE)
    backend = backends.create(name, work.case.spec, device=DEVICE)
    wrong, length = with_wrong_index(work)
    words = rf"in 0\.\.{length - 1} for request 0 of {length} tokens.* got {length} in column 1"
    with pytest.raises(ValueError, match=words):
        backend.plan(wrong)
    plan = backend.plan(work.batch)
    with pytest.raises(ValueError, match=words):
        backend.plan(wrong, out=plan)
    out = backend.run(work.q, work.kv, plan)
    assert MlaOracle(work.q, work.kv, work.batch).check(out).passed


@pytest.mark.parametrize("name", SPARSE)
def test_an_index_out_of_range_is_refused_and_the_plan_stays_good(name, fakes) -> None:
    assert_refuses_wrong_index(name)


@pytest.mark.parametrize(("name", "top_k"), [*((n, 70) for n in SPARSE), *((n, 0) for n in DENSE)])
def test_a_cache_without_the_planned_pages_is_refused_before_the_call(name, top_k, fakes) -> None:
    case = case_for(name, top_k=top_k, lengths="fixed")
    work = build_mla_workload(case, device="cpu")
    backend = backends.create(name, case.spec, device="cpu")
    plan = backend.plan(work.batch)
    with pytest.raises(ValueError, match="cache must have the pages that the plan names"):
        backend.run(work.q, work.kv[:2], plan)
    assert fakes.calls == []


def test_an_unknown_mla_backend_lists_the_valid_names() -> None:
    with pytest.raises(ValueError, match="one of flashinfer-mla-fa2.* for mla, got 'fa3'"):
        backends.entry_of("fa3", "mla")
    with pytest.raises(ValueError, match="one of sdpa.*got 'flashmla-dense'"):
        backends.entry_of("flashmla-dense", "decode")


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("flashinfer-mla-fa2", MlaSpec(16, 64, 64, "fp8-656"), "kv_format must be bfloat16"),
        ("flashinfer-mla-fa3", MlaSpec(16, 0, 64, "fp8-656"), "kv_format must be bfloat16"),
        ("flashmla-dense", MlaSpec(16, 64), "top_k must be 0, got 64"),
        ("flashmla-dense", MlaSpec(16, 0, 16), "page_size must be 64, got 16"),
        ("flashmla-dense", MlaSpec(16, 0, 64, "fp8-656"), "kv_format must be bfloat16"),
        ("flashmla-sparse-fp8", MlaSpec(16, 0, 64, "fp8-656"), "top_k must be at least 1, got 0"),
        ("flashmla-sparse-fp8", MlaSpec(129, 64, 64, "fp8-656"), "at most 128, got 129"),
        ("flashmla-sparse-fp8", MlaSpec(16, 64), "kv_format must be fp8-656, got bfloat16"),
    ],
)
def test_a_spec_that_the_kernel_cannot_run_is_refused_with_the_reason(name, spec, words, fakes):
    assert words in backends.unsupported(name, spec)
    with pytest.raises(RuntimeError, match=f"{name} cannot run"):
        backends.create(name, spec, device="cpu")


@pytest.mark.parametrize("name", backends.MLA_BACKENDS)
def test_a_missing_library_is_refused_with_its_install_line(name, monkeypatch) -> None:
    monkeypatch.setattr(base, "installed_version", lambda _: "")
    monkeypatch.setattr(flashmla.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RuntimeError, match="pip install (flashinfer-python|sgl-flash-mla)"):
        backends.create(name, case_for(name).spec)


@pytest.mark.parametrize("name", [n for n in backends.MLA_BACKENDS if n != "flashinfer-mla-fa2"])
def test_another_gpu_than_hopper_is_refused(name, monkeypatch) -> None:
    monkeypatch.setattr(base, "installed_version", lambda _: "0.6.4")
    monkeypatch.setattr(flashmla, "unavailable", lambda: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    reason = backends.unavailable(name)
    assert reason == "needs compute capability 9.x (Hopper), got 10.0"


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["fixed", "ragged", "skewed"])
@pytest.mark.parametrize(("heads", "top_k"), [(128, 2048), (64, 512), (32, 512), (16, 70), (8, 1)])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_matches_the_oracle(name, heads, top_k, lengths) -> None:
    case = case_for(able(name), heads, top_k, batch_size=9, kv_len=3000, lengths=lengths)
    assert_matches_oracle(name, case)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["fixed", "ragged", "skewed"])
@pytest.mark.parametrize("heads", [128, 64, 32, 16, 8])
@pytest.mark.parametrize("name", DENSE)
def test_dense_attention_matches_the_oracle(name, heads, lengths) -> None:
    case = case_for(able(name), heads, 0, batch_size=9, kv_len=3000, lengths=lengths)
    assert_matches_oracle(name, case)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch_size", "kv_len"), [(1, 131072), (64, 8192)])
@pytest.mark.parametrize("name", SPARSE)
def test_long_and_wide_batches_match_the_oracle(name, batch_size, kv_len) -> None:
    case = case_for(able(name), 16, 2048, batch_size=batch_size, kv_len=kv_len, lengths="fixed")
    assert_matches_oracle(name, case)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_takes_any_page_size(name, page_size) -> None:
    case = case_for(able(name))
    assert_matches_oracle(name, replace(case, spec=replace(case.spec, page_size=page_size)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPARSE)
def test_on_a_gpu_an_index_out_of_range_is_refused(name) -> None:
    assert_refuses_wrong_index(able(name))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "top_k"), [*((n, 70) for n in SPARSE), *((n, 0) for n in DENSE)])
def test_a_graph_replays_with_a_batch_changed_in_place(name, top_k) -> None:
    case = case_for(able(name), top_k=top_k, batch_size=7, kv_len=3000)
    work = build_mla_workload(case, device="cuda")
    backend = backends.create(name, case.spec, cuda_graph=True)
    plan = backend.plan(work.batch)
    backend.run(work.q, work.kv, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.run(work.q, work.kv, plan)
    for batch in (work.batch, flipped(work.batch), work.batch):
        backend.plan(batch, out=plan)
        out.fill_(float("nan"))
        graph.replay()
        assert MlaOracle(work.q, work.kv, batch).check(out).passed
