"""A plugin says once which known problems its server runs into, by facts of the server alone."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import vllm_fakes
from support.sglang_code import ModelRunner, installed

from attnlib.engines import arms, known, sglang_steps, vllm

SGLANG = {
    "stack": "sglang==0.5.23",
    "mode": "mla",
    "gpu": "NVIDIA H100 80GB HBM3",
    "backend": "fa3",
    "heads": "128/1",
    "page_size": 1,
    "graph": True,
    "speculative": False,
    "context": 131072,
}
CAP = "[sglang-fa3-split-cap-mla]"
SCHEDULE = "[sglang-schedule-mla]"


@pytest.fixture
def said(monkeypatch, caplog):
    """What the log says of the known problems of a server, where these arms are set."""

    def ask(facts, *names, engine=arms.SGLANG):
        state = arms.State(arms=dict.fromkeys(names, "on"))
        for place in (known, sglang_steps, vllm):
            monkeypatch.setattr(place, "STATE", state)
        for _ in range(2):
            known.warn_once(engine, "this server", lambda: facts)
        return [text for text in caplog.messages if "known problem" in text]

    return ask


def test_each_problem_is_said_once_with_what_to_do_and_that_lengths_decide(said):
    lines = said(SGLANG)
    (cap,) = [line for line in lines if CAP in line]
    assert cap.startswith("attnlib: for some lengths of requests, known problem, slower: ")
    assert "Do: ATTNLIB_SGLANG_SPLITS=bounded" in cap
    (schedule,) = [line for line in lines if SCHEDULE in line]
    assert schedule.startswith("attnlib: known problem, slower: ")
    assert len(lines) == len({*lines})


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "triton"},
        {"stack": "sglang==0.5.15"},
        {"gpu": "NVIDIA B200"},
        {"mode": "decode", "heads": "8/1", "backend": "triton"},
    ],
)
def test_a_server_without_the_problem_is_told_nothing_of_it(said, change):
    assert not [line for line in said(SGLANG | change) if CAP in line]


def test_a_problem_whose_remedy_is_set_is_not_said(said):
    assert not [line for line in said(SGLANG, "splits") if CAP in line]


def test_what_cannot_be_asked_is_said_and_the_server_goes_on(said):
    lines = said(SGLANG | {"gpu": "a card of next year"})
    assert len(lines) == 1
    assert "known problems of this server cannot be asked: ValueError" in lines[0]


def test_the_facts_of_a_server_of_sglang(said, monkeypatch):
    installed(monkeypatch, {})
    monkeypatch.setattr(sglang_steps, "ranks", lambda: (0, 8, 1))
    monkeypatch.setattr(sglang_steps, "decodes_in_graphs", lambda server: True)
    monkeypatch.setattr(sglang_steps, "installed_version", lambda name: "0.5.23")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    runner = ModelRunner(speculative_num_draft_tokens=4, speculative_algorithm="EAGLE")
    runner.kv_cache_dtype = torch.bfloat16
    runner.model_config = SimpleNamespace(
        num_attention_heads=128,
        attention_arch=SimpleNamespace(name="MLA"),
        context_len=65536,
    )
    facts = sglang_steps.server_facts(runner)
    assert facts["mode"] == "mla"
    assert facts["heads"] == "16/1"
    assert "head_dim" not in facts
    assert facts["speculative"]
    assert facts["draft_tokens"] == 4
    assert facts["context"] == 65536
    assert [line for line in said(facts) if CAP in line]
    runner.server_args.attention_backend = "unread"
    with pytest.raises(ValueError, match="backend must be one that was read of SGLang"):
        sglang_steps.server_facts(runner)


@pytest.mark.parametrize(("rank", "asks"), [(0, 1), (3, 0)])
def test_one_rank_asks_once_at_a_decode_step_of_the_target_model(monkeypatch, rank, asks):
    state = arms.State(arms={"splits": "bounded"})
    for place in (known, sglang_steps):
        monkeypatch.setattr(place, "STATE", state)
    asked = []
    monkeypatch.setattr(sglang_steps, "_judge", lambda *_: None)
    monkeypatch.setattr(sglang_steps, "ranks", lambda: (rank, 8, 1))
    monkeypatch.setattr(sglang_steps, "server_facts", lambda runner: asked.append(1) or SGLANG)
    for mode, is_draft in (
        ("EXTEND", False),
        ("DECODE", True),
        ("DECODE", False),
        ("DECODE", False),
    ):
        batch = SimpleNamespace(forward_mode=SimpleNamespace(name=mode))
        sglang_steps.judge_step(None, SimpleNamespace(is_draft_worker=is_draft), batch)
    assert len(asked) == asks


def test_the_facts_of_layers_of_vllm(said, monkeypatch, caplog):
    installed(monkeypatch, vllm_fakes.parts())
    monkeypatch.setattr(vllm, "installed_version", lambda name: "0.33.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    group = vllm_fakes.AttentionGroup("TRITON_ATTN")
    facts = vllm.server_facts(group)
    assert facts["heads"] == "32/8"
    assert facts["head_dim"] == 128
    assert facts["page_size"] == 16
    assert facts["kv_dtype"] == "float8_e4m3fn" and facts["context"] == 64
    lines = said(facts, engine=arms.VLLM)
    assert any("for some lengths" in line and "[vllm-triton-unsplit]" in line for line in lines)
    group.backend.get_name = lambda: "FLASH_ATTN"
    caplog.clear()
    lines = said(vllm.server_facts(group), engine=arms.VLLM)
    assert not [line for line in lines if "[vllm-triton-unsplit]" in line]


def test_the_plugins_load_select_at_a_servers_first_step_alone():
    for module in (known, sglang_steps, vllm):
        tree = ast.parse(Path(module.__file__).read_text())
        for node in tree.body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith("select")], module.__name__
