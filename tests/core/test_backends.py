"""Backends against the oracle: SDPA anywhere, FlashInfer's modes on a GPU."""

from __future__ import annotations

import pytest
import torch

from attnlib.core import backends
from attnlib.core.backends import base
from attnlib.core.backends.table import FAMILIES, named_by
from attnlib.core.batch import DecodeBatch, PagedKV
from attnlib.core.spec import AttnSpec
from attnlib.kinds.call import Workload
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.decode.measure import Oracle, build_workload
from attnlib.kinds.lengths import sample_seq_lens

FLASHINFER = tuple(name for name in backends.BACKENDS if name.startswith("flashinfer"))
GROUP_SIZES = range(1, 9)


def spec_of(group_size: int, page_size: int, head_dim: int = 128, dtype: str = "bfloat16"):
    return AttnSpec(2 * group_size, 2, head_dim, page_size, dtype)


def assert_matches_oracle(name: str, case: DecodeCase, device: str) -> None:
    work = build_workload(case, device=device)
    backend = backends.create(name, case.spec, device=device)
    out = backend.run(work.q, work.kv, backend.plan(work.batch))
    verdict = Oracle(work.q, work.kv, work.batch).check(out)
    assert verdict.passed, f"{name} on {case.label}: {verdict}"
    assert str(out.dtype) == f"torch.{case.spec.out_dtype}"


def shorter(work: Workload) -> DecodeBatch:
    """The same page table and batch size with other lengths and rows in another order."""
    lens = torch.from_numpy(sample_seq_lens(work.case)).flip(0) // 3 + 1
    return DecodeBatch.build(work.case.spec, lens.int(), work.batch.page_table.flip(0).contiguous())


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_sdpa_matches_the_oracle_for_every_page_and_group_size(page_size, group_size):
    case = DecodeCase(spec_of(group_size, page_size, 64), 3, 70, "ragged")
    assert_matches_oracle("sdpa", case, "cpu")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sdpa_matches_the_oracle_for_every_head_dim_and_dtype(head_dim, dtype):
    assert_matches_oracle("sdpa", DecodeCase(spec_of(4, 16, head_dim, dtype), 2, 33), "cpu")


def test_sdpa_replanned_in_place_serves_the_new_lengths():
    case = DecodeCase(spec_of(4, 16, 64), 5, 96, "ragged")
    work = build_workload(case, device="cpu")
    backend = backends.create("sdpa", case.spec, device="cpu")
    plan = backend.plan(work.batch)
    tokens = plan.state.tokens
    again = backend.plan(shorter(work), out=plan)
    assert again.state.tokens is tokens
    out = backend.run(work.q, work.kv, again)
    assert Oracle(work.q, work.kv, shorter(work)).check(out).passed


def test_sdpa_refuses_to_replan_over_a_table_of_another_width():
    backend = backends.create("sdpa", spec_of(1, 16), device="cpu")
    wide = build_workload(DecodeCase(spec_of(1, 16), 2, 64), device="cpu").batch
    narrow = build_workload(DecodeCase(spec_of(1, 16), 2, 16), device="cpu").batch
    with pytest.raises(ValueError, match=r"out must be a plan over \[2, 16\] tokens"):
        backend.plan(narrow, out=backend.plan(wide))


def test_what_lies_in_unused_pages_never_reaches_sdpas_output():
    case = DecodeCase(spec_of(1, 4, 64), 2, 8, "ragged")
    work = build_workload(case, device="cpu")
    k, v = (torch.cat([torch.full_like(c[:1], float("nan")), c]) for c in vars(work.kv).values())
    batch = DecodeBatch.build(
        case.spec, torch.tensor([3, 8]).int(), torch.tensor([[1, 0], [2, 3]]).int()
    )
    backend = backends.create("sdpa", case.spec, device="cpu")
    out = backend.run(work.q, PagedKV(k, v), backend.plan(batch))
    assert torch.isfinite(out).all()


def test_an_unknown_backend_lists_the_valid_names():
    with pytest.raises(ValueError, match=r"one of sdpa, flashinfer-auto.*got 'fa9'"):
        backends.backend_class("fa9")


def test_a_missing_library_is_refused_with_its_install_line(monkeypatch):
    monkeypatch.setattr(base, "installed_version", lambda _: "")
    with pytest.raises(RuntimeError, match="pip install flashinfer-python"):
        backends.create("flashinfer-fa2", spec_of(1, 16))


