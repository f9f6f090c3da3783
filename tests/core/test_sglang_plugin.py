"""The plugin in SGLang's place, over stand-ins of what it hooks: same words, other launches."""

import inspect
import itertools
import pkgutil
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import sglang_fakes as fakes

from attnlib.core.engines import arms, capture, sglang, sglang_hooks
from attnlib.core.fa2 import planner
from attnlib.core.fa2.words import plan_words
from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.schedule.splits import plan_splits
from attnlib.core.spec import AttnSpec
from attnlib.studies.scheduler_metadata.words import words_of

if torch.cuda.is_available():
    pytest.skip("the stand-ins are for machines without a GPU", allow_module_level=True)

ROWS = torch.tensor([2, 0, 4])
LENS = torch.tensor([33, 1, 60], dtype=torch.int32)


@pytest.fixture
def loaded(monkeypatch):
    """Load the plugin with these variables, as SGLang does; the modules it hooks."""
    for name, value in vars(arms.State()).items():
        monkeypatch.setattr(arms.STATE, name, value)
    monkeypatch.setattr("attnlib.core.backends.base.installed_version", lambda name: "0.5.11")
    monkeypatch.setattr(planner, "installed_version", lambda name: "0.6.8.post1")
    small = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: small)
    monkeypatch.setattr(sglang_hooks, "sm_count", lambda _: 132)
    registry = fakes.installed(monkeypatch)

    def load(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"ATTNLIB_SGLANG_{name}", str(value))
        sglang.register()
        registry.apply_hooks()
        backends = {**_module("flashattention_backend"), **_module("flashinfer_backend")}
        runner = vars(sys.modules["sglang.srt.model_executor.model_runner"])
        return SimpleNamespace(**backends, ModelRunner=runner["ModelRunner"], registry=registry)

    return load


def _module(name):
    found = vars(sys.modules[f"{fakes.ATTENTION}.{name}"])
    return {name: value for name, value in found.items() if not name.startswith("_")}


def captured(backend, batch=3):
    """The backend with a graph of this batch size: the engine's lengths, and what it holds."""
    lens = torch.ones(batch, dtype=torch.int32)
    backend.init_forward_metadata_capture_cuda_graph(batch, lens)
    return lens, backend.decode_cuda_graph_metadata[batch]


