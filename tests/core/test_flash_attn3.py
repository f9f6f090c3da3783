"""FlashAttention-3 over pages: the call and its guard on the CPU, the kernels on a GPU."""

from dataclasses import replace

import pytest
import torch
from support.backend_calls import DECODE, backend_for
from support.workloads import query_rows

from attnlib.core import AttnSpec, DecodeBatch, backends, precompute
from attnlib.core.backends import flash_attn3
from attnlib.core.backends.table import family_of
from attnlib.core.schedule.splits import max_words
from attnlib.measure.calls.check import Judge
from attnlib.measure.calls.decode import measure as decode
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.decode.measure import build_workload
from attnlib.measure.trace import kernel_family, trace_kernels


def build(case, q_len, device):
    """The workload, and queries [bs * q_len, heads, head_dim]."""
    work = build_workload(case, device=device)
    if q_len == 1:
        return work, work.q
    rows = replace(case, batch_size=case.batch_size * q_len, kv_len=1, lengths="fixed")
    return work, build_workload(rows, device=device).q


def long_enough(work, q_len):
    """The batch with no request shorter than its queries."""
    lens = work.batch.seq_lens_cpu.clamp(min=q_len)
    return DecodeBatch.build(work.case.spec, lens, work.batch.page_table)


@pytest.mark.parametrize(
    "name, asks",
    [("flash-attn-3", 0), ("flash-attn-3-precomputed", 1)],
)
def test_metadata_is_asked_for_once_and_given_to_every_call_or_left_to_each(
    name, asks, fake_fa3, libraries
):
    work = build_workload(DECODE, device="cpu")
    backend = backend_for(name, DECODE, "cpu")
    plan = backend.plan(work.batch)
    for _ in range(3):
        backend.run(work.q, work.kv, plan)
    assert len(fake_fa3.scheduled) == asks
    assert len(fake_fa3.launched) == 3
    metadata = plan.state[1]
    words, cap = (metadata.words, metadata.facts.num_splits) if asks else (None, 0)
    assert all(call["scheduler_metadata"] is words for call in fake_fa3.launched)
    assert {call["num_splits"] for call in (*fake_fa3.scheduled, *fake_fa3.launched)} == {cap}
    assert bool(cap) == bool(asks)


def test_several_queries_a_request_see_one_token_more_each(fake_fa3):
    work, q = build(DECODE, 3, "cpu")
    batch = long_enough(work, 3)
    out = flash_attn3.attend(q, work.kv, batch, q_len=3)
    judge = Judge(decode.attend, q, work.kv, query_rows(batch, 3))
    assert judge.check(out).passed


def test_queries_that_do_not_fit_the_batch_are_refused(fake_fa3):
    work = build_workload(DECODE, device="cpu")
    with pytest.raises(ValueError, match=r"q must be \[6, .* for 3 requests of q_len 2.* got \[3"):
        flash_attn3.attend(work.q, work.kv, work.batch, q_len=2)
    with pytest.raises(ValueError, match="k_cache and v_cache bfloat16, got .* torch.float16"):
        flash_attn3.attend(work.q.half(), work.kv, work.batch)
    assert fake_fa3.launched == []


def test_the_facts_of_a_batch_are_those_of_its_call(fake_fa3):
    work, q = build(DECODE, 2, "cpu")
    options = {"q_len": 2, "causal": False, "window": (7, 0), "num_splits": 3}
    metadata = precompute(flash_attn3.facts_of(work.batch, **options), work.batch.seq_lens)
    flash_attn3.attend(q, work.kv, long_enough(work, 2), metadata=metadata, **options)
    assert fake_fa3.launched[0]["window_size"] == (7, 0)


def assert_right(q, kv, batch, out):
    verdict = Judge(decode.attend, q, kv, batch).check(out)
    assert verdict.passed, str(verdict)


