"""Models by name: data/checkpoints.yaml, and how a model is served, in words."""

import pytest

from attnlib import AttnSpec, Call, explain
from attnlib.core.checkpoints import DENSE, LATENT, checkpoints, find_checkpoint, served
from attnlib.core.layer import MODELS, parse_layer
from attnlib.select.facts import facts_of_model
from attnlib.select.models import FAMILIES, LAYERS

ASKED_FOR = (
    "DeepSeek-V3",
    "DeepSeek-V3.2",
    "DeepSeek-V4-Pro",
    "Kimi-K2",
    "GLM-5",
    "Gemma-3-27B",
    "Gemma-4-31B",
    "Qwen3-32B",
    "Qwen3-235B-A22B",
    "Qwen3-Next-80B-A3B",
    "Llama-4-Scout",
    "gpt-oss-120b",
    "MiniMax-M2",
    "MiniMax-M3",
)


def test_every_model_says_where_it_was_read_and_its_layers_fit():
    assert {*ASKED_FOR} <= {*checkpoints()}
    for model in checkpoints().values():
        assert model.source and model.architecture and model.kinds
        for kind in model.kinds:
            family = FAMILIES.get(model.architecture, "")
            if kind.name in (*DENSE, *LATENT):
                assert kind.spec(1, 16).num_qo_heads == kind.heads
            else:
                assert LAYERS[family][kind.name]["own"]


def test_the_usual_layers_are_those_of_the_models():
    for name, sizes in MODELS.items():
        assert parse_layer(model=name) == AttnSpec(*sizes, 16)


@pytest.mark.parametrize(
    "text, ranks, speculative, branches",
    [
        ("DeepSeek-V3", 1, False, 0),
        ("DeepSeek-V3 at TP 8", 8, False, 0),
        ("deepseek v3 at TP 8 with DP attention", 1, False, 0),
        ("DeepSeek-V3 at TP 16 with DP attention of 2 and speculation", 8, True, 0),
        ("DeepSeek-V3 at TP 8 with speculation of 4 branches", 8, True, 4),
    ],
)
def test_how_a_model_is_served_is_said_in_words(text, ranks, speculative, branches):
    model = served(text)
    assert model.checkpoint is find_checkpoint("DeepSeek-V3")
    assert model.ranks == ranks
    assert model.speculative == speculative
    assert model.branches == branches
    call = Call(**facts_of_model(text))
    assert call.speculative == speculative
    assert call.eagle_topk == branches


def test_a_name_that_is_not_known_names_the_nearest_few():
    with pytest.raises(ValueError, match="DeepSeek-V3.2") as error:
        served("DeepSeek-V32")
    assert len(str(error.value)) < 150
    with pytest.raises(ValueError, match="latent: explain and advise take it"):
        parse_layer(model="DeepSeek-V3")
    with pytest.raises(ValueError, match="tp must be left out"):
        served("DeepSeek-V3 at TP 8", tp=4)


def test_python_takes_a_card_as_the_shell_does():
    layer = AttnSpec(32, 8, 128, 16)
    for gpu in ("h100", "NVIDIA H100 80GB HBM3", "H200", "sm90"):
        choice = explain(layer, mode="decode", gpu=gpu, library="flashinfer==0.6.3")
        assert choice.gpu == "sm90"
        assert choice.backend == "fa3"
    with pytest.raises(ValueError, match="gpu must be one of sm75, .*card such as"):
        explain(layer, mode="decode", gpu="h1000", library="flashinfer==0.6.3")


def test_dp_attention_is_known_where_words_or_dp_say_it():
    assert not served("DeepSeek-V3 at TP 8").dp_attention
    assert served("DeepSeek-V3 with DP attention").dp_attention
    assert served("DeepSeek-V3", tp=8, dp=8).dp_attention
    with pytest.raises(ValueError, match="dp must be left out"):
        served("DeepSeek-V3 at TP 8 with DP attention", dp=4)


@pytest.mark.parametrize(
    "row, words",
    [
        ("architecture: A", "models.yaml:2: M: source must be given"),
        ("{architecture: A, source: s, layers: {ful: {}}}", "kind of layers must be one of"),
        (
            "{architecture: A, source: s, layers: {full: {count: x}}}",
            "M, full: count must be a whole number, got 'x'",
        ),
        ("{architecture: A, source: s, layers: {}, width: 2}", "keys must be .*, got width"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line_and_field(row, words, tmp_path, monkeypatch):
    file = tmp_path / "models.yaml"
    file.write_text(f"M:\n  {row}\n")
    monkeypatch.setattr("attnlib.core.checkpoints.FILE", file)
    with pytest.raises(ValueError, match=words):
        checkpoints.__wrapped__()
