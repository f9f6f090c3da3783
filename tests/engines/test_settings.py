"""A setting that does nothing says so: at the start, or at the first decode step."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from support import sglang_code
from support.sglang_code import LENS, ROWS

from attnlib.engines import arms, sglang, sglang_hooks, sglang_steps, vllm

if torch.cuda.is_available():
    pytest.skip("the stand-ins are for machines without a GPU", allow_module_level=True)

RELEASE = "attnlib.engines.points.installed_version"
OTHERS = ("triton", "trtllm_mha", "torch_native", "flashmla")
VALUES = {name: values for name, values in arms.ARMS.items() if name != "splits"}
VALUES["splits"] = ("upstream", "bounded", "7")
EACH = [(name, value) for name, values in VALUES.items() for value in values]


@pytest.fixture
def loaded(monkeypatch):
    """Load the plugin with these variables, as SGLang does; its parts, hooked."""
    monkeypatch.setattr(RELEASE, lambda name: "0.5.16")
    engine = sglang_code.installed(monkeypatch, sglang_code.parts())
    for name in ("forward_decode", "forward_extend"):
        own = lambda self, q, layer, forward_batch: "output"  # noqa: E731
        setattr(engine.FlashAttentionBackend, name, own)
    prepare = lambda self, forward_batch, in_capture=False: None  # noqa: E731
    engine.FlashAttentionBackend.init_forward_metadata_out_graph = prepare
    library = lambda scheduler_metadata=None: "output"  # noqa: E731
    monkeypatch.setattr(sys.modules[sglang_code.FLASH], "flash_attn_with_kvcache", library, False)
    sglang_code.stand_in_guard(monkeypatch)

    def load(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"ATTNLIB_SGLANG_{name}", value)
        sglang.register()
        engine.HookRegistry.apply_hooks()
        return engine

    return load


def step_of(mode="DECODE", requests=3):
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        batch_size=requests,
        seq_lens=LENS,
        req_pool_indices=ROWS,
    )


def idle(caplog):
    """What the log says of settings that did nothing, or of a guard of slots alone."""
    return [message for message in caplog.messages if " in a decode step of " in message]


@pytest.mark.parametrize("name, value", EACH)
@pytest.mark.parametrize("backend", OTHERS)
def test_an_arm_of_another_attention_backend_says_so_at_the_first_decode_step(
    loaded, caplog, name, value, backend
):
    runner = loaded(**{name.upper(): value}).ModelRunner(attention_backend=backend)
    runner.forward(step_of("EXTEND"))
    assert idle(caplog) == [], "a prefill is no decode step"
    for _ in range(3):
        assert runner.forward(step_of()) == "logits"
    said = idle(caplog)
    assert len(said) == 1, f"{name} must do nothing with {backend}: it is for its `backends` alone"
    message = said[0]
    needs = " or ".join(arms.SGLANG_ARMS[name].backends)
    did = "checked slots alone" if name == "guard" else "did nothing"
    start = f"attnlib: ATTNLIB_SGLANG_{name.upper()}={value} is set and {did} in a decode step"
    assert message.startswith(f"{start} of 3 requests")
    assert message.endswith(f"it is for the attention backend {needs}, this is {backend}")
    assert ("attnlib runs" in caplog.text) == (name == "guard")


@pytest.mark.parametrize(
    "variables, backend",
    [({"DECODE": "planned"}, "fa3"), ({"METADATA": "fused"}, "flashinfer")],
)
def test_of_two_backends_that_have_arms_each_has_its_own(loaded, caplog, variables, backend):
    loaded(**variables).ModelRunner(attention_backend=backend).forward(step_of())
    assert idle(caplog)[0].endswith(f"this is {backend}")


def test_the_backend_of_decode_counts_where_prefill_has_another(loaded, caplog):
    runner = loaded(SCHEDULE="layer").ModelRunner(attention_backend="fa3")
    runner.decode_attention_backend_str = "triton"
    runner.forward(step_of())
    assert idle(caplog)[0].endswith("this is triton")


@pytest.mark.parametrize(
    "variables, server, mode, words",
    [
        ({"METADATA": "fused"}, {"disable_cuda_graph": True}, "DECODE", "without CUDA graphs"),
        ({"METADATA": "eager"}, {}, "TARGET_VERIFY", "speculative decoding keep SGLang's own"),
        ({"GUARD": "log", "SCHEDULE": "layer"}, {}, "DECODE", "SCHEDULE=layer leaves no schedule"),
        ({"GUARD": "log"}, {"disable_cuda_graph": True}, "DECODE", "decodes without CUDA graphs"),
    ],
)
def test_a_server_in_which_an_arm_cannot_run_is_named_as_the_reason(
    loaded, caplog, variables, server, mode, words
):
    runner = loaded(**variables).ModelRunner(**server)
    runner.forward(step_of(mode))
    assert words in idle(caplog)[0]


def test_planned_says_at_the_first_batch_beyond_the_graphs_that_sglang_plans(loaded, caplog):
    engine = loaded(DECODE="planned")
    runner = engine.ModelRunner(attention_backend="flashinfer")
    backend = engine.FlashInferAttnBackend(runner)
    lens = torch.ones(3, dtype=torch.int32)
    how = (3, 3, ROWS, lens, None, sglang_code.DECODE, None)
    backend.init_forward_metadata_capture_cuda_graph(*how)
    replay = (3, ROWS, LENS, 94, None, sglang_code.DECODE, None, LENS)
    runner.attend = lambda: backend.init_forward_metadata_replay_cuda_graph(*replay)
    runner.forward(step_of())
    assert idle(caplog) == []
    assert caplog.messages.count("attnlib runs decode=planned") == 1
    updater = backend.indices_updater_decode
    (plain,) = backend.decode_wrappers
    runner.attend = lambda: updater.call_begin_forward(
        plain, ROWS, LENS, 94, updater.kv_indptr[0], None, None, LENS
    )
    with pytest.MonkeyPatch.context() as patched:
        empty = torch.empty
        patched.setattr(
            torch,
            "empty",
            lambda *size, **how: empty(*size, dtype=how["dtype"]),
        )
        runner.forward(step_of(requests=300))
        runner.forward(step_of(requests=300))
    (message,) = idle(caplog)
    assert "step of 300 requests: it leaves out plans of steps without a CUDA graph" in message
    assert arms.STATE.calls["decode: plans of steps without a CUDA graph"] == 2


def test_an_arm_that_runs_is_named_once_and_only_then(loaded, caplog):
    engine = loaded(METADATA="fused")
    backend = engine.FlashAttentionBackend()
    assert "attnlib runs" not in caplog.text
    lens = torch.ones(3, dtype=torch.int32)
    backend.init_forward_metadata_capture_cuda_graph(
        3, 3, ROWS, lens, None, sglang_code.DECODE, None
    )
    assert "attnlib runs" not in caplog.text, "a capture keeps SGLang's own"
    runner = engine.ModelRunner()

    def attend():
        sglang_hooks.prepare_step(backend)
        how = (3, ROWS, lens, 3, None, sglang_code.DECODE, None, lens)
        backend.init_forward_metadata_replay_cuda_graph(*how)

    runner.attend = attend
    for _ in range(3):
        runner.forward(step_of())
    assert caplog.messages.count("attnlib runs metadata=fused") == 1
    assert idle(caplog) == []


def test_a_wrapper_of_another_kernel_is_not_said_to_run(loaded, caplog):
    arms.STATE.arms["decode"] = "fa3"
    wrapper = SimpleNamespace(_backend="fa2", is_cuda_graph_enabled=True)
    sglang_hooks.begin_forward(lambda self, wrapper: None, None, wrapper)
    assert caplog.messages == ["attnlib: decode=fa3 leaves out: a wrapper of fa2"]


def test_a_schedule_of_mla_is_not_said_to_run(loaded, caplog):
    arms.STATE.arms["schedule"] = "layer"
    backend = SimpleNamespace(use_mla=True)
    assert sglang_hooks.compute_schedule(lambda self: None, backend) is None
    assert "attnlib runs" not in caplog.text and "leaves out: MLA" in caplog.text


@pytest.mark.parametrize("of_draft", [True, False])
def test_a_failure_to_judge_a_step_is_one_message_and_a_draft_is_not_judged(
    loaded, caplog, of_draft
):
    runner = loaded(METADATA="fused").ModelRunner()
    runner.is_draft_worker, runner.server_args = of_draft, None
    for _ in range(3):
        assert runner.forward(step_of()) == "logits"
    assert len([m for m in caplog.messages if "is not known" in m]) == (not of_draft)


@pytest.mark.parametrize(
    "name", ["attnlib_sglang_splits", "ATTNLIB_SGLANGSPLITS", "Attnlib_SGLang_Splits"]
)
def test_a_misspelt_variable_ends_the_process(loaded, monkeypatch, name):
    monkeypatch.setenv(name, "bounded")
    with pytest.raises(SystemExit, match=f"a variable must be one of ATTNLIB_SG.*, got '{name}'"):
        loaded()


def test_an_empty_variable_and_one_of_the_other_engine_are_named_once(loaded, monkeypatch, caplog):
    monkeypatch.setenv("ATTNLIB_VLLM_GUARD", "log")
    for _ in range(2):
        assert loaded(METADATA="").HookRegistry._hooks == {}
    assert sorted(caplog.messages) == [
        "attnlib: ATTNLIB_SGLANG_METADATA is empty, which does nothing",
        "attnlib: ATTNLIB_VLLM_GUARD is for vLLM and does nothing in SGLang",
    ]


def test_vllm_names_variables_of_sglang(loaded, monkeypatch, caplog):
    monkeypatch.setenv("ATTNLIB_SGLANG_SPLITS", "bounded")
    vllm.register()
    assert caplog.messages == [
        "attnlib: ATTNLIB_SGLANG_SPLITS is for SGLang and does nothing in vLLM"
    ]


SLOT = ("req_to_token", r"pages in 0..415 for request 1 of 1 tokens, got 416 in column 0")
ROW = ("req_pool_indices", r"must lie in 0..4, got \[2, 5, 4\]")


@pytest.mark.parametrize("backend", (*OTHERS, "fa3", "flashinfer"))
@pytest.mark.parametrize("what, words", [SLOT, ROW])
def test_slots_of_any_backend_are_held_to_the_pool(loaded, caplog, backend, what, words):
    runner = loaded(GUARD="raise").ModelRunner(attention_backend=backend)
    table = runner.req_to_token_pool.req_to_token.clone()
    runner.req_to_token_pool = SimpleNamespace(req_to_token=table)
    step = step_of()
    runner.forward(step)
    if what == "req_to_token":
        table[0, 0] = 416
    else:
        step.req_pool_indices = torch.tensor([2, 5, 4])
    for _ in range(99):
        runner.forward(step)
    with pytest.raises(RuntimeError, match=f"{what} .*{words}|{what} {words}"):
        runner.forward(step)
    arms.STATE.arms["guard"] = "log"
    arms.STATE.calls.clear()
    assert runner.forward(step) == "logits"
    assert what in caplog.text


def test_a_runner_that_the_guard_cannot_read_is_one_message(loaded, caplog):
    runner = loaded(GUARD="log").ModelRunner()
    runner.req_to_token_pool = None
    for _ in range(3):
        assert runner.forward(step_of()) == "logits"
    assert len([m for m in caplog.messages if "has no attribute 'req_to_token'" in m]) == 1


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, ""),
        ({"page_table": 26}, "^attnlib: page_table must have pages in 0..25 for request 2 of 60"),
        ({"swa_page_table": 5}, "of the layers with a window, must have pages in 0..4 for requ"),
        ({"cache_seqlens_int32": 65}, "as wide as its lengths, request 2 of 65 tokens, got 4 col"),
    ],
)
def test_tables_that_flashattention_reads_are_held_to_lengths_and_pools(
    loaded, caplog, changes, words
):
    loaded(GUARD="log")
    arms.STATE.pool = arms.Pool(
        slots=26 * 16,
        window_slots=5 * 16,
        window=20,
    )
    call = {
        "page_table": torch.zeros(3, 4, dtype=torch.int32),
        "swa_page_table": torch.zeros(3, 4, dtype=torch.int32),
        "cache_seqlens_int32": LENS.clone(),
        "page_size": 16,
    }
    for name, value in changes.items():
        call[name][(2, 3) if call[name].ndim == 2 else 2] = value
    call["swa_page_table"][2, 0] = -1  # before the window
    sglang_steps.guard_tables(call)
    found = [m for m in caplog.messages if " must " in m]
    assert len(found) == bool(words)
    assert all(re.search(words, message) for message in found)


def test_sglangs_metadata_of_a_step_is_checked_where_it_is_written(loaded, caplog, monkeypatch):
    engine = loaded(GUARD="raise")
    backend = engine.FlashAttentionBackend()
    lens = torch.ones(3, dtype=torch.int32)
    how = (3, 3, ROWS, lens, None, sglang_code.DECODE, None)
    backend.init_forward_metadata_capture_cuda_graph(*how)
    arms.STATE.pool = arms.Pool(slots=1, window_slots=0, window=0)
    with pytest.raises(RuntimeError, match="page_table must have pages in 0..0 for request"):
        replay = (3, ROWS, lens, 3, None, sglang_code.DECODE, None, lens)
        backend.init_forward_metadata_replay_cuda_graph(*replay)
    assert arms.STATE.calls["guard, page tables of FlashAttention"] == 1