GQA = AttnSpec(16, 2, 128, 16)
GPU_CALLS = [
    *(
        (DecodeCase(AttnSpec(*heads, 128, 16), batch_size, 1500, "skewed"), {})
        for heads in ((8, 8), (32, 8), (8, 1), (28, 4), (64, 1))
        for batch_size in (1, 33, 200)
    ),
    *(
        (DecodeCase(replace(GQA, page_size=page_size), 5, 1000, "ragged"), {"q_len": q_len})
        for page_size in (1, 64, 256)
        for q_len in (2, 5, 64)
    ),
    *(
        (DecodeCase(replace(GQA, head_dim=head_dim, window=window), 6, 3000, "ragged"), {})
        for head_dim in (64, 128, 256)
        for window in (1, 64, 701)
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case, options", GPU_CALLS)
@pytest.mark.parametrize("precomputed", [False, True])
def test_on_a_gpu_groups_batches_queries_and_windows_match_the_oracle(
    on_hopper, case, options, precomputed
):
    q_len = options.get("q_len", 1)
    work, q = build(case, q_len, "cuda")
    batch = long_enough(work, q_len)
    facts = flash_attn3.facts_of(batch, **options)
    metadata = precompute(facts, batch.seq_lens) if precomputed else None
    out = flash_attn3.attend(q, work.kv, batch, metadata=metadata, **options)
    assert_right(q, work.kv, query_rows(batch, q_len), out)


@pytest.mark.gpu
def test_changed_lengths_alone_are_harmless(on_hopper):
    work = build_workload(DecodeCase(GQA, 8, 8000, "ragged"), device="cuda")
    facts = flash_attn3.facts_of(work.batch)
    lens = work.batch.seq_lens_cpu.flip(0) // 3 + 1
    table = work.batch.page_table.flip(0).contiguous()
    other = DecodeBatch.build(GQA, lens, table)
    for then in (1, 64, 8000):
        stale = precompute(facts, torch.full_like(work.batch.seq_lens, then))
        for batch in (work.batch, other):
            out = flash_attn3.attend(work.q, work.kv, batch, metadata=stale)
            assert_right(work.q, work.kv, batch, out)


@pytest.mark.gpu
@pytest.mark.parametrize("num_layers", [1, 8])
def test_a_graph_of_many_layers_replays_with_metadata_renewed_in_a_buffer(on_hopper, num_layers):
    case = DecodeCase(AttnSpec(16, 2, 128, 16), 5, 8000, "ragged")
    work = build_workload(case, device="cuda")
    own = replace(work.batch, seq_lens=work.batch.seq_lens.clone())
    buffer = torch.zeros(max_words(16), dtype=torch.int32, device="cuda")
    metadata = precompute(flash_attn3.facts_of(own), own.seq_lens, out=buffer)
    flash_attn3.attend(work.q, work.kv, own, metadata=metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [
            flash_attn3.attend(work.q, work.kv, own, metadata=metadata) for _ in range(num_layers)
        ]
    for tokens in (8000, 1, 500, 4096):
        lens = torch.full_like(own.seq_lens_cpu, tokens)
        batch = DecodeBatch.build(case.spec, lens, own.page_table)
        own.seq_lens.copy_(batch.seq_lens)
        metadata.renew(own.seq_lens)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out in outs:
            assert_right(work.q, work.kv, batch, out)


@pytest.mark.gpu
def test_the_guard_refuses_during_capture_and_leaves_the_graph_usable(on_hopper):
    work = build_workload(DecodeCase(GQA, 4, 2000, "ragged"), device="cuda")
    facts = flash_attn3.facts_of(work.batch)
    unfit = precompute(
        replace(facts, batch_size=3),
        work.batch.seq_lens[:3].contiguous(),
    )
    fit = precompute(facts, work.batch.seq_lens)
    flash_attn3.attend(work.q, work.kv, work.batch, metadata=fit)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="made for 3 requests; this call has 4"):
            flash_attn3.attend(work.q, work.kv, work.batch, metadata=unfit)
        out = flash_attn3.attend(work.q, work.kv, work.batch, metadata=fit)
    graph.replay()
    assert_right(work.q, work.kv, work.batch, out)


@pytest.mark.gpu
@pytest.mark.parametrize("name, prepares", [("flash-attn-3", 1), ("flash-attn-3-precomputed", 0)])
def test_the_trace_shows_the_family_and_who_prepares(on_hopper, name, prepares):
    work = build_workload(DecodeCase(GQA, 4, 8000), device="cuda")
    backend = backends.create(name, work.case.spec)
    plan = backend.plan(work.batch)
    kernels = trace_kernels(lambda: backend.run(work.q, work.kv, plan))
    launches = {kernel.name: kernel.launches for kernel in kernels}
    assert kernel_family(launches, family_of) == "flash-attn-3"
    assert launches.get("prepare_varlen_num_blocks_kernel", 0) == prepares
    assert launches["FlashAttnFwdSm90"] == launches["FlashAttnFwdCombine"] == 1