def live(step, page_size, lens=LENS):
    pages = [-(-int(n) // page_size) for n in lens]
    table = [row[:n].tolist() for row, n in zip(step.page_table, pages, strict=True)]
    return step.cache_seqlens_int32.tolist(), step.cu_seqlens_k.tolist(), table


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("arm", arms.ARMS["metadata"])
def test_every_arm_writes_the_metadata_that_sglang_does(loaded, arm, page_size):
    backend = loaded(METADATA=arm).FlashAttentionBackend(page_size)
    lens, step = captured(backend)
    assert step.cache_seqlens_int32.data_ptr() == lens.data_ptr(), "as in SGLang"
    lens.copy_(LENS)
    backend.init_forward_metadata_replay_cuda_graph(3, ROWS, lens)
    rows = backend.req_to_token[ROWS][:, : fakes.CONTEXT : page_size] // page_size
    pages = [-(-int(n) // page_size) for n in LENS]
    wanted = [row[:n].tolist() for row, n in zip(rows, pages, strict=True)]
    assert live(step, page_size) == ([33, 1, 60], [0, 33, 34, 94], wanted)
    assert arms.STATE.calls[f"metadata={arm}"] == 1
    assert backend.schedules == (1 if arm == "one-launch" else 2)


def facts_of(backend, batch, **more):
    columns = backend.decode_cuda_graph_metadata["page_table"].shape[1]
    sizes = (batch, 32, 8, 128, 1, columns * backend.page_size, 132)
    return SchedulerFacts(*sizes, page_size=backend.page_size, causal=True, **more)


def test_one_launch_writes_the_schedule_where_the_graph_reads_it(loaded):
    backend = loaded(METADATA="one-launch").FlashAttentionBackend()
    lens, step = captured(backend)
    assert set(step.scheduler_metadata.tolist()) == {7}, "SGLang's own, at capture"
    for values in (LENS, torch.tensor([5, 64, 64])):
        lens.copy_(values)
        backend.init_forward_metadata_replay_cuda_graph(3, ROWS, lens)
        wanted = words_of(plan_splits(facts_of(backend, 3).settled, values.numpy())).values
        assert backend._sched_meta_buf.tolist() == wanted.tolist()


def test_a_schedule_does_not_depend_on_whether_cu_seqlens_q_is_passed(loaded):
    """SGLang's calls pass it, of one query token a request; our facts say that they do not."""
    backend = loaded(METADATA="one-launch").FlashAttentionBackend()
    lens = np.array([33, 1, 60_000])
    plain = replace(facts_of(backend, 3), max_seqlen_k=2**16).settled
    varlen = replace(plain, varlen_q=True)
    plans = plan_splits(plain, lens), plan_splits(varlen, lens, np.ones(3, int))
    words = [words_of(plan).values.tolist() for plan in plans]
    assert words[0] == words[1] and max(plans[0].num_splits) > 1
    assert replace(facts_of(backend, 3, varlen_q=True), max_seqlen_k=2**16).settled == varlen


def test_arms_alternate_step_by_step_over_the_same_buffers(loaded):
    backend = loaded(METADATA="sglang").FlashAttentionBackend()
    lens, step = captured(backend)
    seen = []
    order = itertools.islice(itertools.cycle(arms.ARMS["metadata"]), 9)
    for number, arm in enumerate(order):
        sglang.use(metadata=arm)
        lens.copy_(LENS).sub_(1).clamp_(min=1).add_(number // 4)
        before = backend.schedules
        backend.init_forward_metadata_replay_cuda_graph(3, ROWS, lens)
        assert (backend.schedules == before) == (arm == "one-launch")
        seen.append(live(step, 1, lens))
    assert seen[0:4] == [seen[0]] * 4 and seen[4:8] == [seen[4]] * 4 != [seen[0]] * 4
    assert arms.STATE.calls == {
        **{f"metadata={arm}": 2 for arm in arms.ARMS["metadata"]},
        "metadata=eager": 3,
    }


@pytest.mark.parametrize("arm", arms.ARMS["metadata"])
def test_a_draft_step_has_longer_requests_and_no_schedule(loaded, arm):
    backend = loaded(METADATA=arm).FlashAttentionBackend()
    _, step = captured(backend)
    step.cache_seqlens_int32, step.scheduler_metadata = torch.zeros(3, dtype=torch.int32), None
    backend.init_forward_metadata_replay_cuda_graph(3, ROWS, LENS, delta=2)
    assert live(step, 1)[:2] == ([35, 3, 62], [0, 35, 38, 100])


@pytest.mark.parametrize(("arm", "schedules"), [("once", 2), ("layer", 0)])
def test_a_schedule_is_written_once_a_step_or_left_to_the_layers(loaded, arm, schedules):
    backend = loaded(SCHEDULE=arm).FlashAttentionBackend()
    lens, step = captured(backend)
    assert (step.scheduler_metadata is None) == (arm == "layer")
    backend.init_forward_metadata_replay_cuda_graph(3, ROWS, lens)
    assert backend.schedules == schedules


def test_one_launch_without_a_schedule_says_so_and_so_does_another_layout(loaded):
    backend = loaded(METADATA="one-launch").FlashAttentionBackend()
    lens, step = captured(backend)
    own, step.scheduler_metadata = step.scheduler_metadata, None
    with pytest.raises(ValueError, match="must have a schedule to write, .*: use fused"):
        backend.init_forward_metadata_replay_cuda_graph(3, ROWS, lens)
    step.scheduler_metadata = torch.cat([own, own])
    with pytest.raises(ValueError, match="of 3 requests must have 17 words, .*, got 34"):
        backend.init_forward_metadata_replay_cuda_graph(3, ROWS, lens)


@pytest.mark.parametrize("arm", ["eager", "fused"])
def test_a_sliding_window_is_mapped_by_the_pools_int64_map(loaded, arm):
    arguments = loaded(METADATA=arm)
    backend = arguments.FlashAttentionBackend()
    _, step = captured(backend)
    pool = SimpleNamespace(full_to_swa_index_mapping=torch.arange(400))
    call = sglang_hooks.MetadataCall(
        *(step.cache_seqlens_int32, step.cu_seqlens_k, step.page_table, backend.req_to_token),
        *(ROWS, torch.arange(64), 60, LENS, 0, 1, step.page_table.clone(), pool),
    )
    arguments.normal_decode_set_metadata(*call)
    for row, length in enumerate(step.cache_seqlens_int32.tolist()):
        assert call.swa_page_table[row, :length].tolist() == step.page_table[row, :length].tolist()


def flashinfer(hooked, **values):
    for name, value in values.items():
        setattr(hooked.FlashInferAttnBackend, name, value)
    return hooked.FlashInferAttnBackend(hooked.ModelRunner())


def capture_graph(backend, mode=fakes.DECODE, spec_info=None):
    ones = torch.ones(3, dtype=torch.int32)
    zeros = torch.zeros(3, dtype=torch.int64)
    backend.init_forward_metadata_capture_cuda_graph(3, 3, zeros, ones, None, mode, spec_info)
    return backend.decode_cuda_graph_metadata.get(3, [None])[0]


@pytest.mark.parametrize("arm", ["fa2", "fa3"])
def test_the_decode_kernels_are_pinned_with_and_without_a_graph(loaded, arm):
    backend = flashinfer(loaded(DECODE=arm))
    wrapper = capture_graph(backend)
    assert [wrapper._backend, *(w._backend for w in backend.decode_wrappers)] == [arm] * 2
    backend.init_forward_metadata_replay_cuda_graph(3, ROWS, LENS)
    assert wrapper.plans == 2, "SGLang plans, as ever"


def test_planned_takes_each_graphs_wrapper_over_and_nothing_else_plans_or_fills_it(loaded):
    backend = flashinfer(loaded(DECODE="planned"))
    wrapper = capture_graph(backend)
    own = wrapper.attnlib
    assert wrapper._plan_info is own.info and wrapper.plans == 1
    backend.init_forward_metadata_replay_cuda_graph(3, ROWS, LENS)
    assert wrapper.plans == 1 and wrapper._plan_info is own.info
    words = wrapper._int_workspace_buffer[: own.layout.int_bytes].view(torch.int32)
    wanted = plan_words(own.shape, LENS.tolist()).image(len(words))
    assert words.tolist() == wanted.tolist()
    assert backend.kv_indptr[:4].tolist() == [0, 33, 34, 94]
    table = backend.indices_updater_decode.req_to_token[ROWS]
    slots = [slot for row, n in zip(table, LENS, strict=True) for slot in row[:n].tolist()]
    assert backend.kv_indices[:94].tolist() == slots
    assert backend.kv_last_page_len.tolist() == [1] * 4
    assert arms.STATE.calls["decode=planned, steps"] == 1


def test_planned_leaves_verification_alone_and_refuses_drafts(loaded):
    backend = flashinfer(loaded(DECODE="planned"))
    assert capture_graph(backend, fakes.VERIFY, object()) is None
    with pytest.raises(ValueError, match="must be without draft tokens"):
        capture_graph(backend, spec_info=object())


@pytest.mark.parametrize(
    ("arm", "values", "words"),
    [
        ("fa3", {"decode_use_tensor_cores": False}, "decode fa3 must have tensor cores"),
        ("planned", {"decode_use_tensor_cores": False}, "decode planned must have tensor cores"),
        ("planned", {"num_wrappers": 2}, "must have full self-attention alone"),
        ("planned", {"enable_deterministic": True}, "must have splits"),
    ],
)
def test_an_arm_that_cannot_be_what_it_says_stops_the_engine_at_its_start(
    loaded, arm, values, words
):
    hooked = loaded(DECODE=arm)
    with pytest.raises(ValueError, match=words):
        flashinfer(hooked, **values)


def test_planned_without_graphs_stops_the_engine_too(loaded, monkeypatch):
    hooked = loaded(DECODE="planned")
    monkeypatch.setattr(hooked.ModelRunner.server_args, "disable_cuda_graph", True)
    with pytest.raises(ValueError, match="decode planned must have CUDA graphs"):
        flashinfer(hooked)


def batch(mode="DECODE", lens=(7, 9), queries=None):
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        batch_size=len(lens),
        seq_lens_cpu=torch.tensor(lens),
        extend_seq_lens_cpu=queries,
    )


def test_every_nth_step_of_each_mode_is_captured_and_read_again(loaded, tmp_path):
    path = tmp_path / "steps.jsonl"
    runner = loaded(CAPTURE=path, CAPTURE_EVERY=2).ModelRunner()
    steps = [batch("EXTEND", (40, 8), [30, 8]), *(batch(lens=(n, 9)) for n in (41, 42, 43))]
    assert [runner.forward(step) for step in steps] == ["logits"] * 4
    found = capture.read(path)
    assert [(s.mode, s.number, s.lengths, s.q_lengths) for s in found] == [
        ("extend", 0, (40, 8), (30, 8)),
        ("decode", 0, (41, 9), None),
        ("decode", 2, (43, 9), None),
    ]
    assert found[0].spec == AttnSpec(32, 8, 128, 16, "bfloat16", "float8_e4m3fn")
    assert (found[0].backend, found[0].batch_size, found[0].kind) == ("fa3", 2, "mha")
    with pytest.raises(ValueError, match="kind must be mha"):
        replace(found[0], kind="mla").spec  # noqa: B018 - the attribute is asked for


def test_lengths_that_the_host_does_not_know_are_not_fetched(loaded, tmp_path):
    runner = loaded(CAPTURE=tmp_path / "steps.jsonl").ModelRunner()
    step = batch()
    step.seq_lens_cpu = None
    runner.forward(step)
    assert capture.read(tmp_path / "steps.jsonl")[0].lengths is None


def test_a_rank_that_shares_its_batch_writes_nothing(loaded, tmp_path, monkeypatch):
    runner = loaded(CAPTURE=tmp_path / "steps.jsonl").ModelRunner()
    ranks = sys.modules["sglang.srt.layers.dp_attention"]
    monkeypatch.setattr(ranks, "get_attention_tp_rank", lambda: 1)
    runner.forward(batch())
    assert not (tmp_path / "steps.jsonl").exists()


def test_a_capture_that_fails_is_logged_once_and_the_engine_goes_on(loaded, tmp_path, caplog):
    runner = loaded(CAPTURE=tmp_path / "missing" / "steps.jsonl", CAPTURE_EVERY=1).ModelRunner()
    assert [runner.forward(batch()) for _ in range(3)] == ["logits"] * 3
    assert [r.getMessage() for r in caplog.records] == [
        "attnlib: no further step is captured, SGLang goes on"
    ]


def test_a_line_that_is_no_step_is_named(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"mode": "decode"}\n')
    with pytest.raises(ValueError, match="steps.jsonl:1 must be a captured step, got KeyError"):
        capture.read(path)


def test_without_a_variable_nothing_is_hooked(loaded):
    assert loaded(METADATA="").registry.hooks == []


def test_an_arm_hooks_what_it_needs_alone(loaded):
    hooked = loaded(SCHEDULE="layer").registry.hooks
    assert [target.rpartition(".")[2] for target, *_ in hooked] == ["_compute_scheduler_metadata"]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"METADATA": "quick"},
            "ATTNLIB_SGLANG_METADATA must be one of eager, sglang, fused, one-launch, got 'quick'",
        ),
        ({"METDATA": "fused"}, "a variable must be one of ATTNLIB_SGLANG_METADATA, .*METDATA"),
        ({"CAPTURE_EVERY": "0"}, "ATTNLIB_SGLANG_CAPTURE_EVERY must be a number of steps >= 1"),
        ({"METADATA": "one-launch", "SCHEDULE": "layer"}, "schedule must be once, got layer"),
    ],
)
def test_what_is_not_known_ends_the_process_with_what_is(loaded, variables, words):
    with pytest.raises(SystemExit, match=words):
        loaded(**variables)


