"""Named models: what is theirs, and the way there and back."""

from __future__ import annotations

import pytest

from attnlib.core.spec import AttnSpec, MlaSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.step.case import StepCase
from attnlib.lab.choices import MLA, NAMES, model_of, require_model, spec_of, variant_of

LLAMA = AttnSpec(32, 8, 128, 16)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("Llama-3.1-8B", (32, 8, 128)),
        ("Llama-3.1-70B at TP 8", (8, 1, 128)),
        ("Qwen3-32B at TP 4", (16, 2, 128)),
        ("Qwen3-0.6B", (16, 8, 128)),
    ],
)
def test_a_model_is_known_by_its_heads_and_its_heads_by_the_model(name, heads):
    spec = spec_of(name, variant="bfloat16", page_size=16)
    assert spec == AttnSpec(*heads, page_size=16)
    assert model_of(DecodeCase(spec, 4, 1024)) == name


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_variant_says_the_dtypes_and_gives_them_back(kv_dtype):
    spec = AttnSpec(32, 8, 128, 16, "bfloat16", kv_dtype)
    assert spec_of("Llama-3.1-8B", variant=variant_of(spec), page_size=16) == spec


@pytest.mark.parametrize("spec", [MlaSpec(128), MlaSpec(16, 2048, 64, "fp8-656")])
def test_a_variant_of_latent_attention_says_heads_tokens_and_cache(spec):
    assert model_of(MlaCase(spec, 4, 1024)) == MLA
    assert spec_of(MLA, variant=variant_of(spec), page_size=spec.page_size) == spec


def test_a_shape_of_no_named_model_has_no_name():
    assert model_of(DecodeCase(AttnSpec(16, 4, 64, 16), 4, 1024)) == ""


def test_a_step_and_a_ceiling_are_not_a_call_of_a_model():
    assert model_of(StepCase(DecodeCase(LLAMA, 4, 1024), layers=32)) == ""
    assert model_of(None) == ""


def test_an_unknown_model_gets_the_list_of_names():
    with pytest.raises(ValueError, match="one of Llama-3.1-8B, .*DeepSeek MLA; got 'GPT-7'"):
        require_model("GPT-7")
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("variant", ["", "dense", "128 heads, all, bfloat16"])
def test_a_variant_that_cannot_be_read_is_answered_with_two_that_can(variant):
    with pytest.raises(ValueError, match="variant of DeepSeek MLA must be as '128 heads, dense"):
        spec_of(MLA, variant=variant, page_size=64)


def test_a_dtype_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match="dtype must be one of bfloat16.*got 'int3'"):
        spec_of("Llama-3.1-8B", variant="int3", page_size=16)
