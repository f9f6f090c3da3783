"""Choices: named models and their shapes, the case that they make, the call that says them."""

import ast
from dataclasses import fields, replace

import pytest

from attnlib.core.spec import AttnSpec, MlaSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.step.case import StepCase
from attnlib.lab.choices import LINE, MLA, Choices, model_of, spec_of, variant_of

LLAMA = AttnSpec(32, 8, 128, 16)
TENSORS = {"variant": "bfloat16", "page_size": 16, "lengths": "ragged", "batch": 4, "kv_len": 1024}
ASKED = {"release": "0.6.3", "timer": "graph", **TENSORS, "against": "flashinfer-fa2"}
BACKENDS = ("flashinfer-fa2", "flashinfer-fa3")
CHOICES = Choices("Llama-3.1-70B at TP 8", "demo", backends=BACKENDS, **ASKED)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("Llama-3.1-8B", LLAMA),
        ("Llama-3.1-8B", replace(LLAMA, kv_dtype="float8_e4m3fn")),
        ("Llama-3.1-8B", replace(LLAMA, kv_dtype="float8_e4m3fn", window=4096)),
        ("Llama-3.1-8B", replace(LLAMA, window=128, sinks=True)),
        ("Llama-3.1-70B at TP 8", AttnSpec(8, 1, 128, 16)),
        ("Qwen3-32B at TP 4", AttnSpec(16, 2, 128, 1)),
        ("Qwen3-0.6B", AttnSpec(16, 8, 128, 64)),
        (MLA, MlaSpec(128)),
        (MLA, MlaSpec(16, 2048, 64, "fp8-656")),
    ],
)
def test_a_shape_is_a_model_with_a_variant_and_they_give_it_back(name, spec):
    case = (MlaCase if name == MLA else DecodeCase)(spec, 4, 1024)
    assert model_of(case) == name
    assert spec_of(name, variant=variant_of(spec), page_size=spec.page_size) == spec


def test_what_is_no_call_of_a_named_model_has_no_name():
    assert model_of(DecodeCase(AttnSpec(16, 4, 64, 16), 4, 1024)) == ""
    assert model_of(StepCase(DecodeCase(LLAMA, 4, 1024), layers=32)) == ""
    assert model_of(None) == ""


@pytest.mark.parametrize("variant", ["", "dense", "128 heads, all, bfloat16"])
def test_a_variant_that_cannot_be_read_is_answered_with_those_that_can(variant):
    with pytest.raises(ValueError, match="variant of DeepSeek MLA must be as '128 heads, dense"):
        spec_of(MLA, variant=variant, page_size=64)
    with pytest.raises(ValueError, match="one of Llama-3.1-8B, .*DeepSeek MLA, got 'GPT-7'"):
        spec_of("GPT-7", variant=variant, page_size=64)


@pytest.mark.parametrize(("records", "unsaid"), [("demo", {"rounds"}), ("live", set())])
def test_the_call_says_every_choice_and_rounds_only_where_they_count(records, unsaid):
    chosen = replace(CHOICES, records=records, rounds=5)
    tree = ast.parse(chosen.call, mode="eval").body
    said = {keyword.arg: ast.literal_eval(keyword.value) for keyword in tree.keywords}
    said["model"] = ast.literal_eval(tree.args[0])
    names = {f.name for f in fields(Choices)} - unsaid
    assert said == {name: getattr(chosen, name) for name in names}


def test_the_case_has_the_chosen_sizes_and_the_call_fits_a_line_and_breaks_no_name():
    assert CHOICES.case == DecodeCase(AttnSpec(8, 1, 128, 16), 4, 1024, "ragged")
    assert "'Llama-3.1-70B at TP 8'" in CHOICES.call
    assert max(map(len, CHOICES.call.splitlines())) <= LINE


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"backends": ()}, "backends must name at least one"),
        ({"against": "sdpa"}, "against must be one of flashinfer-fa2, .*got 'sdpa'"),
        ({"rounds": 0}, "rounds must be an integer >= 1, got 0"),
    ],
)
def test_choices_that_make_no_view_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        replace(CHOICES, **wrong)
