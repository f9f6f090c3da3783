"""The driver of transformers' continuous batching, over a stand-in of its model and scheduler."""

from types import SimpleNamespace

import pytest
from support import sglang_fakes as fakes

from attnlib.core.engines import arms, hf
from attnlib.kinds.engine import batching

ARMS = {"hf": {"metadata": "own"}, "hf-once": {"metadata": "once"}}


class Processor:
    def _generation_step(self, model):
        Model.now += 0.005


class Model:
    now, runs = 0.0, []

    def __init__(self):
        self.config = SimpleNamespace()

    def eval(self):
        return self

    def generate_batch(self, inputs, generation_config):
        assert self.config._attn_implementation_internal == "paged|flash_attention_3"
        count = generation_config.max_new_tokens
        self.runs.append(([len(each) for each in inputs], count))
        forward = hf.import_module(hf.PATH)._paged_decode_forward
        for n in range(count + 3):
            forward() if n < 2 else None
            Processor()._generation_step(self)
        return {
            f"req_{n}": SimpleNamespace(generated_tokens=[n] * count) for n in range(len(inputs))
        }


@pytest.fixture
def driver(monkeypatch):
    transformers = {
        "AutoConfig": SimpleNamespace(from_pretrained=lambda folder: folder),
        "AutoModelForCausalLM": SimpleNamespace(from_config=lambda config, dtype: Model()),
        "GenerationConfig": SimpleNamespace,
    }
    own = {"_paged_decode_forward": lambda: None}
    api = "transformers.generation.continuous_batching"
    parts = {
        hf.PATH: own,
        api: {"continuous_api": SimpleNamespace(ContinuousBatchProcessor=Processor)},
    }
    fakes.installed(monkeypatch, parts | {"transformers": transformers})
    monkeypatch.setattr(hf, "_Once", lambda: lambda: None)
    monkeypatch.setattr(arms, "installed_version", lambda name: "5.17.0")
    monkeypatch.setattr(batching, "installed_version", lambda name: "5.17.0")
    monkeypatch.setattr(batching.time, "perf_counter", lambda: Model.now)
    monkeypatch.setattr(Processor, "_generation_step", Processor._generation_step)
    return batching.Batching({"model": "folder"})


def test_last_steps_of_two_runs_an_arm_there_and_back(driver):
    answer = driver.measure({"lens": [9, 4], "arms": ARMS, "steps": 6, "trace": False})
    assert Model.runs == [([9, 4], batching.WARM_STEPS + 6)] * 4
    for found in answer["arms"].values():
        assert len(found["run_us"]) == 12 and found["run_us"] == pytest.approx([5000.0] * 12)
        assert found["error"] == 0 and found["digest"] == answer["arms"]["hf"]["digest"]
    assert answer["calls"] == {"metadata=own": 4, "metadata=once": 4}
    assert answer["said"] == ["transformers 5.17.0"]


def test_another_release_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(arms, "installed_version", lambda name: "")
    refused = batching.Batching({"model": "folder"}).measure({})["refused"]
    assert "must be a release that was tried (5.17.0), got none" in refused