def test_fa3_is_refused_on_a_release_that_would_silently_run_fa2(monkeypatch):
    monkeypatch.setattr(base, "installed_version", lambda _: "0.5.3")
    with pytest.raises(RuntimeError, match=r"0.5.3 has no flashinfer-fa3.*>=0.6.0"):
        backends.create("flashinfer-fa3", spec_of(1, 16))


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("flashinfer-cuda-cores", spec_of(5, 16), "group size must be"),
        ("flashinfer-cuda-cores", spec_of(7, 16), "group size must be"),
        ("flashinfer-fa2", spec_of(1, 16, 96), "head_dim must be"),
        ("flashinfer-fa2", spec_of(1, 16, dtype="float8_e4m3fn"), "no FP8 query"),
        ("sdpa", spec_of(1, 16, dtype="float8_e4m3fn"), "no FP8 tensors"),
    ],
)
def test_a_spec_that_the_library_cannot_run_is_refused_with_the_reason(name, spec, words):
    assert words in backends.unsupported(name, spec)


@pytest.mark.parametrize("name", backends.TABLE)
def test_every_entry_has_its_class_and_a_family_that_a_kernel_proves(name):
    entry = backends.TABLE[name]
    assert issubclass(backends.backend_class(name), base.Backend)
    assert entry.family in ("", *FAMILIES)
    assert entry.hopper == ("fa3" in name or name.startswith("flashmla"))


def test_available_names_every_backend_and_says_why_not():
    found = backends.available()
    assert tuple(found) == (
        *backends.BACKENDS,
        *backends.MLA_BACKENDS,
        *backends.EXTEND_BACKENDS,
    )
    assert found["sdpa"] == ""
    if not torch.cuda.is_available():
        assert all(found[name] for name in FLASHINFER)


@pytest.mark.parametrize(
    ("library", "word", "latent", "backend"),
    [
        ("flashinfer==0.6.4", "fa2", False, "flashinfer-fa2"),
        ("flashinfer==0.6.4", "cuda-cores", False, "flashinfer-cuda-cores"),
        ("flashinfer==0.6.4", "fa3", True, "flashinfer-mla-fa3"),
        ("sglang==0.5.23", "fa3", False, "fa3"),
        ("vllm==0.33.0", "FLASH_ATTN", False, "fa3"),
        ("vllm==0.33.0", "FLASHMLA", True, "flashmla-dense"),
        ("vllm==0.33.0", "FLASHMLA_SPARSE", True, "flashmla-sparse-fp8"),
    ],
)
def test_words_of_kernels_that_we_have_name_a_backend_of_ours(library, word, latent, backend):
    assert named_by(library, word, latent=latent) == backend
    assert backend in (backends.MLA_BACKENDS if latent else backends.BACKENDS)


def test_sglangs_fa3_for_mla_and_unknown_words_are_not_ours():
    assert named_by("sglang==0.5.23", "fa3", latent=True) == ""
    assert named_by("vllm==0.33.0", "TRITON_ATTN", latent=False) == ""


def test_installed_version_of_a_missing_distribution_is_empty():
    assert base.installed_version("no-such-distribution") == ""


def flashinfer_case(name: str, group_size: int, page_size: int, lengths: str) -> DecodeCase:
    case = DecodeCase(spec_of(group_size, page_size), 7, 1500, lengths)
    reason = backends.unavailable(name) or backends.unsupported(name, case.spec)
    if reason:
        pytest.skip(reason)
    return case


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in FLASHINFER if n != "flashinfer-graph-auto"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_flashinfer_matches_the_oracle(name, group_size, page_size):
    assert_matches_oracle(name, flashinfer_case(name, group_size, page_size, "ragged"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in FLASHINFER if n != "flashinfer-graph-auto"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "float16"), (256, "bfloat16")])
def test_flashinfer_matches_the_oracle_for_other_head_dims(name, head_dim, dtype):
    spec = spec_of(4, 16, head_dim, dtype)
    reason = backends.unavailable(name)
    if reason:
        pytest.skip(reason)
    assert_matches_oracle(name, DecodeCase(spec, 5, 999, "ragged"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", backends.BACKENDS)
def test_a_graph_replays_with_lengths_changed_in_place(name):
    case = flashinfer_case(name, 4, 16, "ragged")
    work = build_workload(case, device="cuda")
    backend = backends.create(name, case.spec, cuda_graph=True)
    plan = backend.plan(work.batch)
    backend.run(work.q, work.kv, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.run(work.q, work.kv, plan)
    for batch in (work.batch, shorter(work), work.batch):
        backend.plan(batch, out=plan)
        out.fill_(float("nan"))
        graph.replay()
        assert Oracle(work.q, work.kv, batch).check(out).passed


@pytest.mark.gpu
def test_cases_skewed_and_long_match_the_oracle():
    spec = AttnSpec(32, 8, 128, 16)
    for name in ("flashinfer-fa2", "flashinfer-cuda-cores", "sdpa"):
        assert_matches_oracle(name, DecodeCase(spec, 4, 20000, "skewed"), "cuda")