@pytest.mark.parametrize("release", ["0.5.12", ""])
def test_a_release_that_was_not_tried_is_refused_by_name(loaded, monkeypatch, release):
    monkeypatch.setattr("attnlib.core.backends.base.installed_version", lambda name: release)
    words = rf"tried \(0.5.11\), got {release or 'none'}: unset"
    with pytest.raises(SystemExit, match=words):
        loaded(METADATA="fused")


def test_what_cannot_be_hooked_ends_the_process_too(loaded, monkeypatch):
    monkeypatch.setitem(sys.modules, f"{fakes.ATTENTION}.flashinfer_backend", None)
    with pytest.raises(SystemExit, match="flashinfer_backend must be importable to be hooked, got"):
        loaded(DECODE="fa3")


def test_what_cannot_be_switched_says_why(loaded):
    with pytest.raises(RuntimeError, match="must be set when SGLang loads its plugins"):
        sglang.use(metadata="fused")
    loaded(METADATA="sglang", SCHEDULE="layer")
    with pytest.raises(ValueError, match="metadata must be one of eager, sglang, fused"):
        sglang.use(metadata="quick")
    with pytest.raises(ValueError, match="schedule must be once, got layer"):
        sglang.use(metadata="one-launch")


def test_the_entry_point_is_sglangs_door():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (door,) = project["entry-points"]["sglang.srt.plugins"].values()
    assert pkgutil.resolve_name(door) is sglang.register


@pytest.mark.parametrize("point", sglang_hooks.POINTS, ids=lambda p: p.name)
def test_the_stand_ins_take_what_the_hooks_rely_on(point):
    stand_in = pkgutil.resolve_name(f"support.sglang_fakes:{point.name}")
    names = tuple(inspect.signature(stand_in).parameters)
    assert names[: len(point.arguments)] == point.arguments
