"""What single wrappers do beyond the contract of `test_backends`: buffers, padding, checks."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import backend_calls as calls
from support import library_fakes as fakes
from support.backend_calls import MLA, MODES, SPARSE

from attnlib.core import AttnSpec, PagedKV
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.decode.measure import attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_auto_reports_fa2_under_a_custom_mask_and_fa3_without(libraries):
    reported = {}
    for case in MODES:
        backend = calls.backend_for("flashinfer-prefill-auto", case, "cpu")
        plan = backend.plan(calls.call_of(case, "cpu").batch)
        reported.setdefault(case.mask, set()).add(plan.reported_backend)
    assert reported == {
        "tree": {"fa2"},
        "chain": {"fa2"},
        "causal": {"fa3"},
        "full": {"fa3"},
    }


def test_a_plan_is_promised_equal_queries_only_where_they_are(libraries):
    backend = calls.backend_for(calls.UNIFORM, MODES[2], "cpu", cuda_graph=True)
    backend.plan(calls.call_of(MODES[2], "cpu").batch)
    assert libraries.wrappers[-1].promised == 6
    with pytest.raises(ValueError, match="q_lens must be equal for .*-uniform, got [1-4] to 5"):
        backend.plan(calls.call_of(MODES[6], "cpu").batch)


@pytest.mark.parametrize("name, case", [each for each in MLA if "flashinfer" in each[0]])
def test_mla_is_called_by_structures_where_the_library_has_them(name, case, libraries, monkeypatch):
    metadata = SimpleNamespace(csr=dict)
    new = {"BatchMLAPagedAttentionWrapper": fakes.FakeNewMla, "MLAPlanMetadata": metadata}
    monkeypatch.setitem(sys.modules, "flashinfer.mla", SimpleNamespace(**new))
    calls.assert_matches_oracle(name, case, "cpu")


def test_flashmla_sparse_pads_heads_to_what_its_kernel_has(libraries):
    name = "flashmla-sparse-fp8"
    for heads in (16, 64, 65, 128):
        calls.assert_matches_oracle(name, calls.mla_case(name, heads), "cpu")
    assert libraries.flashmla.heads == [64, 64, 128, 128]


def assert_refuses_wrong_index(name):
    """The token after the last one of the first request."""
    call = calls.call_of(calls.mla_case(name), DEVICE)
    backend = calls.backend_for(name, call.case, DEVICE)
    chosen = call.batch.chosen.clone()
    length = chosen[0, 1] = int(call.batch.paged.seq_lens_cpu[0])
    wrong = replace(call.batch, chosen=chosen)
    words = rf"in 0\.\.{length - 1} for request 0 of {length} tokens.* got {length} in column 1"
    with pytest.raises(ValueError, match=words):
        backend.plan(wrong)
    plan = backend.plan(call.batch)
    with pytest.raises(ValueError, match=words):
        backend.plan(wrong, out=plan)
    call.assert_right(backend.run(call.q, call.cache, plan))


@pytest.mark.parametrize("name", SPARSE)
def test_an_index_out_of_range_is_refused_and_the_plan_stays_good(name, libraries):
    assert_refuses_wrong_index(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPARSE)
def test_on_a_gpu_an_index_out_of_range_is_refused(name):
    assert_refuses_wrong_index(calls.able(name, calls.mla_case(name)))


@pytest.mark.parametrize("name, case", MLA)
def test_a_cache_without_the_planned_pages_is_refused_before_the_call(name, case, libraries):
    case = replace(case, lengths="fixed")
    call = calls.call_of(case, "cpu")
    backend = calls.backend_for(name, case, "cpu")
    plan = backend.plan(call.batch)
    with pytest.raises(ValueError, match="cache must have the pages that the plan names"):
        backend.run(call.q, call.cache[:2], plan)
    assert libraries.flashmla.calls == []


PAGED = dict(each for each in calls.CALLS if "mla" not in each[0])


@pytest.mark.parametrize("name, case", PAGED.items())
def test_a_cache_of_other_pages_than_the_plan_s_is_refused_before_the_call(name, case, libraries):
    call = calls.call_of(case, "cpu")
    backend = calls.backend_for(name, case, "cpu")
    (
        plan,
        (
            pages,
            size,
            *rest,
        ),
    ) = backend.plan(call.batch), call.cache.k_cache.shape
    other = PagedKV(
        *torch.zeros(
            2,
            pages,
            2 * size,
            *rest,
            dtype=call.cache.k_cache.dtype,
        )
    )
    with pytest.raises(
        ValueError, match=rf"cache must have pages of .*\[{size}, .* got \[{2 * size}"
    ):
        backend.run(call.q, other, plan)


def test_xqa_is_given_contiguous_tensors_whatever_the_caller_s_are(libraries):
    case = calls.DECODE
    call = calls.call_of(case, "cpu")
    backend = calls.backend_for("flashinfer-xqa", case, "cpu")
    batch = replace(call.batch, page_table=call.batch.page_table.T.contiguous().T)
    q = call.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not (q.is_contiguous() or batch.page_table.is_contiguous())
    call.assert_right(backend.run(q, call.cache, backend.plan(batch)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_query_rounded_to_fp8_is_outside_the_budget_of_one_that_is_not(head_dim):
    spec = AttnSpec(8, 2, head_dim, 16, "bfloat16", "float8_e4m3fn")
    call = calls.call_of(calls.DecodeCase(spec, 3, 1500, "ragged"), "cpu")
    rounded = call.q.to(torch.float8_e4m3fn).to(call.q.dtype)
    out = attend(rounded, call.cache, call.batch).to(call.q.dtype)
    verdict = call.oracle.check(out)
    assert verdict.error > 3 * verdict.budget


def graph_wrapper(workspace, kv_layout, use_tensor_cores, **buffers):
    """CUDAGraphBatchDecodeWithPagedKVCacheWrapper."""
    named = {f"paged_kv_{name}": buffer for name, buffer in buffers.items()}
    return fakes.FakeDecode(workspace, use_tensor_cores, use_cuda_graph=True, **named)


def test_flashinfers_wrapper_of_a_graph_is_on_tensor_cores(libraries, monkeypatch):
    name = "CUDAGraphBatchDecodeWithPagedKVCacheWrapper"
    monkeypatch.setattr(sys.modules["flashinfer"], name, graph_wrapper, raising=False)
    case = DecodeCase(AttnSpec(8, 2, 64, 16), 3, 40, "ragged")
    calls.assert_matches_oracle("flashinfer-graph-auto", case, "cpu")
